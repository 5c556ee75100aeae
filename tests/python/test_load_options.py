# SPDX-License-Identifier: MIT
"""What a load can be told: lists of files, globs and functions for slices, other names, a device
for each tensor, dtypes that leave quantised weights alone, and modules to fill."""
import os

import numpy
import pytest
import torch
from safetensors.torch import save_file

import penstock
from support import PACKAGE, assert_same, environment, python, random_tensor, raw, same, write_raw

# Every test below holds for tensors that look into the file and for copies.
pytestmark = pytest.mark.usefixtures("each_way")

FAKES = PACKAGE.parent / "tests/fakes"


# --------------------------------------------------------------------------------- lists of files

LOADS = {
    "load_file": penstock.load_file,
    "load_model": penstock.load_model,
    "stream": lambda names: dict(penstock.stream(names)),
    "safe_open": lambda names: penstock.safe_open(names).get_tensors(),
}


@pytest.fixture
def shards(tmp_path):
    """Two files of a model, and a third in the same folder that is none of it."""
    tensors = {f"layers.{i}.weight": random_tensor(torch.float32, (6, 4), seed=i)
               for i in range(4)}
    names = list(tensors)
    save_file({name: tensors[name] for name in names[2:]}, tmp_path / "b.safetensors", {"of": "b"})
    save_file({name: tensors[name] for name in names[:2]}, tmp_path / "a.safetensors", {"is": "a"})
    save_file({names[0]: torch.zeros(1)}, tmp_path / "other.safetensors")
    return [tmp_path / "b.safetensors", tmp_path / "a.safetensors"], tensors


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("kind", [list, tuple, lambda paths: map(str, paths),
                                  lambda paths: [os.fsencode(path) for path in paths]],
                         ids=["list", "tuple", "iterator", "bytes"])
def test_listed_files_are_one_model(shards, load, kind):
    paths, tensors = shards
    loaded = LOADS[load](kind(paths))
    assert_same(loaded, tensors)


def test_tensors_come_in_the_order_of_the_list(shards):
    paths, tensors = shards
    names = list(tensors)
    assert list(penstock.load_model(paths)) == names[2:] + names[:2]
    assert list(penstock.load_model(paths[::-1])) == names


def test_safe_open_of_a_list_has_the_metadata_of_all(shards):
    with penstock.safe_open(shards[0], "pt") as model:
        assert model.metadata() == {"of": "b", "is": "a"}
        assert same(model.get_slice("layers.1.weight")[2:4], shards[1]["layers.1.weight"][2:4])


def test_a_load_joins_a_prefetch_of_the_same_list(shards):
    from penstock import _prefetch

    paths, tensors = shards
    begun = penstock.prefetch(paths, "cpu")
    assert penstock.prefetch(map(str, paths), "cpu") is begun
    begun.wait()
    assert "a.safetensors" in repr(begun)
    assert_same(penstock.load_model(paths), tensors)
    assert begun not in _prefetch._begun.values()


def test_relative_names_of_a_list_are_those_of_the_moment(shards, monkeypatch):
    paths, tensors = shards
    monkeypatch.chdir(paths[0].parent)
    stream = penstock.stream([path.name for path in paths])
    monkeypatch.chdir("/")
    assert_same(dict(stream), tensors)


def test_a_tensor_in_two_listed_files_is_named_with_both(shards):
    paths, _ = shards
    other = paths[0].parent / "other.safetensors"
    with pytest.raises(penstock.Error, match="layers.0.weight.*also in .*a.safetensors") as caught:
        penstock.load_model([*paths, other])
    assert caught.value.object == str(other)


def test_a_list_that_is_empty_or_has_a_folder_is_refused(shards):
    paths, _ = shards
    with pytest.raises(ValueError, match="no file is named"):
        penstock.load_model([])
    with pytest.raises(IsADirectoryError, match="Name a file in it"):
        penstock.load_model([paths[0], paths[0].parent])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        penstock.load_model([paths[0], "nowhere"])


