# SPDX-License-Identifier: MIT
"""penstock.from_pretrained() against transformers' own: the same model, bit for bit.

The models are tiny and random, one of each kind that loads in its own way: tied embeddings, a
base-model prefix, experts that are merged, computed buffers, weights kept in float32, an encoder.
"""
import copy
import errno
import gc
import io
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import penstock
import penstock._load
from penstock._device import device_name
from support import outcome
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "vocab_size": 128}
GROUPED = {**SMALL, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

CAUSAL = {
    "qwen2": ("Qwen2", GROUPED),
    "qwen3-tied": ("Qwen3", {**GROUPED, "head_dim": 16, "tie_word_embeddings": True}),
    "llama-scaled": ("Llama", {**GROUPED, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {**GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 16}),
    "phi": ("Phi", SMALL),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128,
                      "n_positions": 64}),
    "opt": ("OPT", {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "vocab_size": 128, "word_embed_proj_dim": 64,
                    "max_position_embeddings": 64}),
    "bloom": ("Bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}),
    "neox": ("GPTNeoX", SMALL),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4}),
    "qwen2-moe": ("Qwen2Moe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 32,
                               "shared_expert_intermediate_size": 32}),
}
MERGED = ("mixtral", "qwen2-moe")
LM = "AutoModelForCausalLM"


def make(folder, family, options, head=None, dtype=torch.bfloat16, **saving):
    """A model with random weights, none of them what a constructor makes."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    config.pad_token_id = 0
    if head is None:
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    else:
        model = getattr(transformers, f"{family}{head}")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(folder, **saving)
    return folder


def theirs(folder, device="cpu", auto_class=LM, **options):
    """What transformers itself loads."""
    if device != "cpu":
        options.setdefault("device_map", device)
    return getattr(transformers, auto_class).from_pretrained(folder, **options)


def inputs(device, count=12):
    return torch.arange(1, count + 1, device=device).reshape(2, -1)


def everything(model):
    """All parameters and buffers, those that are not saved as well."""
    return {**dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False))}


def assert_same_model(mine, reference):
    assert type(mine) is type(reference)
    left, right = everything(mine), everything(reference)
    assert set(left) == set(right)
    for name, tensor in right.items():
        assert left[name].device == tensor.device, name
        assert left[name].dtype == tensor.dtype, name
        assert left[name].requires_grad == tensor.requires_grad, name
        assert torch.equal(left[name], tensor), name
    assert mine.config.to_dict() == reference.config.to_dict()
    assert not any(module.training for module in mine.modules())
    for left, right in zip(mine.modules(), reference.modules(), strict=True):
        assert getattr(left, "name_or_path", None) == getattr(right, "name_or_path", None)
    if reference.can_generate():
        assert mine.generation_config.to_dict() == reference.generation_config.to_dict()


def assert_same_logits(mine, reference, device):
    with torch.no_grad():
        assert torch.equal(mine(inputs(device)).logits, reference(inputs(device)).logits)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> folder, made when asked for."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = make(str(tmp_path_factory.mktemp("model") / name), *CAUSAL[name])
        return made[name]

    return get


@pytest.fixture
def loads(monkeypatch):
    """The arguments and the addresses of every load of tensors."""
    seen = []
    load, begin = penstock._load.load_model, penstock._load.Begun

    def record(tensors, path, device, **options):
        seen.append({"path": path, "device": device, **options,
                     "addresses": {name: each.data_ptr() for name, each in tensors.items()}})

    def recorded(path, device, **options):
        tensors = load(path, device, **options)
        record(tensors, path, device, **options)
        return tensors

    class Recorded(begin):
        def __init__(self, path, device, arena, **options):
            super().__init__(path, device, arena, **options)
            record(self.tensors, path, device, arena=arena, **options)

    monkeypatch.setattr(penstock._load, "load_model", recorded)
    monkeypatch.setattr(penstock._load, "Begun", Recorded)
    return seen


@pytest.fixture
def warned(caplog, monkeypatch):
    """What transformers warns of."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return caplog


# ------------------------------------------------------------------------------- the same model --

@pytest.mark.parametrize("name", CAUSAL)
def test_same_as_transformers(models, name, device):
    mine = penstock.from_pretrained(models(name), device)
    reference = theirs(models(name), device)
    assert_same_model(mine, reference)
    assert_same_logits(mine, reference, device)


