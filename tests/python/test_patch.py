# SPDX-License-Identifier: MIT
"""penstock.patch(): who calls safetensors or torch is served by Penstock, whenever names were
bound; what it cannot serve gets the original's answer; and nothing is left of it afterwards."""
import importlib
import inspect
import io
import json
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
import safetensors.torch
import torch.distributed.checkpoint as dcp

import penstock
import penstock._ondemand
from penstock._patch import TABLE
from support import assert_same, outcome, python

# Not globals of their own: these would be rebound.
REAL = SimpleNamespace(open=safetensors.safe_open, load=safetensors.torch.load_file,
                       torch_load=torch.load, torch_save=torch.save)
DCP = "torch.distributed.checkpoint.filesystem."


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    left = safetensors.safe_open is not REAL.open
    while safetensors.safe_open is not REAL.open:
        penstock.unpatch()
    assert not left


def call(name):
    """What a program would call: safetensors.torch.load_file for "safetensors.torch.load_file"."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def opened(name):
    def read(path, _):
        with call(name)(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}
    return read


def loaded(name, convert=dict):
    return lambda path, _: convert(call(name)(path))


def loaded_bytes(name, convert=dict):
    return lambda path, _: convert(call(name)(path.read_bytes()))


def saved(name, make=dict):
    def write(path, out):
        call(name)(make(penstock.load_file(path)), out, metadata={"format": "pt"})
        return penstock.load_file(out)
    return write


def saved_bytes(name, make=dict):
    def write(path, out):
        out.write_bytes(call(name)(make(penstock.load_file(path)), metadata={"format": "pt"}))
        return penstock.load_file(out)
    return write


def specs(tensors):
    specs.alive = tensors
    return {name: safetensors.TensorSpec(dtype=str(each.dtype).removeprefix("torch."),
                                         shape=each.shape, data_ptr=each.data_ptr(),
                                         data_len=each.nbytes) for name, each in tensors.items()}


class Module(torch.nn.Module):
    """With these tensors."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.clone())


def module_loaded(path, _):
    module = Module({name: torch.zeros_like(each)
                     for name, each in penstock.load_file(path).items()})
    assert call("safetensors.torch.load_model")(module, path) == (set(), [])
    return dict(module.state_dict())


def torch_loaded(path, out):
    REAL.torch_save(penstock.load_file(path, copy=True), out)
    return call("torch.load")(out, "cpu")


def torch_saved(path, out):
    call("torch.save")(penstock.load_file(path), out)
    return REAL.torch_load(out)


def sharded_loaded(path, out):
    from penstock.dcp import Writer

    found = penstock.load_file(path)
    dcp.save(found, storage_writer=Writer(out))
    found = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    dcp.load(found, storage_reader=call(DCP + "FileSystemReader")(out))
    return found


def sharded_saved(path, out):
    from penstock.dcp import Reader

    found = penstock.load_file(path)
    dcp.save(found, storage_writer=call(DCP + "FileSystemWriter")(out))
    found = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    dcp.load(found, storage_reader=Reader(out))
    return found


def to_numpy(tensors):
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def from_numpy(arrays):
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def to_jax(tensors):
    import jax

    return {name: jax.numpy.asarray(tensor.numpy()) for name, tensor in tensors.items()}


def from_jax(arrays):
    import numpy

    return {name: torch.from_numpy(numpy.array(array)) for name, array in arrays.items()}


