# SPDX-License-Identifier: MIT
"""save(): what torch.save does, into a file that is always whole.

torch's own reducers make the pickle; the storages that they name are collected as torch collects
them, each once, and go with the pickle to the engine, which writes the zip file in one job from
whatever devices they are on. torch.load opens it like any other.
"""
from __future__ import annotations

import io
import os
import pickle
from typing import Any

from . import _penstock, _report
from ._device import device_name, open_device
from ._error import raising
from ._names import file_name
from ._options import options
from ._progress import wait_or_stop
from ._torch import by_torch, streams, why_not

_PROTOCOL = 2


class _Storages:
    """The storages that a pickler meets, under the keys that torch would give them."""

    def __init__(self, torch: Any):
        """None so far."""
        self.torch = torch
        self.found: list[Any] = []
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, Any] = {}
        #: Types of things that are no storages; most of what a pickler asks about.
        self._others: set[type] = set()

    def persistent_id(self, thing: Any) -> tuple | None:
        """What a pickle has in the place of a storage; None for anything else."""
        if type(thing) in self._others:
            return None
        torch = self.torch
        if isinstance(thing, torch.storage.TypedStorage):
            storage, dtype = thing._untyped_storage, thing.dtype
            kind, count = getattr(torch, thing._pickle_storage_type()), thing._size()
        elif torch.is_storage(thing):
            storage, dtype = thing, torch.uint8
            kind, count = getattr(torch, type(thing).__name__), thing.nbytes()
        else:
            self._others.add(type(thing))
            return None
        on_meta = storage.device.type == "meta"
        if not on_meta and storage.data_ptr() and \
                self._dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data "
                               "as different types")
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._keys[storage._cdata] = str(len(self.found))
            self.found.append(storage)
        fake = getattr(thing, "_fake_device", None)
        location = torch.serialization.location_tag(storage) if fake is None else str(fake)
        return "storage", kind, key, location, count

    def on_devices(self) -> list[tuple[Any, str]]:
        """Each with the engine's name of its device; what is elsewhere comes to the host, as torch
        has it."""
        placed = []
        for storage in self.found:
            kind = storage.device.type
            if kind not in ("cpu", "cuda"):
                storage = storage.cpu()
            placed.append((storage, device_name(storage.device) if kind == "cuda" else "host"))
        return placed


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


def collect(torch: Any, obj: Any, pickle_module: Any = pickle, pickle_protocol: int = _PROTOCOL
            ) -> tuple[bytes, _Storages]:
    """The pickle of an object, and the storages that it names."""
    storages = _Storages(torch)
    content = io.BytesIO()
    pickler = pickle_module.Pickler(content, protocol=pickle_protocol)
    pickler.persistent_id = storages.persistent_id
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
