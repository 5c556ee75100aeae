# SPDX-License-Identifier: MIT
"""Packed models, loaded by everything that loads: the same bits as the originals."""
import os
import pathlib
import subprocess

import numpy
import pytest
import torch
from safetensors import safe_open as their_safe_open
from safetensors.torch import load_file as their_load_file, save_file

import penstock
import penstock.safetensors.torch
from support import PACKAGE, assert_same, environment, python, random_tensor, raw, same

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(os.environ.get("PENSTOCK", ROOT / "build" / "penstock"))
FAKES = PACKAGE.parent / "tests" / "fakes"


def pack(source, target):
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not built")
    subprocess.run([PROGRAM, "pack", source, target, "-q"], check=True, stdin=subprocess.DEVNULL)
    return target


def state(seed=0):
    """Weights of every kind that is coded, and some that are not."""
    chance = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=chance) * 0.02
    return {
        "bf16": normal(300, 170).to(torch.bfloat16), "f32": normal(90, 401),
        "deep": normal(7, 80, 90), "large": normal(1200, 1000).to(torch.bfloat16),
        "f16": normal(50000).to(torch.float16), "e4m3": normal(200, 200).to(torch.float8_e4m3fn),
        "e5m2": normal(200, 200).to(torch.float8_e5m2), "bias": normal(300),
        "noise": random_tensor(torch.bfloat16, (220, 230)), "int": torch.arange(77),
        "empty": torch.empty(0, 5), "scalar": torch.tensor(3.5),
        "special": random_tensor(torch.float32, (100, 100)) * 0,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("coded")
    save_file(state(), path / "plain.safetensors", metadata={"format": "pt", "who": "me"})
    pack(path / "plain.safetensors", path / "packed.safetensors")
    return path


@pytest.fixture(scope="module")
def packed(folder):
    return folder / "packed.safetensors"


@pytest.fixture(scope="module")
def plain(folder):
    return their_load_file(folder / "plain.safetensors")


def test_load_file_gives_the_original(packed, plain, device):
    assert_same(penstock.load_file(packed, device), plain)


def test_the_report_tells_what_was_decoded(packed, device):
    penstock.load_model(packed, device, copy=True)
    report = penstock.last_report()
    assert 0 < report.coded_bytes < report.bytes < report.delivered_bytes
    assert report.device_staging_bytes == 0 and "decoded" in str(report)
    assert (report.decode_seconds > 0) == (device == "cpu")
    assert report.core_decoded_bytes == (report.coded_bytes if device == "cpu" else 0)
    assert ("by cores" if device == "cpu" else "by the GPU") in str(report)


@pytest.mark.parametrize("options", [
    {"arena": True}, {"copy": True}, {"keys": "b*"}, {"cache": "drop"}, {"memory_limit": 1 << 20},
], ids=str)
def test_load_model_gives_the_original_with_any_options(packed, plain, options, device):
    found = penstock.load_model(packed, device=device, **options)
    assert_same(found, {name: plain[name] for name in found})
    assert len(found) == (2 if "keys" in options else len(plain))


@pytest.mark.parametrize("name, box", [
    ("bf16", slice(10, 20)), ("bf16", (slice(0, 300), slice(3, 5))), ("bf16", (slice(299, 300),)),
    ("deep", (slice(1, 6), slice(20, 61), slice(89, 90))), ("deep", (slice(2, 3),)),
    ("f16", slice(16383, 16385)), ("e4m3", (slice(None), slice(100, 200))), ("noise", slice(5, 9)),
    ("deep", slice(3, 3)), ("large", slice(3, 1100)), ("large", (slice(None), slice(7, 8))),
])
def test_slices_are_those_of_the_original(packed, plain, name, box, device):
    for arena in (False, True):
        found = penstock.load_model(packed, device=device, keys=[name, "bias"], slices={name: box},
                                    arena=arena)
        assert same(found[name], plain[name][box]) and same(found["bias"], plain["bias"])
    with penstock.safe_open(packed, "pt", device) as file:
        assert same(file.get_slice(name)[box], plain[name][box])


def test_tensors_are_loaded_into_those_that_are_there(packed, plain, device):
    into = {name: torch.full_like(tensor.float(), 7, device=device).to(tensor.dtype)
            for name, tensor in plain.items()}
    penstock.load_model(packed, device=device, into=into)
    assert_same(into, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_are_converted_on_the_way(packed, plain, dtype, device):
    names = ["bf16", "f16", "f32", "deep", "bias"]
    found = penstock.load_model(packed, device=device, keys=names, dtype=dtype)
    assert_same(found, {name: plain[name].to(dtype) for name in names})
    found = penstock.load_model(packed, device=device, keys=["deep"], dtype=dtype,
                                slices={"deep": (slice(1, 6), slice(20, 61), slice(3, 90))})
    assert same(found["deep"], plain["deep"][1:6, 20:61, 3:90].to(dtype))
    found = penstock.load_model(packed, device=device, keys=["large"], dtype=dtype,
                                slices={"large": slice(3, 1100)})
    assert same(found["large"], plain["large"][3:1100].to(dtype))


def test_a_stream_has_every_tensor(packed, plain, device):
    found = {name: tensor.clone() for name, tensor in
             penstock.stream(packed, device=device, window=100000)}
    assert_same(found, plain)


def test_safe_open_tells_of_the_original(packed, plain, folder):
    with penstock.safe_open(packed, "pt") as mine, \
            their_safe_open(folder / "plain.safetensors", "pt") as theirs:
        assert mine.metadata() == theirs.metadata()
        assert sorted(mine.keys()) == sorted(theirs.keys())
        assert_same({name: mine.get_tensor(name) for name in mine.keys()}, plain)
        assert mine.get_slice("deep").get_shape() == [7, 80, 90]


def test_tensors_come_in_the_order_of_the_original(packed, folder):
    original = folder / "plain.safetensors"
    assert list(penstock.load_file(packed)) == list(penstock.load_file(original))
    assert list(penstock.load_model(packed)) == list(penstock.load_model(original))
    with penstock.safe_open(packed, "pt") as mine, penstock.safe_open(original, "pt") as theirs:
        assert mine.offset_keys() == theirs.offset_keys()


def test_numpy_gets_the_same(packed, plain):
    found = penstock.load_file(packed, framework="numpy")
    assert numpy.array_equal(found["f32"], plain["f32"].numpy())


def test_what_was_prefetched_is_used(packed, plain, device):
    penstock.prefetch(packed, device=device).wait()
    assert_same(penstock.load_model(packed, device=device), plain)


def test_a_folder_of_shards_is_one_model(tmp_path):
    whole = state(1)
    (tmp_path / "model").mkdir()
    names = list(whole)
    for i in range(2):
        save_file({name: whole[name] for name in names[i::2]},
                  tmp_path / "model" / f"model-{i}.safetensors")
    pack(tmp_path / "model", tmp_path / "packed")
    assert_same(penstock.load_model(tmp_path / "packed", device="cpu"), whole)


def test_bytes_of_a_packed_file_are_refused_not_misread(packed):
    with pytest.raises(penstock.Error, match="packed"):
        penstock.safetensors.torch.load(packed.read_bytes())


def test_damage_is_named(packed, tmp_path, device):
    data = bytearray(packed.read_bytes())
    with their_safe_open(packed, "pt") as file:
        assert file.get_tensor("bf16").dtype == torch.uint8
    data[len(data) // 2] ^= 64
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(penstock.Error, match=r"chunk \d+ of tensor .* checksum"):
        penstock.load_file(tmp_path / "bad.safetensors", device)


# ----------------------------------------------------------------------------- the fake driver --

TO_GPU = """
    import sys, penstock
    path, folder, ways = sys.argv[1], sys.argv[2], sys.argv[3].split()

    def write(way, arrays):
        for name, array in arrays:
            with penstock.File(f"{folder}/{way}-{name}", "w") as file:
                file.write(array)

    to = {"device": "cuda:0", "framework": "dlpack"}
    for way in ways:
        options = dict(keys=["bf16", "deep", "f32"])
        if way == "slices":
            options["slices"] = {"bf16": (slice(3, 290), slice(5, 100)), "f32": slice(11, 80)}
        elif way in ("bf16", "f16", "f32"):
            options["dtype"] = way
        if way == "whole":
            write(way, penstock.load_file(path, **to).items())
        elif way == "stream":
            write(way, penstock.stream(path, window=100000, **to))
        elif way == "prefetch":
            penstock.prefetch(path, device="cuda:0").wait()
            write(way, penstock.load_file(path, **to).items())
        elif way == "open":
            with penstock.safe_open(path, "dlpack", "cuda:0") as file:
                write(way, [(name, file.get_tensor(name)) for name in file.keys()])
        else:
            write(way, penstock.load_model(path, **options, **to).items())
    penstock.load_model(path, **to)
    report = penstock.last_report()
    print(*[f"{each.path}: {each.reason}" for each in report.refused if each.path == "kernels"],
          report.decode_seconds > 0, report.coded_bytes > 0)
    """


def on_fake_gpu(packed, folder, ways, fail=""):
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip("no fake driver beside this package")
    return python(TO_GPU, packed, folder, ways, env=environment(
        LD_LIBRARY_PATH=str(FAKES), FAKE_CUDA_STRICT="0" if fail else "1",
        FAKE_CUDA_ABORT_ON_LEAK="1", FAKE_CUDA_FAIL=fail)).stdout


def assert_written(folder, way, tensors):
    for name, tensor in tensors.items():
        if tensor.numel():
            assert (folder / f"{way}-{name}").read_bytes() == raw(tensor).numpy().tobytes(), name


def test_a_gpu_decodes_by_every_way_without_torch(packed, plain, tmp_path):
    told = on_fake_gpu(packed, tmp_path, "whole stream prefetch open slices bf16 f16 f32")
    assert "kernels" not in told and told.split() == ["False", "True"]
    for way in ("whole", "stream", "prefetch", "open"):
        assert_written(tmp_path, way, plain)
    assert_written(tmp_path, "slices", {"bf16": plain["bf16"][3:290, 5:100],
                                        "f32": plain["f32"][11:80], "deep": plain["deep"]})
    for way, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)):
        assert_written(tmp_path, way, {name: plain[name].to(dtype)
                                       for name in ("bf16", "deep", "f32")})


@pytest.mark.parametrize("fail,word", [
    ("cuModuleLoadData:1+=209", "NO_BINARY"), ("cuModuleGetFunction:8=500", "NOT_FOUND"),
    ("cuMemHostRegister_v2:1+=2", "pinned"),
])
def test_where_a_gpu_cannot_a_core_decodes(packed, plain, tmp_path, fail, word):
    told = on_fake_gpu(packed, tmp_path, "whole slices f16", fail)
    assert "kernels" in told and word in told and told.split()[-2:] == ["True", "True"]
    assert_written(tmp_path, "whole", plain)
    assert_written(tmp_path, "slices", {"bf16": plain["bf16"][3:290, 5:100]})
    assert_written(tmp_path, "f16", {"deep": plain["deep"].half()})


# -------------------------------------------------------------------- those who do not know it --

@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    path = tmp_path_factory.mktemp("tiny")
    config = transformers.Qwen2Config(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, vocab_size=128)
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path / "plain")
    pack(path / "plain", path / "packed")
    return path


