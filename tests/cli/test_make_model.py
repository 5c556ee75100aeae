# SPDX-License-Identifier: MIT
"""penstock make-model: what the peers' own libraries make of the files, and what misuse does."""
import hashlib
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import time

import pytest

from cli_program import MIB, PROGRAM

SMALL = "layers=3,hidden=32,intermediate=48,heads=4,kv=2,vocab=100"
FIELDS = {"model", "folder", "seed", "files", "tensors", "tensor_bytes", "bytes", "seconds",
          "commit_seconds", "gb_per_s"}


def make(penstock, *args):
    return penstock.ok("make-model", *map(str, args), "--json").json


def header(path):
    """The header of a safetensors file, and where it ends."""
    with open(path, "rb") as file:
        length, = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def tensors(folder):
    """All tensors of the safetensors files of a folder, by the package itself."""
    from safetensors.torch import load_file
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            assert name not in found
            found[name] = tensor
    return found


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


# -------------------------------------------------------------------------------- the files --

@pytest.mark.parametrize("spec", [SMALL, SMALL + ",qwen2,untied,shards=3"])
def test_files_are_byte_for_byte_what_safetensors_would_write(penstock, tmp_path, spec):
    from safetensors.torch import load_file, save_file
    report = make(penstock, spec, tmp_path / "out")
    for name in report["files"]:
        path, again = tmp_path / "out" / name, tmp_path / "again"
        save_file(load_file(path), again, metadata={"format": "pt"})
        assert path.read_bytes() == again.read_bytes()


def test_numbers_are_normal_with_a_deviation_of_0_02(penstock, tmp_path):
    import torch
    make(penstock, "layers=1,hidden=256,vocab=4000", tmp_path / "out")
    found = tensors(tmp_path / "out")
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16, name
    weights = found["model.embed_tokens.weight"].double() / 0.02
    assert abs(weights.mean()) < 0.005 and abs(weights.std() - 1) < 0.005
    assert abs((weights ** 4).mean() - 3) < 0.05
    for bound, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert abs((weights.abs() < bound).double().mean() - share) < 0.004
    # Neighbours, rows and tensors have nothing to do with each other.
    flat = weights.flatten()
    assert abs((flat[1:] * flat[:-1]).mean()) < 0.005
    assert abs((weights[1:] * weights[:-1]).mean()) < 0.005
    other = found["model.layers.0.mlp.gate_proj.weight"].double().flatten() / 0.02
    assert abs((other * flat[:len(other)]).mean()) < 0.02


def test_the_same_seed_gives_the_same_bytes_on_any_number_of_cores(penstock, tmp_path):
    make(penstock, SMALL, tmp_path / "a", "--seed", 5)
    args = [PROGRAM, "make-model", SMALL, tmp_path / "b", "--seed", "5", "-q"]
    subprocess.run(args, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {
        min(os.sched_getaffinity(0))}))
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_another_seed_gives_other_numbers_everywhere(penstock, tmp_path):
    make(penstock, SMALL, tmp_path / "a", "--seed", 5)
    make(penstock, SMALL, tmp_path / "b", "--seed", 6)
    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert a.keys() == b.keys() and not any(a[name].equal(b[name]) for name in a)


def test_shards_change_nothing_about_the_numbers(penstock, tmp_path):
    make(penstock, SMALL, tmp_path / "a")
    report = make(penstock, SMALL + ",shards=7", tmp_path / "b")
    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert len(report["files"]) == 7 and a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a)


def test_model_that_takes_several_windows(penstock, tmp_path):
    """More than two pieces of 64 MiB: whatever their borders do would show here."""
    import torch
    report = make(penstock, "layers=1,hidden=1024,vocab=90000,shards=2", tmp_path / "big")
    assert report["bytes"] > 180 * MIB
    big = tensors(tmp_path / "big")["model.embed_tokens.weight"]
    make(penstock, "layers=1,hidden=1024,vocab=1000", tmp_path / "small")
    small = tensors(tmp_path / "small")["model.embed_tokens.weight"]
    assert big[:1000].equal(small)
    assert abs(big.double().std() / 0.02 - 1) < 0.001
    rows = big.view(torch.int16).int()
    assert len(torch.unique(rows[:, 0] * 65536 + rows[:, 1])) > 30000


