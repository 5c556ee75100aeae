# SPDX-License-Identifier: MIT
"""load(): what torch.load does, with storages read straight to the devices that they belong to.

All storages are read in one job that starts before anything is unpickled, each to where
map_location sends it. torch's own unpickler, the restricted one unless weights_only=False, builds
objects meanwhile; where it comes to a storage it waits for its bytes, which lie in the file in the
order in which the pickle names them. So nothing looks at bytes that have not come, and what takes
longer, reading or unpickling, is all that is waited for. Digests are compared as the bytes pass.
"""
from __future__ import annotations

import errno
import io
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from . import _penstock, _report
from ._device import device_name, open_device
from ._error import Error, from_engine, raising, refuse
from ._names import file_name
from ._options import options
from ._progress import wait
from ._torch import by_torch, streams, why_not

_ZIP = b"PK\x03\x04"
_CUDA = re.compile("cuda(:[0-9]+)?")
_YES = ("1", "y", "yes", "true")
#: What torch's allocator takes from large blocks, and in multiples of what.
_LARGE, _ROUND = 1 << 20, 512
#: (what a file holds, (record, users) by the address of a storage) -> what records go into
Fill = Callable[[Any, dict[int, tuple[str, int]]], dict[str, Any]]


def _damaged(path: Any, message: str, hint: str = "", also: tuple[type, ...] = ()) -> Error:
    return from_engine(-errno.EBADMSG, "format", 0, "load", os.fspath(path), -1, message, hint,
                       also)


# ------------------------------------------------------------------------------- where it goes --

def _gpu_of(torch: Any, map_location: Any, location: str | None) -> str | None:
    """The GPU that a storage goes to, in the engine's words; None where it comes to the host at
    first, and torch takes it from there."""
    if isinstance(map_location, (str, torch.device)):
        location = str(map_location)
    elif isinstance(map_location, dict):
        location = map_location.get(location, location)
    elif map_location is not None:
        return None     # a function is given the storage on the host
    # Others may have registered ways of their own before torch's.
    first = [entry[0] for entry in torch.serialization._package_registry[:2]]
    if not isinstance(location, str) or not _CUDA.fullmatch(location) or first != [10, 20]:
        return None
    return f"cuda:{torch.serialization.validate_cuda_device(location)}"


class _Place:
    """The memory of one storage: its own, or that of a tensor which is there already."""

    __slots__ = ("device", "group", "record", "storage", "tensor")

    def __init__(self, record: int, device: str, storage: Any, tensor: Any = None):
        """`group` is what the job calls it; None: it has no bytes. With `tensor`, `storage` is on
        meta."""
        self.record, self.device, self.storage, self.tensor = record, device, storage, tensor
        self.group: int | None = None

    def address(self) -> int:
        """Where the bytes go."""
        return (self.storage if self.tensor is None else self.tensor).data_ptr()


