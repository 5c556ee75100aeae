# SPDX-License-Identifier: MIT
"""A name is that of a file, whatever it looks like, and means the same file after a chdir()."""
import os
import pathlib
import shutil

import numpy
import pytest
import torch
from safetensors.torch import save, save_file

import penstock
from support import assert_same

ODD = ["null:", "pattern:4K", "pattern:4K,rate=1M", "null:x", "host:", "cuda:0", "pattern:"]
TENSORS = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder that relative names are in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ----------------------------------------------------------------------- names like a store's --

LOADS = {
    "load_file": penstock.load_file,
    "load_model": penstock.load_model,
    "stream": lambda name: dict(penstock.stream(name)),
    "safe_open": lambda name: penstock.safe_open(name).get_tensors(),
    "prefetch": lambda name: penstock.prefetch(name, "cpu").wait() or penstock.load_file(name),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("kind", [str, os.fsencode, pathlib.Path])
def test_a_file_is_loaded_whatever_it_is_called(here, kind, name, load):
    save_file(TENSORS, here / name)
    assert_same(LOADS[load](kind(name)), TENSORS)


@pytest.mark.parametrize("name", ODD)
def test_a_folder_is_loaded_whatever_it_is_called(here, name):
    (here / name).mkdir()
    save_file(TENSORS, here / name / "model.safetensors")
    assert_same(penstock.load_model(name), TENSORS)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("kind", [str, os.fsencode, pathlib.Path])
def test_a_file_is_written_whatever_it_is_called(here, kind, name):
    penstock.save_file(TENSORS, kind(name))
    assert os.listdir(here) == [name]
    save_file(TENSORS, here / "theirs")
    assert (here / name).read_bytes() == (here / "theirs").read_bytes()
    penstock.tofile(numpy.arange(5), kind(name))
    assert (here / name).read_bytes() == numpy.arange(5).tobytes()
    assert (penstock.fromfile(kind(name), numpy.int64) == numpy.arange(5)).all()


@pytest.mark.parametrize("name", [pathlib.Path("null:"), b"null:", "./null:"], ids=repr)
def test_file_takes_a_path_for_a_file(here, name):
    with penstock.File(name, "w") as file:
        file.write(b"12345678")
    assert (here / "null:").read_bytes() == b"12345678"
    content = bytearray(8)
    with penstock.File(name, "r+") as file:
        file.write(b"AB")
        file.read(content)
    assert content == b"AB345678"


def test_file_takes_the_names_of_stores_as_text(here):
    """Whatever files of these names there are, and however they change."""
    (here / "pattern:4K").write_bytes(b"a file")
    with penstock.File("pattern:4K") as file:
        (here / "pattern:4K").write_bytes(b"another content")
        content = numpy.empty(512, numpy.uint64)
        assert file.read(content) == 4096
    assert (content == numpy.arange(0, 4096, 8)).all()
    with penstock.File("null:", "w") as file:
        assert file.write(content) == 4096
    with penstock.File("null:", "r+") as file:
        file.write(content)
        file.flush()
        assert file.write(content) == 4096
    assert os.listdir(here) == ["pattern:4K"]


# ----------------------------------------------------------------------------- after a chdir() --

@pytest.fixture
def elsewhere(here):
    """Another folder, with other files of the same names."""
    folder = here / "elsewhere"
    folder.mkdir()
    save_file({name: tensor + 1 for name, tensor in TENSORS.items()}, folder / "x.safetensors")
    save_file(TENSORS, here / "x.safetensors")
    return folder


def test_safe_open_reads_on_after_a_chdir(elsewhere):
    with penstock.safe_open("x.safetensors") as file:
        os.chdir(elsewhere)
        assert_same(file.get_tensors(), TENSORS)
        assert_same({name: file.get_tensor(name) for name in TENSORS}, TENSORS)


def test_a_stream_goes_on_after_a_chdir(elsewhere):
    coming = penstock.stream("x.safetensors", window=2)
    os.chdir(elsewhere)
    assert_same(dict(coming), TENSORS)


def test_a_prefetch_is_joined_after_a_chdir(elsewhere, here):
    begun = penstock.prefetch("x.safetensors", "cpu")
    os.chdir(elsewhere)
    begun.wait()
    assert begun.current()
    assert_same(penstock.load_file(here / "x.safetensors"), TENSORS)
    assert begun.finish("", False) is None, "the load began anew"
    assert penstock.load_file("x.safetensors")["a"][0] == 1


def test_a_file_is_written_where_it_was_opened(elsewhere, here):
    file = penstock.File("new", "w")
    os.chdir(elsewhere)
    file.write(b"content")
    file.close()
    assert (here / "new").read_bytes() == b"content" and not (elsewhere / "new").exists()


def test_a_file_is_read_and_written_on_where_it_was_opened(elsewhere, here):
    for folder in (here, elsewhere):
        (folder / "x").write_bytes(b"....")
    content = bytearray(4)
    with penstock.File("x", "r+") as file:
        os.chdir(elsewhere)
        file.write(b"one")
        file.flush()
        file.write(b"two")
        file.read(content)
    assert (here / "x").read_bytes() == content == b"two."
    assert (elsewhere / "x").read_bytes() == b"...."


def test_what_follows_a_link_is_not_normalised(here):
    """link/.. is the folder above that which the link leads to."""
    (here / "deep" / "er").mkdir(parents=True)
    (here / "link").symlink_to(here / "deep" / "er")
    (here / "x").write_bytes(b"wrong")
    (here / "deep" / "x").write_bytes(b"right")
    content = bytearray(5)
    with penstock.File("link/../x", "r+") as file:
        file.write(b"R")
        file.read(content)
    assert content == b"Right" and (here / "x").read_bytes() == b"wrong"


def test_a_folder_that_was_removed_is_an_error_in_words(here):
    save_file(TENSORS, here / "x.safetensors")
    begun = penstock.prefetch("x.safetensors", "cpu")
    (here / "gone").mkdir()
    os.chdir(here / "gone")
    shutil.rmtree(here / "gone")
    for call in (penstock.load_file, lambda name: penstock.prefetch(name, "cpu").wait()):
        with pytest.raises(FileNotFoundError, match="x.safetensors") as caught:
            call("x.safetensors")
        assert isinstance(caught.value, penstock.Error)
    assert_same(penstock.load_file(here / "x.safetensors"), TENSORS)
    assert begun.finish("", False) is None, "the load began anew"


@pytest.mark.parametrize("name", [3, None, 3.5, [3], object(), True],
                         ids=lambda name: type(name).__name__)
@pytest.mark.parametrize("call", [penstock.load_file, penstock.load_model, penstock.stream,
                                  penstock.safe_open, penstock.File, penstock.fromfile,
                                  penstock.from_pretrained,
                                  lambda name: penstock.prefetch(name, "cpu"),
                                  lambda name: penstock.save_file({}, name),
                                  lambda name: penstock.tofile(b"", name)])
def test_what_is_no_name_is_refused(call, name):
    with pytest.raises(TypeError, match="str, bytes or os.PathLike"):
        call(name)


@pytest.mark.parametrize("progress", [False, True])
def test_a_name_in_bytes_is_a_name(here, few, progress):
    path, tensors = few
    name = os.fsencode(path)
    assert_same(penstock.load_file(name, progress=progress), tensors)
    assert_same(dict(penstock.stream(name, progress=progress)), tensors)
    penstock.save_file(tensors, b"copy", progress=progress)
    assert_same(penstock.load_model("copy", progress=progress), tensors)
    begun = penstock.prefetch(name, "cpu")
    assert_same(penstock.load_file(path, progress=progress), tensors)
    assert begun.finish("", False) is None, "the load began anew"


# ----------------------------------------------------------- where absolute names are too long --

@pytest.fixture(params=[4033, 3900, 4093, 4200])
def deep(here, request):
    """The working folder, whose own name is about as long as a name may be, or longer."""
    length = len(os.fsencode(here))
    while length < request.param:
        part = min(200, request.param - length - 1) or 1
        os.mkdir("d" * part)
        os.chdir("d" * part)
        length += 1 + part
    yield pathlib.Path(".")
    os.chdir(here)
    for entry in here.iterdir():
        shutil.rmtree(entry)


LONG = "x" * 180 + ".safetensors"


@pytest.mark.parametrize("load", LOADS)
def test_a_relative_name_is_enough_however_deep_the_process_is(deep, load):
    pathlib.Path(LONG).write_bytes(save(TENSORS))
    assert_same(LOADS[load](LONG), TENSORS)


@pytest.mark.parametrize("name", ["m" * 100, ".", "./"], ids=["folder", "here", "here/"])
def test_a_model_is_found_in_a_folder_however_deep_it_is(deep, name):
    os.makedirs(name, exist_ok=True)
    pathlib.Path(name, "model-00001-of-00001.safetensors").write_bytes(save(TENSORS))
    assert_same(penstock.load_model(name), TENSORS)


def test_a_file_is_written_however_deep_the_process_is(deep, here):
    penstock.save_file(TENSORS, LONG)
    assert os.listdir() == [LONG]
    assert pathlib.Path(LONG).read_bytes() == save(TENSORS)
    content = bytearray(7)
    file = penstock.File(pathlib.Path("null:"), "w")
    file.write(b"content")
    folder = os.open(".", os.O_RDONLY)
    os.chdir(here)
    file.close()
    os.fchdir(folder)
    os.close(folder)
    with penstock.File("./null:") as file:
        file.read(content)
    assert content == b"content" and sorted(os.listdir()) == ["null:", LONG]


def test_safe_open_reads_on_after_a_chdir_from_the_deep(deep, here):
    pathlib.Path(LONG).write_bytes(save(TENSORS))
    with penstock.safe_open(LONG) as file:
        os.chdir(here)
        assert_same(file.get_tensors(), TENSORS)
        assert_same({name: file.get_tensor(name) for name in TENSORS}, TENSORS)