def test_report_counts_what_is_there(penstock, tmp_path):
    out = tmp_path / "out"
    report = make(penstock, SMALL + ",shards=2", out, "--seed", 3)
    assert set(report) == FIELDS
    assert report["bytes"] == sum((out / name).stat().st_size for name in report["files"])
    found = tensors(out)
    assert report["tensors"] == len(found) and report["seed"] == 3
    assert report["tensor_bytes"] == sum(tensor.nbytes for tensor in found.values())
    assert sorted(os.listdir(out)) == sorted(
        report["files"] + ["config.json", "model.safetensors.index.json"])


def test_report_for_people(penstock, tmp_path):
    out = penstock.ok("make-model", SMALL, tmp_path / "out").out
    assert re.fullmatch(r"\S+/out: 1 file, 35 tensors, [\d.]+ kB in [\d.]+ m?s: [\d.]+ [GMk]B/s "
                        r"\([\d.]+ m?s of it to make it durable\)\n", out), out
    assert ": 0.00 " not in out
    assert penstock.ok("make-model", SMALL, tmp_path / "quiet", "--quiet").out == ""


def test_index_is_as_the_libraries_write_it(penstock, tmp_path):
    out = tmp_path / "out"
    report = make(penstock, SMALL + ",shards=3", out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report["tensor_bytes"]
    listed = {}
    for name in report["files"]:
        listed.update({key: name for key in header(out / name)[0] if key != "__metadata__"})
    assert index["weight_map"] == listed
    assert report["files"] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.mark.parametrize("shards", [1, 2, 13, 34, 35])
def test_any_number_of_shards_up_to_that_of_tensors(penstock, tmp_path, shards):
    report = make(penstock, f"{SMALL},shards={shards}", tmp_path / "out")
    assert len(report["files"]) == shards and len(tensors(tmp_path / "out")) == 35


def test_shard_size_is_kept(penstock, tmp_path):
    out = tmp_path / "out"
    report = make(penstock, SMALL + ",shard-size=8K", out)
    assert len(report["files"]) > 3
    for name in report["files"]:
        listed, start = header(out / name)
        listed.pop("__metadata__")
        assert (out / name).stat().st_size - start <= 8192 or len(listed) == 1


# ------------------------------------------------------------------------- the known models --

def plan(penstock, tmp_path, spec):
    """The files of a large model without its bytes: one shard's header says what all would be."""
    from transformers import AutoConfig, AutoModelForCausalLM
    import torch
    make(penstock, spec, tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    return config, state, {name: tuple(tensor.shape)
                           for name, tensor in tensors(tmp_path / "out").items()}


@pytest.mark.parametrize("spec, kind, heads, kv, tied", [
    ("0.6b,layers=2,vocab=500", "qwen3", 16, 8, True),
    ("7b,layers=1,vocab=500,intermediate=64", "qwen2", 28, 4, False),
])
def test_a_slice_of_a_known_model_has_the_names_and_shapes_of_transformers(
        penstock, tmp_path, spec, kind, heads, kv, tied):
    config, state, found = plan(penstock, tmp_path, spec)
    assert config.model_type == kind and config.head_dim == 128
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv)
    assert config.tie_word_embeddings is tied and str(config.dtype) == "torch.bfloat16"
    assert state == found


def test_qwen3_0_6b_is_whole(penstock, tmp_path):
    if os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize < 4 << 30:
        pytest.skip("the disk is too full for 1.2 GB")
    from transformers import AutoConfig, AutoModelForCausalLM
    import torch
    out = tmp_path / "out"
    report = make(penstock, "0.6b", out)
    assert report["tensors"] == 310 and report["tensor_bytes"] == 1192099840
    assert report["files"] == ["model.safetensors"]
    config = AutoConfig.from_pretrained(out)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    del state["lm_head.weight"]
    listed, _ = header(out / "model.safetensors")
    assert listed.pop("__metadata__") == {"format": "pt"}
    assert {name: tuple(entry["shape"]) for name, entry in listed.items()} == \
        {name: tuple(tensor.shape) for name, tensor in state.items()}
    (out / "model.safetensors").unlink()


def test_qwen2_5_7b_is_four_shards_and_refused_at_once_where_it_does_not_fit(penstock, small_fs):
    error = penstock.fails("make-model", "7b", small_fs / "out")
    assert error["errno"] == "ENOSPC"
    assert error["object"].endswith("model-00001-of-00004.safetensors")
    assert os.listdir(small_fs) == []


@pytest.mark.parametrize("spec", [SMALL, SMALL + ",qwen2,untied,shards=2"])
def test_transformers_loads_it_and_computes(penstock, tmp_path, spec):
    from transformers import AutoModelForCausalLM
    import torch
    make(penstock, spec, tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    found = tensors(tmp_path / "out")
    assert model.model.embed_tokens.weight.equal(found["model.embed_tokens.weight"])
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape == (1, 3, 100) and torch.isfinite(logits).all()


# ----------------------------------------------------------------------------- a JSON file --

KINDS = ["BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16",
         "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"]


def write_spec(path, files, **more):
    path.write_text(json.dumps({"files": files, **more}))
    return path


def test_any_tensors_can_be_asked_for_in_a_file(penstock, tmp_path):
    from safetensors import safe_open
    listed = [{"name": f"t.{kind}", "dtype": kind, "shape": [3, 8]} for kind in KINDS]
    listed += [{"name": "scalar", "dtype": "F32", "shape": []},
               {"name": "empty", "dtype": "F32", "shape": [4, 0]},
               {"name": "\u00e4 \"quoted\" \t", "dtype": "I8", "shape": [5]}]
    spec = write_spec(tmp_path / "spec.json", [{"name": "x.safetensors", "tensors": listed}],
                      metadata={"about": "all kinds", "who": "\u00e4"})
    report = make(penstock, spec, tmp_path / "out")
    assert report["files"] == ["x.safetensors"] and os.listdir(tmp_path / "out") == report["files"]
    with safe_open(tmp_path / "out" / "x.safetensors", "pt") as file:
        assert set(file.keys()) == {entry["name"] for entry in listed}
        assert file.metadata() == {"about": "all kinds", "who": "\u00e4"}
        for entry in listed:
            part = file.get_slice(entry["name"])
            assert part.get_shape() == entry["shape"] and part.get_dtype() == entry["dtype"]
        assert set(file.get_tensor("t.BOOL").flatten().tolist()) == {False, True}
        assert 0.005 < file.get_tensor("t.F32").std() < 0.05
        assert file.get_tensor("empty").numel() == 0


def test_files_of_a_file_have_an_index(penstock, tmp_path):
    spec = write_spec(tmp_path / "spec.json", [
        {"name": "a.safetensors", "tensors": [{"name": "x", "dtype": "U8", "shape": [3]}]},
        {"name": "b.safetensors", "tensors": []}])
    make(penstock, spec, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"x": "a.safetensors"}
    assert header(tmp_path / "out" / "b.safetensors") == ({}, 16)


ONE = {"name": "x", "dtype": "U8", "shape": [3]}


@pytest.mark.parametrize("content, message", [
    ("{", "line 1"),
    ("[]", "no list of 1 to 200 files"),
    ('{"files": []}', "no list of 1 to 200 files"),
    ('{"files": [1]}', "the name of file 1"),
    ('{"files": [{"name": "../x.safetensors", "tensors": []}]}', "the name of file 1"),
    ('{"files": [{"name": "x.safetensors", "tensors": []}, {"name": "x.bin", "tensors": []}]}',
     "the name of file 2"),
    ('{"files": [{"name": "x.safetensors"}]}', "no list of tensors"),
    ('{"files": [{"name": "x.safetensors", "tensors": [{}]}]}',
     "tensor 1 of 'x.safetensors' has no name"),
    ('{"files": [{"name": "x.safetensors", "tensors": [1]}]}',
     "tensor 1 of 'x.safetensors' is no object"),
    ('{"files": [], "file": 1}', "it has the key 'file', which means nothing here"),
    ('{"files": [{"name": "x.safetensors", "tensor": []}]}', "a file has the key 'tensor'"),
    ('{"files": [{"name": "x.safetensors", "tensors": []},'
     ' {"name": "y.safetensors", "tensors": []}]}', "several files and not one tensor"),
    ([{**ONE, "type": "F4"}], "a tensor has the key 'type'"),
    ([{**ONE, "dtype": "F7"}], "none of safetensors'"),
    ([{**ONE, "dtype": None}], "none of safetensors'"),
    ([{**ONE, "shape": 3}], "no shape"),
    ([{**ONE, "shape": [-1]}], "no size that can be had"),
    ([{**ONE, "shape": [1 << 40, 1 << 40]}], "no size that can be had"),
    ([{**ONE, "dtype": "F4"}], "does not fill whole bytes"),
    ([{**ONE, "name": "__metadata__"}], "no tensor can be called '__metadata__'"),
    ([ONE, ONE], "two tensors have this name"),
])
def test_file_that_makes_no_sense(penstock, tmp_path, content, message):
    spec = tmp_path / "spec.json"
    if isinstance(content, list):
        write_spec(spec, [{"name": "x.safetensors", "tensors": content}])
    else:
        spec.write_text(content)
    error = penstock.fails("make-model", spec, tmp_path / "out", status=2)
    assert message in error["message"] and not (tmp_path / "out").exists()


def test_tensor_in_two_files_is_refused(penstock, tmp_path):
    spec = write_spec(tmp_path / "spec.json", [
        {"name": name, "tensors": [ONE]} for name in ("a.safetensors", "b.safetensors")])
    error = penstock.fails("make-model", spec, tmp_path / "out", status=2)
    assert error["message"] == "two tensors have this name" and error["object"] == "x"


def test_file_that_is_not_there(penstock, tmp_path):
    error = penstock.fails("make-model", tmp_path / "no.json", tmp_path / "out")
    assert error["errno"] == "ENOENT" and error["object"].endswith("no.json") and error["hint"]


# ---------------------------------------------------------------------------------- misuse --

@pytest.mark.parametrize("spec, words", [
    ("13b", "there is no model '13b'"),
    ("1b", "Those that are known are 0.6b and 7b"),
    ("layer=3", "layers"),
    ("layers", "Write layers=N"),
    ("shard-size", "Write shard-size=SIZE"),
    ("tied=1", "it takes no value"),
    ("shards=2,shard-size=1M", "'shards' and 'shard-size' rule each other out"),
    ("shard-size=1M,shards=2", "'shard-size' and 'shards' rule each other out"),
    ("tied,untied", "'tied' and 'untied' rule each other out"),
    ("qwen3,layers=2,qwen2", "'qwen3' and 'qwen2' rule each other out"),
    ("layers=2,layers=2", "'layers' is given twice"),
    ("tied,tied", "'tied' is given twice"),
    ("layers=0", "'0' is not a whole number from 1 to 4096"),
    ("layers=-1", "'-1' is not a whole number"),
    ("layers=", "'' is not a whole number"),
    ("layers=1e3", "'1e3' is not a whole number"),
    ("hidden=99999999999", "'99999999999' is not a whole number"),
    ("shard-size=lots", "'lots' is not a size"),
    ("layers=2,", "'' is none"),
    ("layers=2,7b", "must come first"),
    ("hidden=65,heads=4", "hidden=65 cannot be divided among heads=4"),
    ("heads=4,kv=3", "heads=4 cannot be divided among kv=3"),
    ("head-dim=7", "odd"),
    ("shards=30", "30 are more than the 24 tensors"),
    ("layers=20,shard-size=1", "200 are the most"),
])
def test_model_that_makes_no_sense(penstock, tmp_path, spec, words):
    error = penstock.fails("make-model", spec, tmp_path / "out", status=2)
    assert words in error["message"] + error["hint"]
    assert not (tmp_path / "out").exists()


def test_slip_is_met_with_what_was_meant(penstock, tmp_path):
    error = penstock.fails("make-model", "hiden=64", tmp_path / "out", status=2)
    assert "Did you mean hidden?" in error["hint"]


def test_what_a_known_model_has_can_be_set_once(penstock, tmp_path):
    report = make(penstock, "7b,layers=1,hidden=64,heads=4,kv=2,head-dim=16,intermediate=64,"
                  "vocab=99,shards=2,tied", tmp_path / "out")
    assert len(report["files"]) == 2


@pytest.mark.parametrize("args", [[], ["0.6b"], ["0.6b", "a", "b"]])
def test_it_takes_a_model_and_a_folder(penstock, args):
    assert "MODEL OUT" in penstock.fails("make-model", *args, status=2)["message"]


def test_seed_is_a_number(penstock, tmp_path):
    error = penstock.fails("make-model", SMALL, tmp_path / "out", "--seed", "x", status=2)
    assert "whole number from 0 to 4294967295" in error["message"]


# ------------------------------------------------------------------------------- the folder --

def test_empty_folder_is_used(penstock, tmp_path):
    (tmp_path / "out").mkdir()
    make(penstock, SMALL, tmp_path / "out")
    assert len(os.listdir(tmp_path / "out")) == 2


def test_folder_with_something_in_it_is_refused_unless_forced(penstock, tmp_path):
    out = tmp_path / "out"
    make(penstock, SMALL, out)
    (out / "notes.txt").write_text("mine")
    before = digest(out)
    error = penstock.fails("make-model", SMALL, out, "--seed", "1")
    assert error["errno"] == "ENOTEMPTY" and "--force" in error["hint"]
    assert digest(out) == before
    make(penstock, SMALL, out, "--seed", 1, "--force")
    after = digest(out)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"model.safetensors"}


@pytest.mark.parametrize("first, second", [("", ",shards=2"), (",shards=2", ""),
                                           (",shards=3", ",shards=2")])
def test_remains_of_another_model_are_not_mixed_with_the_new_one(penstock, tmp_path, first, second):
    out = tmp_path / "out"
    make(penstock, SMALL + first, out)
    before = digest(out)
    error = penstock.fails("make-model", SMALL + second, out, "--force")
    assert error["errno"] == "EEXIST" and "would be mixed" in error["message"]
    assert "model" in error["message"] and digest(out) == before


def test_remains_of_another_model_are_named(penstock, tmp_path):
    out = tmp_path / "out"
    make(penstock, SMALL + ",shards=2", out)
    error = penstock.fails("make-model", SMALL, out, "--force")
    assert error["message"].startswith(
        "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, "
        "model.safetensors.index.json would be mixed")
    make(penstock, SMALL + ",shards=9", tmp_path / "nine")
    error = penstock.fails("make-model", SMALL, tmp_path / "nine", "--force")
    assert "model-00005-of-00009.safetensors and 5 more would be mixed" in error["message"]


def test_folder_that_cannot_be_made(penstock, tmp_path):
    error = penstock.fails("make-model", SMALL, tmp_path / "no" / "out")
    assert error["errno"] == "ENOENT" and error["hint"]
    (tmp_path / "file").write_text("x")
    error = penstock.fails("make-model", SMALL, tmp_path / "file")
    assert error["errno"] == "ENOTDIR" and error["message"] == "it is a file, not a folder"
    assert error["hint"]


def test_read_only_file_system(penstock, small_fs):
    subprocess.run(["mount", "-o", "remount,ro", small_fs], check=True)
    assert penstock.fails("make-model", SMALL, small_fs / "out")["errno"] == "EROFS"


@pytest.mark.parametrize("shards", [1, 3])
def test_full_disk_leaves_nothing(penstock, small_fs, shards):
    free = os.statvfs(small_fs).f_bfree
    error = penstock.fails("make-model", f"hidden=256,vocab=10000,shards={shards}",
                           small_fs / "out")
    assert error["errno"] == "ENOSPC" and os.listdir(small_fs) == []
    assert os.statvfs(small_fs).f_bfree == free
    (small_fs / "mine").mkdir()
    penstock.fails("make-model", "hidden=256,vocab=10000", small_fs / "mine")
    assert os.listdir(small_fs) == ["mine"], "a folder that was there stays"


LARGE = "7b,layers=6"    # large enough to be at it still when it is disturbed


def start_large(penstock, folder, *more):
    """A model that is being made; the hidden folder is seen as soon as writing begins."""
    if os.statvfs(folder.parent).f_bavail * os.statvfs(folder.parent).f_frsize < 8 << 30:
        pytest.skip("the disk is too full for 5 GB")
    process = penstock.start("make-model", LARGE, folder, *more)
    while not stages(folder):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    time.sleep(0.1)
    return process


def stages(folder):
    """The hidden folders of those who make `folder`, beside it and in it."""
    return [*folder.parent.glob(f".{folder.name}.penstock-*"), *folder.glob(".penstock-*")]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143),
                                            (signal.SIGHUP, 129)])