# For each row of the table, a call of it that gives the tensors of a file.
CALLS = {
    "safetensors.safe_open": opened("safetensors.safe_open"),
    "safetensors.serialize_file": saved("safetensors.serialize_file", specs),
    "safetensors.torch.load_file": loaded("safetensors.torch.load_file"),
    "safetensors.torch.save_file": saved("safetensors.torch.save_file"),
    "safetensors.torch.load_model": module_loaded,
    "safetensors.torch.save_model": saved("safetensors.torch.save_model", Module),
    "safetensors.torch.load": loaded_bytes("safetensors.torch.load"),
    "safetensors.torch.save": saved_bytes("safetensors.torch.save"),
    "safetensors.numpy.load_file": loaded("safetensors.numpy.load_file", from_numpy),
    "safetensors.numpy.save_file": saved("safetensors.numpy.save_file", to_numpy),
    "safetensors.numpy.load": loaded_bytes("safetensors.numpy.load", from_numpy),
    "safetensors.numpy.save": saved_bytes("safetensors.numpy.save", to_numpy),
    "safetensors.flax.load_file": loaded("safetensors.flax.load_file", from_jax),
    "safetensors.flax.save_file": saved("safetensors.flax.save_file", to_jax),
    "safetensors.flax.load": loaded_bytes("safetensors.flax.load", from_jax),
    "safetensors.flax.save": saved_bytes("safetensors.flax.save", to_jax),
    DCP + "FileSystemReader": sharded_loaded,
    DCP + "FileSystemWriter": sharded_saved,
    "torch.load": torch_loaded,
    "torch.save": torch_saved,
    "transformers.modeling_utils.safe_open": opened("transformers.modeling_utils.safe_open"),
}


def test_every_row_of_the_table_is_tried():
    assert sorted(CALLS) == sorted(map(str, TABLE))


@pytest.fixture
def plain(tmp_path):
    """A file whose tensors every framework can have, and its tensors."""
    tensors = {"weight": torch.randn(3, 4), "step": torch.tensor([7], dtype=torch.int32),
               "short": torch.randn(5).half()}
    safetensors.torch.save_file(tensors, tmp_path / "plain.safetensors", {"format": "pt"})
    return tmp_path / "plain.safetensors", tensors


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_served_by_penstock(plain, tmp_path, name):
    module = name.rpartition(".")[0]
    pytest.importorskip({"safetensors.flax": "jax"}.get(module, module.partition(".")[0]))
    importlib.import_module(module)
    with penstock.patch() as held:
        out = "out.pt" if module == "torch" else "out.safetensors"
        found = CALLS[name](plain[0], tmp_path / out)
    assert_same(found, plain[1])
    assert held.served == {name: 1} and held.handed_on == {}
    assert str(held) == f"{name}: 1 served"


