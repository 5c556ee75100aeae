# SPDX-License-Identifier: MIT
"""patch(): programs that call safetensors and torch load and save through Penstock, unchanged.

One table says which names of which modules get a stand-in. A stand-in looks like what it stands
for, asks for each call whether Penstock can serve it, and hands on to the original what it
cannot: another framework, a device we do not know, a thing that is not the name of a file.

1. Modules of the table that are imported already are changed at once, others when they have been
   imported: a finder in sys.meta_path sees them come.
2. Packages bind names at import: `from safetensors import safe_open`. Who does so while the patch
   holds gets the stand-in. Who has done so before is found: any global of any module that is the
   original itself is rebound.
3. unpatch() puts originals back wherever a stand-in is the value of a global, of whichever age.
   Who has kept a stand-in elsewhere has, from then on, the original with another face.
4. patch() counts: the last unpatch() undoes. One that fails does not count, and leaves nothing
   behind. No lock is held while something is imported.
"""
from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from ._error import Error
from ._fork import Lock
from ._frameworks import Torch, is_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

# ------------------------------------------------------------------------- what cannot be served --
# Each is called with the arguments of the original, whose signature it has, and returns why
# Penstock cannot serve the call; "" if it can. Arguments that do not fit are the original's to
# refuse, in its own words.

def _names_no_file(filename: Any) -> str:
    if isinstance(filename, (str, os.PathLike)):
        return ""
    return f"a {type(filename).__name__} is not the name of a file"


def _unknown(framework: str, device: Any, backend: str = "mmap") -> str:
    from ._frameworks import adapter

    if backend not in ("mmap", "pread"):
        return f"the backend {backend!r} is not known"
    try:
        target = adapter(framework, device)
        if target.has_bytes:
            target.engine_device()
    except (Error, ImportError) as error:
        return str(error)
    return ""


def _has_strangers(tensors: Any) -> str:
    """Of tensors to be saved: those of torch may be on a device that is not known."""
    if not isinstance(tensors, dict):
        return f"a {type(tensors).__name__} is not a dict of tensors"
    kinds = {str(tensor.device) for tensor in tensors.values() if is_of("torch", "Tensor", tensor)}
    if "meta" in kinds:
        return "tensors on the device meta have no bytes"
    return next(filter(None, (_unknown("pt", device) for device in sorted(kinds))), "")