def test_interruption_leaves_nothing(penstock, tmp_path, number, status, exists):
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    process = start_large(penstock, out, "--json")
    process.send_signal(number)
    sent = time.monotonic()
    result = penstock.finish(process, ["--json"], timeout=30)
    assert result.status == status and time.monotonic() - sent < 5
    assert result.error["operation"] == "make" and result.error["hint"]
    assert result.error["message"] == f"interrupted; nothing was written to {out}"
    assert os.listdir(tmp_path) == ["out"] * exists and (not exists or os.listdir(out) == [])


def test_second_interruption_ends_at_once_and_leaves_nothing(penstock, tmp_path):
    process = start_large(penstock, tmp_path / "out")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert penstock.finish(process, []).status in (130, -signal.SIGINT)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("exists", [False, True])
def test_what_a_killed_one_left_is_swept_and_what_a_live_one_has_is_not(penstock, tmp_path, exists):
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    killed = start_large(penstock, out)
    killed.kill()
    killed.communicate()
    dead = stages(out)
    assert len(dead) == 1, "there is nothing to sweep"
    (dead[0] / "model.safetensors").write_bytes(b"half of it")
    live = start_large(penstock, tmp_path / "out" if not exists else out)
    assert not dead[0].exists() and len(stages(out)) == 1
    if exists:
        error = penstock.fails("make-model", SMALL, out)
        assert error["errno"] == "EBUSY" and "at work" in error["message"] and error["hint"]
    else:
        make(penstock, SMALL, out)
    assert len(stages(out)) == 1, "the folder of the live one was swept"
    live.send_signal(signal.SIGINT)
    live.communicate()
    assert stages(out) == []


