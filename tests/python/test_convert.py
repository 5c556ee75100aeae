# SPDX-License-Identifier: MIT
"""Tensors in another dtype: bf16, fp16 and fp32 become each other on their way, by the engine, with
the bits that torch gives them, on the host and on a GPU; the framework converts the rest."""
import numpy
import pytest
import torch
from safetensors.torch import save_file
from support import PACKAGE, assert_same, environment, one_nan, python, raw, same, write_raw

import penstock
from penstock import _frameworks

pytestmark = pytest.mark.usefixtures("each_way")

HALVES = [torch.bfloat16, torch.float16]
KINDS = [*HALVES, torch.float32]
PAIRS = [(source, target) for source in KINDS for target in KINDS if source != target]
FAKES = PACKAGE.parent / "tests" / "fakes"


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every number of 16 bits, or so many of 32: around what is a tie or an edge elsewhere."""
    if dtype in HALVES:
        return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    high = torch.arange(1 << 20, dtype=torch.int64) << 12
    near = torch.stack([high - 1, high, high + 1], 1).reshape(-1) & 0xffffffff
    return torch.from_numpy(near.numpy().astype(numpy.uint32)).view(torch.float32)


@pytest.fixture
def no_framework(monkeypatch):
    """The framework does not convert."""
    def convert(*_):
        raise AssertionError("the framework was asked to convert")
    for kind in _frameworks.Torch, _frameworks.Numpy:
        monkeypatch.setattr(kind, "convert", convert)


@pytest.mark.parametrize("source,target", PAIRS, ids=str)
def test_numbers_are_those_of_torch(tmp_path, device, no_framework, source, target):
    tensors = {"all": numbers(source), "some": numbers(source)[100:1333].reshape(9, 137).clone()}
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", device, dtype=target)
    assert_same(one_nan(loaded), one_nan({name: t.to(target) for name, t in tensors.items()}))
    report = penstock.last_report()
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert report.bytes == size
    assert report.delivered_bytes == size // source.itemsize * target.itemsize
    assert not [refused for refused in report.refused if refused.path == "kernels"]


def test_slices_into_streams_and_arenas_have_it_too(tmp_path, device, no_framework):
    path = tmp_path / "x.safetensors"
    tensors = {f"t{i}": torch.randn(40, 33 + i) for i in range(4)}
    save_file(tensors, path)
    half = {name: tensor.half() for name, tensor in tensors.items()}
    index = {"t1": (slice(3, 20), slice(5, 9)), "t2": (slice(None), slice(1, 2))}
    assert_same(penstock.load_model(path, device, dtype="fp16", slices=index),
                {name: tensor[index.get(name, ())] for name, tensor in half.items()})
    into = {name: torch.zeros_like(tensor, device=device) for name, tensor in half.items()}
    loaded = penstock.load_model(path, device, dtype="fp16", into=into)
    assert_same(into, half)
    assert all(loaded[name].data_ptr() == into[name].data_ptr() for name in half)
    assert_same(dict(penstock.stream(path, device, dtype="fp16", window=20000)), half)
    loaded = penstock.load_model(path, device, dtype="fp16", arena=True)
    assert_same(loaded, half)
    places = sorted(tensor.data_ptr() for tensor in loaded.values())
    assert places[-1] - places[0] < 4 * 4096
    assert_same(penstock.load_model(path, device, dtype={"t1": "fp16", "t2": "bf16"}),
                tensors | {"t1": half["t1"], "t2": tensors["t2"].bfloat16()})


def test_others_are_converted_by_the_framework_beside_them(tmp_path, device):
    tensors = {"single": torch.randn(100), "double": torch.randn(100, dtype=torch.float64),
               "count": torch.arange(3)}
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", device, dtype="bf16")
    assert_same(loaded, {name: tensor.bfloat16() if name != "count" else tensor
                         for name, tensor in tensors.items()})


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_numbers_at_odd_places_are_converted_by_the_framework(tmp_path, device, odd):
    values = torch.randn(1000)
    write_raw(tmp_path / "x.safetensors",
              {"b": ("U8", (odd,), bytes(odd)),
               "w": ("F32", (1000,), values.numpy().tobytes())}, header_length=256)
    loaded = penstock.load_file(tmp_path / "x.safetensors", device, dtype="fp16")
    assert same(loaded["w"], values.half())
    with pytest.raises(penstock.Error, match="multiples of their size"):
        penstock.load_file(tmp_path / "x.safetensors", framework="dlpack", dtype="fp16")


def test_an_array_at_an_odd_place_is_filled_by_the_framework(tmp_path):
    values = torch.randn(50)
    save_file({"w": values.half()}, tmp_path / "x.safetensors")
    memory = numpy.zeros(50 * 4 + 1, numpy.uint8)
    odd = memory[1:].view(numpy.float32)
    penstock.load_file(tmp_path / "x.safetensors", framework="np", dtype="f32", into={"w": odd})
    assert numpy.array_equal(odd, values.half().float().numpy())


@pytest.mark.parametrize("framework", ["dlpack", "jax"])
def test_frameworks_that_do_not_convert_get_other_dtypes(tmp_path, framework):
    if framework == "jax":
        pytest.importorskip("jax")
    values = torch.randn(300)
    save_file({"w": values}, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", framework=framework, dtype="fp16")
    assert same(torch.from_dlpack(loaded["w"]), values.half())
    with pytest.raises(penstock.Error, match="does not convert"):
        penstock.load_file(tmp_path / "x.safetensors", framework=framework, dtype="float64")


TO_GPU = """
    import sys, penstock
    path, folder = sys.argv[1:]
    arrays = penstock.load_file(path, "cuda:0", framework="dlpack", dtype="bf16")
    for name, array in arrays.items():
        with penstock.File(f"{folder}/{name}", "w") as file:
            file.write(array)
    report = penstock.load_file(path, "cuda:0", framework="dlpack", dtype="bf16") and \\
        penstock.last_report()
    del arrays, array
    print(*[f"{each.path}: {each.reason}" for each in report.refused if each.path == "kernels"])
    """


@pytest.mark.parametrize("fail,word", [("", ""), ("cuModuleLoadData:1+=209", "NO_BINARY")])
def test_a_gpu_converts_without_torch_and_where_it_cannot_a_core_does(tmp_path, fail, word):
    """By way of the fake driver, which runs kernels by their twins, or refuses them."""
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip("no fake driver beside this package")
    tensors = {f"t{i}": torch.randn(5000, 7 + i) for i in range(3)}
    save_file(tensors, tmp_path / "x.safetensors")
    done = python(TO_GPU, tmp_path / "x.safetensors", tmp_path, env=environment(
        LD_LIBRARY_PATH=str(FAKES), FAKE_CUDA_STRICT="0" if fail else "1",
        FAKE_CUDA_ABORT_ON_LEAK="1", FAKE_CUDA_FAIL=fail))
    assert word in done.stdout and bool(word) == ("kernels" in done.stdout)
    for name, tensor in tensors.items():
        assert (tmp_path / name).read_bytes() == raw(tensor.bfloat16()).numpy().tobytes(), name