def _open(filename: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap") -> str:
    return _names_no_file(filename) or _unknown(framework, device, backend)


def _load_file(filename: Any, device: Any = "cpu", *, backend: str = "mmap") -> str:
    return _names_no_file(filename) or _unknown("pt", device, backend)


def _load_model(model: Any, filename: Any, strict: bool = True, device: Any = "cpu", *,
                backend: str = "mmap") -> str:
    return _load_file(filename, device, backend=backend)


def _load_arrays(filename: Any, *, backend: str = "mmap") -> str:
    return _names_no_file(filename) or _unknown("np", "cpu", backend)


def _load_jax(filename: Any, *, backend: str = "mmap") -> str:
    return _names_no_file(filename) or _unknown("jax", "cpu", backend)


def _load_bytes(data: Any) -> str:
    return "" if type(data) is bytes else f"a {type(data).__name__} is not bytes"


def _save_file(tensors: Any, filename: Any, metadata: Any = None) -> str:
    return _names_no_file(filename) or _has_strangers(tensors)


def _save_arrays(tensor_dict: Any, filename: Any, metadata: Any = None) -> str:
    return _save_file(tensor_dict, filename)


def _save_bytes(tensors: Any, metadata: Any = None) -> str:
    return _has_strangers(tensors)


def _save_array_bytes(tensor_dict: Any, metadata: Any = None) -> str:
    return _has_strangers(tensor_dict)


def _save_model(model: Any, filename: Any, metadata: Any = None,
                force_contiguous: bool = True) -> str:
    if not is_of("torch.nn", "Module", model):
        return f"a {type(model).__name__} is not a module of torch"
    return _save_file(model.state_dict(), filename)


def _save_specs(tensor_dict: Any, filename: Any, metadata: Any = None) -> str:
    if not isinstance(tensor_dict, dict) or not all(
            is_of("safetensors", "TensorSpec", spec) and spec.dtype in Torch._names
            for spec in tensor_dict.values()):
        return "not all are a TensorSpec of a known dtype"
    return _names_no_file(filename)


def _torch_load(*args: Any, **kwargs: Any) -> str:
    from ._torch_load import why_torch_loads

    return why_torch_loads(*args, **kwargs)


def _torch_save(*args: Any, **kwargs: Any) -> str:
    from ._torch_save import why_torch_saves

    return why_torch_saves(*args, **kwargs)


def _dcp_writer(*args: Any, **kwargs: Any) -> str:
    from .dcp import why_torch_writes

    return why_torch_writes(*args, **kwargs)


def _dcp_reader(*args: Any, **kwargs: Any) -> str:
    from .dcp import why_torch_reads

    return why_torch_reads(*args, **kwargs)


def serialize_file(tensor_dict: Any, filename: Any, metadata: Any = None) -> None:
    """Serves safetensors' function of this name, whose tensors are described in its own class."""
    from .safetensors import TensorSpec
    from .safetensors import serialize_file as serve

    def ours(spec: Any) -> TensorSpec:
        shape = list(spec.shape)
        if spec.dtype == "F4":          # which TensorSpec takes by the byte and shows by the number
            shape[-1] //= 2
        return TensorSpec(dtype=Torch._names[spec.dtype], shape=shape, data_ptr=spec.data_ptr,
                          data_len=spec.data_len)

    serve({name: ours(spec) for name, spec in tensor_dict.items()}, filename, metadata)


# ----------------------------------------------------------------------------------- the table --

class Row(NamedTuple):
    """A name that gets a stand-in."""

    module: str
    name: str
    #: Why a call cannot be served.
    refuses: Callable[..., str]
    #: Where what serves in its place is; "" where it has the same names below penstock.
    ours: str = ""
    #: What it is called there; "" where that is the same.
    ours_name: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def serving(self) -> Any:
        """What serves in its place."""
        return getattr(import_module(self.ours or f"penstock.{self.module}"),
                       self.ours_name or self.name)


TABLE = (
    Row("safetensors", "safe_open", _open),
    Row("safetensors", "serialize_file", _save_specs, "penstock._patch"),
    Row("safetensors.torch", "load_file", _load_file),
    Row("safetensors.torch", "save_file", _save_file),
    Row("safetensors.torch", "load_model", _load_model),
    Row("safetensors.torch", "save_model", _save_model),
    Row("safetensors.torch", "load", _load_bytes),
    Row("safetensors.torch", "save", _save_bytes),
    Row("safetensors.numpy", "load_file", _load_arrays),
    Row("safetensors.numpy", "save_file", _save_arrays),
    Row("safetensors.numpy", "load", _load_bytes),
    Row("safetensors.numpy", "save", _save_array_bytes),
    Row("safetensors.flax", "load_file", _load_jax),
    Row("safetensors.flax", "save_file", _save_file),
    Row("safetensors.flax", "load", _load_bytes),
    Row("safetensors.flax", "save", _save_bytes),
    Row("torch", "load", _torch_load, "penstock._torch_load"),
    Row("torch", "save", _torch_save, "penstock._torch_save"),
    Row("torch.distributed.checkpoint.filesystem", "FileSystemWriter", _dcp_writer, "penstock.dcp",
        "Writer"),
    Row("torch.distributed.checkpoint.filesystem", "FileSystemReader", _dcp_reader, "penstock.dcp",
        "Reader"),
    # In place of the name that it has from safetensors, one that knows what becomes of the tensors.
    Row("transformers.modeling_utils", "safe_open", _open, "penstock._ondemand"),
)
_MODULES = tuple(dict.fromkeys(row.module for row in TABLE))

# ------------------------------------------------------------------------------------- stand-ins --

_lock = Lock(kind=threading.RLock)
#: How many patches hold.
_count = 0
#: By row and identity of the original: (original, stand-in). They stay for the next patch.
_made: dict[tuple[Row, int], tuple[Any, Any]] = {}
#: Is this thread in a call that Penstock serves?
_serving = threading.local()
_served: Counter[str] = Counter()
_handed_on: Counter[tuple[str, str]] = Counter()


def _serves(row: Row, args: tuple, kwargs: dict) -> bool:
    """Shall Penstock serve this call? Counts the answer. What Penstock itself calls, as it serves
    another call, it wants from the original."""
    if not _count or getattr(_serving, "now", False):
        return False
    try:
        reason = row.refuses(*args, **kwargs)
    except TypeError as error:
        reason = str(error)
    with _lock:
        if reason:
            _handed_on[str(row), reason] += 1
        else:
            _served[str(row)] += 1
    return not reason


@contextmanager
def serving() -> Iterator[None]:
    """Within, what this thread calls is the original's."""
    before, _serving.now = getattr(_serving, "now", False), True
    try:
        yield
    finally:
        _serving.now = before


def _function(row: Row, original: Callable) -> Callable:
    @wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if not _serves(row, args, kwargs):
            return original(*args, **kwargs)
        serve = row.serving()
        with serving():
            return serve(*args, **kwargs)

    return stand_in


def _class(row: Row, original: type) -> type:
    """A class of ours that takes other files for its own too: the original's, of which some were
    made before and some are made when a call is handed on, and those of other rows."""
    from ._safe_open import safe_open

    class Kind(type):
        def __instancecheck__(cls, thing: Any) -> bool:
            return cls.__subclasscheck__(type(thing))

        def __subclasscheck__(cls, other: type) -> bool:
            known = (original, safe_open) if cls is stand_in else ()
            return super().__subclasscheck__(other) or issubclass(other, known)

    class stand_in(row.serving(), metaclass=Kind):  # noqa: N801 - it gets the original's name
        __doc__ = original.__doc__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if not _serves(row, args, kwargs):
                return original(*args, **kwargs)
            return super().__new__(cls)

    stand_in.__module__, stand_in.__name__ = row.module, row.name
    stand_in.__qualname__ = row.name
    return stand_in


def _chooser(row: Row, original: type) -> type:
    """What makes one of ours, which is derived from the original, or the original. To whoever asks
    it is the original; a class that is derived from it knows that from within, and becomes the
    original's. It has no bases, or those would ask it, in turn, for what is derived from them."""
    meta: Any = type(original)

    class Kind(meta):
        def __new__(mcls, name: str, bases: tuple, space: dict, **kwargs: Any) -> Any:
            if not bases:
                return super().__new__(mcls, name, bases, space, **kwargs)
            return meta(name, tuple(original if type(base) is mcls else base for base in bases),
                        space, **kwargs)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return (row.serving() if _serves(row, args, kwargs) else original)(*args, **kwargs)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, original)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, original)

    stand_in: type = Kind(row.name, (), {"__module__": row.module, "__qualname__": row.name,
                                         "__doc__": original.__doc__})
    return stand_in