def test_folders_that_are_not_ours_are_never_swept(penstock, tmp_path):
    for name in (".out.penstock-", ".out.penstock-1", ".out.penstock-1-x", ".out.penstock-1-2x",
                 ".other.penstock-1-2", "out.penstock-1-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("x")
    (tmp_path / ".out.penstock-9-9").symlink_to(tmp_path / ".other.penstock-1-2")
    before = sorted(os.listdir(tmp_path))
    make(penstock, SMALL, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == sorted(before + ["out"])
    assert len(list(tmp_path.glob("*/mine"))) == len(before) and (
        tmp_path / ".other.penstock-1-2" / "mine").exists()


def test_folder_is_there_whole_or_not_at_all(penstock, tmp_path):
    """Whoever looks sees all files or no folder."""
    process = penstock.start("make-model", SMALL + ",shards=9", tmp_path / "out", "-q")
    seen = set()
    while process.poll() is None:
        try:
            seen.add(len(os.listdir(tmp_path / "out")))
        except FileNotFoundError:
            pass
    process.communicate()
    assert seen <= {11} and len(os.listdir(tmp_path / "out")) == 11


# Names appear by rename and by link; hidden ones are only on the way to that.
FAILING_NAME = r"""
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>

static int calls;

static int fails(void)
{
	if (++calls != atoi(getenv("FAIL_NAME")))
		return 0;
	errno = EIO;
	return 1;
}

int rename(const char *from, const char *to)
{
	int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");

	return fails() ? -1 : real(from, to);
}

int renameat(int old, const char *from, int new, const char *to)
{
	int (*real)(int, const char *, int, const char *) = dlsym(RTLD_NEXT, "renameat");

	return fails() ? -1 : real(old, from, new, to);
}

int linkat(int old, const char *from, int new, const char *to, int flags)
{
	int (*real)(int, const char *, int, const char *, int) = dlsym(RTLD_NEXT, "linkat");

	return to[0] != '.' && fails() ? -1 : real(old, from, new, to, flags);
}
"""


@pytest.fixture(scope="module")
def failing_name(tmp_path_factory):
    """The program with a library before it that fails the file or folder of that number
    when it is to get its name."""
    from cli_program import Penstock
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(FAILING_NAME)
    subprocess.run(["gcc", "-D_GNU_SOURCE", "-shared", "-fPIC", folder / "shim.c", "-o",
                    folder / "shim.so"], check=True)
    return lambda number: Penstock(LD_PRELOAD=str(folder / "shim.so"), FAIL_NAME=str(number))


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_name_that_fails_leaves_an_old_folder_as_it_was(penstock, failing_name, tmp_path, number):
    out = tmp_path / "out"
    make(penstock, SMALL + ",shards=2", out)
    (out / "config.json").unlink()      # one that is new, among those that are replaced
    before = digest(out)
    error = failing_name(number).fails("make-model", SMALL + ",shards=2", out, "--seed", "1",
                                       "--force")
    assert error["errno"] == "EIO" and str(out) in error["object"]
    assert digest(out) == before
    make(penstock, SMALL + ",shards=2", out, "--seed", 1, "--force")
    assert digest(out) != before and len(os.listdir(out)) == 4


@pytest.mark.parametrize("number", range(1, 6))
def test_name_that_fails_leaves_no_new_folder(failing_name, tmp_path, number):
    error = failing_name(number).fails("make-model", SMALL + ",shards=2", tmp_path / "out")
    assert error["errno"] == "EIO" and error["object"].startswith(str(tmp_path / "out"))
    assert os.listdir(tmp_path) == []


def test_memory_stays_within_256_mib(penstock, tmp_path):
    process = penstock.start("make-model", "0.6b,layers=14", tmp_path / "out", "-q")
    most = 0
    while process.poll() is None:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.M)    # none once it has ended
        most = max(most, int(found.group(1)) if found else 0)
        time.sleep(0.01)
    process.communicate()
    assert process.returncode == 0 and 64 << 10 < most <= 256 << 10


def test_json_members_are_in_the_man_page(penstock, tmp_path):
    from test_options import documented_members
    assert set(make(penstock, SMALL, tmp_path / "out")) <= documented_members("make-model")
