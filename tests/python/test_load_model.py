# SPDX-License-Identifier: MIT
"""load_model finds the tensors of a checkpoint however it lies on the disk, or says why not."""
import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

import penstock
from support import assert_same, random_tensor, same

# Every test below holds for tensors that look into the file and for copies.
pytestmark = pytest.mark.usefixtures("each_way")

INDEX = "model.safetensors.index.json"


def shard(number: int, count: int = 3) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def make(folder, *, index: bool = True, count: int = 3) -> dict:
    """A checkpoint of several shards; its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, where = {}, {}
    for number in range(1, count + 1):
        part = {
            f"layers.{number}.weight": random_tensor(torch.bfloat16, (20, 30), seed=number),
            f"layers.{number}.bias": random_tensor(torch.float32, (20,), seed=10 + number),
            f"layers.{number}.count": torch.tensor(number),
        }
        save_file(part, folder / shard(number, count), metadata={"format": "pt"})
        tensors.update(part)
        where.update({name: shard(number, count) for name in part})
    if index:
        write_index(folder, where, sum(tensor.nbytes for tensor in tensors.values()))
    return tensors


def write_index(folder, where: dict, total: int = 0, name: str = INDEX) -> None:
    content = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / name).write_text(json.dumps(content, indent=2))


def read_index(folder) -> dict:
    return json.loads((folder / INDEX).read_text())["weight_map"]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    return folder, make(folder)


# ------------------------------------------------------------------------------- where they are --

def test_a_folder_with_an_index(model, device):
    folder, tensors = model
    loaded = penstock.load_model(folder, device)
    assert_same(loaded, tensors)
    assert all(tensor.device == torch.device(device) for tensor in loaded.values())


def test_a_folder_without_an_index(tmp_path, device):
    tensors = make(tmp_path / "m", index=False)
    assert_same(penstock.load_model(tmp_path / "m", device), tensors)


def test_an_index_file(model):
    folder, tensors = model
    assert_same(penstock.load_model(folder / INDEX), tensors)


def test_an_index_of_another_name(tmp_path):
    """Diffusers and variants name theirs after the weights."""
    tensors = make(tmp_path / "m")
    os.rename(tmp_path / "m" / INDEX, tmp_path / "m" / "model.fp16.safetensors.index.json")
    assert_same(penstock.load_model(tmp_path / "m"), tensors)
    assert_same(penstock.load_model(tmp_path / "m" / "model.fp16.safetensors.index.json"), tensors)


def test_a_single_file_and_a_folder_that_holds_one(few, tmp_path):
    path, tensors = few
    assert_same(penstock.load_model(path), tensors)
    (tmp_path / "one").mkdir()
    os.link(path, tmp_path / "one" / "model.safetensors")
    assert_same(penstock.load_model(tmp_path / "one"), tensors)


def test_relative_paths_and_trailing_slashes(model, monkeypatch):
    folder, tensors = model
    assert_same(penstock.load_model(str(folder) + "/"), tensors)
    monkeypatch.chdir(folder)
    assert_same(penstock.load_model("."), tensors)
    assert_same(penstock.load_model(INDEX), tensors)
    assert_same(penstock.load_model(shard(1)),
                {name: tensors[name] for name in tensors if ".1." in name})


def test_shards_that_are_links_into_a_cache(tmp_path, device):
    """The cache of huggingface_hub: snapshots are links to blobs named by their hash."""
    tensors = make(tmp_path / "plain")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate(sorted(os.listdir(tmp_path / "plain"))):
        os.rename(tmp_path / "plain" / name, blobs / f"{number:064x}")
        os.symlink(f"../../blobs/{number:064x}", snapshot / name)
    assert_same(penstock.load_model(snapshot, device), tensors)
    assert_same(penstock.load_model(snapshot / INDEX, device), tensors)
    os.symlink(snapshot, tmp_path / "link")
    assert_same(penstock.load_model(tmp_path / "link", device), tensors)


def test_shards_in_a_subfolder(tmp_path):
    tensors = make(tmp_path / "m" / "weights", index=False)
    where = {name: f"weights/{shard(int(name.split('.')[1]))}" for name in tensors}
    write_index(tmp_path / "m", where)
    assert_same(penstock.load_model(tmp_path / "m"), tensors)


def test_other_files_in_the_folder_do_not_matter(model):
    folder, tensors = model
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("weights")
    (folder / "pytorch_model.bin").write_bytes(b"junk")
    (folder / "notes.safetensors.txt").write_bytes(b"junk")
    assert_same(penstock.load_model(folder), tensors)


def test_files_that_the_index_does_not_name_do_not_matter(model):
    folder, tensors = model
    save_file({"stray": torch.ones(3)}, folder / "consolidated.safetensors")
    assert_same(penstock.load_model(folder), tensors)


def test_many_shards(tmp_path):
    tensors = make(tmp_path / "m", count=60)
    assert_same(penstock.load_model(tmp_path / "m"), tensors)


# ----------------------------------------------------------------------------------- parameters --

def test_keys_slices_dtype_and_into_reach_over_shards(model, device):
    folder, tensors = model
    loaded = penstock.load_model(
        folder, device, keys=["*.weight", "layers.3.bias"],
        slices={"layers.1.weight": (slice(None), slice(15, 30))})
    assert_same(loaded, {
        "layers.1.weight": tensors["layers.1.weight"][:, 15:30],
        "layers.2.weight": tensors["layers.2.weight"],
        "layers.3.weight": tensors["layers.3.weight"],
        "layers.3.bias": tensors["layers.3.bias"],
    })
    into = {name: torch.zeros_like(tensor, device=device) for name, tensor in tensors.items()}
    loaded = penstock.load_model(folder, device, into=into)
    assert_same(into, tensors)
    assert all(loaded[name].data_ptr() == into[name].data_ptr() for name in tensors)
    half = penstock.load_model(folder, device, dtype=torch.float16, arena=False)
    assert half["layers.1.weight"].dtype == half["layers.1.bias"].dtype == torch.float16
    assert half["layers.1.count"].dtype == torch.int64
    assert same(half["layers.3.bias"], tensors["layers.3.bias"].to(torch.float16))


def test_keys_of_one_shard_do_not_read_the_others(tmp_path):
    for number in (1, 2):
        (tmp_path / "m").mkdir(exist_ok=True)
        save_file({f"t{number}": random_tensor(torch.uint8, (4 << 20,))},
                  tmp_path / "m" / shard(number, 2))
    penstock.load_model(tmp_path / "m", keys="t2", copy=True)
    assert penstock.last_report().storage_bytes < 5 << 20


def test_the_arena_is_one_over_all_shards(model, device):
    folder, tensors = model
    loaded = penstock.load_model(folder, device, copy=True)
    first = min(tensor.data_ptr() for tensor in loaded.values())
    last = max(tensor.data_ptr() + tensor.nbytes for tensor in loaded.values())
    assert last - first <= sum((tensor.nbytes + 255) // 256 * 256 for tensor in tensors.values())
    assert penstock.last_report().bytes == sum(tensor.nbytes for tensor in tensors.values())


# --------------------------------------------------------------------------------------- errors --

def test_a_missing_shard_is_named(model):
    folder, _ = model
    (folder / shard(2)).unlink()
    with pytest.raises(penstock.Error, match=shard(2)) as caught:
        penstock.load_model(folder)
    assert caught.value.errno == 2
    assert caught.value.hint


def test_a_shard_whose_link_leads_nowhere_is_named(model):
    folder, _ = model
    (folder / shard(2)).unlink()
    os.symlink("../blobs/gone", folder / shard(2))
    with pytest.raises(penstock.Error, match=shard(2)):
        penstock.load_model(folder)


def test_a_tensor_that_is_listed_but_absent_is_named(model):
    folder, _ = model
    write_index(folder, dict(read_index(folder), **{"layers.9.weight": shard(3)}))
    with pytest.raises(penstock.Error, match="layers.9.weight") as caught:
        penstock.load_model(folder)
    assert shard(3) in str(caught.value)
    assert caught.value.domain == "format"


def test_a_tensor_that_is_listed_for_the_wrong_shard_is_named(model):
    folder, _ = model
    write_index(folder, dict(read_index(folder), **{"layers.1.weight": shard(3)}))
    with pytest.raises(penstock.Error, match="layers.1.weight"):
        penstock.load_model(folder)


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_is_not_listed_does_no_harm(model):
    folder, tensors = model
    where = read_index(folder)
    del where["layers.2.bias"]
    write_index(folder, where)
    loaded = penstock.load_model(folder)
    assert set(tensors) - {"layers.2.bias"} <= set(loaded) <= set(tensors)
    assert all(same(loaded[name], tensors[name]) for name in loaded)


def test_a_tensor_that_is_not_listed_is_told(model):
    folder, _ = model
    where = read_index(folder)
    del where["layers.2.bias"]
    write_index(folder, where)
    with pytest.warns(UserWarning, match="layers.2.bias"):
        penstock.load_model(folder)


@pytest.mark.parametrize("climb", ["../{}", "a/../../{}", "./../{}", "{absolute}",
                                   "a/b/../../../{}"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path, climb):
    save_file({"secret": torch.ones(3)}, tmp_path / "secret.safetensors")
    (tmp_path / "m" / "a" / "b").mkdir(parents=True)
    name = climb.format("secret.safetensors", absolute=tmp_path / "secret.safetensors")
    write_index(tmp_path / "m", {"secret": name})
    with pytest.raises(penstock.Error, match="secret.safetensors") as caught:
        penstock.load_model(tmp_path / "m")
    assert caught.value.errno != 2, "it was looked for"


def test_a_tensor_in_two_shards_is_named_with_both(tmp_path):
    make(tmp_path / "m", index=False, count=2)
    save_file({"layers.1.weight": torch.ones(3)}, tmp_path / "m" / "extra.safetensors")
    with pytest.raises(penstock.Error, match="layers.1.weight") as caught:
        penstock.load_model(tmp_path / "m")
    assert "extra.safetensors" in str(caught.value) and shard(1, 2) in str(caught.value)


def test_a_folder_without_safetensors_says_what_was_looked_for(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"junk")
    with pytest.raises(penstock.Error, match="safetensors") as caught:
        penstock.load_model(tmp_path / "m")
    assert str(tmp_path / "m") in str(caught.value)


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '"weight_map"', "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}',
    '{"weight_map": {"a": null}}', '{"weight_map": {"a": ""}}', "\0", "\ufeff{}",
    '{"weight_map": {"a": "x.safetensors"', '{"weight_map": {"a": "nul\\u0000.safetensors"}}',
])
def test_a_broken_index_is_named(model, text):
    folder, _ = model
    (folder / INDEX).write_text(text)
    with pytest.raises(penstock.Error) as caught:
        penstock.load_model(folder)
    assert INDEX in str(caught.value) or "safetensors" in str(caught.value)


def test_bad_text_in_an_index_is_named(model):
    folder, _ = model
    (folder / INDEX).write_bytes(b'{"weight_map": {"\xff": "x.safetensors"}}')
    with pytest.raises(penstock.Error, match="index.json"):
        penstock.load_model(folder)


def test_a_broken_shard_is_named(model):
    folder, _ = model
    content = (folder / shard(2)).read_bytes()
    (folder / shard(2)).write_bytes(content[:-1])
    with pytest.raises(penstock.Error, match=shard(2)):
        penstock.load_model(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(penstock.Error, match="nowhere") as caught:
        penstock.load_model(tmp_path / "nowhere")
    assert caught.value.errno == 2


def test_a_pickle_is_not_taken_for_a_model(tmp_path):
    (tmp_path / "model.bin").write_bytes(pickle.dumps({"a": [1, 2, 3]}))
    with pytest.raises(penstock.Error, match="model.bin"):
        penstock.load_model(tmp_path / "model.bin")
