# SPDX-License-Identifier: MIT
"""slices= gives what tensor[...] would give, and reads only the bytes of it."""
import pytest
import torch
from safetensors.torch import save_file

import penstock
from support import DTYPES, F4, REFUSED, assert_same, random_tensor, same

# Every test below holds for tensors that look into the file and for copies.
pytestmark = pytest.mark.usefixtures("each_way")

S = slice
ALL = slice(None)

INDICES = [
    (S(0, 3),), (S(2, 6),), (S(3, 4),), (S(None, 2),), (S(4, None),), (ALL,), (),
    (ALL, S(2, 5)), (ALL, ALL, S(1, 7)), (S(1, 3), S(2, 9), S(0, 8)), (S(1, 3), S(2, 9), S(3, 4)),
    (S(-2, None),), (S(None, -1),), (S(-4, -2), S(-3, None)), (ALL, ALL, S(-1, None)),
    (..., S(2, 4)), (S(1, 2), ..., S(2, 4)), (..., ), (S(0, 2), ...), (..., S(0, 2), ALL),
    (2,), (-1,), (0, 0), (ALL, 3), (ALL, ALL, -1), (S(1, 4), 5, S(0, 2)), (5, 9, 7), (..., 0),
    (S(0, 0),), (S(3, 1),), (ALL, S(5, 5), ALL), (S(100, 200),), (S(0, 0), S(0, 0), S(0, 0)),
    (S(0, 100),), (S(-100, 3),), (S(-100, 100), S(5, 1000)), (ALL, S(-1, -5)),
    (S(0, 6, 1),), (S(None, None, 1), S(1, 2, 1)), (S(None, None, None),),
]


@pytest.fixture(scope="module")
def cube(tmp_path_factory):
    tensors = {"cube": random_tensor(torch.float32, (6, 10, 8)), "other": torch.arange(7)}
    path = tmp_path_factory.mktemp("cube") / "x.safetensors"
    save_file(tensors, path)
    return path, tensors


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_slice_is_what_indexing_gives(cube, device, each_way, index):
    path, tensors = cube
    loaded = penstock.load_file(path, device, slices={"cube": index})
    assert_same(loaded, {"cube": tensors["cube"][index], "other": tensors["other"]})
    assert loaded["cube"].is_contiguous()
    assert loaded["cube"].data_ptr() % 256 == 0 or each_way == "mapped"


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("arena", [True, False])
def test_load_model_and_stream_slice_alike(cube, index, arena):
    path, tensors = cube
    loaded = penstock.load_model(path, slices={"cube": index}, arena=arena)
    assert same(loaded["cube"], tensors["cube"][index])
    streamed = dict(penstock.stream(path, slices={"cube": index}))
    assert same(streamed["cube"], tensors["cube"][index])


@pytest.mark.parametrize("index", [S(1, 3), 4, ...], ids=str)
def test_a_lone_index_needs_no_tuple(cube, index):
    path, tensors = cube
    loaded = penstock.load_file(path, slices={"cube": index})
    assert same(loaded["cube"], tensors["cube"][index])


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != F4], ids=str)
def test_every_width_of_number_is_cut_at_the_right_byte(tmp_path, device, dtype):
    tensors = {"t": random_tensor(dtype, (9, 7, 5))}
    save_file(tensors, tmp_path / "x.safetensors")
    for index in ((S(2, 7),), (ALL, S(1, 6)), (ALL, ALL, S(3, 5)), (S(1, 2), S(2, 3), S(4, 5))):
        loaded = penstock.load_file(tmp_path / "x.safetensors", device, slices={"t": index})
        assert same(loaded["t"], tensors["t"][index]), index


@pytest.mark.skipif(F4 is None, reason="this torch has no four-bit floats")
def test_four_bit_numbers_are_cut_by_rows(tmp_path, device):
    tensors = {"t": random_tensor(F4, (8, 6))}
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", device, slices={"t": (S(2, 5),)})
    assert same(loaded["t"].view(torch.uint8), tensors["t"].view(torch.uint8)[2:5])


@pytest.mark.skipif(F4 is None, reason="this torch has no four-bit floats")
def test_half_a_byte_cannot_be_cut(tmp_path):
    """In the numbers of the file, two to a byte; never a neighbour's half."""
    tensors = {"t": random_tensor(F4, (8, 6))}
    save_file(tensors, tmp_path / "x.safetensors")
    for columns in (S(1, 3), S(0, 3), S(3, 12)):
        with pytest.raises(penstock.Error, match="(?s)t.*byte"):
            penstock.load_file(tmp_path / "x.safetensors", slices={"t": (ALL, columns)})
    loaded = penstock.load_file(tmp_path / "x.safetensors", slices={"t": (ALL, S(4, 8))})
    assert same(loaded["t"].view(torch.uint8), tensors["t"].view(torch.uint8)[:, 2:4])


def test_a_scalar_can_be_taken_whole(tmp_path):
    save_file({"s": torch.tensor(4.5)}, tmp_path / "x.safetensors")
    for index in ((), (...,)):
        loaded = penstock.load_file(tmp_path / "x.safetensors", slices={"s": index})
        assert same(loaded["s"], torch.tensor(4.5))


