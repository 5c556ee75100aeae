# SPDX-License-Identifier: MIT
"""save(): what torch.save does, into a file that is always whole.

torch's own reducers make the pickle; the storages that they name are collected as torch collects
them, each once, and go with the pickle to the engine, which writes the zip file in one job from
whatever devices they are on. torch.load opens it like any other.
"""
from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _penstock, _report
from ._device import device_name, open_device
from ._error import raising
from ._garbage import without_collections
from ._names import file_name
from ._options import options
from ._progress import wait_or_stop
from ._torch import by_torch, streams, why_not

_PROTOCOL = 2


class _Typed(NamedTuple):
    """A storage with the type of its elements, as torch's TypedStorage, which takes longer to make
    than all else about a tensor."""

    storage: Any
    dtype: Any
    kind: type


class _NoHooks:
    """In the place of a tensor's empty OrderedDict, which Python reduces slowly. Each tensor has
    its own, since a pickle refers back to what it has seen."""

    __slots__ = ()


class _Place(NamedTuple):
    """A device, as others call it."""

    #: torch in a pickle, and the engine; "" where that does not know it.
    tag: str
    name: str
    is_meta: bool


class _Storages:
    """The storages that a pickler meets, under the keys that torch would give them."""

    def __init__(self, torch: Any):
        """None so far."""
        self.torch = torch
        self.found: list[tuple[Any, _Place]] = []
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, Any] = {}
        #: By device: to ask for each storage takes longer than all else about it.
        self._places: dict[Any, _Place] = {}

    def persistent_id(self, thing: Any) -> tuple | None:
        """What a pickle has in the place of a storage; None for anything else, as its type says."""
        torch = self.torch
        if type(thing) is _Typed:
            storage, dtype, kind = thing
            count = storage.nbytes() // dtype.itemsize
        elif isinstance(thing, torch.storage.TypedStorage):
            storage, dtype = thing._untyped_storage, thing.dtype
            kind, count = getattr(torch, thing._pickle_storage_type()), thing._size()
        elif torch.is_storage(thing):
            storage, dtype = thing, torch.uint8
            kind, count = getattr(torch, type(thing).__name__), thing.nbytes()
        else:
            return None
        place = self._places.get(storage.device) or self._new_place(storage)
        address = 0 if place.is_meta else storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data "
                               "as different types")
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._keys[storage._cdata] = str(len(self.found))
            self.found.append((storage, place))
        fake = getattr(thing, "_fake_device", None)
        return "storage", kind, key, place.tag if fake is None else str(fake), count

    def _new_place(self, storage: Any) -> _Place:
        device, name = storage.device, ""
        if device.type in ("cpu", "cuda"):
            name = "host" if device.type == "cpu" else device_name(device)
        made = self._places[device] = _Place(self.torch.serialization.location_tag(storage), name,
                                             device.type == "meta")
        return made

    def on_devices(self) -> list[tuple[Any, str]]:
        """Each with the engine's name of its device; what is elsewhere comes to the host, as torch
        has it."""
        return [(storage, place.name) if place.name else (storage.cpu(), "host")
                for storage, place in self.found]


def why_torch_saves(obj: Any, f: Any, pickle_module: Any = pickle,
                    pickle_protocol: int = _PROTOCOL, _use_new_zipfile_serialization: bool = True,
                    _disable_byteorder_record: bool = False) -> str:
    """Why a call of torch.save() with these arguments is torch's own; "" if it can be ours."""
    import torch

    if not _use_new_zipfile_serialization:
        return "the format before zip is torch's"
    if _disable_byteorder_record:
        return "a file without its byte order is torch's"
    if getattr(torch.serialization._serialization_tls, "skip_data", False):
        return "torch writes files without their bytes"
    return why_not(f)


