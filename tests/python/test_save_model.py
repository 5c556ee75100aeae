# SPDX-License-Identifier: MIT
"""save_model writes folders as the Hugging Face libraries do, one model in the place of another."""
import json
import os
import random
import re
import signal
import time

import numpy
import pytest
import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards

import penstock
from support import Talk, assert_same, random_tensor

INDEX = "model.safetensors.index.json"


def model(seed: int = 0, count: int = 12) -> dict:
    chance = random.Random(seed)
    return {f"layer.{i}.weight": random_tensor(chance.choice((torch.float32, torch.bfloat16)),
                                               (chance.randrange(1, 400), 7), seed=seed + i)
            for i in range(count)}


# ---------------------------------------------------------------------------------- the same cut --

@pytest.mark.parametrize("size", ["1KB", "3KB", "5 KB", "20KB", "1GB", 2500, "0.01MB"])
@pytest.mark.parametrize("seed", range(4))
def test_files_and_index_are_those_of_the_hub(tmp_path, seed, size):
    tensors = model(seed)
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=size)
    penstock.save_model(tensors, tmp_path, size)
    names = set(os.listdir(tmp_path))
    assert names == set(split.filename_to_tensors) | ({INDEX} if split.is_sharded else set())
    for name, listed in split.filename_to_tensors.items():
        with safetensors.safe_open(tmp_path / name, "pt") as file:
            assert set(file.keys()) == set(listed) and file.metadata() == {"format": "pt"}
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        assert (tmp_path / INDEX).read_text() == \
            json.dumps(index, indent=2, sort_keys=True) + "\n"
    assert_same(penstock.load_model(tmp_path), tensors)


def test_files_of_a_model_are_padded_unless_told_otherwise(tmp_path):
    for align in (4096, 8):
        penstock.save_model(model(), tmp_path, "3KB", align=align)
        for path in tmp_path.glob("*.safetensors"):
            start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
            assert start % align == 0 and (align == 4096 or start < 4096)


def test_names_in_the_index_are_written_as_python_writes_them(tmp_path):
    tensors = {name: torch.ones(300) for name in ("ä", "名", "\U0001f600", 'a"\\\n\x7f', "a/b")}
    penstock.save_model(tensors, tmp_path, "2KB")
    text = (tmp_path / INDEX).read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert_same(penstock.load_model(tmp_path), tensors)


@pytest.mark.parametrize("size", ["", "5B", "5 apples", "GB", 0, -1, 1.5, True, None, "0GB",
                                  "1e3GB"])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(ValueError, match="max_shard_size"):
        penstock.save_model(model(), tmp_path / "new", size)
    assert not (tmp_path / "new").exists()


# --------------------------------------------------------------------------------- what it takes --

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.randn(6, 4).T)


def test_a_module_is_saved_with_its_tied_tensors_once(tmp_path):
    module = Tied()
    penstock.save_model(module, tmp_path / "model")
    with safetensors.safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"embed.weight", "turned"}
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert_same(penstock.load_model(tmp_path / "model"),
                {"embed.weight": module.embed.weight.detach(),
                 "turned": module.turned.detach().contiguous()})


def test_names_that_a_module_calls_tied_are_those_that_go(tmp_path):
    module = Tied()
    module._tied_weights_keys = {"embed.weight": "head.weight"}
    penstock.save_model(module, tmp_path)
    assert set(penstock.load_model(tmp_path)) == {"head.weight", "turned"}


def test_transformers_reads_what_was_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=48,
                                      num_hidden_layers=2, num_attention_heads=2,
                                      num_key_value_heads=1)
    made = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    penstock.save_model(made, tmp_path, "10KB")
    assert (tmp_path / INDEX).exists()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(dict(again.state_dict()), dict(made.state_dict()))


def test_arrays_of_numpy_have_no_format_of_torch(tmp_path):
    penstock.save_model({"a": numpy.arange(3)}, tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.metadata() is None
    penstock.save_model({"a": torch.ones(3)}, tmp_path, metadata={"k": "v"})
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "k": "v"}