def test_torch_keeps_file_objects_and_what_torch_alone_reads(few, tmp_path):
    content = io.BytesIO()
    with penstock.patch() as held:
        torch.save(few[1], content)
        content.seek(0)
        assert_same(torch.load(content), few[1])
        torch.save(few[1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        assert_same(torch.load(tmp_path / "old.pt"), few[1])
        torch.serialization.save(few[1], tmp_path / "new.pt")
        assert_same(torch.load(tmp_path / "new.pt", mmap=True), few[1])
    assert held.served == {"torch.load": 1, "torch.save": 1}
    assert sorted(name for name, _ in held.handed_on) == ["torch.load"] * 2 + ["torch.save"] * 2
    assert torch.load is REAL.torch_load and torch.serialization.save is REAL.torch_save


# ------------------------------------------------------------------------- names bound at import --

BOUND = """
from safetensors import safe_open as opener
from safetensors.torch import load_file
import safetensors as whole
"""


def bind(name):
    """A package that binds names as it is imported."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(BOUND, vars(module))
    return module


@pytest.mark.parametrize("order", ["before", "meanwhile"])
def test_names_that_others_bound_are_rebound_and_restored(few, monkeypatch, order):
    monkeypatch.setitem(sys.modules, "some_package", None)
    other = bind("some_package") if order == "before" else None
    with penstock.patch() as held:
        other = other or bind("some_package")
        assert_same(other.load_file(few[0]), few[1])
        with other.opener(few[0], "pt") as file:
            assert_same({name: file.get_tensor(name) for name in file.keys()}, few[1])
    assert held.served == {"safetensors.torch.load_file": 1, "safetensors.safe_open": 1}
    assert other.load_file is REAL.load and other.opener is REAL.open


@pytest.mark.parametrize("first", ["penstock", "packages"])
def test_real_packages_in_either_order_of_import(few, first):
    """And patching imports nothing by itself."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    done = python("""
        import sys
        import penstock
        first, path = sys.argv[1:]
        if first == "penstock":
            held = penstock.patch()
            assert not {"torch", "numpy", "safetensors"} & set(sys.modules)
        import accelerate.utils.modeling, accelerate.utils.offload, accelerate.utils.other
        import transformers.modeling_utils, transformers.integrations.accelerate
        import safetensors.torch
        if first == "packages":
            held = penstock.patch()
        bound = [(accelerate.utils.modeling, "safe_open"), (accelerate.utils.offload, "safe_open"),
                 (accelerate.utils.modeling, "safe_load_file"),
                 (accelerate.utils.other, "safe_save_file"),
                 (transformers.modeling_utils, "safe_open"),
                 (transformers.modeling_utils, "safe_save_file"),
                 (transformers.integrations.accelerate, "safe_open"),
                 (safetensors.torch, "safe_open"), (safetensors, "safe_open")]
        patched = [getattr(module, name) for module, name in bound]
        accelerate.utils.modeling.safe_load_file(path)
        assert held.served == {"safetensors.torch.load_file": 1}, held.served
        penstock.unpatch()
        for (module, name), before in zip(bound, patched):
            now = getattr(module, name)
            assert now is not before and now.__module__ != "penstock", (module, name)
            assert now in (safetensors.safe_open, safetensors.torch.load_file,
                           safetensors.torch.save_file)
        assert type(safetensors.torch.__spec__.loader).__module__ != "penstock._patch"
        assert type(safetensors.torch.__loader__).__module__ != "penstock._patch"
        assert not [each for each in sys.meta_path if type(each).__module__ == "penstock._patch"]
        """, first, few[0], timeout=120)
    assert done.stderr == ""


def test_a_module_that_is_reloaded_stays_patched(few):
    before = dict(vars(safetensors.torch))
    try:
        with penstock.patch() as held:
            importlib.reload(safetensors.torch)
            safetensors.torch.load_file(few[0])
            assert held.served == {"safetensors.torch.load_file": 1}
        assert not hasattr(safetensors.torch.load_file, "__wrapped__")
    finally:
        vars(safetensors.torch).update(before)


def test_names_that_are_bound_while_their_module_is_imported(few, tmp_path):
    """A module that safetensors.torch itself imports, in its last line as it were."""
    (tmp_path / "part.py").write_text("from safetensors.torch import load_file\n")
    python("""
        import sys
        from importlib.machinery import SourceFileLoader
        import penstock

        sys.path.insert(0, sys.argv[2])
        execute = SourceFileLoader.exec_module
        def and_part(self, module):
            execute(self, module)
            if module.__name__ == "safetensors.torch":
                import part
        SourceFileLoader.exec_module = and_part
        with penstock.patch() as held:
            import safetensors.torch, part
            part.load_file(sys.argv[1])
            assert held.served == {"safetensors.torch.load_file": 1}, held.served
        """, few[0], tmp_path)


def test_what_penstock_calls_in_turn_is_the_original(few, monkeypatch):
    """Else it would be asked what it asks itself."""
    import penstock.safetensors.torch

    monkeypatch.setattr(penstock.safetensors.torch, "load_file",
                        lambda *args, **options: safetensors.torch.load_file(*args, **options))
    with penstock.patch() as held:
        assert_same(safetensors.torch.load_file(few[0]), few[1])
        safetensors.torch.load_file(few[0])
    assert held.served == {"safetensors.torch.load_file": 2}


def test_names_of_penstock_itself_are_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "penstock.own", None)
    own = bind("penstock.own")
    with penstock.patch():
        assert own.load_file is REAL.load


# --------------------------------------------------------------------------------------- undoing --

def everything():
    """What every global of every module is."""
    return {(name, key): id(value) for name, module in sys.modules.items()
            if isinstance(module, ModuleType) and name.partition(".")[0] != "penstock"
            for key, value in vars(module).items()}


def test_undoing_restores_everything(few):
    with penstock.patch():      # what is imported by the way comes now
        safetensors.torch.load_file(few[0])
    path, before, modules = list(sys.meta_path), everything(), set(sys.modules)
    with penstock.patch():
        assert everything() != before
        safetensors.torch.load_file(few[0])
    assert set(sys.modules) == modules and everything() == before
    assert sys.meta_path == path


def test_patches_are_counted(few):
    penstock.patch()
    with penstock.patch():
        penstock.patch()
        penstock.unpatch()
    assert safetensors.torch.load_file is not REAL.load
    penstock.unpatch()
    assert safetensors.torch.load_file is REAL.load
    penstock.unpatch()          # once too often does no harm
    with penstock.patch() as held:
        safetensors.torch.load_file(few[0])
    assert held.served and safetensors.torch.load_file is REAL.load


def test_a_block_that_fails_undoes_its_patch():
    with pytest.raises(KeyError), penstock.patch():
        raise KeyError
    assert safetensors.torch.load_file is REAL.load


def test_a_block_undoes_once():
    penstock.patch()
    held = penstock.patch()
    with held:
        pass
    with held:
        pass
    assert safetensors.torch.load_file is not REAL.load
    penstock.unpatch()


def test_a_name_that_somebody_kept_is_the_original_again(few):
    with penstock.patch() as held:
        kept, opener = safetensors.torch.load_file, safetensors.safe_open
    assert_same(kept(few[0]), few[1])
    assert type(opener(few[0], framework="pt")) is REAL.open
    assert held.served == {}
    with penstock.patch() as held:
        kept(few[0])
    assert held.served == {"safetensors.torch.load_file": 1}


def test_what_others_put_in_its_place_stays(monkeypatch):
    theirs = lambda *_: None
    with penstock.patch():
        monkeypatch.setattr(safetensors.torch, "load_file", theirs)
    assert safetensors.torch.load_file is theirs
    monkeypatch.undo()
    safetensors.torch.load_file = REAL.load


def test_threads_may_patch_at_once(few):
    wrong = []

    def work():
        for _ in range(5):
            with penstock.patch():
                if safetensors.torch.load_file is REAL.load:
                    wrong.append("not patched")
                if len(safetensors.torch.load_file(few[0])) != len(few[1]):
                    wrong.append("other tensors")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and safetensors.torch.load_file is REAL.load


# ----------------------------------------------------------------------- what cannot be served --

def words(call):
    """The result of a call, or its exception as words."""
    found, error = outcome(call)
    return sorted(found) if isinstance(found, dict) else (type(error), str(error))


@pytest.mark.parametrize("why, calling", [
    ("framework", lambda path: safetensors.safe_open(path, framework="tf")),
    ("framework", lambda path: safetensors.safe_open(path, framework="nothing")),
    ("device", lambda path: safetensors.safe_open(path, framework="pt", device="mps")),
    ("device", lambda path: safetensors.torch.load_file(path, device="xpu:0")),
    ("backend", lambda path: safetensors.torch.load_file(path, backend="magic")),
    ("name of a file", lambda path: safetensors.torch.load_file(open(path, "rb"))),
    ("name of a file", lambda path: safetensors.torch.load_file(7)),
    ("framework", lambda path: safetensors.safe_open(path)),
    ("unexpected", lambda path: safetensors.torch.load_file(path, colour="blue")),
    ("meta", lambda path: safetensors.torch.save_file({"a": torch.empty(2, device="meta")},
                                                      f"{path}.new")),
], ids=lambda each: each if isinstance(each, str) else "")
def test_what_penstock_does_not_know_gets_the_answer_of_safetensors(few, why, calling):
    theirs = words(lambda: calling(few[0]))
    with penstock.patch() as held:
        assert words(lambda: calling(few[0])) == theirs
    assert held.handed_on and why in str(held) and not held.served


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_for_safetensors_to_refuse(few):
    theirs = words(lambda: REAL.load(few[0], device="cuda:0"))
    with penstock.patch() as held:
        assert words(lambda: safetensors.torch.load_file(few[0], device="cuda:0")) == theirs
    assert held.handed_on


def test_to_a_gpu(few, device):
    with penstock.patch() as held:
        found = safetensors.torch.load_file(few[0], device=device)
    assert {str(tensor.device) for tensor in found.values()} == {device}
    assert_same({name: tensor.cpu() for name, tensor in found.items()}, few[1])
    assert held.served


# ------------------------------------------------------------------------- the look of stand-ins --

def test_stand_ins_look_like_what_they_stand_for():
    import pickle

    with penstock.patch():
        for name in ("load_file", "save_file"):
            ours = getattr(safetensors.torch, name)
            theirs = inspect.unwrap(ours)
            assert ours is not theirs and inspect.signature(ours) == inspect.signature(theirs)
            assert (ours.__name__, ours.__module__, ours.__doc__) \
                == (theirs.__name__, theirs.__module__, theirs.__doc__)
            assert pickle.loads(pickle.dumps(ours)) is ours
        assert safetensors.safe_open.__name__ == "safe_open"
        assert pickle.loads(pickle.dumps(safetensors.safe_open)) is safetensors.safe_open


def test_safe_open_is_a_class_still(few):
    before = safetensors.safe_open(few[0], framework="pt")
    with penstock.patch():
        opened = safetensors.safe_open(few[0], framework="pt")
        assert type(opened) is safetensors.safe_open
        assert all(isinstance(each, safetensors.safe_open) for each in (
            before, opened, penstock.safe_open(few[0])))
        assert not isinstance("text", safetensors.safe_open)
        assert issubclass(REAL.open, safetensors.safe_open)

        class Mine(safetensors.safe_open):
            def first(self):
                return self.keys()[0]

        mine = Mine(few[0], framework="pt")
        assert mine.first() == sorted(few[1])[0] and isinstance(mine, safetensors.safe_open)
        assert not isinstance(opened, Mine) and not isinstance(before, Mine)
    assert_same({name: opened.get_tensor(name) for name in opened.keys()}, few[1])


# ------------------------------------------------------------------------------- real packages --

@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model in several files, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=128, tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("patch") / "model"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder,
                                                                          max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def transformers_model(folder, **options):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def assert_same_weights(mine, theirs):
    # Beside a GPU accelerate keeps what is mapped to the host on meta, and its weights elsewhere.
    mine, theirs = ({name: each.cpu() for name, each in model.state_dict().items()
                     if each.device.type != "meta"} for model in (mine, theirs))
    assert_same(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("device_map", [None, "auto", "device", {"": "device"}, "parts"], ids=str)
def test_transformers(model, device_map, device):
    files = len(list(model.glob("*.safetensors")))
    if device_map == "parts":
        device_map = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": device,
                      "model.rotary_emb": device, "model.layers.0": "cpu",
                      "model.layers.1": device}
    options = {"device_map": json.loads(json.dumps(device_map).replace('"device"', f'"{device}"'))}
    theirs = transformers_model(model, **options)
    with penstock.patch() as held:
        mine = transformers_model(model, **options)
    assert held.served == {"transformers.modeling_utils.safe_open": files} and not held.handed_on
    assert [each.device for each in mine.parameters()] == [
        each.device for each in theirs.parameters()]
    assert_same_weights(mine, theirs)


@pytest.mark.slow
def test_transformers_with_another_dtype(model, device):
    with penstock.patch() as held:
        mine = transformers_model(model, device_map=device, dtype=torch.float16)
    assert held.served
    assert_same_weights(mine, transformers_model(model, device_map=device, dtype=torch.float16))


@pytest.mark.slow
def test_transformers_saves(model, tmp_path):
    whole = transformers_model(model)
    with penstock.patch() as held:
        whole.save_pretrained(tmp_path / "mine", max_shard_size="100KB")
    whole.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    files = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == files
    for name in files:
        assert (tmp_path / "mine" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert held.served["safetensors.torch.save_file"] == sum(
        name.endswith(".safetensors") for name in files)


@pytest.mark.slow
def test_transformers_with_a_quantised_model(tmp_path):
    """Eight-bit weights and their scales, which transformers makes bfloat16 where there is no
    GPU for them."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=128, dtype="bfloat16",
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128],
                             "activation_scheme": "dynamic"})
    plain = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    tensors = {}
    for name, weight in plain.state_dict().items():
        if "_proj" in name:
            tensors[f"{name}_scale_inv"] = torch.rand(weight.shape[0] // 128,
                                                      weight.shape[1] // 128)
            weight = (weight * 100).to(torch.float8_e4m3fn)
        tensors[name] = weight
    config.save_pretrained(tmp_path)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = transformers_model(tmp_path, device_map="cpu")
    with penstock.patch() as held:
        mine = transformers_model(tmp_path, device_map="cpu")
    assert held.served == {"transformers.modeling_utils.safe_open": 1}
    assert_same_weights(mine, theirs)


@pytest.mark.slow
def test_accelerate(model, device):
    accelerate = pytest.importorskip("accelerate")
    import transformers

    theirs = transformers_model(model)
    config = transformers.AutoConfig.from_pretrained(model)
    files = len(list(model.glob("*.safetensors")))
    with penstock.patch() as held:
        with accelerate.init_empty_weights():
            mine = transformers.AutoModelForCausalLM.from_config(config)
        mine.tie_weights()
        mine = accelerate.load_checkpoint_and_dispatch(mine, str(model), device_map={"": device})
        assert held.served["safetensors.torch.load_file"] == files
        assert_same_weights(mine, theirs)

        other = transformers.AutoModelForCausalLM.from_config(config)
        accelerate.load_checkpoint_in_model(other, str(model))
        assert held.served["safetensors.torch.load_file"] == 2 * files
        assert_same_weights(other, theirs)


@pytest.mark.slow
def test_diffusers(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    net = diffusers.UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(32, 32),
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"))
    with penstock.patch() as held:
        diffusers.DDPMPipeline(net, diffusers.DDPMScheduler()).save_pretrained(tmp_path)
        assert held.served == {"safetensors.torch.save_file": 1}
        mine = diffusers.DDPMPipeline.from_pretrained(tmp_path).unet
        assert held.served["safetensors.torch.load_file"] == 1
    assert_same_weights(mine, net)


@pytest.mark.slow
def test_peft(model, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(transformers_model(model), settings)
    with penstock.patch() as held:
        adapted.save_pretrained(tmp_path)
        assert held.served == {"safetensors.torch.save_file": 1}
        mine = peft.PeftModel.from_pretrained(transformers_model(model), tmp_path)
        assert held.served["safetensors.torch.load_file"] == 1
    assert_same_weights(mine, adapted)


# --------------------------------------------------------------- tensors that are read elsewhere --

@pytest.fixture
def pretended(monkeypatch):
    """The places that tensors were read to, of which the host is one here."""
    seen = []
    on = penstock._ondemand.safe_open.on
    monkeypatch.setattr(penstock._ondemand.safe_open, "can_read_to", lambda self, device: True)
    monkeypatch.setattr(penstock._ondemand.safe_open, "on",
                        lambda self, device: seen.append(str(device)) or on(self, device))
    return seen


def test_a_tensor_is_read_to_where_it_is_sent(few, pretended):
    path, tensors = few
    with penstock._ondemand.safe_open(path, "pt") as file:
        for name, tensor in tensors.items():
            part = file.get_slice(name)
            assert part.get_shape() == list(tensor.shape)
            assert torch.equal(part[...].to("cpu"), tensor)
            assert torch.equal(part[...].to(device="cpu", dtype=torch.float64), tensor.double())
    assert pretended == ["cpu"] * 2 * len(tensors)


def test_a_tensor_that_is_not_sent_is_on_the_host(few, pretended):
    path, tensors = few
    name, tensor = "model.embed.weight", few[1]["model.embed.weight"]
    file = penstock._ondemand.safe_open(path, "pt")
    part, later = file.get_slice(name), file.get_slice(name)[...]
    file.__exit__(None, None, None)
    assert torch.equal(part[2:4], tensor[2:4])
    assert torch.equal(later.to(torch.float64), tensor.double())
    assert torch.equal(torch.cat([later, later]), torch.cat([tensor, tensor]))
    assert later.shape == tensor.shape and later.dtype == tensor.dtype
    assert not pretended


def test_a_gpu_that_the_engine_has_not_is_not_read_to(few):
    file = penstock._ondemand.safe_open(few[0], "pt")
    assert not file.can_read_to(torch.device("meta")) and not file.can_read_to(torch.device("cpu"))
    if not torch.cuda.is_available():
        assert not file.can_read_to(torch.device("cuda", 0))


def test_only_tensors_of_torch_on_the_host_wait(few):
    numpy = pytest.importorskip("numpy")
    found = penstock._ondemand.safe_open(few[0], "np").get_slice("step")[...]
    assert isinstance(found, (numpy.ndarray, numpy.generic))


def test_an_import_that_fails_in_another_thread_fails_there_alone(tmp_path):
    """patch() waits for modules that are being imported; one that does not come is not its affair,
    and is changed when it comes after all."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").touch()
    (tmp_path / "transformers/modeling_utils.py").write_text("""if True:
        import sys
        from safetensors import safe_open
        sys.there.set()
        sys.go.wait(10)
        if sys.fails:
            raise ImportError("no libtorch_odd.so")
        """)
    said = python("""
        import sys, threading, time
        sys.path.insert(0, sys.argv[1])
        sys.there, sys.go, sys.fails = threading.Event(), threading.Event(), True
        import penstock, safetensors
        from penstock import _patch
        real, told = [safetensors.safe_open], []    # a global would be rebound

        def load():
            try:
                import transformers.modeling_utils
            except ImportError as error:
                told.append(str(error))

        thread = threading.Thread(target=load)
        thread.start()
        sys.there.wait(10)
        threading.Timer(0.2, sys.go.set).start()
        held = penstock.patch()
        thread.join()
        assert told == ["no libtorch_odd.so"] and _patch._count == 1
        sys.fails = False
        import transformers.modeling_utils as late
        assert late.safe_open is not real[0] and safetensors.safe_open is not real[0]
        penstock.unpatch()
        assert late.safe_open is safetensors.safe_open is real[0] and not _patch._count
        print("ok")
    """, tmp_path)
    assert said.stdout == "ok\n"


def test_a_patch_that_fails_counts_for_nothing(monkeypatch):
    def fail(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(penstock._patch, "_rebind", lambda swaps, real=penstock._patch._rebind:
                        fail(swaps) if swaps.keys() == penstock._patch._stand_ins().keys()
                        else real(swaps))
    with pytest.raises(KeyboardInterrupt):
        penstock.patch()
    monkeypatch.undo()
    assert safetensors.safe_open is REAL.open and torch.load is REAL.torch_load
    assert not [each for each in sys.meta_path if each is penstock._patch._finder]
    with penstock.patch():
        assert safetensors.safe_open is not REAL.open
    assert safetensors.safe_open is REAL.open