@pytest.mark.parametrize("name", ["qwen3-tied", "gpt2", "mixtral"])
def test_generates(models, name, device):
    mine = penstock.from_pretrained(models(name), device)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(
        inputs(device))}
    assert torch.equal(mine.generate(inputs(device), **options),
                       theirs(models(name), device).generate(inputs(device), **options))


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mixtral"])
def test_sharded(tmp_path, name, device):
    folder = make(tmp_path / name, *CAUSAL[name], max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    mine, reference = penstock.from_pretrained(folder, device), theirs(folder, device)
    assert_same_model(mine, reference)
    assert_same_logits(mine, reference, device)


@pytest.mark.parametrize("dtype", [torch.float32, "float16", "bfloat16", "auto", None])
@pytest.mark.parametrize("name", ["llama-scaled", "gpt2", "mixtral"])
def test_dtypes(models, name, dtype, device):
    mine = penstock.from_pretrained(models(name), device, dtype=dtype)
    reference = theirs(models(name), device, dtype=dtype)
    assert_same_model(mine, reference)
    assert_same_logits(mine, reference, device)


def test_old_name_of_dtype(models):
    assert penstock.from_pretrained(models("qwen2"), torch_dtype=torch.float32).dtype \
        == torch.float32


@pytest.mark.parametrize("word", ["fp16", "half", "bf16", "BF16", "fp32", "torch.float32", "F64"])
def test_words_for_dtypes_are_those_of_load_model(models, loads, word):
    """And where one dtype holds for all, the load converts, as with torch's own names."""
    expected = penstock.load_file(f"{models('qwen2')}/model.safetensors", dtype=word)
    model = penstock.from_pretrained(models("qwen2"), dtype=word)
    assert model.dtype == expected["model.norm.weight"].dtype
    assert loads[-1]["dtype"] == (None if model.dtype == torch.bfloat16 else model.dtype)
    assert penstock.from_pretrained(models("qwen2"), torch_dtype=word).dtype == model.dtype


def test_dtype_that_the_configuration_does_not_name(tmp_path, models):
    folder = tmp_path / "model"
    model = theirs(models("qwen2"))
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("dtype", None)
    settings.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(settings))
    mine = penstock.from_pretrained(folder)
    assert mine.dtype == torch.bfloat16
    assert_same_model(mine, theirs(folder))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_kept_in_float32(tmp_path, dtype, device):
    """float32 weights that the model keeps must not pass through a smaller dtype on the way."""
    sizes = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4,
             "vocab_size": 128}
    folder = make(tmp_path / "t5", "T5", sizes, head="ForConditionalGeneration",
                  dtype=torch.float32)
    mine = penstock.from_pretrained(folder, device, dtype=dtype,
                                    auto_class="AutoModelForSeq2SeqLM")
    reference = theirs(folder, device, "AutoModelForSeq2SeqLM", dtype=dtype)
    kept = mine.encoder.block[0].layer[-1].DenseReluDense.wo.weight
    assert (kept.dtype == torch.float32) == (dtype == torch.float16)
    assert_same_model(mine, reference)


def test_tied_weights_are_one(models, device):
    for name in ("qwen3-tied", "gpt2", "opt"):
        model = penstock.from_pretrained(models(name), device)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_untied_weights_are_two(models):
    model = penstock.from_pretrained(models("qwen2"))
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_checkpoint_of_the_base_model(tmp_path):
    """The same weights without the prefix "transformer."."""
    folder = make(tmp_path / "base", *CAUSAL["gpt2"], head="Model")
    assert not any(name.startswith("transformer.")
                   for name in load_file(folder / "model.safetensors"))
    assert_same_model(penstock.from_pretrained(folder), theirs(folder))


def test_base_model_of_a_whole_checkpoint(models):
    mine = penstock.from_pretrained(models("qwen2"), auto_class="AutoModel")
    assert_same_model(mine, theirs(models("qwen2"), auto_class="AutoModel"))


def test_language_part_of_a_larger_model(tmp_path, device):
    """A checkpoint of text and vision, of which the class takes the text alone."""
    text = {**GROUPED, "head_dim": 16, "layer_types": ["full_attention", "linear_attention"],
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
              "out_hidden_size": 64}
    folder = make(tmp_path / "both", "Qwen3_5", {"text_config": text, "vision_config": vision},
                  head="ForConditionalGeneration")
    mine, reference = penstock.from_pretrained(folder, device), theirs(folder, device)
    assert type(mine).__name__ == "Qwen3_5ForCausalLM"
    assert_same_model(mine, reference)
    assert_same_logits(mine, reference, device)


def test_experts_are_apart_in_the_file(models):
    """What makes the cases of experts worth their name."""
    for name in MERGED:
        names = load_file(os.path.join(models(name), "model.safetensors"))
        assert any(".experts.3." in each for each in names)


# ------------------------------------------------------------------------------------ no copies --

@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in MERGED])
def test_no_second_copy(models, loads, name, arena, device):
    model = penstock.from_pretrained(models(name), device, arena=arena)
    assert len(loads) == 1
    places = loads[0]["addresses"]
    assert {each.data_ptr() for each in model.parameters()} <= set(places.values())


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_no_second_copy_when_converted(models, loads, name, device):
    model = penstock.from_pretrained(models(name), device, dtype="float32")
    assert loads[0]["dtype"] == torch.float32
    places = loads[0]["addresses"]
    assert {each.data_ptr() for each in model.parameters()} <= set(places.values())


def test_single_allocations_where_tensors_are_used_up(models, loads):
    penstock.from_pretrained(models("qwen2"), copy=True)
    penstock.from_pretrained(models("mixtral"), copy=True)
    assert [load["arena"] for load in loads] == [True, False]


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_on_the_host_weights_look_into_the_files(models, loads, name):
    model = penstock.from_pretrained(models(name))
    assert [path.path for path in penstock.last_report().paths] == ["mapped-file"]
    assert name != "qwen2" or {each.data_ptr() for each in model.parameters()} \
        <= set(loads[0]["addresses"].values())
    penstock.from_pretrained(models(name), copy=True)
    assert "mapped-file" not in [path.path for path in penstock.last_report().paths]