def test_slices_of_many_tensors_at_once(tmp_path, device):
    """Tensor parallel: each rank takes its half, some by rows, some by columns."""
    tensors, halves = {}, {}
    for layer in range(20):
        tensors[f"{layer}.up"] = random_tensor(torch.bfloat16, (64, 48), seed=layer)
        tensors[f"{layer}.down"] = random_tensor(torch.bfloat16, (48, 64), seed=50 + layer)
        tensors[f"{layer}.norm"] = random_tensor(torch.bfloat16, (48,), seed=100 + layer)
        halves[f"{layer}.up"] = (S(32, 64),)
        halves[f"{layer}.down"] = (ALL, S(32, 64))
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", device, slices=halves)
    assert_same(loaded, {name: tensor[halves.get(name, ())] for name, tensor in tensors.items()})


# ------------------------------------------------------------------------ what is read for them --

@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """40 MB; its rows are long enough that half of one is worth a read of its own."""
    tensors = {f"w{i}": random_tensor(torch.float32, (40, 128 << 10), seed=i) for i in range(2)}
    path = tmp_path_factory.mktemp("halves") / "x.safetensors"
    save_file(tensors, path)
    return path, tensors


@pytest.mark.parametrize("index", [(S(0, 20),), (S(20, 40),), (ALL, S(0, 64 << 10)),
                                   (ALL, S(64 << 10, None))],
                         ids=["top", "bottom", "left", "right"])
def test_half_of_each_tensor_reads_half_of_the_file(halves, device, index):
    path, tensors = halves
    loaded = penstock.load_file(path, device, slices={name: index for name in tensors})
    report = penstock.last_report()
    assert_same(loaded, {name: tensor[index] for name, tensor in tensors.items()})
    assert report.bytes == path.stat().st_size // (8 << 20) * (8 << 20) // 2
    assert report.storage_bytes <= 0.55 * path.stat().st_size


def test_an_empty_slice_reads_nothing_to_speak_of(halves):
    path, _ = halves
    penstock.load_file(path, slices={"w0": (S(0, 0),), "w1": (S(3, 3),)})
    assert penstock.last_report().storage_bytes < 1 << 20


def test_a_slice_of_narrow_columns_is_right_over_many_rows(tmp_path, device):
    tensors = {"t": random_tensor(torch.int16, (50000, 33))}
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", device, slices={"t": (ALL, S(16, 18))})
    assert same(loaded["t"], tensors["t"][:, 16:18])


# ------------------------------------------------------------------------------------- refusals --

@pytest.mark.parametrize("index", [(S(None, None, 2),), (S(0, 6, 3),), (S(None, None, -1),),
                                   (ALL, S(0, 4, 2))], ids=str)
def test_steps_are_refused_in_words(cube, index):
    path, _ = cube
    with pytest.raises(REFUSED, match="(?s)step"):
        penstock.load_file(path, slices={"cube": index})


@pytest.mark.parametrize("index", [(6,), (-7,), (ALL, 10), (0, 0, 8), (10**30,), (-10**30,)],
                         ids=str)
def test_an_integer_out_of_range_is_refused(cube, index):
    path, _ = cube
    with pytest.raises(REFUSED, match="cube"):
        penstock.load_file(path, slices={"cube": index})


@pytest.mark.parametrize("index", [(ALL,) * 4, (0, 0, 0, 0), (..., ALL, ALL, ALL, ALL)], ids=str)
def test_too_many_indices_are_refused(cube, index):
    path, _ = cube
    with pytest.raises(REFUSED, match="cube"):
        penstock.load_file(path, slices={"cube": index})


@pytest.mark.parametrize("index", ["a", ("a",), (1.5,), ([0, 2],), (S("a", "b"),), (S(0.5, 1),),
                                   (object,), {"a": 1}], ids=str)
def test_other_things_are_refused(cube, index):
    path, _ = cube
    with pytest.raises(REFUSED):
        penstock.load_file(path, slices={"cube": index})


def test_two_ellipses_are_torchs_or_refused(cube):
    path, tensors = cube
    try:
        loaded = penstock.load_file(path, slices={"cube": (..., ..., S(0, 2))})
    except REFUSED:
        return
    assert same(loaded["cube"], tensors["cube"][..., ..., 0:2])


def test_a_new_axis_is_torchs_or_refused(cube):
    path, tensors = cube
    try:
        loaded = penstock.load_file(path, slices={"cube": (None, S(0, 2))})
    except REFUSED:
        return
    assert same(loaded["cube"], tensors["cube"][None, 0:2])


def test_integers_may_be_numpys(cube):
    import numpy

    path, tensors = cube
    index = (numpy.int64(2), S(numpy.int32(1), numpy.int64(5)))
    assert same(penstock.load_file(path, slices={"cube": index})["cube"], tensors["cube"][2, 1:5])


def test_huge_bounds_are_cut_as_python_cuts_them(cube):
    path, tensors = cube
    index = (S(-10**30, 10**30), S(2, 10**40))
    assert same(penstock.load_file(path, slices={"cube": index})["cube"], tensors["cube"][:, 2:])


def test_a_name_that_is_not_there_is_named(cube):
    path, _ = cube
    with pytest.raises(REFUSED, match="cubic"):
        penstock.load_file(path, slices={"cubic": (ALL,)})


def test_slices_that_are_no_dict_are_refused(cube):
    path, _ = cube
    with pytest.raises(REFUSED):
        penstock.load_file(path, slices=[(ALL,)])


@pytest.mark.parametrize("index", [True, (True,), None, (None, 0)], ids=repr)
def test_what_is_no_range_is_refused(few, index):
    path, tensors = few
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    with pytest.raises(penstock.Error, match=name):
        penstock.load_file(path, slices={name: index})