# ----------------------------------------------------------------------------------------- slices

def test_slices_by_globs(few):
    path, tensors = few
    loaded = penstock.load_file(path, slices={"*.mlp.weight": (slice(None), slice(0, 3)),
                                              "*.weight": slice(0, 4),
                                              "model.layers.1.mlp.weight": slice(2, 4)})
    cut = {"model.embed.weight": slice(0, 4), "model.layers.0.norm.weight": slice(0, 4),
           "model.layers.0.mlp.weight": (slice(None), slice(0, 3)),
           "model.layers.1.mlp.weight": slice(2, 4)}
    assert_same(loaded, {name: tensor[cut.get(name, ...)] for name, tensor in tensors.items()})


def test_slices_by_a_function(few):
    path, tensors = few
    seen = {}

    def half(name, info):
        seen[name] = info
        return slice(0, info.shape[0] // 2) if info.dtype == "BF16" else None

    loaded = penstock.load_file(path, slices=half)
    assert_same(loaded, {name: tensor[:6] if tensor.dtype == torch.bfloat16 else tensor
                         for name, tensor in tensors.items()})
    assert seen["model.embed.weight"] == penstock.TensorInfo("F32", (16, 8), 512)
    assert set(seen) == set(tensors)


def test_a_glob_of_slices_that_matches_nothing_is_an_error(few):
    path, _ = few
    with pytest.raises(KeyError, match=r"no\.\*"):
        penstock.load_file(path, slices={"no.*": slice(0, 1)})
    with pytest.raises(ValueError, match=r"\*\.mlp\.\*.*keys= does not ask"):
        penstock.load_file(path, keys="step", slices={"*.mlp.*": slice(0, 1)})
    penstock.load_file(path, keys="*.0.mlp.*", slices={"*.mlp.*": slice(0, 1)})


def test_a_name_with_the_characters_of_a_glob_is_sliced_by_itself(tmp_path):
    tensors = {"a[0]": torch.arange(4), "a0": torch.arange(4)}
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", slices={"a[0]": slice(0, 1)})
    assert loaded["a[0]"].tolist() == [0]


# ----------------------------------------------------------------------------------------- rename

@pytest.mark.parametrize("rename", [
    ("model.", ""), ["model.", ""], lambda name: name.removeprefix("model."),
    {"model.embed.weight": "embed.weight",
     "model.layers.0.mlp.weight": "layers.0.mlp.weight",
     "model.layers.0.norm.weight": "layers.0.norm.weight",
     "model.layers.1.mlp.weight": "layers.1.mlp.weight"}],
    ids=["pair", "list", "function", "mapping"])
@pytest.mark.parametrize("load", ["load_file", "stream"])
def test_tensors_get_other_names(few, rename, load):
    path, tensors = few
    loaded = dict(getattr(penstock, load)(path, rename=rename))
    assert_same(loaded, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})


def test_all_other_arguments_know_the_new_names(few, device):
    path, tensors = few
    into = {"x.layers.1.mlp.weight": torch.zeros(3, 6, dtype=torch.float32, device=device)}
    penstock.load_file(path, device, rename=("model.", "x."), keys="x.layers.1.*", into=into,
                       slices={"x.layers.1.mlp.weight": slice(1, 4)},
                       dtype={"x.layers": torch.float32})
    assert same(into["x.layers.1.mlp.weight"], tensors["model.layers.1.mlp.weight"][1:4].float())


def test_a_prefetched_model_can_be_renamed(few):
    path, tensors = few
    penstock.prefetch(path, "cpu").wait()
    loaded = penstock.load_file(path, rename=("model", "m"), keys="m.embed.weight")
    assert_same(loaded, {"m.embed.weight": tensors["model.embed.weight"]})
    assert_same(penstock.load_file(path), tensors)