def _reducers(torch: Any) -> dict[type, Callable[[Any], Any]]:
    """Reducers that have a plain tensor pickled to the same bytes as torch's own, in a fraction of
    the time; none if torch's own is not the one that is known here."""
    sample = torch.empty(0, device="cpu")
    rebuild, given, *more = sample.__reduce_ex__(_PROTOCOL)
    if more or [type(each) for each in given[:1]] != [torch.storage.TypedStorage] or \
            given[1:] != (0, (0,), (1,), False, OrderedDict()):
        return {}
    strided = torch.strided
    # Where tensors can have names, torch refuses to save those.
    has_names = getattr(torch.Tensor, "has_names", lambda tensor: False)
    # Newer dtypes are not among them, and quantized ones have more to tell.
    kinds = {dtype: getattr(torch, name) for dtype, name
             in torch.storage._dtype_to_storage_type_map().items() if not name.startswith("Q")}

    def reduce(tensor: Any) -> tuple:
        dtype = tensor.dtype
        kind = kinds.get(dtype)
        if kind is None or tensor.layout is not strided or tensor.__dict__ or tensor.is_nested \
                or not (tensor.is_cpu or tensor.is_cuda) or tensor._backward_hooks \
                or (dtype.is_complex and tensor.is_conj()) or tensor.is_neg() or has_names(tensor):
            return tensor.__reduce_ex__(_PROTOCOL)
        return rebuild, (_Typed(tensor.untyped_storage(), dtype, kind), tensor.storage_offset(),
                         tuple(tensor.size()), tensor.stride(), tensor.requires_grad,
                         _NoHooks())

    return {torch.Tensor: reduce, _NoHooks: lambda _: (OrderedDict, ())}


def collect(torch: Any, obj: Any, pickle_module: Any = pickle, pickle_protocol: int = _PROTOCOL
            ) -> tuple[bytes, _Storages]:
    """The pickle of an object, and the storages that it names."""
    storages = _Storages(torch)
    content = io.BytesIO()
    pickler = pickle_module.Pickler(content, protocol=pickle_protocol)
    pickler.persistent_id = _penstock.ask_by_type(storages.persistent_id)
    # Other picklers, and who has registered a reducer, have their own idea of a tensor.
    if type(pickler) is pickle.Pickler and torch.Tensor not in copyreg.dispatch_table:
        pickler.dispatch_table = copyreg.dispatch_table | _reducers(torch)
    with without_collections():
        pickler.dump(obj)
    return content.getvalue(), storages


def start(torch: Any, path: str, content: bytes, placed: list[tuple[Any, str]], transfer: int,
          memory_limit: int | str, gather: bool = False) -> tuple[_penstock.Saving, str]:
    """Begin to write them, behind what is queued on the current streams; the save, and where the
    bytes come from. With `gather` the memory may change when wait_gathered() returns."""
    devices = {device for _, device in placed} or {"host"}
    job = _penstock.torch_save(
        path, open_device("host"), [("data.pkl", content)],
        [(storage.data_ptr(), storage.nbytes(), open_device(device))
         for storage, device in placed],
        placed, transfer, memory_limit, streams(torch, devices), gather)
    return job, "+".join(sorted(devices))


def save(obj: Any, f: str | os.PathLike, pickle_module: Any = pickle,
         pickle_protocol: int = _PROTOCOL, _use_new_zipfile_serialization: bool = True,
         _disable_byteorder_record: bool = False, *, transfer: str | int = "auto",
         memory_limit: int | None = None, progress: bool = False) -> None:
    """Save an object as ``torch.save`` does, into a file that ``torch.load`` opens.

    The file appears under its name only when it is complete and durable; until then, and after any
    error, what was there before stays. Storages lie at multiples of 4096 bytes, so that they
    travel directly, but for small ones, which are packed. A table of their digests is in the file,
    which ``penstock.load`` verifies and torch ignores. Work queued on the current streams is done
    first; the interpreter's lock is free while bytes move.

    File objects and the format before zip are left to torch. ``transfer``, ``memory_limit`` and
    ``progress`` are as in load_model(); what happened is in ``last_report()``.
    """
    import torch

    kind, limit, _ = options(transfer, memory_limit)
    given = (pickle_module, pickle_protocol, _use_new_zipfile_serialization,
             _disable_byteorder_record)
    reason = why_torch_saves(obj, f, *given)
    if reason:
        return by_torch(lambda: torch.save(obj, f, *given), f, reason, kind, memory_limit)
    content, storages = collect(torch, obj, pickle_module, pickle_protocol)
    placed = storages.on_devices()
    with raising(RuntimeError):
        job, device = start(torch, file_name(f), content, placed, kind, limit)
        report = wait_or_stop(job, os.path.basename(os.fspath(f)), progress)
    report["device"] = device
    _report.keep(report)
    return None
