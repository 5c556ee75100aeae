# SPDX-License-Identifier: MIT
"""safe_open answers code that was written for safetensors: the same results, the same errors."""
import gc
import os
import pathlib

import numpy
import pytest
import safetensors
import torch
from safetensors.torch import save_file

import penstock
from support import (DTYPES, F4, MIB, REFUSED, assert_same, in_use, outcome, random_tensor, same,
                     settled, write_raw)

# Every test below holds for tensors that look into the file and for copies.
pytestmark = pytest.mark.usefixtures("each_way")

BUILTIN = (IndexError, ValueError, TypeError, KeyError, FileNotFoundError, OSError)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    tensors = {
        "cube": random_tensor(torch.float32, (4, 6, 8)),
        "row": torch.arange(10),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 5),
        "half": random_tensor(torch.bfloat16, (3, 3)),
        "flags": torch.tensor([True, False]),
    }
    path = tmp_path_factory.mktemp("open") / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "ä": "ö"})
    return path


@pytest.fixture
def both(path, device):
    with penstock.safe_open(path, framework="pt", device=device) as mine, \
            safetensors.safe_open(path, framework="pt", device="cpu") as theirs:
        yield mine, theirs


def agree(mine, theirs):
    """Two calls give the same tensor, or errors of the same kind."""
    result, error = outcome(theirs)
    if error is None:
        answer = mine()
        assert same(answer, result)
        return
    kinds = tuple(kind for kind in BUILTIN if isinstance(error, kind)) or REFUSED
    with pytest.raises(kinds):
        mine()


# ----------------------------------------------------------------------------------- the basics --

def test_names_and_metadata_are_those_of_safetensors(both):
    mine, theirs = both
    assert list(mine.keys()) == list(theirs.keys())
    assert list(mine.offset_keys()) == list(theirs.offset_keys())
    assert mine.metadata() == theirs.metadata() == {"format": "pt", "ä": "ö"}