@pytest.mark.parametrize("rename", [lambda name: "same" if ".mlp." in name else name,
                                    {"model.layers.0.mlp.weight": "model.layers.1.mlp.weight"}],
                         ids=["function", "mapping"])
def test_two_tensors_of_one_new_name_are_named_both(few, rename):
    with pytest.raises(ValueError, match="0.mlp.weight.*1.mlp.weight|1.mlp.weight.*0.mlp.weight"):
        penstock.load_file(few[0], rename=rename)


@pytest.mark.parametrize("rename, words", [
    ({"model.embd.weight": "x"}, "model.embd.weight.*model.embed.weight"),
    (("decoder.", ""), "decoder.*begins with it"), (7, "rename"), (("a", "b", "c"), "rename"),
    (lambda name: None, "None is no name"), ("a", "rename")],
                         ids=["typo", "prefix", "number", "triple", "nothing", "text"])
def test_what_cannot_be_renamed_is_refused(few, rename, words):
    with pytest.raises(penstock.Error, match=words):
        penstock.load_file(few[0], rename=rename)


# ------------------------------------------------------------------------------------------ dtype

WORDS = {
    torch.float16: ["fp16", "half", "float16", "F16", "FP16", "torch.float16", "torch.half",
                    numpy.float16, numpy.dtype("float16"), torch.half],
    torch.bfloat16: ["bf16", "bfloat16", "BF16", "torch.bfloat16"],
    torch.float32: ["fp32", "float", "float32", "single", "torch.float", numpy.float32],
    torch.float64: ["fp64", "double", "float64", numpy.double, numpy.dtype(float)],
    torch.float8_e5m2: ["float8_e5m2", "F8_E5M2", "fp8_e5m2"],
}


@pytest.mark.parametrize("dtype, word", [(dtype, word) for dtype, words in WORDS.items()
                                         for word in words], ids=str)
def test_words_for_dtypes_are_understood(few, dtype, word):
    path, tensors = few
    name = "model.layers.0.mlp.weight"
    assert same(penstock.load_file(path, keys=name, dtype=word)[name], tensors[name].to(dtype))


@pytest.mark.parametrize("dtype", ["fp15", "int4x", numpy.longdouble, numpy.dtype(">f2"), 16],
                         ids=str)
def test_an_unknown_dtype_is_told_which_are_known(few, dtype):
    with pytest.raises(ValueError, match="no such dtype") as caught:
        penstock.load_file(few[0], dtype=dtype)
    for word in ("fp16", "half", "bf16", "float32", "float8_e4m3fn"):
        assert word in caught.value.hint


def test_pythons_float_is_none_of_them(few):
    with pytest.raises(ValueError, match="64 bits"):
        penstock.load_file(few[0], dtype=float)