def _make(row: Row, original: Any) -> Any:
    if not isinstance(original, type):
        return _function(row, original)
    return _chooser(row, original) if issubclass(row.serving(), original) else \
        _class(row, original)


def _original(value: Any) -> Any:
    """What a stand-in stands for; anything else stands for itself."""
    return next((original for original, stand_in in _made.values() if stand_in is value), value)


def _install(module: ModuleType) -> None:
    """Give the names of a module their stand-ins, those that it has."""
    for row in TABLE:
        if row.module == module.__name__ and row.name in vars(module):
            original = _original(vars(module)[row.name])
            key = row, id(original)
            if key not in _made:
                _made[key] = original, _make(row, original)
            setattr(module, row.name, _made[key][1])


def _imported() -> list[ModuleType]:
    """Modules of the table that are there, or are being imported."""
    found = (sys.modules.get(name) for name in _MODULES)
    return [module for module in found if isinstance(module, ModuleType)]


def _stand_ins() -> dict[int, Any]:
    """By the identity of an original. Where two rows have the same, the first is for everybody."""
    return {id(original): stand_in for original, stand_in in reversed(_made.values())}


def _rebind(swaps: dict[int, Any]) -> None:
    """Change every global, of every module, that is one of these things. Ours stay ours."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "penstock" or not isinstance(module, ModuleType):
            continue
        for name, value in vars(module).copy().items():
            if id(value) in swaps:
                setattr(module, name, swaps[id(value)])


class _Loader:
    """The loader of a module of the table, which gives the module its stand-ins in the end."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing of this is to be seen on the module afterwards."""
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with _lock:
            if _count:
                _install(module)
                # Modules that it imported in turn may have bound its names already.
                _rebind(_stand_ins())


