# SPDX-License-Identifier: MIT
"""from_pretrained(): a ready transformers model whose weights Penstock moved.

transformers knows how a checkpoint becomes a model: which names it renames, which experts it
merges, what is tied to what, which buffers are computed, how a missing head is initialised. That
knowledge changes with every release, so none of it is repeated here. Penstock moves the bytes; the
tensors, where they landed, are then given to transformers' own loading code as its public argument
`state_dict`, and become the parameters. There is no second path for the simple case: with 339
tensors transformers takes about 30 ms to put them into place, and no byte is copied.

Three things make it so:

1. transformers asks each entry of a state dict for entry[...] and then .to(device, dtype). An entry
   of ours answers with the tensor on the device where it is, cast there if it must be, and forgets
   it. So no device_map is needed, whose loader would first reserve the size of the whole model a
   second time on the GPU, and neither is accelerate. What transformers makes itself, buffers and
   missing weights, is on the host and moves at the end.
2. The names in the state dict come from the headers. The bytes travel while transformers builds the
   skeleton on the meta device and finds out which name goes where, and while torch and transformers
   are imported: prefetch() comes first, and the load joins it when a tensor is to be put into
   place. Where torch has started CUDA already, the tensors are there before their bytes: they are
   put into place meanwhile, and whoever does more with one than to ask for its shape waits for all.
   Threads of transformers wait for a load, until it is cancelled.
3. Where the model wants another dtype than the file has, the load converts, if one dtype holds for
   all of the model. Where transformers makes new tensors out of those of the file (experts merged
   into one, or a cast that keeps some weights in float32), each tensor has an allocation of its own
   and goes as soon as it is used up. On the host tensors look into the mapped files, and there is
   nothing to let go of. Such loads run when transformers first looks at the names.

What is built stays, so a search for garbage meanwhile finds none; with all that torch and
transformers have made it takes as long as a load. None is begun here.
"""
from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from . import _report
from ._device import device_name
from ._dtypes import dtype_index
from ._error import shown
from ._fork import Lock
from ._frameworks import DTYPES, Torch, is_floating
from ._garbage import without_collections
from ._names import file_name
from ._report import last_report

if TYPE_CHECKING:
    import torch
    import transformers

    from ._load import Begun
    from ._prefetch import Prefetch
    from ._report import Report

# For what from_pretrained() does not do: transformers does, and Penstock moves the bytes.
_PATCH = "call transformers' own from_pretrained() under \"with penstock.patch():\""

# Arguments of transformers that make no sense here, and what to do instead.
_REFUSED = {
    "state_dict": "the weights come from the folder",
    "quantization_config": f"for a quantised model {_PATCH}",
    "load_in_4bit": f"for a quantised model {_PATCH}",
    "load_in_8bit": f"for a quantised model {_PATCH}",
    "gguf_file": "only safetensors files are read",
    "from_tf": "only safetensors files are read",
    "from_flax": "only safetensors files are read",
    "max_memory": f"the whole model goes to one device; to spread it {_PATCH}",
    "offload_folder": f"the whole model goes to one device; to offload parts of it {_PATCH}",
    "offload_buffers": f"the whole model goes to one device; to offload parts of it {_PATCH}",
    "tp_plan": f"for tensor parallelism {_PATCH}, or load_model() with slices=",
    "tp_size": f"for tensor parallelism {_PATCH}, or load_model() with slices=",
    "device_mesh": f"for tensor parallelism {_PATCH}, or load_model() with slices=",
    "distributed_config": f"for tensor parallelism {_PATCH}, or load_model() with slices=",
}

# What only concerns a download, or the way in which transformers reads files.
_DROPPED = ("force_download", "proxies", "token", "local_files_only", "code_revision",
            "disable_mmap", "weights_only", "tqdm_class", "low_cpu_mem_usage")

# What fields of config.json are, where transformers or the code below looks into them.
_FIELDS = {"architectures": list, "auto_map": dict, "dtype": (str, dict), "id2label": dict,
           "model_type": str, "quantization_config": dict, "text_config": dict,
           "torch_dtype": (str, dict), "transformers_weights": str}

# Checkpoints with a tensor for each expert, which transformers stacks into one.
_EXPERTS = re.compile(r"\.experts\.\d+\.")