@pytest.mark.alone
def test_device_memory(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    folder = make(tmp_path / "large", "Qwen2", {**GROUPED, "hidden_size": 1024,
                                                "intermediate_size": 8192, "vocab_size": 64000,
                                                "num_hidden_layers": 8})
    size = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
    penstock.from_pretrained(folder, "cuda:0", dtype="auto")        # the libraries' own memory
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    model = penstock.from_pretrained(folder, "cuda:0")
    taken = before - torch.cuda.mem_get_info()[0]
    assert model.device == torch.device("cuda:0")
    assert taken < size * 1.01 + (8 << 20)


# -------------------------------------------------------------------------------- other classes --

@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return make(tmp_path_factory.mktemp("bert"), "Bert", {**SMALL, "max_position_embeddings": 64},
                head="ForMaskedLM", dtype=torch.float32)


@pytest.mark.parametrize("asked, found", [
    ("AutoModelForMaskedLM", "BertForMaskedLM"),
    (transformers.AutoModelForMaskedLM, "BertForMaskedLM"),
    ("BertForMaskedLM", "BertForMaskedLM"),
    (transformers.BertForMaskedLM, "BertForMaskedLM"),
])
def test_auto_class(bert, asked, found, device):
    mine = penstock.from_pretrained(bert, device, auto_class=asked)
    assert type(mine).__name__ == found
    reference = theirs(bert, device, "AutoModelForMaskedLM")
    assert_same_model(mine, reference)
    assert_same_logits(mine, reference, device)


def test_encoder(bert, device):
    mine = penstock.from_pretrained(bert, device, auto_class="AutoModel", add_pooling_layer=False)
    reference = theirs(bert, device, "AutoModel", add_pooling_layer=False)
    assert_same_model(mine, reference)
    with torch.no_grad():
        assert torch.equal(mine(inputs(device)).last_hidden_state,
                           reference(inputs(device)).last_hidden_state)


def test_wrong_auto_class(bert):
    with pytest.raises(ValueError, match="has no class AutoModelForNothing"):
        penstock.from_pretrained(bert, auto_class="AutoModelForNothing")
    with pytest.raises(TypeError, match="neither an Auto class nor a model class"):
        penstock.from_pretrained(bert, auto_class=dict)
    with pytest.raises(ValueError, match="AutoModelForSpeechSeq2Seq.*BertForMaskedLM.*auto_class="):
        penstock.from_pretrained(bert, auto_class="AutoModelForSpeechSeq2Seq")


REMOTE_CONFIG = """
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "penstock-tiny"
    width = 16
"""

REMOTE_MODEL = """
import torch
from transformers import PreTrainedModel

from .configuration_tiny import TinyConfig


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(32, config.width)
        self.head = torch.nn.Linear(config.width, 32)
        self.post_init()

    def forward(self, ids):
        return self.head(self.embed(ids))
"""


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A folder that brings its own code."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE",
                        str(tmp_path / "modules"))
    folder = tmp_path / "tiny--model"
    folder.mkdir()
    (folder / "configuration_tiny.py").write_text(REMOTE_CONFIG)
    (folder / "modeling_tiny.py").write_text(REMOTE_MODEL)
    (folder / "config.json").write_text(json.dumps({
        "model_type": "penstock-tiny", "architectures": ["TinyModel"], "width": 16,
        "auto_map": {"AutoConfig": "configuration_tiny.TinyConfig",
                     "AutoModelForCausalLM": "modeling_tiny.TinyModel"}}))
    save_file({"embed.weight": torch.randn(32, 16), "head.weight": torch.randn(32, 16),
               "head.bias": torch.randn(32)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_code_of_the_folder(remote, device):
    mine = penstock.from_pretrained(remote, device, trust_remote_code=True)
    assert type(mine).__name__ == "TinyModel"
    tensors = load_file(remote / "model.safetensors", device=device)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in mine.named_parameters())
    assert mine(inputs(device)).shape == (2, 6, 32)


def test_code_of_the_folder_needs_trust(remote):
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        penstock.from_pretrained(remote, trust_remote_code=False)


# ------------------------------------------------------------ checkpoints that do not quite fit --

def test_missing_head(bert, warned, device):
    mine, info = penstock.from_pretrained(bert, device, num_labels=5, output_loading_info=True,
                                          auto_class="AutoModelForSequenceClassification")
    assert info["missing_keys"] >= {"classifier.weight", "classifier.bias"}
    assert "classifier.weight" in warned.text and "MISSING" in warned.text
    assert mine.classifier.weight.shape == (5, 64)
    assert mine.classifier.weight.device == torch.device(device)
    assert 0.005 < mine.classifier.weight.std() < 0.05 and not mine.classifier.bias.any()
    assert all(not each.is_meta for each in everything(mine).values())


def test_missing_and_tied(models):
    """The output embeddings are not in the file because they are the input's: no warning."""
    mine, info = penstock.from_pretrained(models("qwen3-tied"), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.fixture
def altered(tmp_path, models):
    """Change the tensors of a checkpoint."""
    def alter(change):
        folder = tmp_path / "altered"
        theirs(models("qwen2")).save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return alter


def test_unexpected_weights(altered, warned):
    folder = altered(lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)}))
    mine = penstock.from_pretrained(folder)
    assert "model.extra.weight" in warned.text and "UNEXPECTED" in warned.text
    assert_same_model(mine, theirs(folder))


