# SPDX-License-Identifier: MIT
"""The examples of docs/python.md run as they stand, in order, beside a small model; and the guide
names what there is: every public name, every argument, every field of a report."""
import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import penstock
from support import environment

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).resolve().parents[2] / "docs/python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# The blocks are one session; each is compiled where it stands, so that errors name lines of the
# guide.
RUN = """
import re, sys
guide, device = sys.argv[1:]
text = open(guide).read()
session = {"device": device}
for block in re.finditer(r"^```python\\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
    before = text[:block.start(1)].count("\\n")
    exec(compile("\\n" * before + block[1], guide, "exec"), session)
    print("line", before, "ran")

import penstock, torch
from safetensors.torch import load_file
theirs = load_file("weights.safetensors")
def same(mine, name):
    return torch.equal(mine.cpu(), theirs[name])
assert len(session["tensors"]) == len(theirs)
assert all(same(mine, name) for name, mine in session["tensors"].items())
assert open("copy.safetensors", "rb").read() == open("weights.safetensors", "rb").read()
assert same(session["layer"].weight.data, "model.layers.0.mlp.up_proj.weight")
assert len(session["attention"]) == 12 and set(session["norms"]) < set(theirs)
mine = session["shard"]["model.layers.1.self_attn.o_proj.weight"]
assert torch.equal(mine.cpu(), theirs["model.layers.1.self_attn.o_proj.weight"][:, :32])
assert len(session["listed"]) == len(theirs)
assert session["top"]["model.layers.1.mlp.up_proj.weight"].shape == (8, 64)
name = "layers.0.mlp.up_proj.weight"
assert same(session["bare"][name], f"model.{name}")
assert same(session["spread"][f"model.{name}"], f"model.{name}")
assert all(same(parameter.data, name) for name, parameter in session["filled"].named_parameters())
assert same(session["norm"].weight.data, "model.norm.weight")
assert {tensor.dtype for tensor in session["smaller"].values()} == {torch.float16}
assert {tensor.dtype for tensor in session["again_smaller"].values()} == {torch.float16}
assert session["precise"]["model.norm.weight"].dtype == torch.float32
assert torch.equal(session["state"], session["copy"])
assert torch.equal(session["part"].cpu(), theirs["model.embed_tokens.weight"][:16, 8:24])
assert str(session["model"].device) == str(torch.device(device))
assert torch.equal(session["again"].cpu(), theirs["model.norm.weight"])
assert session["numbers"].tolist() == [float(n) for n in range(10, 20)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("docs")
    config = transformers.Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=128, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder / "my-model", max_shard_size="60KB")
    shards = sorted((folder / "my-model").glob("*.safetensors"))
    assert len(shards) > 1
    tensors = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    save_file(tensors, folder / "weights.safetensors", {"format": "pt"})
    return folder


def test_every_example_of_the_guide_runs(folder, device):
    done = subprocess.run([sys.executable, "-c", RUN, GUIDE, device], cwd=folder, text=True,
                          capture_output=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count(" ran\n") == len(BLOCK.findall(GUIDE.read_text())) > 12
    assert "never closed" not in done.stderr


@pytest.mark.parametrize("guide, at, given", [("python.md", 0, ""),
                                              ("checkpoint.md", 1, "steps, ckpt = 3, "
                                               "penstock.Checkpointer('checkpoints')")])
def test_trainings_of_the_guides_go_on_where_they_ended(tmp_path, guide, at, given):
    """Twice as they stand, and once more with further steps to do."""
    block = [block for block in BLOCK.findall((GUIDE.parent / guide).read_text())
             if "ckpt.save(" in block or "ckpt.restore(" in block][at]
    code = f"""
