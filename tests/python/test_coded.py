# SPDX-License-Identifier: MIT
"""Packed models, loaded by everything that loads on the host: the same bits as the originals."""
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
from support import assert_same, random_tensor, same

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(os.environ.get("PENSTOCK", ROOT / "build" / "penstock"))


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


def test_load_file_gives_the_original(packed, plain):
    assert_same(penstock.load_file(packed), plain)


@pytest.mark.parametrize("options", [
    {"arena": True}, {"copy": True}, {"keys": "b*"}, {"cache": "drop"}, {"memory_limit": 1 << 20},
], ids=str)
def test_load_model_gives_the_original_with_any_options(packed, plain, options):
    found = penstock.load_model(packed, device="cpu", **options)
    assert_same(found, {name: plain[name] for name in found})
    assert len(found) == (2 if "keys" in options else len(plain))


@pytest.mark.parametrize("name, box", [
    ("bf16", slice(10, 20)), ("bf16", (slice(0, 300), slice(3, 5))), ("bf16", (slice(299, 300),)),
    ("deep", (slice(1, 6), slice(20, 61), slice(89, 90))), ("deep", (slice(2, 3),)),
    ("f16", slice(16383, 16385)), ("e4m3", (slice(None), slice(100, 200))), ("noise", slice(5, 9)),
    ("deep", slice(3, 3)), ("large", slice(3, 1100)), ("large", (slice(None), slice(7, 8))),
])
def test_slices_are_those_of_the_original(packed, plain, name, box):
    for arena in (False, True):
        found = penstock.load_model(packed, device="cpu", keys=[name, "bias"], slices={name: box},
                                    arena=arena)
        assert same(found[name], plain[name][box]) and same(found["bias"], plain["bias"])
    with penstock.safe_open(packed, "pt") as file:
        assert same(file.get_slice(name)[box], plain[name][box])


def test_tensors_are_loaded_into_those_that_are_there(packed, plain):
    into = {name: torch.full_like(tensor.float(), 7).to(tensor.dtype)
            for name, tensor in plain.items()}
    penstock.load_model(packed, device="cpu", into=into)
    assert_same(into, plain)


def test_numbers_are_converted_on_the_way(packed, plain):
    found = penstock.load_model(packed, device="cpu", keys=["bf16", "f16", "large"],
                                dtype=torch.float32, slices={"large": slice(3, 1100)})
    expected = {"bf16": plain["bf16"], "f16": plain["f16"], "large": plain["large"][3:1100]}
    assert_same(found, {name: tensor.float() for name, tensor in expected.items()})


def test_a_stream_has_every_tensor(packed, plain):
    found = {name: tensor.clone() for name, tensor in penstock.stream(packed, device="cpu")}
    assert_same(found, plain)


def test_safe_open_tells_of_the_original(packed, plain, folder):
    with penstock.safe_open(packed, "pt") as mine, \
            their_safe_open(folder / "plain.safetensors", "pt") as theirs:
        assert mine.metadata() == theirs.metadata()
        assert sorted(mine.keys()) == sorted(theirs.keys())
        assert_same({name: mine.get_tensor(name) for name in mine.keys()}, plain)
        assert mine.get_slice("deep").get_shape() == [7, 80, 90]


def test_numpy_gets_the_same(packed, plain):
    found = penstock.load_file(packed, framework="numpy")
    assert numpy.array_equal(found["f32"], plain["f32"].numpy())


def test_what_was_prefetched_is_used(packed, plain):
    penstock.prefetch(packed, device="cpu").wait()
    assert_same(penstock.load_model(packed, device="cpu"), plain)


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


def test_damage_is_named(packed, tmp_path):
    data = bytearray(packed.read_bytes())
    with their_safe_open(packed, "pt") as file:
        assert file.get_tensor("bf16").dtype == torch.uint8
    data[len(data) // 2] ^= 64
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(penstock.Error, match=r"chunk \d+ of tensor .* checksum"):
        penstock.load_file(tmp_path / "bad.safetensors")


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


def test_from_pretrained_loads_it(tiny):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    mine = penstock.from_pretrained(tiny / "packed", device="cpu")
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