def test_wrong_shape(altered):
    wrong = "model.layers.1.mlp.up_proj.weight"
    folder = altered(lambda tensors: tensors.update({wrong: torch.ones(7, 64)}))
    with pytest.raises(RuntimeError, match=rf"{wrong}.*\[7, 64\].*\[96, 64\]"):
        penstock.from_pretrained(folder)
    mine = penstock.from_pretrained(folder, ignore_mismatched_sizes=True)
    reference = theirs(folder, ignore_mismatched_sizes=True)
    for name, tensor in reference.state_dict().items():
        if name == wrong:
            assert mine.state_dict()[name].shape == (96, 64)
        else:
            assert torch.equal(mine.state_dict()[name], tensor), name


def test_other_files_beside_the_weights(tmp_path, models):
    """Only what transformers would read: not the second copy that some models bring along."""
    folder = tmp_path / "model"
    theirs(models("qwen2")).save_pretrained(folder)
    save_file({"lm_head.weight": torch.zeros(128, 64)}, folder / "consolidated.safetensors")
    assert_same_model(penstock.from_pretrained(folder), theirs(folder))


def test_variant(tmp_path, models):
    folder = tmp_path / "model"
    theirs(models("qwen2")).save_pretrained(folder, variant="fp16")
    assert_same_model(penstock.from_pretrained(folder, variant="fp16"),
                      theirs(folder, variant="fp16"))
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        penstock.from_pretrained(folder)


def test_subfolder(tmp_path, models):
    theirs(models("qwen2")).save_pretrained(tmp_path / "all" / "part")
    mine = penstock.from_pretrained(tmp_path / "all", subfolder="part")
    assert_same_model(mine, theirs(tmp_path / "all", subfolder="part"))


# ------------------------------------------------------------------------------------ arguments --

@pytest.mark.parametrize("form", [lambda device: device, lambda device: {"": device},
                                  lambda device: torch.device(device),
                                  lambda device: {"model": device, "lm_head": device},
                                  lambda device: "auto" if torch.cuda.device_count() < 2 else device
                                  ], ids=["name", "dict", "torch", "parts", "auto"])
def test_device_map(models, loads, form, device):
    if device == "cpu" and form(device) == "auto" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    mine = penstock.from_pretrained(models("qwen2"), device_map=form(device))
    reference = theirs(models("qwen2"), device, device_map=form(device))
    assert_same_model(mine, reference)
    assert not hasattr(mine, "hf_device_map") and not hasattr(reference, "hf_device_map")
    assert {each.device for each in mine.parameters()} == {torch.device(device)}


def test_device_map_that_says_what_device_says(models, loads, device):
    penstock.from_pretrained(models("qwen2"), device, device_map={"": device})
    assert [load["device"] for load in loads] == [device_name(device)]


@pytest.mark.parametrize("count, word, place", [(0, "auto", "cpu"), (1, "auto", "cuda:0"),
                                                (1, "sequential", "cuda:0"), (1, "cuda", "cuda:1"),
                                                (1, 0, 0), (2, "cuda:3", "cuda:3")])
def test_words_of_a_device_map(monkeypatch, count, word, place):
    from penstock._transformers import _place
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _place(None, word) == place


def test_a_model_is_not_spread_over_several_gpus(models, monkeypatch, loads):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"device_map=auto.*one device.*penstock.patch\(\)"):
        penstock.from_pretrained(models("qwen2"), device_map="auto")
    assert not loads


def test_attention(models, device):
    mine = penstock.from_pretrained(models("qwen2"), device, attn_implementation="eager")
    assert mine.config._attn_implementation == "eager"
    assert_same_logits(mine, theirs(models("qwen2"), device, attn_implementation="eager"), device)


def test_configuration(models):
    config = transformers.AutoConfig.from_pretrained(models("qwen2"))
    config.num_hidden_layers = 1
    config.layer_types = config.layer_types[:1]
    mine = penstock.from_pretrained(models("qwen2"), config=config)
    assert len(mine.model.layers) == 1
    assert config.num_hidden_layers == 1 and config is not mine.config
    mine = penstock.from_pretrained(models("qwen2"), rms_norm_eps=0.5)
    assert mine.config.rms_norm_eps == mine.model.norm.variance_epsilon == 0.5


def test_generation_config(tmp_path, models):
    folder = tmp_path / "model"
    model = theirs(models("qwen2"))
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(folder)
    mine = penstock.from_pretrained(folder)
    assert mine.generation_config.max_new_tokens == 3
    assert mine.generate(inputs("cpu"), do_sample=False).shape == (2, 9)
    own = transformers.GenerationConfig(max_new_tokens=2)
    mine = penstock.from_pretrained(folder, generation_config=own)
    assert mine.generation_config.max_new_tokens == 2


def test_transfer_arguments_reach_the_load(models, loads):
    penstock.from_pretrained(models("qwen2"), transfer="CPU_ONLY", memory_limit=64 << 20,
                             progress=False)
    assert loads[0]["transfer"] == "CPU_ONLY" and loads[0]["memory_limit"] == 64 << 20