def test_nothing_at_all_is_a_folder_that_can_be_read(tmp_path):
    penstock.save_model({}, tmp_path)
    assert penstock.load_model(tmp_path) == {}


# ----------------------------------------------------------------------------- one after another --

def test_a_new_folder_is_gone_again_when_the_save_fails(tmp_path):
    with pytest.raises(ValueError):
        penstock.save_model({"a": torch.ones(3)}, tmp_path / "a" / "b", align=3)
    assert not (tmp_path / "a" / "b").exists()


def test_a_file_in_the_way_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="file"):
        penstock.save_model({"a": torch.ones(3)}, tmp_path / "file")


@pytest.mark.parametrize("first", ["1KB", "5KB", "1GB"])
@pytest.mark.parametrize("second", ["1KB", "5KB", "1GB"])
def test_only_the_second_model_is_left(tmp_path, first, second):
    penstock.save_model(model(1, 20), tmp_path, first)
    (tmp_path / "config.json").write_text("{}")
    penstock.save_model(model(2), tmp_path, second)
    assert_same(penstock.load_model(tmp_path), model(2))
    left = {name for name in os.listdir(tmp_path) if re.search("safetensors$", name)}
    index = tmp_path / INDEX
    assert left == (set(json.loads(index.read_text())["weight_map"].values()) if index.exists()
                    else {"model.safetensors"})
    assert (tmp_path / "config.json").exists()


SAVES = """
    import sys, numpy, penstock
    sizes = ["100KB", "350KB", "1GB"]
    models = [{f"t{i}": numpy.full((1 + i) * 2500, seed, numpy.float32) for i in range(10)}
              for seed in range(250)]
    start = int(sys.argv[2])
    print("saving", flush=True)
    for i in range(start, 10**9):
        penstock.save_model(models[i % 250], sys.argv[1], sizes[(i // 2) % 3], coded=i % 2 == 1)
    """


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* not named by the index")     # what is left until the next
def test_a_kill_at_any_moment_leaves_one_whole_model(tmp_path):
    """Of whichever shape, coded or not: the old one or the new one, never parts of both."""
    chance = random.Random(7)
    seen = set()
    for kill in range(40):
        with Talk(SAVES, tmp_path, kill * 17) as saver:
            assert saver.line() == "saving"
            time.sleep(chance.uniform(0, 0.4))
            saver.process.send_signal(signal.SIGKILL)
            saver.process.wait()
        if not os.listdir(tmp_path):
            continue
        loaded = penstock.load_model(tmp_path, framework="np")
        assert set(loaded) == {f"t{i}" for i in range(10)}
        values = {value for array in loaded.values() for value in numpy.unique(array)}
        assert len(values) == 1, f"kill {kill}: parts of {values}"
        seen |= values
    assert len(seen) > 3


def test_a_dict_under_the_name_of_a_file_is_that_file(tmp_path):
    """As of a module: no folder that is called x.safetensors."""
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}
    penstock.save_model(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    assert (tmp_path / "x.safetensors").read_bytes() \
        == (tmp_path / "theirs.safetensors").read_bytes()
    penstock.save_model(tensors, filename=tmp_path / "plain", progress=False)
    assert set(safetensors.torch.load_file(tmp_path / "plain")) == {"a", "b"}
    penstock.save_model(tensors, folder=tmp_path / "y.safetensors")
    assert (tmp_path / "y.safetensors/model.safetensors").is_file(), "a folder by its word"


@pytest.mark.parametrize("model", [{"a": torch.ones(3)}, torch.nn.Linear(2, 2)],
                         ids=["dict", "module"])
def test_one_file_is_not_cut(tmp_path, model):
    with pytest.raises(ValueError, match="one file is not cut.*Name a folder"):
        penstock.save_model(model, tmp_path / "x.safetensors", max_shard_size="1GB")
    assert not list(tmp_path.iterdir())
