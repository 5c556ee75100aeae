# SPDX-License-Identifier: MIT
"""stream gives each tensor once, with the right bytes, as it lands, and stops when left."""
import gc
import itertools
import os

import pytest
import torch
from safetensors.torch import save_file

import penstock
from support import (MIB, REFUSED, assert_same, in_use, one_nan, python, random_tensor, same,
                     settled)

# Every test below holds for tensors that look into the file and for copies.
pytestmark = pytest.mark.usefixtures("each_way")


def collect(pairs) -> dict:
    """All pairs of a stream; a name that comes twice is a failure."""
    tensors = {}
    for name, tensor in pairs:
        assert name not in tensors, f"{name} came twice"
        tensors[name] = tensor
    return tensors


@pytest.fixture
def many(tmp_path):
    tensors = {f"t{i:03}": random_tensor(torch.float32, (i * 37 % 500, 4), seed=i)
               for i in range(200)}
    folder = tmp_path / "model"
    folder.mkdir()
    for part in range(4):
        save_file({name: tensors[name] for name in list(tensors)[part::4]},
                  folder / f"part-{part}.safetensors")
    return folder, tensors


# ----------------------------------------------------------------------------- the same tensors --

def test_each_tensor_comes_once_with_its_bytes(many, device):
    folder, tensors = many
    assert_same(collect(penstock.stream(folder, device)), tensors)


def test_a_tensor_is_complete_when_it_comes(many, device):
    folder, tensors = many
    for name, tensor in penstock.stream(folder, device):
        assert same(tensor, tensors[name])


def test_large_tensors(big, device):
    path, tensors = big
    seen = set()
    for name, tensor in penstock.stream(path, device):
        assert same(tensor, tensors[name])
        seen.add(name)
    assert seen == set(tensors)


def test_tensors_are_plain(many, device, each_way):
    folder, _ = many
    for name, tensor in penstock.stream(folder, device):
        assert tensor.device == torch.device(device)
        assert tensor.is_contiguous() and not tensor.requires_grad
        assert tensor.data_ptr() % 256 == 0 or each_way == "mapped"


@pytest.mark.parametrize("window", [1, 4096, 1 << 20, 1 << 40])
def test_a_window_of_any_size(many, device, window):
    folder, tensors = many
    assert_same(collect(penstock.stream(folder, device, window=window)), tensors)


def test_a_window_smaller_than_one_tensor(big, device):
    path, tensors = big
    seen = 0
    for name, tensor in penstock.stream(path, device, window=1 << 20):
        assert same(tensor, tensors[name])
        seen += 1
    assert seen == len(tensors)


def test_kept_tensors_stay_right_while_others_land(many, device):
    """Memory of the window is not used again under a tensor that somebody holds."""
    folder, tensors = many
    kept = collect(penstock.stream(folder, device, window=16 << 10))
    gc.collect()
    assert_same(kept, tensors)


def test_tensors_can_be_written_while_others_land(many, device):
    folder, tensors = many
    for name, tensor in penstock.stream(folder, device, window=64 << 10):
        assert same(tensor, tensors[name]), "written over by a neighbour"
        tensor.fill_(float("nan"))


def test_scalars_empty_tensors_and_empty_files(tmp_path, device):
    tensors = {"s": torch.tensor(3), "e": torch.empty(0, 3), "t": torch.tensor([True])}
    save_file(tensors, tmp_path / "x.safetensors")
    assert_same(collect(penstock.stream(tmp_path / "x.safetensors", device)), tensors)
    save_file({}, tmp_path / "y.safetensors")
    assert list(penstock.stream(tmp_path / "y.safetensors", device)) == []
    save_file({"e": torch.empty(0)}, tmp_path / "z.safetensors")
    assert_same(collect(penstock.stream(tmp_path / "z.safetensors", device)),
                {"e": torch.empty(0)})


def test_it_is_an_iterator(few):
    path, _ = few
    stream = penstock.stream(path)
    assert iter(stream) is stream
    name, tensor = next(stream)
    assert isinstance(name, str) and isinstance(tensor, torch.Tensor)
    assert len(list(stream)) == 5
    with pytest.raises(StopIteration):
        next(stream)


# ----------------------------------------------------------------------------------- parameters --