@pytest.fixture
def quantised(tmp_path):
    """As fine-grained fp8, compressed-tensors, GPTQ and bitsandbytes have it, all in one."""
    tensors = {
        "fp8.weight": torch.randn(8, 8).to(torch.float8_e4m3fn),
        "fp8.weight_scale_inv": torch.randn(1, 1),
        "fp8.input_scale": torch.randn(1),
        "fp8.bias": torch.randn(8),
        "int8.weight": torch.arange(8, dtype=torch.int8),
        "int8.SCB": torch.randn(8),
        "nvfp4.weight_scale_2": torch.randn(1),
        "gptq.qweight": torch.arange(8, dtype=torch.int32),
        "gptq.scales": torch.randn(4),
        "bnb.weight.absmax": torch.randn(4),
        "bnb.weight.quant_map": torch.randn(16),
        "norm.weight": torch.randn(8),
        "scale.weight": torch.randn(8),
        "scaled": torch.randn(8),
        "upscale": torch.randn(8),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    return path, tensors


PLAIN = {"fp8.bias", "norm.weight", "scale.weight", "scaled", "upscale"}


def test_dtype_leaves_quantised_weights_and_their_scales_alone(quantised, device):
    path, tensors = quantised
    loaded = penstock.load_file(path, device, dtype="bf16")
    assert_same(loaded, {name: tensor.to(torch.bfloat16) if name in PLAIN else tensor
                         for name, tensor in tensors.items()})
    # What is asked for does not change what the model is.
    alone = penstock.load_file(path, device, dtype="bf16", keys="gptq.scales")
    assert same(alone["gptq.scales"], tensors["gptq.scales"])


@pytest.mark.parametrize("weight", ["a.qweight", "a.weight_packed"])
def test_packed_weights_are_known_by_their_names(tmp_path, weight):
    tensors = {weight: torch.arange(4, dtype=torch.int32), "a.scales": torch.randn(4)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert_same(penstock.load_file(tmp_path / "x.safetensors", dtype="half"), tensors)


def test_packed_four_bit_weights_have_scales_too(tmp_path):
    write_raw(tmp_path / "x.safetensors", {"w": ("F4", (2, 4), bytes(4)),
                                           "w_scale": ("F32", (1,), bytes(4))})
    loaded = penstock.load_file(tmp_path / "x.safetensors", dtype="half", keys="w_scale")
    assert loaded["w_scale"].dtype == torch.float32


def test_where_nothing_is_quantised_a_scale_is_a_tensor_like_others(tmp_path):
    """CLIP has a logit_scale."""
    save_file({"logit_scale": torch.tensor(2.5), "m": torch.tensor([True])},
              tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", dtype="half")
    assert same(loaded["logit_scale"], torch.tensor(2.5).half())


@pytest.mark.parametrize("dtype", [{"": "bf16"}, {"*": torch.bfloat16},
                                   lambda name, info: "bf16"], ids=["rest", "glob", "function"])
def test_who_names_tensors_has_them_converted_whatever_they_are(quantised, dtype):
    path, tensors = quantised
    loaded = penstock.load_file(path, dtype=dtype)
    assert_same(loaded, {name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
                         for name, tensor in tensors.items()})


def test_each_tensor_has_the_dtype_that_a_map_says(few, device):
    path, tensors = few
    dtype = {"*.norm.*": "fp32", "model.layers": "half", "model.layers.1": torch.float64}
    expected = dict(tensors)
    # A part of the model counts before globs.
    expected["model.layers.0.mlp.weight"] = tensors["model.layers.0.mlp.weight"].half()
    expected["model.layers.1.mlp.weight"] = tensors["model.layers.1.mlp.weight"].double()
    assert_same(penstock.load_file(path, device, dtype=dtype), expected)
    assert_same(dict(penstock.stream(path, device, dtype=dtype)), expected)
    by_function = penstock.load_file(
        path, device, dtype=lambda name, info: "fp64" if info.dtype == "F16" else None)
    expected = {name: tensor.double() if tensor.dtype == torch.float16 else tensor
                for name, tensor in tensors.items()}
    assert_same(by_function, expected)


# ---------------------------------------------------------------------------------------- devices

def test_a_map_of_devices_to_one_of_them(few, device):
    path, tensors = few
    for devices in ({"": device}, {"*": device}, {"model": device, "*": torch.device(device)}):
        loaded = penstock.load_model(path, devices)
        assert_same(loaded, tensors)
        assert list(loaded) == list(penstock.load_model(path))
        assert all(tensor.device == torch.device(device) for tensor in loaded.values())


def test_a_prefetch_is_joined_through_a_map_of_one_device(few):
    path, tensors = few
    penstock.prefetch(path, "cpu").wait()
    assert_same(penstock.load_model(path, {"": "cpu"}), tensors)


@pytest.mark.parametrize("devices, words", [
    ({"model": "cpu"}, "(step|mask).*says nothing"), ({}, "empty"), ({"": "disk"}, "disk"),
    ({3: "cpu"}, "device")], ids=str)
def test_a_map_that_does_not_do_is_refused(few, devices, words):
    with pytest.raises(penstock.Error, match=words):
        penstock.load_model(few[0], devices)


PLACES = {
    "model.layers.1.w": "cuda:1", "model.layers.10.w": "host", "model.norm.w": "cuda:0",
    "model.layers.1.norm.w": "cuda:0", "lm_head.w": "host",
}
SPREAD = """
    import sys, penstock
    path, folder = sys.argv[1:]
    devices = {{"model.layers.1": 1, "model.layers.1.norm": "cuda:0", "*.norm.*": 0, "": "cpu"}}
    {code}
    for name, array in arrays.items():
        kind, number = map(int, array.__dlpack_device__())
        print(name, f"cuda:{{number}}" if kind == 2 else "host")
        with penstock.File(f"{{folder}}/{{name}}", "w") as file:
            file.write(array)
    del arrays, array
    """


@pytest.mark.parametrize("code", [
    "arrays = penstock.load_model(path, devices, framework='dlpack')",
    "arrays = penstock.load_model(path, devices, framework='dlpack', arena=False)",
    "arrays = penstock.load_model([path], devices, framework='dlpack', copy=True)",
    "penstock.prefetch(path, 1); "
    "arrays = penstock.load_model(path, devices, framework='dlpack')",
    "arrays = dict(penstock.stream(path, devices, framework='dlpack', window=64))",
])
def test_tensors_go_where_a_map_says(tmp_path, code):
    """To two GPUs of the fake driver, which counts what it gave, and to the host."""
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip("no fake driver beside this package")
    tensors = {name: random_tensor(torch.float32, (5, 7), seed=i) for i, name in enumerate(PLACES)}
    save_file(tensors, tmp_path / "x.safetensors")
    env = environment(LD_LIBRARY_PATH=str(FAKES), FAKE_CUDA_STRICT="1",
                      FAKE_CUDA_ABORT_ON_LEAK="1", FAKE_CUDA_DEVICES="2")
    done = python(SPREAD.format(code=code), tmp_path / "x.safetensors", tmp_path, env=env)
    assert dict(line.split() for line in done.stdout.splitlines()) == PLACES
    assert done.stderr == ""
    for name, tensor in tensors.items():
        assert (tmp_path / name).read_bytes() == raw(tensor).numpy().tobytes(), name


def test_several_devices_are_one_job(tmp_path):
    """Neighbours in the file are read together, whichever of them goes where."""
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip("no fake driver beside this package")
    tensors = {f"t{i:02}": random_tensor(torch.float32, (50, 7), seed=i) for i in range(24)}
    save_file(tensors, tmp_path / "x.safetensors")
    env = environment(LD_LIBRARY_PATH=str(FAKES), FAKE_CUDA_STRICT="1",
                      FAKE_CUDA_ABORT_ON_LEAK="1", FAKE_CUDA_DEVICES="2")
    done = python("""
        import sys, penstock
        devices = {f"t{i:02}": (0, 1, "cpu")[i % 3] for i in range(24)}
        for more in {}, {"arena": False}:
            arrays = penstock.load_model(sys.argv[1], devices, framework="dlpack", copy=True,
                                         **more)
            report = penstock.last_report()
            print(report.requests, report.bytes, report.device)
            for name, array in arrays.items():
                where = devices[name]
                assert array.device == ("host" if where == "cpu" else f"cuda:{where}")
                penstock.tofile(array, f"{sys.argv[2]}/{name}")
            del arrays, array
    """, tmp_path / "x.safetensors", tmp_path, env=env)
    assert done.stdout.splitlines() == ["1 33600 cuda:0, cuda:1, host"] * 2 and done.stderr == ""
    for name, tensor in tensors.items():
        assert (tmp_path / name).read_bytes() == raw(tensor).numpy().tobytes(), name


# ---------------------------------------------------------------------------------------- modules

class Tied(torch.nn.Module):
    """An embedding that is the head too, a buffer that is saved, and one that is not."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4, dtype=dtype)
        self.block = torch.nn.Linear(4, 4, dtype=dtype)
        self.again = self.block
        self.head = torch.nn.Linear(4, 10, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.full((2,), 7.0), persistent=False)
        self.register_parameter("none", None)


def stored(tmp_path, *, drop=(), seed=5):
    """A file with what a module like that has, and its tensors."""
    torch.manual_seed(seed)
    module = Tied()
    module.steps += 4
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()
               if name not in drop}
    save_file(tensors, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors", tensors


def check(module, tensors):
    state = module.state_dict()
    for name, tensor in tensors.items():
        assert same(state[name], tensor), name
    assert module.head.weight is module.embed.weight
    assert module.again is module.block


@pytest.mark.parametrize("drop", [(), ("head.weight",), ("embed.weight",), ("again.weight",)],
                         ids=str)
def test_a_module_is_filled_in_place(tmp_path, device, drop):
    path, tensors = stored(tmp_path, drop=drop)
    module = Tied().to(device)
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    parameters = list(module.parameters())
    loaded = penstock.load_model(path, into=module)
    check(module, tensors)
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == before
    assert all(old is new for old, new in zip(parameters, module.parameters(), strict=True))
    assert module.cache.tolist() == [7, 7]
    assert set(loaded) == set(before)
    assert all(loaded[name].data_ptr() == address for name, address in before.items())


def test_of_tied_weights_the_last_counts_as_in_torch(tmp_path):
    path, tensors = stored(tmp_path)
    tensors["head.weight"] = torch.randn(10, 4)
    save_file(tensors, path)
    mine, theirs = Tied(), Tied()
    penstock.load_model(path, into=mine)
    theirs.load_state_dict(tensors)
    assert same(mine.embed.weight, theirs.embed.weight)


@pytest.mark.parametrize("drop", [(), ("head.weight",)], ids=str)
@pytest.mark.parametrize("load", ["load_model", "stream"])
def test_what_a_module_has_on_the_device_meta_is_made(tmp_path, device, load, drop):
    path, tensors = stored(tmp_path, drop=drop)
    with torch.device("meta"):
        module = Tied()
    module.block.weight.requires_grad = False
    if load == "stream":
        assert {name for name, _ in penstock.stream(path, device, into=module)} \
            == {*tensors, "head.weight"}
    else:
        penstock.load_model(path, device, into=module)
    check(module, tensors)
    assert isinstance(module.block.bias, torch.nn.Parameter) and module.block.bias.requires_grad
    assert isinstance(module.block.weight, torch.nn.Parameter)
    assert not module.block.weight.requires_grad
    assert module.cache.is_meta
    assert all(parameter.device == torch.device(device) for parameter in module.parameters())


def test_a_module_that_is_half_on_the_device_meta(tmp_path):
    path, tensors = stored(tmp_path)
    module = Tied()
    address = module.embed.weight.data_ptr()
    module.block.to("meta")
    module.block = module.again = torch.nn.Linear(4, 4, device="meta")
    penstock.load_model(path, into=module)
    check(module, tensors)
    assert module.embed.weight.data_ptr() == address


def test_autograd_knows_that_a_module_was_filled(tmp_path):
    path, _ = stored(tmp_path)
    module = Tied()
    before = module.block.weight._version
    penstock.load_model(path, into=module)
    assert module.block.weight._version > before


def test_names_that_only_one_side_has(tmp_path):
    path, tensors = stored(tmp_path, drop=("block.bias", "again.bias", "steps"))
    tensors["more"] = torch.ones(2)
    save_file(tensors, path)
    module = Tied()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ValueError, match="Tied.*not have steps, block.bias, again.bias.*"
                                         "no place for more.*strict=False"):
        penstock.load_model(path, into=module)
    assert_same(module.state_dict(), before)
    loaded = penstock.load_model(path, into=module, strict=False)
    assert "more" not in loaded and "steps" not in loaded
    state = module.state_dict()
    for name, old in before.items():
        assert same(state[name], tensors.get(name, old)), name


def test_keys_choose_what_of_a_module_is_filled(tmp_path):
    path, tensors = stored(tmp_path)
    module = Tied()
    bias = module.block.bias.clone()
    loaded = penstock.load_model(path, into=module, keys=["embed.weight", "steps"])
    assert set(loaded) == {"embed.weight", "head.weight", "steps"}
    assert same(module.block.bias, bias) and same(module.steps, tensors["steps"])


@pytest.mark.parametrize("meta", [False, True])
def test_other_shapes_and_dtypes_are_refused_before_anything_is_written(tmp_path, meta):
    path, tensors = stored(tmp_path)
    with torch.device("meta" if meta else "cpu"):
        module, wide = Tied(torch.bfloat16), Tied()
        wide.register_buffer("steps", torch.zeros(4, dtype=torch.int64))
    for each, words in ((module, r"bfloat16.*F32.*Pass dtype=torch.bfloat16"),
                        (wide, r"steps.*shape \(4,\), the file \(3,\)")):
        before = {name: tensor.clone() for name, tensor in each.state_dict().items()}
        with pytest.raises(ValueError, match=words):
            penstock.load_model(path, into=each)
        assert meta or not any(torch.any(tensor != before[name])
                               for name, tensor in each.state_dict().items())
        assert all(tensor.is_meta == meta for tensor in each.parameters())
    penstock.load_model(path, into=module, dtype="bf16")
    check(module, {name: tensor.bfloat16() if tensor.is_floating_point() else tensor
                   for name, tensor in tensors.items()})


def test_a_module_is_filled_from_renamed_and_listed_files(tmp_path):
    _, tensors = stored(tmp_path)
    names = sorted(tensors)
    for half, file in ((names[:3], "a"), (names[3:], "b")):
        save_file({f"model.{name}": tensors[name] for name in half}, tmp_path / file)
    module = Tied()
    penstock.load_model([tmp_path / "a", tmp_path / "b"], into=module, rename=("model.", ""))
    check(module, tensors)


def test_a_module_takes_tensors_of_torch_alone(tmp_path):
    path, _ = stored(tmp_path)
    with pytest.raises(ValueError, match="framework 'np'"):
        penstock.load_model(path, into=Tied(), framework="np")


def test_views_of_one_storage_are_no_tied_weights(tmp_path):
    tensors = {"a": torch.arange(4.0), "b": torch.arange(4.0, 8.0)}
    save_file(tensors, tmp_path / "x.safetensors")
    flat = torch.zeros(8)
    module = torch.nn.Module()
    module.a, module.b = (torch.nn.Parameter(part) for part in flat.split(4))
    penstock.load_model(tmp_path / "x.safetensors", into=module)
    assert flat.tolist() == list(range(8))
    module.b = torch.nn.Parameter(flat[2:6])
    with pytest.raises(ValueError, match="its memory is also that of"):
        penstock.load_model(tmp_path / "x.safetensors", into=module)


# ------------------------------------------------------------------------------------ wrong names

def test_a_wrong_name_among_very_many_is_compared_with_few_and_what_was_meant_is_told(monkeypatch):
    import difflib

    from penstock._choose import no_tensor

    compared, compare = [], difflib.get_close_matches

    def counted(name, names, *more):
        compared.append(len(names))
        return compare(name, names, *more)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    names = dict.fromkeys(f"model.layers.{i // 100}.mlp.experts.{i % 100}.down_proj.weight"
                          for i in range(50000))
    for wrong in ("model.layers.77.mlp.experts.5.down_proj.wieght",
                  "modle.layers.77.mlp.experts.5.down_proj.weight",
                  "model.layers.77.mlp.experts.5.donw_proj.weight"):
        assert "model.layers.77.mlp.experts.5.down_proj.weight" in no_tensor(names, wrong).hint
    assert len(compared) == 3 and max(compared) < 1000