@pytest.mark.parametrize("options, words", [
    ({"device_map": {"model": 0, "lm_head": "cpu"}}, r"one device.*penstock.patch\(\)"),
    ({"device_map": {"": "disk"}}, r"one device.*penstock.patch\(\)"),
    ({"device_map": {}}, r"one device.*penstock.patch\(\)"),
    ({"device_map": "everywhere"}, "no device of this name"),
    ({"device_map": "cuda:1", "device": "cpu"}, "different places"),
    ({"load_in_8bit": True}, r"load_in_8bit=: for a quantised model .*penstock.patch\(\)"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=: for a quantised"),
    ({"state_dict": {}}, "state_dict=: the weights come from the folder"),
    ({"gguf_file": "x.gguf"}, "gguf_file=: only safetensors"),
    ({"max_memory": {0: "1GB"}}, "max_memory=: the whole model goes to one device"),
    ({"tp_plan": "auto"}, r"tp_plan=: for tensor parallelism .*penstock.patch\(\)"),
    ({"use_safetensors": False}, "use_safetensors=False"),
])
def test_refused(models, options, words, loads):
    with pytest.raises(ValueError, match=words):
        penstock.from_pretrained(models("qwen2"), **options)
    assert not loads


def test_arguments_that_ask_for_nothing(models):
    penstock.from_pretrained(models("qwen2"), device_map=None, quantization_config=None,
                             low_cpu_mem_usage=True, use_safetensors=True, token=None,
                             local_files_only=True, revision="main")


def test_quantised_checkpoint(tmp_path, models, loads):
    folder = tmp_path / "model"
    theirs(models("qwen2")).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"quantised .gptq.*penstock.patch\(\).*load_model"):
        penstock.from_pretrained(folder)
    assert not loads


def test_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="adapter.*base model"):
        penstock.from_pretrained(tmp_path)


# ---------------------------------------------------------------------------------------- names --

@pytest.mark.parametrize("kind", [str, os.fsencode, pathlib.Path])
def test_a_folder_is_a_folder_whatever_it_is_called(tmp_path, monkeypatch, models, kind):
    shutil.copytree(models("qwen2"), tmp_path / "null:")
    monkeypatch.chdir(tmp_path)
    mine, other = penstock.from_pretrained(kind("null:")), theirs("null:")
    assert mine.name_or_path == other.name_or_path
    assert all(torch.equal(value, other.state_dict()[name])
               for name, value in mine.state_dict().items())


def test_no_device_is_the_host(models, loads):
    model = penstock.from_pretrained(models("qwen2"), None)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert loads[-1]["device"] == "host"


ODD = [None, 3, 2.5, True, False, "odd", "", [], [1], ["odd"], {}, {"odd": 1}]


@pytest.mark.parametrize("field", ["architectures", "auto_map", "dtype", "torch_dtype", "id2label",
                                   "model_type", "quantization_config", "text_config",
                                   "transformers_weights"])
@pytest.mark.filterwarnings("ignore")
def test_a_field_of_an_odd_type_is_taken_as_transformers_takes_it_or_named(tmp_path, models, field):
    folder = tmp_path / "model"
    shutil.copytree(models("qwen2"), folder)
    settings = json.loads((folder / "config.json").read_text())
    if field == "torch_dtype":
        del settings["dtype"]
    for value in ODD:
        (folder / "config.json").write_text(json.dumps({**settings, field: value}))
        _, their_error = outcome(lambda: theirs(folder))
        _, my_error = outcome(lambda: penstock.from_pretrained(folder))
        assert (my_error is None) == (their_error is None), (value, my_error, their_error)
        if isinstance(their_error, (TypeError, AttributeError, IndexError)) \
                and not (field == "text_config" and isinstance(value, dict)):
            assert isinstance(my_error, ValueError), (value, my_error)
            assert f"{folder}/config.json: {field} is {json.dumps(value)}, and " in str(my_error)


@pytest.mark.parametrize("value", [[], [1], 3, None, True, "text"], ids=repr)
def test_a_configuration_that_has_no_fields_is_named(tmp_path, models, value):
    folder = tmp_path / "model"
    shutil.copytree(models("qwen2"), folder)
    (folder / "config.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"model/config.json: it holds a \w+, and not"):
        penstock.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"model/config.json: it holds a \w+, and not"):
        penstock.from_pretrained(models("qwen2"), config=folder / "config.json")


@pytest.mark.parametrize("value", [3, ["odd"], [1]], ids=repr)
def test_a_model_without_a_class_is_told_whatever_its_architectures_are(tmp_path, bert, value):
    folder = tmp_path / "model"
    shutil.copytree(bert, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "architectures": value}))
    # Some transformers refuse such a configuration themselves, with an error of their own.
    with pytest.raises(Exception, match="auto_class=|architectures is 3|field 'architectures'"):
        penstock.from_pretrained(folder, auto_class="AutoModelForSpeechSeq2Seq")


