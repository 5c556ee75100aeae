# SPDX-License-Identifier: MIT
"""load_file gives what safetensors.torch.load_file gives, bit for bit, on the device asked for."""
import os
import pathlib
import re

import pytest
import safetensors.numpy
import safetensors.torch
import torch
from safetensors.torch import save_file

import penstock
from support import (DTYPES, F4, MIB, REFUSED, assert_same, held_below, in_use, outcome,
                     random_tensor, same, settled, write_raw)

# Every test below holds for tensors that look into the file and for copies.
pytestmark = pytest.mark.usefixtures("each_way")


def theirs(path) -> dict:
    return safetensors.torch.load_file(path)


# -------------------------------------------------------------------------------- the same bits --

@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).split(".")[1])
def test_every_dtype_comes_back_bit_for_bit(tmp_path, device, dtype):
    tensors = {
        "matrix": random_tensor(dtype, (33, 6)),
        "deep": random_tensor(dtype, (2, 1, 3, 4), seed=1),
        "one": random_tensor(dtype, (1,), seed=2),
        "none": random_tensor(dtype, (0, 4)),
    }
    if dtype != F4:
        tensors["scalar"] = random_tensor(dtype, (), seed=3)
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    assert_same(penstock.load_file(path, device), theirs(path))


def test_all_dtypes_in_one_file(tmp_path, device):
    tensors = {str(dtype): random_tensor(dtype, (7, 10), seed=i) for i, dtype in enumerate(DTYPES)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert_same(penstock.load_file(tmp_path / "x.safetensors", device), tensors)


def test_names_come_in_the_order_that_safetensors_gives(few):
    path, _ = few
    assert list(penstock.load_file(path)) == list(theirs(path))


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (5, 0, 3), (1, 1, 1, 1, 1, 1, 1, 1), (1,)])
def test_scalars_and_empty_tensors_keep_their_shape(tmp_path, device, shape):
    tensors = {"a": torch.ones(3), "odd": random_tensor(torch.float32, shape), "z": torch.ones(5)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert_same(penstock.load_file(tmp_path / "x.safetensors", device), tensors)


def test_a_file_of_nothing_but_empty_tensors(tmp_path, device):
    tensors = {"a": torch.empty(0), "b": torch.empty(3, 0, dtype=torch.int8)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert_same(penstock.load_file(tmp_path / "x.safetensors", device), tensors)


@pytest.mark.parametrize("metadata", [None, {"a": "b"}])
def test_a_file_without_tensors_gives_an_empty_dict(tmp_path, device, metadata):
    save_file({}, tmp_path / "x.safetensors", metadata=metadata)
    assert penstock.load_file(tmp_path / "x.safetensors", device) == {}


def test_metadata_is_no_tensor(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors", metadata={"b": "c", "d": "ä\n"})
    assert set(penstock.load_file(tmp_path / "x.safetensors")) == {"a"}


@pytest.mark.parametrize("length", range(200, 208))
def test_data_may_begin_at_any_byte(tmp_path, device, each_way, length):
    tensors = {
        "bytes": ("U8", (3,), b"\1\2\3"),
        "floats": ("F32", (5,), bytes(range(20))),
        "long": ("I64", (1,), b"abcdefgh"),
    }
    path = tmp_path / "x.safetensors"
    write_raw(path, tensors, header_length=length)
    loaded = penstock.load_file(path, device)
    assert_same(loaded, theirs(path))
    assert each_way == "mapped" or all(t.data_ptr() % 256 == 0 for t in loaded.values())


def test_tensors_out_of_name_order_and_of_mixed_sizes(tmp_path, device):
    """What other writers make: names in no order, numbers not aligned to their own size."""
    path = tmp_path / "x.safetensors"
    write_raw(path, {"z": ("U8", (1,), b"z"), "b": ("F64", (2,), bytes(range(16))),
                     "a": ("BOOL", (3,), b"\1\0\1"), "c": ("BF16", (2, 2), bytes(range(8)))})
    assert_same(penstock.load_file(path, device), theirs(path))


def test_thousands_of_tiny_tensors(tmp_path, device):
    tensors = {f"block.{i}": random_tensor(torch.uint8, (i % 37,), seed=i) for i in range(6000)}
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", device)
    assert_same(loaded, tensors)
    report = penstock.last_report()
    assert report.requests < 600, "tiny tensors were not read together"


def test_one_large_tensor(big, device):
    path, tensors = big
    loaded = penstock.load_file(path, device)
    assert_same(loaded, tensors)


@pytest.mark.parametrize("name", [
    "", " ", "a/b/c", 'quo"te', "back\\slash", "tab\tline\nend", "ünïcödé",
    "名前", "\U0001f600", "é", "*", "[a]", "__meta__", "x" * 5000, "\x7f\u2028",
])
def test_names_are_free(tmp_path, name):
    tensors = {name: torch.arange(5), "other": torch.ones(2)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert_same(penstock.load_file(tmp_path / "x.safetensors"), tensors)


def test_a_name_with_a_nul_is_itself_or_refused(tmp_path):
    """Never cut short: "a" and "a\\0b" are two names."""
    tensors = {"a": torch.zeros(2), "a\0b": torch.ones(3)}
    save_file(tensors, tmp_path / "x.safetensors")
    loaded, error = outcome(lambda: penstock.load_file(tmp_path / "x.safetensors"))
    if error is None:
        assert_same(loaded, tensors)
    else:
        assert isinstance(error, penstock.Error) and "x.safetensors" in str(error)


def test_a_long_header(tmp_path):
    """Metadata of 20 MB, which some training tools write."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(9)}, path, metadata={"log": "x" * (20 << 20)})
    assert_same(penstock.load_file(path), {"a": torch.arange(9)})


def test_a_header_with_escapes_and_white_space(tmp_path):
    path = tmp_path / "x.safetensors"
    write_raw(path, {"": ("F32", (1,), b"\0\0\200\77")}, header=(
        b'{ "na\\u006de \\ud83d\\ude00" : { "shape" : [ 1 ] ,\n\t"data_offsets":[0, 4],'
        b'"dtype":"F32" } }  '))
    assert list(theirs(path)) == ["name \U0001f600"]
    assert_same(penstock.load_file(path), theirs(path))


def test_files_by_other_writers(tmp_path):
    import numpy

    arrays = {"a": numpy.arange(12, dtype=numpy.uint16).reshape(3, 4), "b": numpy.ones(3)}
    safetensors.numpy.save_file(arrays, tmp_path / "n.safetensors")
    assert_same(penstock.load_file(tmp_path / "n.safetensors"), theirs(tmp_path / "n.safetensors"))

    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    model.append(model[0])  # shared: written once
    safetensors.torch.save_model(model, str(tmp_path / "m.safetensors"))
    assert_same(penstock.load_file(tmp_path / "m.safetensors"), theirs(tmp_path / "m.safetensors"))


def test_a_state_dict_of_torch_survives_the_way_through(tmp_path):
    model = torch.nn.TransformerEncoderLayer(32, 4, 64)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    state = torch.load(tmp_path / "x.pt")
    save_file(state, tmp_path / "x.safetensors")
    other = torch.nn.TransformerEncoderLayer(32, 4, 64)
    other.load_state_dict(penstock.load_file(tmp_path / "x.safetensors"))
    for mine, yours in zip(other.parameters(), model.parameters(), strict=True):
        assert same(mine, yours)


@pytest.mark.parametrize("code, length", [("F6_E2M3", 3), ("F6_E3M2", 3)])
def test_a_dtype_that_torch_lacks_is_named_and_only_refused_when_asked_for(tmp_path, code, length):
    path = tmp_path / "x.safetensors"
    write_raw(path, {"six": (code, (4,), b"123"), "fine": ("F32", (1,), b"\0\0\200\77")})
    with pytest.raises(REFUSED, match="(?s)six.*" + code + "|" + code + ".*six"):
        penstock.load_file(path)
    assert_same(penstock.load_file(path, keys=["fine"]), {"fine": torch.ones(1)})


# ------------------------------------------------------------------------ tensors as users want --

def test_tensors_are_plain(few, device):
    path, _ = few
    for tensor in penstock.load_file(path, device).values():
        assert tensor.device == torch.device(device)
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert tensor.is_leaf
        assert tensor.layout == torch.strided
        assert type(tensor) is torch.Tensor


@pytest.mark.parametrize("arena", [True, False])
def test_addresses_are_multiples_of_256(few, device, arena):
    path, _ = few
    for name, tensor in penstock.load_file(path, device, arena=arena).items():
        assert tensor.data_ptr() % 256 == 0, name


def test_tensors_can_be_written_and_the_file_stays(few, device):
    path, tensors = few
    before = path.read_bytes()
    loaded = penstock.load_file(path, device)
    for tensor in loaded.values():
        tensor.zero_()
    assert not any(tensor.to(torch.float32).any() for tensor in loaded.values())
    assert path.read_bytes() == before
    assert_same(penstock.load_file(path, device), tensors)


def test_writing_one_tensor_leaves_its_neighbours(tmp_path, device):
    tensors = {f"t{i}": torch.full((i,), i, dtype=torch.uint8) for i in range(1, 40)}
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", device)
    loaded["t7"].fill_(200)
    del tensors["t7"], loaded["t7"]
    assert_same(loaded, tensors)


def test_two_loads_share_nothing(few):
    path, tensors = few
    first, second = penstock.load_file(path), penstock.load_file(path)
    first["model.embed.weight"].zero_()
    assert same(second["model.embed.weight"], tensors["model.embed.weight"])


def test_tensors_work_with_autograd_and_modules(few, device):
    path, tensors = few
    weight = penstock.load_file(path, device)["model.embed.weight"].requires_grad_()
    weight.sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.ones(16, 8))


# ------------------------------------------------------------------------------ the call itself --

def test_paths_may_be_of_any_kind(few, monkeypatch):
    path, tensors = few
    assert_same(penstock.load_file(str(path)), tensors)
    assert_same(penstock.load_file(pathlib.PurePosixPath(path)), tensors)
    monkeypatch.chdir(path.parent)
    assert_same(penstock.load_file(path.name), tensors)

    class Path:
        def __fspath__(self):
            return str(path)

    assert_same(penstock.load_file(Path()), tensors)


def test_a_path_with_odd_characters(few, tmp_path):
    path, tensors = few
    for name in ("with space.safetensors", "ünïcödé.safetensors", "a:b%s.safetensors"):
        os.link(path, tmp_path / name)
        assert_same(penstock.load_file(tmp_path / name), tensors)
    undecodable = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.safetensors")
    os.link(path, undecodable)
    assert_same(penstock.load_file(undecodable), tensors)


def test_the_name_needs_no_suffix(few, tmp_path):
    """Files of the Hugging Face cache are named by their hash."""
    path, tensors = few
    os.link(path, tmp_path / "0123abcd")
    assert_same(penstock.load_file(tmp_path / "0123abcd"), tensors)


def test_arguments_stand_where_safetensors_has_them(few):
    path, tensors = few
    assert_same(penstock.load_file(path, "cpu"), tensors)
    assert_same(penstock.load_file(filename=path, device="cpu"), tensors)
    with pytest.raises(TypeError):
        penstock.load_file(path, "cpu", "pt")


def test_devices_by_all_their_names(few):
    path, tensors = few
    for device in ("cpu", "host", torch.device("cpu")):
        loaded = penstock.load_file(path, device)
        assert_same(loaded, tensors)
        assert loaded["step"].device == torch.device("cpu")
    if torch.cuda.is_available():
        for device in ("cuda", "cuda:0", 0, torch.device("cuda", 0), torch.device("cuda")):
            loaded = penstock.load_file(path, device)
            assert_same(loaded, tensors)
            assert loaded["step"].device == torch.device("cuda:0")


@pytest.mark.parametrize("transfer", ["auto", "AUTO", "cpu_only", "1", 1])
def test_a_transfer_type_can_be_named(few, transfer):
    path, tensors = few
    assert_same(penstock.load_file(path, transfer=transfer), tensors)


@pytest.mark.parametrize("limit", [64 << 10, 1 << 20, 32 << 20])
def test_a_memory_limit_is_kept(big, device, limit):
    path, tensors = big
    loaded = penstock.load_file(path, device, keys="part.0*", memory_limit=limit)
    assert penstock.last_report().pinned_bytes <= limit
    assert_same(loaded, {name: tensors[name] for name in tensors if name != "large"})


# ----------------------------------------------------------------------------------------- keys --

@pytest.mark.parametrize("keys, expected", [
    ("step", {"step"}),
    ("model.layers.*", {"model.layers.0.mlp.weight", "model.layers.0.norm.weight",
                        "model.layers.1.mlp.weight"}),
    ("*.mlp.weight", {"model.layers.0.mlp.weight", "model.layers.1.mlp.weight"}),
    ("model.layers.?.norm.*", {"model.layers.0.norm.weight"}),
    ("model.layers.[1-9].*", {"model.layers.1.mlp.weight"}),
    (["step", "mask"], {"step", "mask"}),
    (("step", "*.norm.weight"), {"step", "model.layers.0.norm.weight"}),
    ({"mask"}, {"mask"}),
    (lambda name: "layers" not in name, {"model.embed.weight", "step", "mask"}),
    (str.isalpha, {"step", "mask"}),
    ("*", None),
    (None, None),
], ids=lambda value: ",".join(sorted(value)) if isinstance(value, set) else
   getattr(value, "__name__", str(value)))
def test_keys_choose_tensors(few, device, keys, expected):
    path, tensors = few
    loaded = penstock.load_file(path, device, keys=keys)
    assert_same(loaded, {name: tensors[name] for name in (expected or tensors)})


def test_keys_read_only_what_they_choose(big):
    path, tensors = big
    penstock.load_file(path, keys="part.01")
    report = penstock.last_report()
    assert report.bytes == tensors["part.01"].nbytes
    assert report.storage_bytes < 1.05 * report.bytes


def test_keys_that_hold_glob_characters_match_themselves(tmp_path):
    tensors = {"a[0]": torch.ones(1), "a0": torch.zeros(1), "b*": torch.ones(2)}
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", keys=["a[0]", "b*"])
    assert {"a[0]", "b*"} <= set(loaded)


@pytest.mark.parametrize("keys", ["nothing.*", ["step", "no such tensor"], ["no.*"]])
def test_keys_that_match_nothing_are_an_error_that_names_them(few, keys):
    path, _ = few
    word = "nothing" if isinstance(keys, str) else keys[-1].replace("*", "")
    with pytest.raises(REFUSED, match=word):
        penstock.load_file(path, keys=keys)


@pytest.mark.parametrize("keys", [7, [7], [None], b"step"])
def test_keys_of_a_wrong_kind_are_refused(few, keys):
    path, _ = few
    with pytest.raises(REFUSED):
        penstock.load_file(path, keys=keys)


def test_an_error_in_the_callable_reaches_the_caller(few):
    path, _ = few

    def choose(name):
        raise ZeroDivisionError(name)

    with pytest.raises(ZeroDivisionError):
        penstock.load_file(path, keys=choose)


# ---------------------------------------------------------------------------------------- dtype --

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "bfloat16",
                                   "float32", "torch.float16"], ids=str)
def test_dtype_converts_what_floats_and_leaves_the_rest(few, device, dtype):
    path, tensors = few
    target = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.split(".")[-1])
    expected = {name: tensor.to(target) if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()}
    loaded = penstock.load_file(path, device, dtype=dtype)
    assert_same(loaded, expected)
    assert all(tensor.device == torch.device(device) for tensor in loaded.values())


def test_dtype_leaves_complex_numbers_and_bytes_alone(tmp_path):
    tensors = {"c": torch.randn(3, dtype=torch.complex64), "b": torch.arange(4, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert_same(penstock.load_file(tmp_path / "x.safetensors", dtype=torch.bfloat16), tensors)


def test_dtype_converts_doubles_and_empty_tensors(tmp_path):
    tensors = {"d": torch.randn(50, 3, dtype=torch.float64), "e": torch.empty(0, 3),
               "s": torch.tensor(1.25)}
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", dtype=torch.float16)
    assert_same(loaded, {name: tensor.to(torch.float16) for name, tensor in tensors.items()})


@pytest.mark.parametrize("dtype", ["no such dtype", 7, object], ids=str)
def test_a_wrong_dtype_is_refused(few, dtype):
    path, _ = few
    with pytest.raises(REFUSED):
        penstock.load_file(path, dtype=dtype)


# ----------------------------------------------------------------------------------------- into --

def empty_like(tensors, device):
    return {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}


def test_into_fills_the_memory_it_is_given(few, device):
    path, tensors = few
    into = empty_like(tensors, device)
    places = {name: tensor.data_ptr() for name, tensor in into.items()}
    loaded = penstock.load_file(path, device, into=into)
    assert_same(into, tensors)
    assert_same(loaded, tensors)
    assert {name: tensor.data_ptr() for name, tensor in loaded.items()} == places


def test_into_fills_parameters_of_a_module(tmp_path, device):
    model = torch.nn.Linear(64, 32, device=device)
    state = {name: torch.randn_like(tensor, device="cpu")
             for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "x.safetensors")
    penstock.load_file(tmp_path / "x.safetensors", device, into=dict(model.named_parameters()))
    assert_same(dict(model.state_dict()), state)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_into_takes_memory_at_any_address(tmp_path, device):
    tensors = {"a": random_tensor(torch.uint8, (5001,)), "b": random_tensor(torch.uint8, (9000,))}
    save_file(tensors, tmp_path / "x.safetensors")
    for shift in (1, 2, 3, 7, 255):
        memory = torch.zeros(20000, dtype=torch.uint8, device=device)
        into = {"a": memory[shift:shift + 5001], "b": memory[6000 + shift:15000 + shift]}
        penstock.load_file(tmp_path / "x.safetensors", device, into=into)
        assert_same(into, tensors)
        assert not memory[:shift].any() and not memory[shift + 5001:6000 + shift].any()
        assert not memory[15000 + shift:].any()


def test_into_with_keys_fills_the_chosen_ones(few, device):
    path, tensors = few
    into = {name: tensor.zero_() for name, tensor in empty_like(tensors, device).items()}
    loaded = penstock.load_file(path, device, keys=["step", "mask"], into=into)
    assert_same(loaded, {"step": tensors["step"], "mask": tensors["mask"]})
    assert loaded["step"].data_ptr() == into["step"].data_ptr()
    assert not into["model.embed.weight"].any()


def test_keys_beyond_into_are_loaded_or_refused_by_name(few, device):
    path, tensors = few
    into = empty_like({"step": tensors["step"]}, device)
    loaded, error = outcome(lambda: penstock.load_file(path, device, keys=["step", "mask"],
                                                       into=into))
    if error is None:
        assert_same(loaded, {"step": tensors["step"], "mask": tensors["mask"]})
    else:
        assert isinstance(error, (penstock.Error, ValueError)) and "mask" in str(error)


def test_into_an_empty_tensor(tmp_path, device):
    tensors = {"e": torch.empty(0, 3), "a": torch.ones(3)}
    save_file(tensors, tmp_path / "x.safetensors")
    into = empty_like(tensors, device)
    penstock.load_file(tmp_path / "x.safetensors", device, into=into)
    assert_same(into, tensors)


@pytest.mark.parametrize("arguments", [
    {"device": 1 << 70}, {"device": "cuda:300"}, {"device": "cuda:128"}, {"transfer": "\ud800"},
    {"transfer": "ä"}, {"slices": {"model.embed.weight": slice("x")}},
    {"slices": {"model.embed.weight": slice(1.5)}},
], ids=ascii)
def test_arguments_that_make_no_sense_are_refused_in_words_of_ours(few, arguments):
    with pytest.raises(penstock.Error) as caught:
        penstock.load_file(few[0], **arguments)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_what_calls_of_safetensors_say_is_understood(few, backend):
    path, tensors = few
    assert_same(penstock.load_file(path, None, backend=backend), tensors)
    with penstock.safe_open(path, framework="pt", device=None, backend=backend) as file:
        assert_same(file.get_tensors(), tensors)


@pytest.mark.parametrize("backend", ["", "io_uring", None, 3], ids=repr)
def test_a_backend_that_safetensors_has_not_is_refused(few, backend):
    for call in (penstock.load_file, penstock.safe_open):
        with pytest.raises(ValueError, match="'mmap' and 'pread'"):
            call(few[0], backend=backend)


def bad_into(tensors):
    good = tensors["model.embed.weight"]
    return {
        "shape": torch.empty(8, 16),
        "rank": torch.empty(128),
        "dtype": torch.empty(16, 8, dtype=torch.int32),
        "contiguous": torch.empty(8, 16).T,
        "strided": torch.empty(16, 16)[:, :8],
        "expanded": torch.empty(1, 8).expand(16, 8),
        "meta": torch.empty(16, 8, device="meta"),
        "kind": [0.0] * 128,
        "sparse": good.to_sparse(),
    }


@pytest.mark.parametrize("what", ["shape", "rank", "dtype", "contiguous", "strided", "expanded",
                                  "meta", "kind", "sparse"])
def test_into_refuses_what_does_not_fit_and_writes_nothing(few, what):
    path, tensors = few
    into = empty_like(tensors, "cpu")
    for tensor in into.values():
        tensor.zero_()
    into["model.embed.weight"] = bad_into(tensors)[what]
    with pytest.raises(REFUSED, match="model.embed.weight"):
        penstock.load_file(path, into=into)
    assert not into["model.layers.0.norm.weight"].any(), "another tensor was written first"


@pytest.mark.parametrize("theirs, mine", [
    (torch.float32, torch.float16), (torch.int8, torch.float32), (torch.float32, torch.int32),
    (torch.int64, torch.int32), (torch.float32, torch.qint8), (torch.bool, torch.uint8),
    (torch.float8_e4m3fn, torch.bfloat16),
], ids=str)
def test_into_of_another_dtype_advises_what_helps(tmp_path, theirs, mine):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3).to(theirs)}, path)
    into = {"a": torch.quantize_per_tensor(torch.ones(3), 1, 0, mine) if mine == torch.qint8
            else torch.zeros(3, dtype=mine)}
    with pytest.raises(ValueError) as caught:
        penstock.load_file(path, into=into)
    advice = re.match(r"Pass dtype=(.*) to have it converted", caught.value.hint)
    if advice:
        penstock.load_file(path, into=into, dtype=eval(advice[1]))
        assert into["a"].float().eq(1).all()
    else:
        assert f"new one of dtype={theirs}" in caught.value.hint
        assert penstock.load_file(path, into={"a": torch.zeros(3, dtype=theirs)})["a"].all()


def test_into_refuses_memory_of_another_device(few, device):
    if device == "cpu":
        pytest.skip("needs a GPU")
    path, tensors = few
    with pytest.raises(REFUSED, match="step"):
        penstock.load_file(path, device, into={"step": torch.empty_like(tensors["step"])})
    with pytest.raises(REFUSED, match="step"):
        penstock.load_file(path, "cpu", into={"step": tensors["step"].to(device)})


def test_into_with_a_name_that_the_file_lacks_is_an_error(few):
    path, tensors = few
    into = dict(empty_like(tensors, "cpu"), missing=torch.empty(3))
    with pytest.raises(REFUSED, match="missing"):
        penstock.load_file(path, into=into)


# ---------------------------------------------------------------------------------------- arena --

def span(tensors) -> int:
    """From the first byte of all tensors to the last."""
    filled = [tensor for tensor in tensors.values() if tensor.numel()]
    return max(t.data_ptr() + t.nbytes for t in filled) - min(t.data_ptr() for t in filled)


def test_an_arena_is_one_piece_without_waste(few, device):
    path, tensors = few
    loaded = penstock.load_file(path, device, arena=True)
    assert span(loaded) <= sum((tensor.nbytes + 255) // 256 * 256 for tensor in tensors.values())


@pytest.mark.parametrize("arena", [True, False])
def test_tensors_do_not_overlap(few, device, arena):
    path, _ = few
    areas = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
                   for tensor in penstock.load_file(path, device, arena=arena).values())
    assert all(first[1] <= second[0] for first, second in zip(areas, areas[1:]))


@pytest.mark.parametrize("arena", [True, False])
def test_a_tensor_outlives_the_dict_and_the_others(few, device, arena):
    path, tensors = few
    for name in tensors:
        kept = penstock.load_file(path, device, arena=arena)[name]
        view = kept.reshape(-1)[:1]
        junk = [penstock.load_file(path, device, arena=arena) for _ in range(3)]
        for loaded in junk:
            for tensor in loaded.values():
                tensor.zero_()
        assert same(kept, tensors[name])
        del kept
        assert same(view, tensors[name].reshape(-1)[:1])


@pytest.mark.alone
@pytest.mark.parametrize("arena", [True, False])
def test_memory_is_given_back_when_the_last_tensor_goes(big, device, arena):
    path, tensors = big
    penstock.load_file(path, device, keys="part.00")  # what stays for good is there now
    before = in_use(device)
    loaded = penstock.load_file(path, device, arena=arena)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert in_use(device) > before + 0.9 * total
    last = loaded["part.01"]
    del loaded
    assert same(last, tensors["part.01"])
    del last
    assert settled(device, before + 16 * MIB) < before + 16 * MIB


@pytest.mark.alone
def test_without_an_arena_each_tensor_gives_its_memory_back(big, device):
    path, _ = big
    penstock.load_file(path, device, keys="part.00")
    before = in_use(device)
    loaded = penstock.load_file(path, device, arena=False)
    kept = loaded["part.00"]
    del loaded
    limit = before + kept.nbytes + 32 * MIB
    assert settled(device, limit) < limit


@pytest.mark.alone
def test_loading_again_and_again_does_not_grow(few, device):
    path, _ = few
    for _ in range(20):
        penstock.load_file(path, device)
    before = in_use(device)
    for i in range(300):
        penstock.load_file(path, device, arena=bool(i % 2))
    assert in_use(device) < before + 4 * MIB


# --------------------------------------------------------------------------------- combinations --

@pytest.mark.parametrize("arena", [True, False])
def test_keys_slices_and_dtype_together(few, device, arena):
    path, tensors = few
    loaded = penstock.load_file(
        path, device, keys=["model.embed.*", "*.1.mlp.weight", "step"], dtype=torch.float16,
        slices={"model.embed.weight": (slice(4, 12),)}, arena=arena)
    assert_same(loaded, {
        "model.embed.weight": tensors["model.embed.weight"][4:12].to(torch.float16),
        "model.layers.1.mlp.weight": tensors["model.layers.1.mlp.weight"].to(torch.float16),
        "step": tensors["step"],
    })


def test_into_a_slice(few, device):
    path, tensors = few
    into = {"model.embed.weight": torch.zeros(16, 4, device=device)}
    loaded = penstock.load_file(path, device, keys="model.embed.weight", into=into,
                                slices={"model.embed.weight": (slice(None), slice(2, 6))})
    assert same(into["model.embed.weight"], tensors["model.embed.weight"][:, 2:6])
    assert loaded["model.embed.weight"].data_ptr() == into["model.embed.weight"].data_ptr()


def test_into_memory_of_another_dtype_when_dtype_says_so(few, device):
    path, tensors = few
    name = "model.layers.0.mlp.weight"
    into = {name: torch.zeros(12, 6, device=device)}
    loaded = penstock.load_file(path, device, keys=name, into=into, dtype=torch.float32)
    assert same(into[name], tensors[name].to(torch.float32))
    assert loaded[name].data_ptr() == into[name].data_ptr()


def test_a_load_leaves_no_file_open(few):
    path, _ = few
    for _ in range(20):
        penstock.load_file(path)
    assert not held_below(path.parent)


# ------------------------------------------------------------------- what others do with tensors --

@pytest.mark.parametrize("arena", [True, False])
def test_a_model_with_loaded_weights_can_be_saved_by_safetensors(tmp_path, device, arena):
    """save_model refuses tensors that are part of a larger storage."""
    def make():
        return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7))

    safetensors.torch.save_model(make(), str(tmp_path / "x.safetensors"))
    model = make()
    model.load_state_dict(penstock.load_file(tmp_path / "x.safetensors", device, arena=arena),
                          assign=True)
    safetensors.torch.save_model(model, str(tmp_path / "y.safetensors"))
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()


@pytest.mark.parametrize("arena", [True, False])
def test_a_pickled_tensor_does_not_drag_the_others_along(tmp_path, device, arena):
    """torch.save writes the whole storage of a tensor."""
    save_file({"large": torch.zeros(1 << 20), "small": torch.ones(3)}, tmp_path / "x.safetensors")
    loaded = penstock.load_file(tmp_path / "x.safetensors", device, arena=arena)
    torch.save(loaded["small"], tmp_path / "small.pt")
    assert (tmp_path / "small.pt").stat().st_size < 10_000
    assert same(torch.load(tmp_path / "small.pt", map_location="cpu"), torch.ones(3))


# ----------------------------------------------------------------------------------- GPU streams --

def test_work_queued_after_a_load_sees_the_bytes(big, device):
    if device == "cpu":
        pytest.skip("needs a GPU")
    path, tensors = big
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        copies = {name: tensor.clone() for name, tensor in penstock.load_file(path, device).items()}
    stream.synchronize()
    assert_same(copies, tensors)


def test_a_load_comes_after_the_work_that_was_queued_before_it(big, device):
    """Memory that a queued kernel still writes is filled after that kernel."""
    if device == "cpu":
        pytest.skip("needs a GPU")
    path, tensors = big
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        into = {"part.00": torch.empty_like(tensors["part.00"], device=device)}
        noise = torch.randn(6000, 6000, device=device)
        for _ in range(20):
            noise = noise @ noise * 1e-3
        into["part.00"].fill_(1)
        penstock.load_file(path, device, keys="part.00", into=into)
        copy = into["part.00"].clone()
    stream.synchronize()
    assert same(copy, tensors["part.00"])


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_freed_memory_is_not_written_by_an_older_load(few, device, dtype):
    """The allocator of torch hands freed memory out again at once, by order of the stream."""
    if device == "cpu":
        pytest.skip("needs a GPU")
    path, tensors = few
    for _ in range(50):
        penstock.load_file(path, device, dtype=dtype)
        zeros = [torch.zeros(1000, device=device) for _ in range(8)]
        assert not any(tensor.any() for tensor in zeros)


# ------------------------------------------------------------------------- into, looked at closely

def test_into_holds_on_to_tensors_that_a_mapping_makes_anew(holes):
    class Fresh(dict):
        def __getitem__(self, name):
            return torch.zeros(64 << 20, dtype=torch.uint8)

    loaded = penstock.load_file(holes, into=Fresh(t00=None, t01=None))
    assert sorted(loaded) == ["t00", "t01"] and all(t[0] and not t[1] for t in loaded.values())


def test_into_a_mapping_that_is_emptied_meanwhile(holes):
    into = {f"t{i:02}": torch.zeros(64 << 20, dtype=torch.uint8) for i in range(4)}
    seen = []
    for name, tensor in penstock.stream(holes, into=into, window=64 << 20):
        into.clear()
        assert tensor[0] and not tensor[1]
        seen.append(name)
        del tensor
    assert sorted(seen) == ["t00", "t01", "t02", "t03"]


def test_into_views_that_only_say_what_they_mean_is_refused(tmp_path):
    numbers = torch.tensor([1 + 2j], dtype=torch.complex64)
    penstock.save_file({"c": numbers, "f": torch.ones(1)}, tmp_path / "x.safetensors")
    views = {"c": numbers.clone().conj(), "f": torch.imag(numbers.clone().conj())}
    for name, view in views.items():
        with pytest.raises(penstock.Error, match="view"):
            penstock.load_file(tmp_path / "x.safetensors", into={name: view})


def test_into_is_a_change_that_autograd_notices(tmp_path):
    penstock.save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    weight = torch.full((3,), 2.0, requires_grad=True)
    result = (weight * weight).sum()
    penstock.load_file(tmp_path / "x.safetensors", into={"w": weight})
    with pytest.raises(RuntimeError, match="modified"):
        result.backward()


def test_the_smallest_memory_limit_works_everywhere(few):
    path, tensors = few
    assert_same(penstock.load_file(path, memory_limit=65536), tensors)
    assert_same(dict(penstock.stream(path, memory_limit=65536)), tensors)
    assert len(penstock.load_file(path, memory_limit=65536, dtype=torch.float16)) == len(tensors)
    with penstock.safe_open(path, memory_limit=65536) as file:
        assert_same({name: file.get_tensor(name) for name in file.keys()}, tensors)


@pytest.mark.parametrize("arguments", [{"keys": 3}, {"keys": [1]}, {"slices": 3}, {"into": []},
                                       {"dtype": "foo"}, {"framework": "tf"}, {"memory_limit": -1},
                                       {"transfer": "warp"}], ids=str)
def test_an_argument_that_makes_no_sense_is_a_value_error_with_words(few, arguments):
    with pytest.raises(ValueError) as caught:
        penstock.load_file(few[0], **arguments)
    assert isinstance(caught.value, penstock.Error) and str(caught.value).startswith("cannot ")


def test_a_tensor_that_is_not_there_is_a_key_error(few):
    with pytest.raises(KeyError) as caught:
        penstock.load_file(few[0], keys="nothing")
    assert not isinstance(caught.value, FileNotFoundError)
    with penstock.safe_open(few[0]) as file, pytest.raises(KeyError):
        file.get_tensor("nothing")


def test_into_two_names_of_the_same_memory_is_refused(tmp_path):
    penstock.save_file({"a": torch.zeros(8), "b": torch.ones(8)}, tmp_path / "x.safetensors")
    shared = torch.empty(12)
    for into in ({"a": shared[:8], "b": shared[:8]}, {"a": shared[:8], "b": shared[4:]}):
        with pytest.raises(penstock.Error, match="memory"):
            penstock.load_file(tmp_path / "x.safetensors", into=into)


@pytest.mark.parametrize("wrong", [torch.zeros(5, 5, dtype=torch.int8), "x", 3], ids=str)
def test_into_is_checked_for_empty_tensors_too(tmp_path, wrong):
    penstock.save_file({"e": torch.empty(0, 4)}, tmp_path / "x.safetensors")
    with pytest.raises(penstock.Error, match="e"):
        penstock.load_file(tmp_path / "x.safetensors", into={"e": wrong})


def test_a_dtype_of_less_than_a_byte_is_left_alone_and_not_converted_to(few):
    with pytest.raises(penstock.Error):
        penstock.load_file(few[0], dtype="F4")