import penstock, torch
device = "cpu"
model = network = torch.nn.Linear(64, 8)
optimizer = torch.optim.SGD(network.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
{given}
{block}
ckpt.close()
"""
    for turn in range(3):
        if turn == 2:
            code = code.replace("+ 1, 4)", "+ 1, 6)").replace("ckpt = 3,", "ckpt = 5,")
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True,
                              capture_output=True, env=environment(), timeout=120,
                              stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr[-2000:]
        with penstock.Checkpointer(tmp_path / "checkpoints") as ckpt:
            assert ckpt.steps() == ([3, 4, 5] if turn == 2 else [1, 2, 3])


def test_the_examples_of_the_readme_run(folder, device):
    text = (GUIDE.parent.parent / "README.md").read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == 3 and BLOCK.search(text[:1500]), "the first is on the first screen"
    code = "\n".join(blocks)
    for example, real in (('"model.safetensors"', '"weights.safetensors"'),
                          ('"/tmp/checkpoints"', '"readme-checkpoints"'),
                          ('"/tmp/m"', '"my-model"'), ('"/tmp/state.pt"', '"state.pt"'),
                          ('"cuda:0"', repr(device))):
        assert example in code
        code = code.replace(example, real)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, text=True, capture_output=True,
                          env=environment(), timeout=120)
    said = "mapped-file" if device == "cpu" else "GB/s"
    assert done.returncode == 0 and said in done.stdout, done.stderr


def test_the_guide_names_everything_there_is():
    text = GUIDE.read_text()
    missing = [name for name in penstock.__all__ if name not in ("Path", "Prefetch", "Report")
               and not re.search(rf"\b{name}\b", text)]
    for call in (penstock.load_model, penstock.stream, penstock.File.read):
        missing += [name for name in inspect.signature(call).parameters
                    if name not in ("self", "task_size") and not re.search(rf"\b{name}\b", text)]
    missing += [name for name in penstock.Report.__annotations__
                if not name.startswith("latency") and f"`{name}`" not in text]
    assert not missing


def written_signatures(text):
    """(function, its signature in the guide): `load(f, map_location, *, device)`, and of methods
    `read` and `write` take `(buffer, size=None)`."""
    for name, parameters in re.findall(r"`(\w+)(\([^`()]*,[^`()]*\))`", text):
        yield getattr(penstock, name), parameters
    for name, parameters in re.findall(r"`ckpt\.(\w+)(\([^`()]*,[^`()]*\))`", text):
        yield getattr(penstock.Checkpointer, name), parameters
    for *names, parameters in re.findall(r"`(\w+)` and `(\w+)` take\s+`(\([^`()]*\))`", text):
        yield from ((getattr(penstock.File, name), parameters) for name in names)


def test_signatures_in_the_guide_are_the_real_ones():
    found = list(written_signatures(GUIDE.read_text().replace("isinstance(file, safe_open)", "")))
    assert {each.__name__ for each, _ in found} >= {"load", "save", "read", "write",
                                                      "restore"}
    for function, written in found:
        told = ast.parse(f"def told{written}: pass").body[0].args
        real = inspect.signature(function).parameters
        # Not those that torch keeps to itself, nor the one that is KvikIO's and means nothing.
        own = [each for name, each in real.items() if name not in ("self", "task_size")
               and not name.startswith("_")]
        assert [each.arg for each in told.args] == [
            each.name for each in own if each.kind is each.POSITIONAL_OR_KEYWORD], function
        assert [each.arg for each in told.kwonlyargs] == [
            each.name for each in own if each.kind is each.KEYWORD_ONLY], function
        defaults = list(zip(reversed(told.args), reversed(told.defaults)))
        for each, value in (*defaults, *zip(told.kwonlyargs, told.kw_defaults)):
            assert value is None or ast.literal_eval(value) == real[each.arg].default, each.arg


def test_the_guide_lists_whatever_takes_a_cache_policy():
    listed = re.search(r"up to `cache=`, which (.*?) take:", GUIDE.read_text(), re.DOTALL)[1]
    takes = {name for name in penstock.__all__ if inspect.isfunction(getattr(penstock, name))
             and "cache" in inspect.signature(getattr(penstock, name)).parameters}
    takes |= {kind.__name__ for kind in (penstock.File, penstock.safe_open)
              if "cache" in inspect.signature(kind).parameters}
    assert set(re.findall(r"`(\w+)`", listed)) == takes