# What torch is asked for that has nothing to do with the bytes of a tensor.
_OUTSIDE = frozenset(("_set_grad_enabled", "device", "dtype", "grad_fn", "is_floating_point",
                      "is_meta", "layout", "ndim", "requires_grad", "shape"))


class _Landed:
    """A tensor where it arrives, as transformers' loader sees it: castable, but not movable."""

    __slots__ = ("_weights", "_name")

    def __init__(self, weights: _Weights, name: str) -> None:
        self._weights, self._name = weights, name

    def __getitem__(self, index: Any) -> Any:
        return self if index is Ellipsis else self._weights.arrived()[self._name][index]

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor where it is, in `dtype`. To be asked once: the source goes when it is cast."""
        tensor = self._weights.tensors().pop(self._name)
        if dtype is None or dtype == tensor.dtype:
            return tensor
        self._weights.arrived()
        return tensor.to(dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        weights = self._weights
        found = weights.tensors() if name in _OUTSIDE else weights.arrived()
        return getattr(found[self._name], name)


class _Weights(Mapping):
    """The state dict for transformers: the load happens, or is joined, when a tensor is wanted."""

    def __init__(self, load: _Load, run: Callable[[], dict[str, torch.Tensor]]):
        """`run` gives the tensors, with all their bytes, where `load` has not made them."""
        self._load, self._run = load, run
        self._names = load.names()
        self._lock = threading.Lock()
        self._tensors: dict[str, torch.Tensor] | None = None
        #: What the load did, in whichever thread.
        self.report: Report | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that were not taken yet; their bytes may be on the way."""
        with self._lock:
            if self._tensors is None:
                begun = self._load.begun
                self._tensors = self._run() if begun is None else dict(begun.tensors)
                if begun is None:
                    self.report = last_report()
        return self._tensors

    def arrived(self) -> dict[str, torch.Tensor]:
        """The same, with all their bytes."""
        tensors = self.tensors()
        with self._lock:
            if self.report is None:
                self._load.begun.finish()
                self.report = last_report()
        return tensors

    def wanted(self) -> bool:
        """Has anybody asked for a tensor?"""
        return self._tensors is not None

    def on_the_way(self) -> bool:
        """Are there tensors whose bytes may not have come?"""
        return self._tensors is not None and self.report is None

    def arrive_for(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Before torch does something with these arguments: if they hold one of the tensors, the
        bytes of all have to be there."""
        from torch import Tensor
        from torch.utils._pytree import tree_leaves

        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.data_ptr() in self._load.begun:
                self.arrived()
                return

    def _known(self) -> list[str]:
        if self._names is None:
            self._names = list(self.tensors())
        return self._names

    def __getitem__(self, name: str) -> _Landed:
        return _Landed(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())


def _refuse(kwargs: dict[str, Any]) -> None:
    """Raise on arguments that cannot be honoured; take out those that mean nothing here."""
    for name, instead in _REFUSED.items():
        value = kwargs.pop(name, None)
        if value is not None and value is not False:
            raise ValueError(f"penstock.from_pretrained() does not take {name}=: {instead}")
    if kwargs.pop("use_safetensors", None) is False:
        raise ValueError("penstock.from_pretrained() reads safetensors files only: "
                         "use_safetensors=False cannot be had")
    for name in _DROPPED:
        kwargs.pop(name, None)


def _place(device: Any, device_map: Any) -> Any:
    """The one device of the model, from either of the two arguments; the host where none is given.

    A device_map is simple where it names one device for all: a device, {"": device}, or a word by
    which transformers spreads a model where there is one GPU at most to spread it over.
    """
    if device_map is None:
        return "cpu" if device is None else device
    found = device_map
    if isinstance(device_map, Mapping):
        places = set(map(str, device_map.values()))
        found = next(iter(device_map.values()), None) if len(places) == 1 else None
    elif device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        found = _only_gpu()
    elif device_map == "cuda":          # transformers means the GPU of the process
        found = f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"
    if found is None or str(found) in ("disk", "meta"):
        raise ValueError(f"device_map={shown(str(device_map))}: penstock.from_pretrained() loads "
                         "the whole model to one device, such as \"cuda:0\" or {\"\": 0}. To "
                         f"spread or offload a model {_PATCH}")
    if device is not None and device_name(device) != device_name(found):
        raise ValueError(f"device={shown(str(device))} and device_map={shown(str(device_map))} are "
                         "different places: give one of them")
    return found


def _only_gpu() -> str | None:
    """The GPU, where there is one; the host, where there is none; None, where there are several."""
    import torch

    count = torch.cuda.device_count()
    return "cpu" if not count else "cuda:0" if count == 1 else None


def _refuse_quantised(settings: Mapping[str, Any], name: str) -> None:
    found = settings.get("quantization_config")
    if not found or isinstance(found, (str, int, float, list)):     # transformers stumbles over it
        return
    method = found.get("quant_method", "unknown") if isinstance(found, Mapping) else found
    raise ValueError(f"{shown(name)} is quantised ({shown(str(method))}): "
                     f"penstock.from_pretrained() does not build quantised models: {_PATCH}, "
                     "or take its tensors as they are with penstock.load_model()")


def _refuse_adapter(folder: str, name: str) -> None:
    """An adapter without its base model; or, where PEFT would apply it, one beside a model."""
    from importlib.util import find_spec

    if not os.path.isfile(os.path.join(folder, "adapter_config.json")):
        return
    if os.path.isfile(os.path.join(folder, "config.json")) and find_spec("peft") is None:
        return
    raise ValueError(f"{shown(name)} holds a PEFT adapter: load its base model with "
                     "penstock.from_pretrained(), then peft.PeftModel.from_pretrained(model, path)")


def _folder(name: str, kwargs: dict[str, Any]) -> str:
    """The local folder of a model: itself, or what the hub's cache has under this name."""
    revision, cache_dir = kwargs.pop("revision", None), kwargs.pop("cache_dir", None)
    subfolder = kwargs.pop("subfolder", None) or ""
    place = file_name(name)
    if os.path.isdir(place):
        return os.path.join(place, subfolder) if subfolder else place
    if os.path.exists(place):
        raise NotADirectoryError(f"{shown(name)} is not a folder: penstock.from_pretrained() needs "
                                 "the folder with config.json and the weights; for the tensors of "
                                 "one file there is penstock.load_file()")
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(name, revision=revision, cache_dir=cache_dir,
                                  local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        plain = shown(name)
        # What the hub says has the name as it is.
        raise FileNotFoundError(f"{plain}: no such folder, and not in the local cache of the hub. "
                                f"If it is a model of the hub, download it first: hf download "
                                f"{plain}") from (error if plain == name else None)
    return os.path.join(found, subfolder) if subfolder else found


def _config_file(folder: str, config: Any) -> str:
    """The file of the configuration: that of the caller, which may name its folder, or the
    model's."""
    place = folder if config is None else file_name(config)
    return os.path.join(place, "config.json") if os.path.isdir(place) else place


def _settings(folder: str, config: Any) -> Mapping[str, Any]:
    """config.json as it stands, or what the caller's own configuration says."""
    if hasattr(config, "to_dict"):
        return config.to_dict()
    place = _config_file(folder, config)
    try:
        with open(place, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}                       # transformers will say what is wrong with it
    if not isinstance(found, dict):
        raise ValueError(f"{shown(place)}: it holds a {type(found).__name__}, and not the "
                         "fields of a model's configuration")
    return found


def _as_json(value: Any) -> str:
    """A value of a configuration, for people."""
    return json.dumps(value, default=str).replace("\x7f", "\\u007f")


def _odd_field(settings: Mapping[str, Any]) -> str | None:
    """In words, the first field whose value nobody can use; None where there is none."""
    import torch

    for name, kinds in _FIELDS.items():
        if name not in settings or settings[name] is None and name != "auto_map":
            continue
        value = settings[name]
        if not isinstance(value, kinds):
            names = {str: "a text", dict: "an object", list: "a list"}
            kinds = kinds if isinstance(kinds, tuple) else (kinds,)
            return f"{name} is {_as_json(value)}, and should be " \
                + " or ".join(names[kind] for kind in kinds)
        if "dtype" in name and isinstance(value, str) \
                and not isinstance(getattr(torch, value, None), torch.dtype):
            return f"{name} is {_as_json(value)}, and torch has no such dtype"
    return None


def _weights(folder: str, variant: str | None, settings: Mapping[str, Any]) -> str:
    """The weights of a folder, by transformers' rules: one file, or the index of several."""
    explicit = settings.get("transformers_weights")
    if explicit and isinstance(explicit, str):      # transformers stumbles over anything else
        place = os.path.abspath(os.path.join(folder, explicit))
        if os.path.commonpath([place, os.path.abspath(folder)]) != os.path.abspath(folder):
            raise ValueError(f"{shown(folder)}: config.json names weights outside of it: "
                             f"{shown(explicit)}")
        return place
    middle = f".{variant}" if variant else ""
    names = (f"model{middle}.safetensors", f"model.safetensors.index{middle}.json")
    for name in names:
        place = os.path.join(folder, name)
        if os.path.isfile(place):
            return place
    hint = ""
    if any(os.path.isfile(os.path.join(folder, name))
           for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")):
        hint = (". It has pytorch_model.bin: load it once with transformers and save it again with "
                "save_pretrained()")
    looked = shown(f"{folder}: no weights here: neither {names[0]} nor {names[1]}")
    raise FileNotFoundError(looked + hint)


def _source(folder: str, weights: str) -> str:
    """What to load: the folder, where that means the same files, so that a prefetch() of the folder
    is joined; else the file or index itself."""
    if os.path.basename(weights) == "model.safetensors.index.json":
        return folder
    others = [name for name in os.listdir(folder)
              if name.endswith((".safetensors", ".safetensors.index.json"))]
    return folder if others == ["model.safetensors"] else weights


def _tensors(weights: str) -> dict[str, str]:
    """Name and kind of each tensor of a checkpoint; none where it is damaged: the load says so."""
    from penstock import Error, _penstock

    try:
        return {name: DTYPES[kind] for name, kind, *_ in _penstock.Model(weights).tensors()}
    except Error:
        return {}


def _converts(tensors: dict[str, str], dtype: Any, settings: Mapping[str, Any]) -> bool:
    """Whether some tensors of the file are not of the dtype that the model will have."""
    if dtype == "auto":
        dtype = settings.get("dtype") or settings.get("torch_dtype")
    kind = dtype_index(dtype)
    return kind is not None and is_floating(kind) and any(
        found != DTYPES[kind] and found.startswith(("F", "BF")) for found in tensors.values())


def _as_torch_has_it(dtype: Any) -> Any:
    """A word for a dtype, or some for parts of the model, by torch's name, which is all that
    transformers knows. What we do not know it shall refuse."""
    if isinstance(dtype, dict):
        return {part: _as_torch_has_it(each) for part, each in dtype.items()}
    kind = dtype_index(dtype) if isinstance(dtype, str) else None
    return dtype if kind is None else Torch._names[DTYPES[kind]]


def _model_class(auto_class: Any) -> Any:
    """The class that was asked for: an Auto class or a model class, itself or by its name."""
    import transformers

    if auto_class is None:
        return transformers.AutoModelForCausalLM
    if isinstance(auto_class, str):
        found = getattr(transformers, auto_class, None)
        if found is None:
            raise ValueError(f"transformers {transformers.__version__} has no class "
                             f"{shown(auto_class)}")
        auto_class = found
    if not hasattr(auto_class, "_model_mapping") and not (
            isinstance(auto_class, type) and issubclass(auto_class, transformers.PreTrainedModel)):
        raise TypeError(f"auto_class: {auto_class!r} is neither an Auto class nor a model class of "
                        "transformers")
    return auto_class


def _configuration(cls: Any, folder: str, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The configuration, changed by the arguments that are its own, and the other arguments."""
    import transformers

    config = kwargs.pop("config", None)
    if isinstance(config, transformers.PreTrainedConfig):
        return config, kwargs
    place = folder if config is None else file_name(config)
    if hasattr(cls, "_model_mapping"):
        return transformers.AutoConfig.from_pretrained(place, return_unused_kwargs=True, **kwargs)
    return cls.config_class.from_pretrained(place, return_unused_kwargs=True, **kwargs)


def _remote_class(cls: Any, config: Any, folder: str, trust: bool | None) -> Any:
    """The model class that comes with the folder as Python code; None where it is not wanted."""
    found = getattr(config, "auto_map", None)
    reference = found.get(cls.__name__) if isinstance(found, Mapping) else None
    if not reference:
        return None
    from transformers.dynamic_module_utils import (get_class_from_dynamic_module,
                                                   resolve_trust_remote_code)
    from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

    if not resolve_trust_remote_code(trust, folder, type(config) in cls._model_mapping, True):
        return None
    found = get_class_from_dynamic_module(reference, folder)
    found.register_for_auto_class(auto_class=cls)
    return add_generation_mixin_to_remote_model(found)


def _local_class(cls: Any, config: Any) -> Any:
    """The model class that an Auto class has for a configuration; None where it has none."""
    if type(config) not in cls._model_mapping:
        return None
    found = cls._model_mapping[type(config)]
    if not isinstance(found, (list, tuple)):
        return found
    named = getattr(config, "architectures", None) or []
    return next((each for name in named for each in found if each.__name__ == name), found[0])


def _concrete(cls: Any, config: Any, folder: str, trust: bool | None) -> tuple[Any, Any]:
    """The class that an Auto class stands for here, and the part of the configuration it takes."""
    if not hasattr(cls, "_model_mapping"):
        return cls, config
    local = _local_class(cls, config)
    registered = local is not None and not local.__module__.startswith("transformers.")
    remote = None if registered else _remote_class(cls, config, folder, trust)
    if remote is not None:
        return remote, config
    if local is None:
        named = ", ".join(map(str, getattr(config, "architectures", None) or [])) or "unknown"
        raise ValueError(f"{cls.__name__} has no model for {type(config).__name__} "
                         f"(architecture: {shown(named)}): name the class to build with "
                         "auto_class=")
    text = config.sub_configs.get("text_config")
    if text is not None and getattr(local, "config_class", None) == text:
        return local, config.get_text_config()
    return local, config


def _is_uniform(cls: Any, config: Any, dtype: torch.dtype) -> bool:
    """Whether every floating parameter and buffer of the model wants `dtype`."""
    import copy

    import torch

    try:
        with torch.device("meta"):
            model = cls._from_config(copy.deepcopy(config), dtype=dtype)
        return not model._get_dtype_plan(dtype) and all(
            tensor.dtype == dtype for tensor in model.state_dict().values()
            if tensor.is_floating_point())
    except Exception:       # then transformers casts, tensor by tensor; that is right in any case
        return False


def _common_dtype(cls: Any, config: Any, dtype: Any) -> torch.dtype | None:
    """The dtype that the load may convert all tensors to; None where they differ."""
    import torch

    if dtype == "auto":
        dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and _is_uniform(cls, config, dtype) else None


def _check_shapes(info: dict[str, Any], ignore: bool) -> None:
    if ignore or not info["mismatched_keys"]:
        return
    lines = [f"{shown(name)}: the checkpoint has {list(theirs)}, the model {list(ours)}"
             for name, theirs, ours in sorted(info["mismatched_keys"], key=lambda key: key[0])]
    first = lines[:8] + ([f"and {len(lines) - 8} more"] if len(lines) > 8 else [])
    raise RuntimeError("the shapes of checkpoint and model differ:\n  " + "\n  ".join(first)
                       + "\nWith ignore_mismatched_sizes=True these are initialised anew")


def _sign(model: Any, name: str, folder: str, generation: bool, trust: bool | None) -> None:
    """What transformers does with the name of the folder, which it was not told."""
    import transformers

    model.config.name_or_path = name
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            module.name_or_path = name
    if generation and model.can_generate() and hasattr(model, "adjust_generation_fn"):
        model.adjust_generation_fn(None, True, None, folder, cache_dir=None, force_download=False,
                                   proxies=None, local_files_only=True, token=None, revision=None,
                                   subfolder="", trust_remote_code=trust)


class _Load:
    """The load of the weights: begun early where that can be, run when transformers wants them."""

    def __init__(self, source: str, device: Any, arena: bool | None, tensors: dict[str, str],
                 converts: bool, options: dict[str, Any]) -> None:
        """`converts`: some tensors are not of the dtype that the model will have."""
        self.source, self.arena, self.options = source, arena, options
        #: By the engine's name: "cuda" means another GPU to each thread.
        self.device = device_name(device)
        self.converts = converts
        #: Tensors look into the mapped files, so none has memory that could be given back.
        self.maps = self.device == "host" and arena is None and not options["copy"] \
            and options["cache"] != "drop"
        self.merges = any(_EXPERTS.search(name) for name in tensors)
        self._tensors = tensors
        self.job: Prefetch | None = None
        #: The tensors, their bytes on the way; None: they come all at once, from run().
        self.begun: Begun | None = None
        self._cancelled = False

    def begin(self) -> None:
        """Let the bytes travel: where torch can give their memory at once, to tensors; else where
        run() can join, with default settings, into one arena or the page cache."""
        from penstock import prefetch

        from ._prefetch import under_way

        plain = self.options["transfer"] == "auto" and self.options["memory_limit"] is None \
            and self.options["cache"] != "drop"
        as_they_are = not self.converts and not self.merges
        if as_they_are and not self.maps and _torch_has(self.device) \
                and not under_way(self.source, self.device):
            from ._load import Begun

            options = {name: value for name, value in self.options.items() if name != "copy"}
            with suppress(OSError):     # which run() meets again, and tells
                self.begun = Begun(self.source, self.device, self.arena is not False, **options)
        elif plain and not self.options["copy"] and (
                self.maps or as_they_are and self.arena is not False):
            self.job = prefetch(self.source, self.device, cache=self.options["cache"])

    def names(self) -> list[str] | None:
        """What will come, where run() may be called by any thread; None: it may not, or nobody
        knows. Who waits in another thread than the main one cannot be interrupted, only
        cancelled."""
        under_way = self.job is not None or self.begun is not None
        return list(self._tensors) if under_way and self._tensors else None

    def run(self, cls: Any, config: Any, dtype: Any) -> dict[str, torch.Tensor]:
        """The tensors, in the one dtype that the model has, if it has one."""
        from penstock._load import load_model

        if self.job is not None and not self.maps:
            with suppress(OSError):     # which the load meets again, and tells
                self.job.wait()
        if self._cancelled:
            raise RuntimeError("nobody waits for the weights any more")
        common = _common_dtype(cls, config, dtype) if self.converts else None
        alone = (self.merges or self.converts and common is None) and not self.maps
        return load_model(self.source, self.device, dtype=common,
                          arena=False if alone else self.arena, **self.options)

    def cancel(self) -> None:
        """Nobody will want the tensors."""
        self._cancelled = True
        for each in (self.job, self.begun):
            if each is not None:
                each.cancel()


def _torch_has(device: str) -> bool:
    """Can torch give memory of a device without starting anything first?"""
    torch = sys.modules.get("torch")
    return torch is not None and (device == "host" or torch.cuda.is_initialized())


def _watched(weights: _Weights) -> Any:
    """A block in which tensors without bytes are not filled with random numbers, which torch takes
    its time for. Those that have bytes are: the weights that a checkpoint lacks. And nothing is
    made out of the weights before their bytes have come."""
    import torch
    from torch.nn import init

    fills = {getattr(init, name) for name in ("uniform_", "normal_", "trunc_normal_", "constant_",
                                              "ones_", "zeros_", "xavier_uniform_",
                                              "xavier_normal_", "kaiming_uniform_",
                                              "kaiming_normal_")}

    def is_outside(function: Any) -> bool:
        getter = getattr(function, "__self__", None)
        return getattr(getter if function.__name__ == "__get__" else function,
                       "__name__", None) in _OUTSIDE

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (),
                               kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            tensor = args[0] if args else kwargs.get("tensor")
            if function in fills and tensor.is_meta:
                return tensor
            if weights.on_the_way() and not is_outside(function):
                weights.arrive_for(args, kwargs)
            return function(*args, **kwargs)

    return Watched()


def _build(name: str, folder: str, cls: Any, dtype: Any, load: _Load,
           kwargs: dict[str, Any]) -> Any:
    """The model out of configuration and weights."""
    import torch
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        raise ValueError("penstock.from_pretrained() does not work under DeepSpeed ZeRO-3, which "
                         "spreads each weight over the ranks: load with transformers")
    trust = kwargs.get("trust_remote_code")
    config, kwargs = _configuration(cls, folder, kwargs)
    kwargs.pop("trust_remote_code", None)
    _refuse_quantised(config.to_dict(), name)
    cls, config = _concrete(cls, config, folder, trust)
    wants_info = kwargs.pop("output_loading_info", False)
    ignore = kwargs.pop("ignore_mismatched_sizes", False)
    weights = _Weights(load, lambda: load.run(cls, config, dtype))
    # A default device of the caller's would be taken for a device_map.
    host = torch.device("cpu") if torch.get_default_device().type != "cpu" else nullcontext()
    with host, _watched(weights):
        model, info = cls.from_pretrained(None, config=config, state_dict=weights, dtype=dtype,
                                          ignore_mismatched_sizes=True, output_loading_info=True,
                                          **kwargs)
    if weights.wanted():
        weights.arrived()
        _report.keep_other(weights.report)
    else:
        load.cancel()                   # the model has none of these names
    _check_shapes(info, ignore)
    if load.device != "host":
        model.to(load.device)
        if load.converts or load.merges:
            torch.cuda.empty_cache()    # what the tensors that were used up leave behind
    _sign(model, name, folder, kwargs.get("generation_config") is None, trust)
    return (model, info) if wants_info else model


def from_pretrained(path: str | os.PathLike[str], device: Any = None, *, device_map: Any = None,
                    dtype: torch.dtype | str | None = None, auto_class: Any = None,
                    copy: bool = False, arena: bool | None = None,
                    transfer: str | int = "auto", memory_limit: int | None = None,
                    cache: str | None = None, progress: bool = False,
                    **kwargs: Any) -> transformers.PreTrainedModel:
    """Load a transformers model with all its weights on one device.

    The result is that of ``AutoModelForCausalLM.from_pretrained``: tied weights, buffers, the
    generation configuration, evaluation mode, warnings about missing and unexpected weights. The
    weights go straight into the final parameters; there is no second copy of them.

    path: a folder with config.json and safetensors weights, or a model of the hub that is in the
        local cache (it is not downloaded).
    device: one device: "cpu" (the default), "cuda", "cuda:1", a number, a torch.device.
    device_map: the same, as transformers has it: a device, {"": device}, or "auto" where there is
        one GPU at most.
    dtype: as transformers has it: "auto" (what the configuration says, also the default), a torch
        dtype, or a word as for load_model(). Conversion happens on the device.
    auto_class: what to build, if not AutoModelForCausalLM: an Auto class or a model class of
        transformers, or its name ("AutoModel", "BertForMaskedLM").
    copy: on the host parameters look into the mapped files, as load_model() says; with True they
        have memory of their own.
    arena: where bytes are copied, the parameters lie in one allocation, which goes when the last of
        them goes; with False each has its own, which takes longer and allows to free single ones.
        Where transformers makes new tensors (experts merged, several dtypes), each has its own
        anyway.
    transfer, memory_limit, cache, progress: as for load_model(). The bar "Loading weights" is
        transformers' own; transformers.utils.logging.disable_progress_bar() turns it off.
    kwargs: what transformers' from_pretrained takes: config, attn_implementation,
        trust_remote_code, ignore_mismatched_sizes, output_loading_info, generation_config,
        key_mapping, variant, subfolder, attributes of the configuration, and so on.
        Quantisation, offloading and several devices are refused: transformers' own from_pretrained
        does that, and loads through Penstock too under patch().
    """
    _refuse(kwargs)
    device = _place(device, device_map)
    name = os.fsdecode(path)
    folder = _folder(name, kwargs)
    config = kwargs.get("config")
    settings = _settings(folder, config)
    _refuse_quantised(settings, name)
    _refuse_adapter(folder, name)
    weights = _weights(folder, kwargs.pop("variant", None), settings)
    other = kwargs.pop("torch_dtype", None)
    dtype = dtype if dtype is not None else other if other is not None else "auto"
    dtype = _as_torch_has_it(dtype)

    tensors = _tensors(weights)
    load = _Load(_source(folder, weights), device, arena, tensors,
                 _converts(tensors, dtype, settings),
                 {"copy": copy, "transfer": transfer, "memory_limit": memory_limit,
                  "cache": cache, "progress": progress})
    load.begin()
    try:
        cls = _model_class(auto_class)
        with without_collections():
            return _build(name, folder, cls, dtype, load, kwargs)
    except BaseException as error:
        load.cancel()
        if isinstance(error, (AttributeError, IndexError, TypeError)):
            odd = _odd_field(settings)
            if odd is not None:
                place = "config" if hasattr(config, "to_dict") else _config_file(folder, config)
                raise ValueError(f"{shown(place)}: {odd}") from error
        raise
