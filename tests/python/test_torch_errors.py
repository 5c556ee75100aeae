# SPDX-License-Identifier: MIT
"""save() and load() fail as torch.save and torch.load do: who catches torch's classes catches ours,
under patch() too. Beyond that they are penstock.Error, with words and what to do."""
import pickle
import zipfile
from types import SimpleNamespace

import pytest
import safetensors
import torch

import penstock
from support import outcome

# Not globals of their own: these would be rebound.
REAL = SimpleNamespace(load=torch.load, save=torch.save)
STATE = {"weight": torch.arange(4000.0)}


def head_only(path):
    torch.save(STATE, path)
    path.write_bytes(path.read_bytes()[:200])


def without_its_end(path):
    torch.save(STATE, path)
    path.write_bytes(path.read_bytes()[:-100])


def another_zip(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("folder/readme", "hello")


def without_a_storage(path):
    torch.save(STATE, path)
    with zipfile.ZipFile(path) as old:
        kept = {name: old.read(name) for name in old.namelist() if not name.endswith("data/0")}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in kept.items():
            file.writestr(name, content)


def empty(path):
    path.touch()


def folder(path):
    path.mkdir()


def nothing(path):
    """There is no such file."""


def below_a_file(path):
    path.parent.touch()


BROKEN = [head_only, without_its_end, another_zip, without_a_storage, empty, folder, nothing]


@pytest.fixture(params=["load", "patched"])
def load(request):
    """penstock.load, and torch.load under a patch."""
    if request.param == "load":
        yield penstock.load
    else:
        with penstock.patch():
            yield lambda path: torch.load(path)


def compare(theirs, ours):
    """What torch raises, and what we do."""
    _, expected = outcome(theirs)
    _, found = outcome(ours)
    assert expected is not None
    assert isinstance(found, type(expected)), f"{expected!r} and {found!r}"
    assert isinstance(found, penstock.Error) and found.message
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is type(found) and str(again) == str(found)
    return found


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_a_file_that_torch_cannot_load_is_the_same_error(tmp_path, load, make):
    path = tmp_path / "x.pt"
    make(path)
    error = compare(lambda: REAL.load(path), lambda: load(path))
    assert not isinstance(error, safetensors.SafetensorError), "it is not their file"


def test_a_name_that_torch_cannot_load_is_the_same_error(tmp_path, load):
    (tmp_path / "file").touch()
    for name in ("", str(tmp_path / "file/x.pt"), str(tmp_path / ("x" * 300))):
        _, error = outcome(lambda: open(name, "rb"))
        assert isinstance(outcome(lambda: load(name))[1], type(error)), name


def test_an_empty_name_is_a_file_that_is_not_there():
    for use in (penstock.load, penstock.load_file, penstock.load_model, penstock.safe_open,
                penstock.File):
        with pytest.raises(FileNotFoundError) as error:
            use("")
        assert error.value.message == "the name is empty"


def test_damage_that_torch_does_not_see_is_an_error_of_its_class_too(tmp_path, load):
    penstock.save(STATE, tmp_path / "x.pt")
    content = bytearray((tmp_path / "x.pt").read_bytes())
    content[content.index(STATE["weight"].numpy().tobytes()) + 5] ^= 1
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(RuntimeError, match="not those that were saved") as error:
        load(tmp_path / "x.pt")
    assert isinstance(error.value, penstock.Error) and error.value.offset is not None


@pytest.mark.parametrize("make", [folder, below_a_file, nothing], ids=lambda make: make.__name__)
def test_a_file_that_torch_cannot_write_is_the_same_error(tmp_path, make):
    path = tmp_path / ("x.pt" if make is folder else "folder/x.pt")
    make(path)
    error = compare(lambda: REAL.save(STATE, path), lambda: penstock.save(STATE, path))
    with penstock.patch():
        patched = compare(lambda: REAL.save(STATE, path), lambda: torch.save(STATE, path))
    assert type(patched) is type(error) and error.errno


def test_an_argument_that_makes_no_sense_is_no_damaged_file(tmp_path):
    torch.save(STATE, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="map_location") as error:
        penstock.load(tmp_path / "x.pt", map_location="cpu", device="cpu")
    assert not isinstance(error.value, RuntimeError)