@pytest.fixture
def cache(tmp_path, models):
    """The hub's cache with a model in it: links to blobs that are named by their hashes."""
    place = tmp_path / "cache" / "models--penstock--tiny"
    shot = place / "snapshots" / ("a" * 40)
    for folder in (shot, place / "refs", place / "blobs"):
        folder.mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    for i, name in enumerate(sorted(os.listdir(models("qwen2")))):
        shutil.copy(os.path.join(models("qwen2"), name), place / "blobs" / f"{i:064x}")
        (shot / name).symlink_to(f"../../blobs/{i:064x}")
    return tmp_path / "cache", shot


def test_model_of_the_hub(cache, models):
    """A name is looked up in the local cache, and never downloaded."""
    mine = penstock.from_pretrained("penstock/tiny", cache_dir=cache[0])
    assert mine.config._name_or_path == mine.name_or_path == "penstock/tiny"
    assert_same_logits(mine, theirs(models("qwen2")), "cpu")
    with pytest.raises(FileNotFoundError, match="hf download penstock/other"):
        penstock.from_pretrained("penstock/other", cache_dir=cache[0])


def test_model_of_the_hub_with_other_files(cache, models):
    """The weights are then loaded by their own name, which is a link."""
    save_file({"lm_head.weight": torch.zeros(128, 64)}, cache[1] / "consolidated.safetensors")
    mine = penstock.from_pretrained("penstock/tiny", cache_dir=cache[0])
    assert_same_logits(mine, theirs(models("qwen2")), "cpu")


def test_wrong_paths(tmp_path, models):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        penstock.from_pretrained(tmp_path / "nothing" / "at" / "all")
    with pytest.raises(NotADirectoryError, match="penstock.load_file"):
        penstock.from_pretrained(os.path.join(models("qwen2"), "model.safetensors"))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin.*save_pretrained"):
        penstock.from_pretrained(tmp_path)


def test_weights_outside_of_the_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "qwen2", "transformers_weights": "../../x.safetensors"}))
    with pytest.raises(ValueError, match="outside of it"):
        penstock.from_pretrained(tmp_path)


NASTY = "\x1b[31m\x7f\u202e"


def nasty_config(folder, **settings):
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **settings}))


@pytest.mark.parametrize("prepare, options", [
    (lambda folder: folder.rmdir(), {}),
    (lambda folder: (folder.rmdir(), folder.write_text("")), {}),
    (lambda folder: None, {}),
    (lambda folder: None, {"variant": NASTY}),
    (lambda folder: (folder / "config.json").write_text("[]"), {}),
    (lambda folder: nasty_config(folder, transformers_weights=f"../../{NASTY}"), {}),
    (lambda folder: nasty_config(folder, quantization_config={"quant_method": NASTY}), {}),
    (lambda folder: (folder / "adapter_config.json").write_text("{}"), {}),
    (lambda folder: (nasty_config(folder),
                     save_file({"a": torch.zeros(1)}, folder / "model.safetensors")),
     {"auto_class": NASTY}),
], ids=["absent", "file", "empty", "variant", "list", "weights", "quantised", "adapter", "class"])
def test_names_cannot_command_the_terminal(tmp_path, prepare, options):
    folder = tmp_path / NASTY
    folder.mkdir()
    prepare(folder)
    with pytest.raises((OSError, ValueError)) as caught:
        penstock.from_pretrained(folder, **options)
    said = "".join(traceback.format_exception_only(caught.value)).rstrip("\n")
    assert r"\x1b[31m\x7f\u202e" in said and said.isprintable()
    assert NASTY not in str(caught.value.__cause__)


@pytest.mark.parametrize("name", ["/absent/\x1b", "/absent/\ud800", "\udcff/x"])
def test_what_is_said_of_a_folder_can_be_printed(name):
    with pytest.raises(FileNotFoundError, match="no such folder") as caught:
        penstock.from_pretrained(name)
    assert str(caught.value).isprintable() and str(caught.value).encode()


def test_a_field_and_a_shape_are_told_in_letters():
    from penstock._transformers import _check_shapes, _odd_field
    assert _odd_field({"dtype": NASTY}).isprintable()
    assert _odd_field({"id2label": NASTY}).isprintable()
    with pytest.raises(RuntimeError) as caught:
        _check_shapes({"mismatched_keys": [(NASTY, [1], [2])]}, False)
    assert all(line.isprintable() for line in str(caught.value).split("\n"))


# ----------------------------------------------------------------------------- the way it works --

class Watched:
    """A prefetch that remembers what became of it."""

    made = []

    def __init__(self, path, device, *, cache):
        self.path, self.device, self.cancelled = path, device, False
        Watched.made.append(self)

    def cancel(self):
        self.cancelled = True


@pytest.fixture
def prefetches(monkeypatch):
    monkeypatch.setattr(penstock, "prefetch", Watched)
    monkeypatch.setattr(Watched, "made", [])
    return Watched.made


def test_bytes_travel_first(models, loads, prefetches):
    penstock.from_pretrained(models("qwen2"))
    assert [(each.path, each.device) for each in prefetches] \
        == [(loads[0]["path"], loads[0]["device"])]
    assert not prefetches[0].cancelled