class _Finder:
    """Sees the modules of the table come."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec that the other finders have, with a loader that tells us."""
        if name not in _MODULES:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


_finder = _Finder()


class Patch:
    """What patch() has done; as a context manager it undoes that at the end of the block.

    ``served`` counts the calls that Penstock served since, by the name that was called, and
    ``handed_on`` those that the original had to serve, by name and reason.
    """

    def __init__(self) -> None:
        """Made by patch()."""
        self._holds = True
        self._served, self._handed_on = _served.copy(), _handed_on.copy()

    @property
    def served(self) -> dict[str, int]:
        """Calls that Penstock served."""
        return dict(_served - self._served)

    @property
    def handed_on(self) -> dict[tuple[str, str], int]:
        """Calls that it could not serve, and why."""
        return dict(_handed_on - self._handed_on)

    def __enter__(self) -> Patch:
        """It holds already."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Undo it, once."""
        if self._holds:
            self._holds = False
            unpatch()

    def __str__(self) -> str:
        """A line for each name that was called."""
        lines = [f"{name}: {count} served" for name, count in sorted(self.served.items())]
        lines += [f"{name}: {count} handed on ({reason})"
                  for (name, reason), count in sorted(self.handed_on.items())]
        return "\n".join(lines) or ("no call of safetensors, torch.load, torch.save or "
                                    "torch.distributed.checkpoint")


def patch() -> Patch:
    """From now on, whoever calls safetensors, torch.load, torch.save or the files of
    torch.distributed.checkpoint loads and saves with Penstock.

    transformers, diffusers, accelerate, peft and others do; they may have been imported before, or
    come later. What Penstock does not know (a framework, a device, a file object) goes
    to safetensors or torch as before. A torch file that Penstock saves is always whole under its
    name, and durable when torch.save returns; files of torch's are verified as they are loaded.
    Either ``unpatch()`` ends it, or the end of a ``with penstock.patch():`` block.
    """
    global _count
    with _lock:
        _count += 1
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        made = Patch()
    try:
        for module in _imported():
            # Another thread may be in the middle of it. If it fails, that thread is told, and
            # there is nothing to change.
            with suppress(Exception):
                import_module(module.__name__)
        with _lock:
            if _count:
                for module in _imported():
                    _install(module)
                _rebind(_stand_ins())
    except BaseException:
        unpatch()
        raise
    return made


def unpatch() -> None:
    """Undo a patch(); when the last is undone, all names are what they were before the first."""
    global _count
    with _lock:
        _count = max(_count - 1, 0)
        if not _count:
            if _finder in sys.meta_path:
                sys.meta_path.remove(_finder)
            _rebind({id(stand_in): original for original, stand_in in _made.values()})