def test_transformers_without_penstock_raises(tiny):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(Exception, match="size|shape|mismatch"):
        transformers.AutoModelForCausalLM.from_pretrained(tiny / "packed")


def test_from_pretrained_loads_it(tiny, device):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    mine = penstock.from_pretrained(tiny / "packed", device=device)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny / "plain")
    assert_same(dict(mine.state_dict()), dict(theirs.state_dict()))


# -------------------------------------------------------------------------------------- saving --

def tree(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("options", [{}, {"align": 4096}, {"metadata": {"a": "b"}}], ids=str)
def test_save_file_coded_writes_what_pack_makes_of_the_plain_file(tmp_path, options):
    penstock.save_file(state(), tmp_path / "plain", **options)
    penstock.save_file(state(), tmp_path / "coded", coded=True, **options)
    pack(tmp_path / "plain", tmp_path / "packed")
    assert (tmp_path / "coded").read_bytes() == (tmp_path / "packed").read_bytes()
    report = penstock.last_report()
    assert report.bytes == (tmp_path / "coded").stat().st_size
    assert report.delivered_bytes == (tmp_path / "plain").stat().st_size
    assert_same(penstock.load_file(tmp_path / "coded"), state())


def test_save_model_coded_writes_what_pack_makes_of_the_plain_folder(tmp_path):
    for name, coded in (("plain", False), ("coded", True)):
        penstock.save_model(state(), tmp_path / name, max_shard_size="100KB", coded=coded)
    pack(tmp_path / "plain", tmp_path / "packed")
    assert len(tree(tmp_path / "coded")) > 3
    assert tree(tmp_path / "coded") == tree(tmp_path / "packed")
    assert_same(penstock.load_model(tmp_path / "coded", device="cpu"), state())


def test_a_module_is_saved_coded_as_one_file(tmp_path):
    module = torch.nn.Linear(100, 200)
    penstock.save_model(module, tmp_path / "model.safetensors", coded=True)
    assert_same(penstock.load_file(tmp_path / "model.safetensors"), dict(module.state_dict()))
    assert (tmp_path / "model.safetensors").stat().st_size < 4 * (200 * 100 + 200)


def test_what_would_not_get_smaller_is_saved_plain(tmp_path):
    tensors = {"noise": random_tensor(torch.bfloat16, (220, 230)), "few": torch.arange(5)}
    penstock.save_file(tensors, tmp_path / "coded", coded=True)
    assert_same(their_load_file(tmp_path / "coded"), tensors)


def test_bytes_of_a_coded_file_are_not_coded_again(packed, tmp_path):
    with their_safe_open(packed, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata()
    with pytest.raises(penstock.Error, match="packed already|coded"):
        penstock.save_file(tensors, tmp_path / "twice", metadata, coded=True)
    with pytest.raises(penstock.Error, match="keep this name|__penstock__"):
        penstock.save_file(tensors, tmp_path / "twice", coded=True)
    assert os.listdir(tmp_path) == []


def test_a_coded_save_says_what_it_cannot_follow(tmp_path):
    with pytest.raises(penstock.Error, match="auto"):
        penstock.save_file(state(), tmp_path / "file", transfer="cached", coded=True)
    with pytest.raises(penstock.Error, match="4 MiB"):
        penstock.save_file(state(), tmp_path / "file", memory_limit=1 << 20, coded=True)
    assert os.listdir(tmp_path) == []