def _make_room(torch: Any, device: str, sizes: list[int]) -> None:
    """Have torch's allocator take memory of a GPU once instead of once for each storage: it cuts
    what follows out of what it was given back."""
    total = sum((size + _ROUND - 1) // _ROUND * _ROUND for size in sizes if size >= _LARGE)
    with suppress(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device=device)


def _places(torch: Any, records: dict[str, tuple], locations: dict[int, str],
            map_location: Any, filled: dict[str, Any]) -> dict[str, _Place]:
    """Memory for every storage of the file; that of tensors in `filled` is theirs."""
    gpus = {location: _gpu_of(torch, map_location, location)
            for location in {None, *locations.values()}}
    storages = [(name, index, size) for name, (index, size) in records.items()
                if name.startswith("data/")]
    wanted = [(name, index, size, gpus[locations.get(index)]) for name, index, size in storages
              if name not in filled]
    for gpu in {gpu for *_, gpu in wanted if gpu is not None}:
        _make_room(torch, gpu, [size for _, _, size, on in wanted if on == gpu])
    places = {name: _Place(index, gpu or "host", torch.UntypedStorage(size, device=gpu or "cpu"))
              for name, index, size, gpu in wanted}
    for name, index, size in storages:
        if name in filled:
            places[name] = _Place(index, device_name(filled[name].device),
                                  torch.UntypedStorage(size, device="meta"), filled[name])
    return places


# ------------------------------------------------------------------------------------- reading --

class _Arrivals:
    """The job that reads the storages, and what of it has come."""

    def __init__(self, torch: Any, file: Any, places: list[_Place], verify: bool, transfer: int,
                 memory_limit: int, cache: int):
        """Starts it."""
        wanted = [place for place in places if place.storage.nbytes()]
        for group, place in enumerate(wanted):
            place.group = group
        self._here = bytearray(len(wanted))
        self._verify = verify
        self._devices = {place.device for place in wanted} or {"host"}
        self._report: dict | None = None
        self._failure: Exception | None = None
        self._job = file.load(
            open_device("host"),
            [(place.record, place.address(), open_device(place.device)) for place in wanted],
            places, verify, transfer, memory_limit,
            streams(torch, self._devices), cache)

    def wait(self, place: _Place) -> None:
        """Until the bytes of a storage are there."""
        while place.group is not None and not self._here[place.group]:
            landed = self._job.landed()
            for group in landed:
                self._here[group] = True
            if not landed:
                self.finish("", False)      # tells why the rest has not come
                break

    def finish(self, label: str, progress: bool) -> dict:
        """Until all are, and are what was saved; the report. It tells the same again."""
        if self._failure is not None:
            raise self._failure
        if self._report is None:
            try:
                self._report = wait(self._job, label, progress)
            except Exception as error:
                self._failure = error
                raise
            self._report["device"] = "+".join(sorted(self._devices))
            if not self._verify:
                self._report["unverified_bytes"] = self._report["bytes"]
        return self._report

    def stop(self) -> None:
        """Nothing more is wanted. What failed has frames that lead back to here, and is let go of:
        the file is closed with its last user."""
        self._failure = None
        self._job.cancel()
        with suppress(Error, ValueError):
            self._job.wait()


# ---------------------------------------------------------------------------------- unpickling --

class _Unpickling:
    """What torch's unpicklers ask for: storages, and classes under their names of today."""

    def __init__(self, torch: Any, path: Any, places: dict[str, _Place], arrivals: _Arrivals,
                 map_location: Any):
        """`places` by the names of records."""
        self.torch, self.path, self.places, self.arrivals = torch, path, places, arrivals
        self.map_location = map_location
        self.restore = torch.serialization._get_restore_location(map_location)
        self.typed: dict[str, Any] = {}

    def persistent_load(self, saved_id: Any) -> Any:
        """The storage that a pickle names, with all its bytes."""
        decode = self.torch.serialization._maybe_decode_ascii
        if not isinstance(saved_id, tuple) or len(saved_id) != 5 \
                or decode(saved_id[0]) != "storage":
            raise pickle.UnpicklingError(f"the pickle asks for {saved_id!r:.100}, which is no "
                                         "storage")
        _, kind, key, location, count = saved_id
        found = self.typed.get(key)
        if found is None:
            dtype = self.torch.uint8 if kind is self.torch.UntypedStorage else kind.dtype
            storage = self._storage(key, count * self.torch._utils._element_size(dtype),
                                    decode(location))
            found = self.torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype,
                                                    _internal=True)
            if found._data_ptr():
                self.typed[key] = found
        return found

    def check_size(self, key: str, size: int | None, needed: int) -> None:
        """Is a storage that the pickle names there, with the bytes that it shall have?"""
        if size is None:
            raise _damaged(self.path, f"the pickle names a storage {key!r} that is not there")
        if size != needed:
            raise _damaged(self.path, f"storage data/{key} has {size} bytes, and the pickle says "
                           f"{needed}")

    def _storage(self, key: str, size: int, location: str) -> Any:
        place = self.places.get(f"data/{key}")
        self.check_size(key, place and place.storage.nbytes(), size)
        self.arrivals.wait(place)
        if place.device != "host" or place.tensor is not None:
            return place.storage
        return self.restore(place.storage, location)

    def check_sizes(self, records: dict[str, tuple]) -> None:
        """A tensor that is larger than its storage makes torch enlarge the storage, by bytes that
        nobody has saved. torch refuses that of memory that it has read a file into."""
        for name, place in self.places.items():
            if place.storage.nbytes() != records[name][1]:
                raise _damaged(self.path, f"a tensor needs {place.storage.nbytes()} bytes of "
                               f"storage {name}, which has {records[name][1]}",
                               "It was damaged or not made by torch.save, or saved while its "
                               "storage was resized")

    def load(self, content: bytes, module: Any, **arguments: Any) -> Any:
        """What the pickle describes."""
        kinds = self.torch.serialization.StorageType

        class Unpickler(module.Unpickler):
            def find_class(self, module_name: str, name: str) -> Any:
                """Storages are types of numbers; a module has moved since."""
                if type(name) is str and "Storage" in name:
                    with suppress(KeyError):
                        return kinds(name)
                return super().find_class("torch._tensor" if module_name == "torch.tensor"
                                          else module_name, name)

        unpickler = Unpickler(io.BytesIO(content), **arguments)
        unpickler.persistent_load = self.persistent_load
        # For tensors that are rebuilt from other things than storages.
        there = self.torch.serialization._serialization_tls
        there.map_location = self.map_location
        try:
            return unpickler.load()
        finally:
            there.map_location = None