def test_a_file_without_metadata_has_none(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    with penstock.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() is None


def test_empty_metadata_is_an_empty_dict(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors", metadata={})
    assert safetensors.safe_open(tmp_path / "x.safetensors", "pt").metadata() == {}
    assert penstock.safe_open(tmp_path / "x.safetensors", "pt").metadata() == {}


def test_every_tensor_is_the_same(both):
    mine, theirs = both
    for name in theirs.keys():
        assert same(mine.get_tensor(name), theirs.get_tensor(name))


def test_tensors_are_where_they_were_asked_for(both, device, each_way):
    mine, _ = both
    for name in mine.keys():
        tensor = mine.get_tensor(name)
        assert tensor.device == torch.device(device)
        assert tensor.is_contiguous() and not tensor.requires_grad
        assert tensor.data_ptr() % 256 == 0 or each_way == "mapped"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_by_get_tensor_and_get_slice(tmp_path, dtype):
    save_file({"t": random_tensor(dtype, (6, 4))}, tmp_path / "x.safetensors")
    with penstock.safe_open(tmp_path / "x.safetensors", "pt") as mine, \
            safetensors.safe_open(tmp_path / "x.safetensors", "pt") as theirs:
        assert same(mine.get_tensor("t"), theirs.get_tensor("t"))
        assert mine.get_slice("t").get_dtype() == theirs.get_slice("t").get_dtype()
        assert mine.get_slice("t").get_shape() == theirs.get_slice("t").get_shape()
        if dtype != F4:
            assert same(mine.get_slice("t")[1:3, 2:], theirs.get_slice("t")[1:3, 2:])


def test_get_tensors_gives_all(both):
    mine, theirs = both
    assert_same(mine.get_tensors(), theirs.get_tensors())


def test_arguments_stand_where_safetensors_has_them(path):
    assert penstock.safe_open(path, "pt", "cpu").get_tensor("row").tolist() == list(range(10))
    with penstock.safe_open(filename=str(path), framework="pt", device="cpu") as file:
        assert file.get_tensor("row").tolist() == list(range(10))
    with penstock.safe_open(pathlib.Path(path), framework="pt") as file:
        assert file.get_tensor("row").device.type == "cpu"


@pytest.mark.parametrize("framework", ["pt", "torch", "pytorch", "np", "numpy"])
def test_frameworks_by_the_names_that_safetensors_knows(path, framework):
    with penstock.safe_open(path, framework=framework) as mine, \
            safetensors.safe_open(path, framework=framework) as theirs:
        assert type(mine.get_tensor("row")) is type(theirs.get_tensor("row"))


def test_numpy_arrays(path):
    with penstock.safe_open(path, framework="np") as mine, \
            safetensors.safe_open(path, framework="np") as theirs:
        for name in ("cube", "row", "scalar", "empty", "flags"):
            one, other = mine.get_tensor(name), theirs.get_tensor(name)
            assert one.dtype == other.dtype and one.shape == other.shape
            assert one.tobytes() == other.tobytes()
        part = mine.get_slice("cube")[1:3, :, 2]
        assert isinstance(part, numpy.ndarray)
        assert numpy.array_equal(part, theirs.get_slice("cube")[1:3, :, 2], equal_nan=True)


def test_the_usual_loop(path):
    """What most code does with safe_open."""
    tensors = {}
    with penstock.safe_open(path, framework="pt", device="cpu") as file:
        for key in file.keys():
            tensors[key] = file.get_tensor(key)
    assert_same(tensors, safetensors.torch.load_file(path))


@pytest.fixture(scope="module")
def forty(tmp_path_factory):
    """Tensors whose order in the file is neither that of names nor its reverse."""
    tensors = {f"t{i:02}": random_tensor(DTYPES[i * 7 % len(DTYPES)], (i % 5, 3), seed=i)
               for i in range(40)}
    path = tmp_path_factory.mktemp("forty") / "x.safetensors"
    save_file(tensors, path)
    return path, tensors


ORDERS = {
    "names": sorted,
    "backwards": lambda names: sorted(names, reverse=True),
    "twice": lambda names: sorted([*names, *names]),
    "again and again": lambda names: sorted(names) * 3,
    "every other": lambda names: sorted(names)[::2] + sorted(names)[1::2],
    "a few, then another": lambda names: sorted(names)[:6] + sorted(names)[20:] + sorted(names)[5:],
    "shuffled": lambda names: sorted(names, key=lambda name: int(name[1:]) * 17 % 41),
}


@pytest.mark.parametrize("order", ORDERS)
def test_tensors_are_right_in_whatever_order_they_are_read(forty, device, order):
    path, tensors = forty
    kept = []
    with penstock.safe_open(path, "pt", device) as file:
        for name in ORDERS[order](tensors):
            tensor = file.get_tensor(name)
            assert same(tensor, tensors[name]), name
            kept.append((name, tensor))
    assert all(same(tensor, tensors[name]) for name, tensor in kept)


def test_tensors_are_right_in_the_order_of_the_file_with_slices_between(forty, device):
    path, tensors = forty
    with penstock.safe_open(path, "pt", device, copy=True) as file:
        for name in file.offset_keys():
            tensor = file.get_tensor(name)
            assert same(tensor, tensors[name])
            tensor.view(torch.uint8).zero_()
            if tensors[name].dtype != F4:
                assert same(file.get_slice(name)[1:], tensors[name][1:])
        for name in file.keys():
            assert same(file.get_tensor(name), tensors[name]), "written by the caller before"


def test_two_readers_of_one_file_do_not_disturb_each_other(forty):
    path, tensors = forty
    with penstock.safe_open(path, "pt") as one, penstock.safe_open(path, "pt") as other:
        for first, second in zip(one.keys(), reversed(other.keys())):
            assert same(one.get_tensor(first), tensors[first])
            assert same(other.get_tensor(second), tensors[second])


def test_a_tensor_that_cannot_be_had_does_not_spoil_those_before_it(tmp_path):
    path = tmp_path / "x.safetensors"
    content = {f"fine{i}": ("F32", (1,), b"\0\0\200\77") for i in range(9)}
    write_raw(path, dict(content, six=("F6_E2M3", (4,), b"123")))
    with penstock.safe_open(path, "pt") as file:
        for i in range(9):
            assert same(file.get_tensor(f"fine{i}"), torch.ones(1))
        with pytest.raises(REFUSED):
            file.get_tensor("six")
        assert same(file.get_tensor("fine8"), torch.ones(1))


@pytest.mark.alone
def test_leaving_in_the_middle_frees(big, device):
    path, tensors = big
    with penstock.safe_open(path, "pt", device) as file:
        file.get_tensor("part.00")
    before = in_use(device)
    with penstock.safe_open(path, "pt", device) as file:
        for name in list(file.keys())[:-1]:
            assert same(file.get_tensor(name), tensors[name])
    assert settled(device, before + 16 * MIB) < before + 16 * MIB


# ------------------------------------------------------------------------------------ get_slice --

INDICES = [
    "[:]", "[...]", "[()]", "[0]", "[-1]", "[3]", "[4]", "[-4]", "[-5]", "[1:3]", "[-2:]", "[:-1]",
    "[1:1]", "[3:1]", "[100:]", "[:100]", "[-100:2]", "[0:4:1]", "[:, 1]", "[:, 2:4]",
    "[:, :, 3:5]", "[..., 0]", "[..., 2:3]", "[1, ..., 2:3]", "[:, ..., 0]", "[1, 2, 3]",
    "[1, 2, 3, 4]", "[0, 0]",
    "[:, 6]", "[:, -6]", "[:, -7]", "[::2]", "[1::2]", "[:, ::3]", "[:, :, ::8]", "[::-1]", "[::0]",
    "[None]", "[None, 0]", "[:, None, 2]", "[1.5]", "['a']", "[1:'a']", "[:, 1.5:2]",
]


@pytest.mark.parametrize("index", INDICES)
def test_an_index_gives_the_same_or_the_same_kind_of_error(both, index):
    mine, theirs = both
    agree(lambda: eval("s" + index, {"s": mine.get_slice("cube")}),
          lambda: eval("s" + index, {"s": theirs.get_slice("cube")}))


@pytest.mark.parametrize("name", ["row", "scalar", "empty", "half", "flags"])
@pytest.mark.parametrize("index", ["[:]", "[...]", "[()]", "[0]", "[-1]", "[1:3]", "[:, 1]",
                                   "[5:2]", "[1, 1]", "[2:, :2]"])
def test_other_ranks_are_indexed_alike(both, name, index):
    mine, theirs = both
    agree(lambda: eval("s" + index, {"s": mine.get_slice(name)}),
          lambda: eval("s" + index, {"s": theirs.get_slice(name)}))


def test_a_slice_tells_its_shape_and_dtype_without_reading(both):
    mine, theirs = both
    for name in theirs.keys():
        assert mine.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
        assert mine.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()


def test_a_slice_can_be_read_after_the_file_was_closed(few):
    """As with safetensors: it keeps what it needs."""
    path, tensors = few
    for opened in (safetensors.safe_open, penstock.safe_open):
        with opened(path, "pt") as file:
            part = file.get_slice("model.embed.weight")
        assert same(part[3:5], tensors["model.embed.weight"][3:5])
        with pytest.raises(Exception, match="closed"):
            file.get_slice("model.embed.weight")


def test_get_slice_reads_only_what_it_needs(big, device):
    path, tensors = big
    with penstock.safe_open(path, "pt", device) as file:
        part = file.get_slice("large")[10:12]
        report = penstock.last_report()
        assert same(part, tensors["large"][10:12])
        assert report.bytes == part.nbytes
        assert report.storage_bytes < 1.1 * part.nbytes
        part = file.get_slice("large")[:, 100:150]
        assert same(part, tensors["large"][:, 100:150])
        assert penstock.last_report().storage_bytes < 1.3 * part.nbytes


def test_opening_reads_the_header_only(holes):
    before = _read_so_far()
    with penstock.safe_open(holes, "pt") as file:
        assert len(list(file.keys())) == 16
        assert file.get_slice("t03").get_shape() == [64 << 20]
    assert _read_so_far() - before < 4 << 20


def _read_so_far() -> int:
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().split()[1])


# --------------------------------------------------------------------------------------- errors --

@pytest.mark.parametrize("method", ["get_tensor", "get_slice"])
def test_a_name_that_is_not_there_is_named(both, method):
    mine, _ = both
    with pytest.raises(REFUSED, match="no.such.name"):
        getattr(mine, method)("no.such.name")


def test_a_name_that_is_no_string_is_a_type_error(both):
    mine, _ = both
    for name in (1, None, b"row", ["row"], {}):
        for ask in (mine.get_tensor, mine.get_slice):
            with pytest.raises(TypeError, match="name is a text"):
                ask(name)


def test_a_missing_file_is_told_at_the_opening(tmp_path):
    with pytest.raises(penstock.Error) as caught:
        penstock.safe_open(tmp_path / "none.safetensors", "pt")
    assert "none.safetensors" in str(caught.value)


def test_an_unknown_framework_is_told_at_the_opening(path):
    with pytest.raises(REFUSED, match="cobol"):
        penstock.safe_open(path, framework="cobol")


def test_an_unknown_device_is_told_at_the_opening(path):
    with pytest.raises(REFUSED, match="abacus"):
        penstock.safe_open(path, framework="pt", device="abacus")


@pytest.mark.parametrize("call", ["keys()", "offset_keys()", "metadata()", "get_tensor('row')",
                                  "get_slice('row')", "get_tensors()"])
def test_use_after_the_with_block_is_an_error(path, call):
    with penstock.safe_open(path, "pt") as file:
        pass
    with pytest.raises((penstock.Error, ValueError), match="(?i)closed"):
        eval("file." + call, {"file": file})


def test_tensors_outlive_the_file(path):
    with penstock.safe_open(path, "pt") as file:
        row, cube = file.get_tensor("row"), file.get_slice("cube")[1:3]
    del file
    gc.collect()
    assert row.tolist() == list(range(10))
    assert same(cube, safetensors.torch.load_file(path)["cube"][1:3])


def test_a_slice_outlives_the_block_or_says_that_the_file_is_closed(path):
    with penstock.safe_open(path, "pt") as file:
        row = file.get_slice("row")
    del file
    gc.collect()
    assert row.get_shape() == [10]
    result, error = outcome(lambda: row[2:4].tolist())
    assert result == [2, 3] or isinstance(error, (penstock.Error, ValueError)), error


def test_an_exception_in_the_block_goes_through(path):
    with pytest.raises(ZeroDivisionError):
        with penstock.safe_open(path, "pt") as file:
            file.get_tensor("row")
            raise ZeroDivisionError


def test_files_are_closed(path):
    def opened():
        return sum(os.path.realpath(f"/proc/self/fd/{number}") == str(path)
                   for number in os.listdir("/proc/self/fd"))

    with penstock.safe_open(path, "pt") as file:
        file.get_tensor("row")
    assert opened() == 0
    file = penstock.safe_open(path, "pt")
    file.get_tensor("row")
    gc.disable()  # as with any other file, the last reference is enough
    try:
        del file
        assert opened() == 0
    finally:
        gc.enable()


def test_a_relative_name_is_kept_wherever_the_process_goes(path, tmp_path, monkeypatch):
    other = tmp_path / path.name
    save_file({"other": torch.ones(3)}, other)
    monkeypatch.chdir(path.parent)
    with penstock.safe_open(path.name, framework="pt") as file:
        os.chdir(tmp_path)
        assert torch.equal(file.get_tensor("row"), torch.arange(10))