def test_names_are_sorted_out_while_the_bytes_travel(models, loads, monkeypatch):
    """The weights are waited for when the first is put into its place, and not before."""
    from transformers import core_model_loading

    seen = []
    rename, load = core_model_loading.rename_source_key, penstock._load.load_model
    monkeypatch.setattr(core_model_loading, "rename_source_key",
                        lambda *args, **options: seen.append("name") or rename(*args, **options))
    monkeypatch.setattr(penstock._load, "load_model",
                        lambda *args, **options: seen.append("load") or load(*args, **options))
    mine = penstock.from_pretrained(models("qwen2"))
    assert seen[0] == "name" and seen.count("load") == 1
    assert_same_model(mine, theirs(models("qwen2")))


def test_a_prefetch_into_memory_is_waited_for(models, monkeypatch):
    waited = []
    wait = penstock.Prefetch.wait
    monkeypatch.setattr(penstock.Prefetch, "wait", lambda self: waited.append(1) or wait(self))
    monkeypatch.setattr(penstock._transformers, "_torch_has", lambda device: False)
    mine = penstock.from_pretrained(models("qwen2"), arena=True)
    assert len(waited) == 1
    assert_same_model(mine, theirs(models("qwen2")))


@pytest.fixture
def finished(monkeypatch):
    """How many parameters have been put into their places when the bytes of a load are waited for;
    one number for each load."""
    from transformers import core_model_loading

    placed, seen = [], []
    place, finish = core_model_loading.set_param_for_module, penstock._load.Begun.finish
    monkeypatch.setattr(core_model_loading, "set_param_for_module",
                        lambda *args, **options: placed.append(1) or place(*args, **options))
    monkeypatch.setattr(penstock._load.Begun, "finish",
                        lambda self: seen.append(len(placed)) or finish(self))
    return seen


def test_weights_are_put_into_place_while_their_bytes_travel(models, finished):
    mine = penstock.from_pretrained(models("qwen2"), copy=True)
    assert finished == [len(list(mine.parameters()))]
    assert_same_model(mine, theirs(models("qwen2")))


def test_what_is_made_out_of_weights_waits_for_their_bytes(models, finished, monkeypatch):
    """A loader of transformers' that looks at what it is given."""
    from transformers import core_model_loading

    place, sums = core_model_loading.set_param_for_module, []
    monkeypatch.setattr(core_model_loading, "set_param_for_module",
                        lambda model, name, value, *args, **options: sums.append(
                            (name, value.shape, float(torch.sum(value))))
                        or place(model, name, value, *args, **options))
    mine = penstock.from_pretrained(models("qwen2"), copy=True)
    assert finished == [0] and len(sums) == len(list(mine.parameters()))
    parameters = dict(mine.named_parameters())
    assert all(total == float(parameters[name].sum()) for name, _, total in sums)


def test_a_file_that_changes_meanwhile_is_read_again(models, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(models("qwen2"), folder)
    expected = theirs(folder)
    wait = penstock._load._Moves.wait
    stale = [penstock._error.from_engine(-errno.ESTALE, "system", 0, "read", str(folder), -1,
                                         "it was changed", "")]

    def once(self, job, label):
        wait(self, job, label)
        if stale:
            raise stale.pop()

    monkeypatch.setattr(penstock._load._Moves, "wait", once)
    assert_same_model(penstock.from_pretrained(folder, copy=True), expected)
    assert not stale


def test_failure_cancels_what_was_begun(models, monkeypatch):
    cancelled = []
    cancel = penstock._load.Begun.cancel
    monkeypatch.setattr(penstock._load.Begun, "cancel",
                        lambda self: cancelled.append(1) or cancel(self))
    with pytest.raises(ValueError):
        penstock.from_pretrained(models("qwen2"), auto_class="AutoModelForSpeechSeq2Seq", copy=True)
    assert cancelled == [1]


def test_who_waits_for_the_bytes_stops_when_nobody_wants_them(models, loads):
    """It is a thread of transformers', which Ctrl-C does not reach."""
    from penstock._transformers import _Load

    class Slow(Watched):
        begun, over = threading.Event(), threading.Event()

        def wait(self):
            self.begun.set()
            assert self.over.wait(30)

        def cancel(self):
            self.over.set()

    load = _Load(models("qwen2"), "cpu", True, {"a": "F32"}, False,
                 {"copy": False, "transfer": "auto", "memory_limit": None, "cache": None})
    load.job = Slow(models("qwen2"), "cpu", cache=None)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(load.run, None, None, None)
        assert Slow.begun.wait(30)
        load.cancel()
        with pytest.raises(RuntimeError, match="nobody waits"):
            waiting.result(30)
    assert not loads


def test_a_checkpoint_of_nothing_but_strangers(altered):
    """No weight is wanted, so none is loaded; the rest is as transformers has it."""
    folder = altered(lambda tensors: tensors.clear() or tensors.update(odd=torch.zeros(3)))
    _, info = penstock.from_pretrained(folder, output_loading_info=True)
    assert info["unexpected_keys"] == {"odd"}
    assert not penstock._prefetch._begun


@pytest.mark.parametrize("enabled", [True, False])
def test_no_search_for_garbage_while_a_model_is_built(models, monkeypatch, enabled):
    seen = []
    load = penstock._load.load_model
    monkeypatch.setattr(penstock._load, "load_model",
                        lambda *args, **options: seen.append(gc.isenabled())
                        or load(*args, **options))
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        penstock.from_pretrained(models("qwen2"))
        assert gc.isenabled() == enabled
        with pytest.raises(ValueError):
            penstock.from_pretrained(models("qwen2"), auto_class="AutoModelForSpeechSeq2Seq")
        assert gc.isenabled() == enabled and seen == [False]
    finally:
        (gc.enable if before else gc.disable)()


def test_several_builds_at_once_look_for_garbage_when_the_last_is_through():
    from penstock._garbage import without_collections

    assert gc.isenabled()
    first, second = without_collections(), without_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert not gc.isenabled()
    second.__exit__()
    assert gc.isenabled()


def test_tensors_without_bytes_are_not_filled(models, monkeypatch):
    """And those that the checkpoint lacks are, as transformers does it."""
    filled = []
    fill = torch.Tensor.uniform_
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, *args, **options: filled.append(
        self.is_meta) or fill(self, *args, **options))
    theirs(models("qwen2"))
    assert True in filled
    filled.clear()
    penstock.from_pretrained(models("qwen2"))
    assert True not in filled