class _Outline(_Unpickling):
    """The same without bytes: what the pickle describes, with all its tensors on meta."""

    def __init__(self, torch: Any, path: Any, records: dict[str, tuple]):
        """None of the file's storages is read."""
        super().__init__(torch, path, {}, None, "meta")
        self.records = records
        self.made: dict[str, Any] = {}
        self.uses: dict[str, int] = {}

    def _storage(self, key: str, size: int, location: str) -> Any:
        record = f"data/{key}"
        self.check_size(key, self.records.get(record, (0, None))[1], size)
        if record not in self.made:
            self.made[record] = self.torch.UntypedStorage(size, device="meta")
        self.uses[record] = self.uses.get(record, 0) + 1
        return self.made[record]

    def names(self) -> dict[int, tuple[str, int]]:
        """The records of storages, and how many tensors look into each, by the address of what
        torch has behind a storage."""
        return {storage._cdata: (record, self.uses[record])
                for record, storage in self.made.items()}


def _restricted(weights_only: bool | None, pickle_module: Any) -> bool:
    """Is only torch's restricted unpickler to be used? By the caller's word, the default, and
    torch's two environment variables."""
    forced, freed = (os.getenv(name, "0").lower() in _YES for name in (
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"))
    if forced and freed:
        raise RuntimeError("TORCH_FORCE_WEIGHTS_ONLY_LOAD and TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD are "
                           "both set; unset one of them")
    if freed and weights_only is None:
        warnings.warn("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set: the file's pickle may run anything",
                      stacklevel=3)
    restricted = weights_only if weights_only is not None else pickle_module is None and not freed
    if forced or restricted:
        if pickle_module is not None:
            raise RuntimeError("Can not safely load weights when explicit pickle_module is "
                               "specified")
        return True
    return False


def _refused(error: pickle.UnpicklingError) -> pickle.UnpicklingError:
    """In torch's class; what is to be done is in torch's own message where it knows."""
    return pickle.UnpicklingError(
        f"Weights only load failed. {error}\nIf you trust the file, load it with "
        "weights_only=False, which runs whatever its pickle names; or allow single classes with "
        "torch.serialization.add_safe_globals().")


# ---------------------------------------------------------------------------------------- load --

def why_torch_loads(f: Any, map_location: Any = None, pickle_module: Any = None, *,
                    weights_only: bool | None = None, mmap: bool | None = None,
                    **pickle_load_args: Any) -> str:
    """Why a call of torch.load() with these arguments is torch's own, as far as they tell; "" if it
    can be ours."""
    import torch
    from torch.utils.serialization import config

    if config.load.mmap if mmap is None else mmap:
        return "mmap=True is torch's"
    if sys.byteorder != "little":
        return "the machine has another byte order than most files"
    if isinstance(map_location, (str, torch.device)) and str(map_location).startswith("meta"):
        return "tensors on meta have no bytes to read"
    if getattr(torch.serialization._serialization_tls, "skip_data", False) \
            or torch._guards.detect_fake_mode(None) is not None:
        return "fake tensors are torch's"
    if isinstance(f, (str, os.PathLike)) and os.fspath(f).endswith(".safetensors"):
        return "torch has safetensors files read by safetensors"
    return why_not(f)


def _why_torch_reads(torch: Any, path: Any) -> tuple[str, Any]:
    """Why what lies in the file is torch's to read, or the open file."""
    head = _ZIP
    with suppress(OSError), open(path, "rb") as plain:      # the engine says what is wrong
        head = plain.read(len(_ZIP))
    if not head:
        raise _damaged(path, "the file is empty", "Was the program that wrote it stopped? "
                       "penstock.save leaves no such files", also=(EOFError,))
    if head != _ZIP:
        return "it is in the format before zip", None
    file = _penstock.TorchFile(file_name(path))
    records = file.records()
    if "constants.pkl" in records:
        return "it is a TorchScript archive", None
    if "data.pkl" not in records:
        raise _damaged(path, "it has no record data.pkl", "Is it a file of torch.save?")
    order = b"little"
    if "byteorder" in records:
        order = file.read(records["byteorder"][0])
    elif torch.serialization.get_default_load_endianness() \
            == torch.serialization.LoadEndianness.BIG:
        order = b"big"
    return ("" if order == b"little" else "its bytes are in another order"), file


def _locations(file: Any, content: bytes, map_location: Any) -> dict[int, str]:
    """The devices that storages were on, by record, where that matters. What is not known comes to
    the host at first."""
    if map_location is not None and not isinstance(map_location, dict):
        return {}
    if b"cuda" not in content and "cuda" not in str(map_location):
        return {}
    with suppress(Error):
        return file.locations()
    return {}


def _outlined(load: Callable[[], Any]) -> Any:
    """What a file holds, with tensors on meta; some objects cannot be made of these."""
    try:
        return load()
    except (RuntimeError, SystemError) as error:
        if isinstance(error, Error):
            raise
        raise refuse("restore into", "the state", "an object in the file needs the bytes of its "
                     f"tensors before they are read: {error}",
                     "Restore without into=, and take from what is returned") from error


def _read(torch: Any, f: Any, file: Any, map_location: Any, module: Any,
          arguments: dict[str, Any], how: tuple, progress: bool, fill: Fill | None = None) -> Any:
    """What is in the file, unpickled by the Unpickler of `module`; see load_into() for `fill`."""
    restricted = module is torch._weights_only_unpickler
    arguments.setdefault("encoding", "utf-8")
    records = file.records()
    content = file.read(records["data.pkl"][0])
    arrivals = None
    try:
        result, filled = None, {}
        if fill:
            outline = _Outline(torch, f, records)
            result = _outlined(lambda: outline.load(content, module, **arguments))
            filled = fill(result, outline.names())
            torch._utils._sparse_tensors_to_validate.clear()
        places = _places(torch, records, _locations(file, content, map_location), map_location,
                         filled)
        arrivals = _Arrivals(torch, file, list(places.values()), *how)
        try:
            # Where all tensors exist, what has them on meta is as good as another.
            if not fill or len(filled) < len(places):
                unpickling = _Unpickling(torch, f, places, arrivals, map_location)
                result = unpickling.load(content, module, **arguments)
                unpickling.check_sizes(records)
        except Exception:
            # Bytes that are not what was saved explain more than what they led to.
            arrivals.finish("", False)
            raise
        report = arrivals.finish(os.path.basename(os.fspath(f)), progress)
        torch._utils._validate_loaded_sparse_tensors()
    except pickle.UnpicklingError as error:
        raise (_refused(error) if restricted else error) from None
    finally:
        if arrivals:
            arrivals.stop()
        torch._utils._sparse_tensors_to_validate.clear()
    _report.keep(report)
    return result


def load_into(f: str | os.PathLike, fill: Fill | None, map_location: Any, weights_only: bool,
              transfer: str | int) -> Any:
    """What a file of save() holds, into tensors that exist: `fill` is told what that is, with the
    tensors on meta, and of the records behind them, and says which records go into which tensors.
    In what is returned tensors of these records may be on meta."""
    import torch

    reason, file = _why_torch_reads(torch, f)
    if reason:
        raise _damaged(f, reason, "Was it written by penstock.save?")
    return _read(torch, f, file, map_location,
                 torch._weights_only_unpickler if weights_only else pickle, {},
                 (True, *options(transfer, None)), False, fill)


def load(f: str | os.PathLike, map_location: Any = None, pickle_module: Any = None, *,
         weights_only: bool | None = None, mmap: bool | None = None, device: Any = None,
         transfer: str | int = "auto", memory_limit: int | None = None, cache: str | None = None,
         verify: bool = True, progress: bool = False, **pickle_load_args: Any) -> Any:
    """Load what ``torch.save`` or ``penstock.save`` wrote, as ``torch.load`` does.

    Storages are read straight to their devices: those in the file, or what ``map_location`` makes
    of them (text, torch.device, dict or function, as in torch). ``device`` is the same for
    all: "cpu", "cuda", "cuda:N", a number or a torch.device. Unless ``weights_only=False`` says
    that the file is trusted, torch's restricted unpickler is used.

    Digests in the file, or the CRC32s of its zip, are compared as the bytes pass; a difference is
    an error that names the tensor and the byte. ``verify=False`` does without. What could not
    be verified is in ``last_report().unverified_bytes``.

    File objects, ``mmap=True``, files in the format before zip and TorchScript archives are left to
    torch. ``transfer``, ``memory_limit``, ``cache`` and ``progress`` are as in load_model().
    """
    import torch

    kind, limit, policy = options(transfer, memory_limit, cache)
    if device is not None:
        if map_location is not None:
            raise refuse("load to", str(device), "map_location says where to already",
                         "Give device= or map_location=")
        map_location = device_name(device).replace("host", "cpu")
    restricted = _restricted(weights_only, pickle_module)
    file = None
    reason = why_torch_loads(f, map_location, pickle_module, mmap=mmap)
    if not reason:
        with raising(RuntimeError, damaged=True):
            reason, file = _why_torch_reads(torch, f)
    if reason:
        return by_torch(lambda: torch.load(f, map_location, pickle_module,
                                           weights_only=weights_only, mmap=mmap,
                                           **pickle_load_args), f, reason, kind, memory_limit)
    if pickle_load_args and restricted:
        warnings.warn("pickle_load_args only works if `weights_only=False`.", stacklevel=2)
    module = torch._weights_only_unpickler if restricted else pickle_module or pickle
    with raising(RuntimeError, damaged=True):
        return _read(torch, f, file, map_location, module, pickle_load_args,
                     (verify, kind, limit, policy), progress)