def test_keys_slices_and_dtype(many, device):
    folder, tensors = many
    index = {"t010": (slice(3, 9),), "t013": (slice(None), slice(1, 3))}
    got = collect(penstock.stream(folder, device, keys="t01?", slices=index, dtype=torch.float16))
    assert_same(one_nan(got), one_nan({
        name: tensors[name][index.get(name, ())].to(torch.float16)
        for name in tensors if name.startswith("t01")}))


def test_into(many, device):
    folder, tensors = many
    into = {name: torch.zeros_like(tensor, device=device) for name, tensor in tensors.items()}
    for name, tensor in penstock.stream(folder, device, into=into):
        assert tensor.data_ptr() == into[name].data_ptr()
    assert_same(into, tensors)


@pytest.mark.parametrize("arguments", [
    {"keys": "nothing"}, {"slices": {"nothing": (slice(1),)}}, {"into": {"nothing": torch.ones(1)}},
    {"device": "abacus"}, {"framework": "cobol"}, {"window": -1}, {"window": 0}, {"window": "big"},
], ids=str)
def test_wrong_arguments_are_refused_before_or_at_the_first_tensor(few, arguments):
    path, _ = few
    with pytest.raises(REFUSED):
        next(penstock.stream(path, **arguments))


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(penstock.Error, match="nowhere"):
        next(penstock.stream(tmp_path / "nowhere"))


# --------------------------------------------------------------------------------- ending early --

@pytest.mark.alone
def test_a_break_stops_and_frees(big, device):
    path, tensors = big
    for _ in penstock.stream(path, device, keys="part.00"):
        pass
    before = in_use(device)
    for name, tensor in penstock.stream(path, device):
        assert same(tensor, tensors[name])
        break
    del tensor
    assert settled(device, before + 16 * MIB) < before + 16 * MIB


@pytest.mark.alone
def test_a_stream_that_is_never_asked_does_no_harm(big, device):
    path, _ = big
    before = in_use(device)
    stream = penstock.stream(path, device)
    del stream
    assert settled(device, before + 16 * MIB) < before + 16 * MIB


def test_a_tensor_outlives_a_stream_that_was_left(big, device):
    path, tensors = big
    name, tensor = next(penstock.stream(path, device))
    gc.collect()
    assert same(tensor, tensors[name])


@pytest.mark.alone
def test_an_exception_of_the_consumer_goes_through_and_frees(big, device):
    path, _ = big
    for _ in penstock.stream(path, device, keys="part.00"):
        pass
    before = in_use(device)
    with pytest.raises(ZeroDivisionError):
        for _, tensor in penstock.stream(path, device):
            raise ZeroDivisionError
    del tensor
    assert settled(device, before + 16 * MIB) < before + 16 * MIB


def test_close_can_be_called(few):
    path, _ = few
    stream = penstock.stream(path)
    next(stream)
    stream.close()
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)


def test_left_streams_leave_no_file_and_no_thread(few):
    path, _ = few

    def count():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for _ in range(3):
        next(penstock.stream(path))
    before = count()
    for _ in range(50):
        next(penstock.stream(path))
    after = count()
    assert after[0] <= before[0] and after[1] <= before[1] + 8


def test_several_streams_side_by_side(many, device):
    folder, tensors = many
    streams = [penstock.stream(folder, device, window=64 << 10) for _ in range(3)]
    seen = [{}, {}, {}]
    for triple in itertools.zip_longest(*streams):
        for number, (name, tensor) in enumerate(triple):
            seen[number][name] = tensor
    for one in seen:
        assert_same(one, tensors)


def test_a_load_within_a_stream(many, device):
    folder, tensors = many
    for number, (name, tensor) in enumerate(penstock.stream(folder, device, window=64 << 10)):
        if number % 50 == 0:
            assert_same(penstock.load_model(folder, device), tensors)
        assert same(tensor, tensors[name])


def test_the_interpreter_may_end_in_the_middle(holes):
    done = python("""
        import sys, penstock
        stream = penstock.stream(sys.argv[1], framework="dlpack", window=128 << 20)
        name, tensor = next(stream)
        print(name)
        """, holes, timeout=20)
    assert done.stdout.startswith("t") and done.stderr == ""


def test_the_report_comes_at_the_end(many):
    folder, tensors = many
    collect(penstock.stream(folder))
    assert penstock.last_report().bytes == sum(tensor.nbytes for tensor in tensors.values())