def test_no_prefetch_that_the_load_could_not_join(models, prefetches):
    penstock.from_pretrained(models("qwen2"), memory_limit=64 << 20)
    penstock.from_pretrained(models("qwen2"), transfer="CPU_ONLY")
    penstock.from_pretrained(models("qwen2"), copy=True)
    penstock.from_pretrained(models("qwen2"), dtype="float32", copy=True)
    penstock.from_pretrained(models("mixtral"), copy=True)
    penstock.from_pretrained(models("qwen2"), arena=False)
    assert not prefetches
    penstock.from_pretrained(models("qwen2"), dtype="float32")
    assert len(prefetches) == 1


def test_own_prefetch_of_the_folder_is_joined(models, loads):
    """The folder is what a program would prefetch, before it imports anything."""
    penstock.prefetch(models("qwen2"), "cpu")
    penstock.from_pretrained(models("qwen2"))
    assert [load["path"] for load in loads] == [models("qwen2")]


def test_failure_cancels_the_prefetch(models, prefetches):
    with pytest.raises(ValueError):
        penstock.from_pretrained(models("qwen2"), auto_class="AutoModelForSpeechSeq2Seq")
    assert [each.cancelled for each in prefetches] == [True]


def test_damaged_file(altered):
    folder = altered(lambda tensors: None)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(penstock.Error):
        penstock.from_pretrained(folder)


def test_default_device_is_not_taken_for_the_models(models):
    """Inside of a device context device= still rules."""
    with torch.device("meta"):
        mine = penstock.from_pretrained(models("qwen2"))
    assert_same_model(mine, theirs(models("qwen2")))


def test_report(models):
    penstock.from_pretrained(models("qwen2"))
    size = sum(tensor.nbytes for tensor in
               load_file(os.path.join(models("qwen2"), "model.safetensors")).values())
    assert penstock.last_report().bytes >= size


def test_import_brings_no_framework():
    code = """
        import sys
        import penstock._transformers
        loaded = {"torch", "transformers", "huggingface_hub", "numpy"} & set(sys.modules)
        sys.exit(f"imported {loaded}" if loaded else 0)
    """
    path = os.path.dirname(os.path.dirname(penstock.__file__))
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True,
                   env={**os.environ, "PYTHONPATH": path})


# --------------------------------------------------------------------------- life after loading --

@pytest.mark.parametrize("arena", [True, False])
def test_life_after_loading(tmp_path, models, monkeypatch, arena, device):
    """Parameters that lie in one allocation are still separate ones to all who ask."""
    from safetensors.torch import save_model

    model = penstock.from_pretrained(models("qwen2"), device, arena=arena)
    reference = theirs(models("qwen2"), device)
    storages = [each.untyped_storage() for each in model.parameters()]
    assert len({each.data_ptr() for each in storages}) == len(storages)
    assert [each.nbytes() for each in storages] == [each.nbytes for each in model.parameters()]

    clones = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, *args, **options: clones.append(
        self.shape) or clone(self, *args, **options))
    model.save_pretrained(tmp_path / "again", max_shard_size="100KB")
    monkeypatch.undo()
    assert not clones
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    again = theirs(tmp_path / "again", device)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    save_model(model, str(tmp_path / "all.safetensors"))
    assert len(load_file(tmp_path / "all.safetensors")) == len(reference.state_dict())

    layer = model.model.layers[0]
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    assert buffer.tell() < 2 * sum(each.nbytes for each in layer.parameters())
    twin = copy.deepcopy(model)
    del model, layer, storages
    assert_same_model(twin, reference)
    assert_same_logits(twin.float(), reference.float(), device)


def test_parameter_outlives_the_model(models, device):
    model = penstock.from_pretrained(models("qwen2"), device)
    weight = model.model.layers[1].mlp.up_proj.weight
    del model
    assert torch.equal(weight, theirs(models("qwen2"), device).model.layers[1].mlp.up_proj.weight)


def test_trains(models, device):
    model = penstock.from_pretrained(models("qwen2"), device, dtype="float32").train()
    before = model.lm_head.weight.detach().clone()
    loss = model(inputs(device), labels=inputs(device)).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(before, model.lm_head.weight)
