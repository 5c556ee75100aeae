# SPDX-License-Identifier: MIT
"""torch.distributed.checkpoint through Penstock: Writer and Reader.

Both are torch's FileSystemWriter and FileSystemReader, with the same files, and move the bytes
otherwise. A file of a rank holds one zip of torch's for each tensor; the engine writes all of them
in one job from whatever devices they are on, and reads any parts of them straight to where they go.

1. A checkpoint is its .metadata, which is replaced in one step when every file that it names is
   durable. Until then the one before is whole: files get names that no file there has.
2. What the new .metadata does not name, of what lay there before, goes when it is durable.
3. All of one save happens in one thread. What belongs to a save is kept for its thread, so that one
   Writer can be used by several; two saves into one folder at a time are refused: those of one
   process when they write, those of two programs by the lock of the coordinator.
4. With async_save the Writer is its own stager: it hands the state on as it is, and holds the
   caller until the bytes are in host memory.
"""
from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import itertools
import math
import os
import pickle
import pickletools
import re
import threading
import warnings
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, storage
from torch.distributed.checkpoint import planner as planning
from torch.futures import Future

from . import _penstock, _report
from ._device import device_name, open_device
from ._error import Error, from_engine, refuse
from ._fork import Lock
from ._names import file_name
from ._options import options
from ._patch import serving
from ._progress import wait_or_stop
from ._torch import streams
from ._torch_save import _PROTOCOL, _Storages

__all__ = ["Reader", "Writer"]

_FILE = re.compile(r"__(\d+)_(\d+)\.distcp")
#: Tensors of the host up to this are written as torch writes them, without pages of their own.
_SMALL = 4096
#: Parts of a tensor that are read each by itself: at least so many bytes, at most so many parts.
_PART, _PARTS = 4096, 16384
#: Host or device memory for what cannot be read straight to its place, at a time.
_ASIDE = 256 << 20


def _engine_device(tensor: torch.Tensor) -> str | None:
    """The engine's name of where a tensor is; None if it knows none."""
    if tensor.device.type == "cpu":
        return "host"
    return device_name(tensor.device) if tensor.device.type == "cuda" else None


# --------------------------------------------------------------------------------------- saving --

class _HostStorages(_Storages):
    """Storages as torch's own writer has them, which saves what it has brought to the host."""

    def persistent_id(self, thing: Any) -> tuple | None:
        found = super().persistent_id(thing)
        return found and (*found[:3], "cpu", found[4])


def _pickled(tensor: torch.Tensor) -> bytes:
    """The data.pkl of a tensor whose storage is just its own bytes."""
    start = tensor.storage_offset() * tensor.itemsize
    own = tensor.untyped_storage()[start:start + tensor.nbytes]
    alone = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        own, 0, tensor.size(), tensor.stride())     # type: ignore[arg-type]
    content = io.BytesIO()
    pickler = pickle.Pickler(content, protocol=_PROTOCOL)
    pickler.persistent_id = _penstock.ask_by_type(      # type: ignore[method-assign]
        _HostStorages(torch).persistent_id)
    pickler.dump(alone)
    return content.getvalue()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Do its elements lie one after the other, in whatever order of dimensions?"""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class _Items:
    """What a rank writes, as the engine wants it."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        #: Memory that is read until all is gathered.
        self.keeps: list[torch.Tensor] = []
        self.devices: set[str] = set()
        self._pickles: dict[tuple, bytes] = {}

    def add_bytes(self, content: bytes) -> None:
        self.items.append(content)

    def add_tensor(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        device = _engine_device(tensor)
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided \
                or tensor.is_quantized or not device or not tensor.nbytes:
            return self._add_as_torch_does(tensor)
        tensor = tensor.resolve_conj().resolve_neg()
        if device == "host" and tensor.nbytes <= _SMALL:
            return self._add_as_torch_does(tensor)
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
        kind = tensor.dtype, tensor.shape, tensor.stride()
        content = self._pickles.get(kind)
        if content is None:
            content = self._pickles[kind] = _pickled(tensor)
        self.items.append((content, tensor.data_ptr(), tensor.nbytes, open_device(device)))
        self.keeps.append(tensor)
        self.devices.add(device)
        return None

    def _add_as_torch_does(self, tensor: torch.Tensor) -> None:
        tensor = tensor.cpu()
        if tensor.layout == torch.strided and tensor.untyped_storage().size() != tensor.nbytes:
            tensor = tensor.clone()
        content = io.BytesIO()
        torch.save(tensor, content)
        self.items.append(content.getvalue())


class _Staging:
    """A state that async_save has handed over, until its bytes are in host memory."""

    def __init__(self) -> None:
        #: The threads there are: the one that is going to save it is none of these.
        self._others = threading.enumerate()
        self._saver: threading.Thread | None = None
        self._gathered = threading.Event()
        self._failure: Exception | None = None
        self.after = [torch.cuda.current_stream(index) for index in range(
            torch.cuda.device_count())] if torch.cuda.is_initialized() else []

    def claim(self) -> bool:
        """Is the calling thread the one that saves it?"""
        thread = threading.current_thread()
        if self._saver is None and thread not in self._others:
            self._saver = thread
        return self._saver is thread

    def end(self, failure: Exception | None = None) -> None:
        """The state may change; or will not be saved."""
        self._failure = failure
        self._gathered.set()

    def wait(self) -> None:
        """A save that has failed before anything was read of the state lets go of it, too: its
        future tells why."""
        while not self._gathered.wait(0.05):
            savers = [self._saver] if self._saver else set(threading.enumerate()).difference(
                self._others)
            if not any(thread.is_alive() for thread in savers):
                return
        if self._failure is not None:
            raise self._failure


class _Open:
    """A folder that is there from now on, durably; and, for a coordinator, locked."""

    def __init__(self, path: str, locked: bool) -> None:
        self._folder = _penstock.checkpoints_open(file_name(path), True, 0 if locked else 1)
        if self._folder.warning:
            warnings.warn(f"{path}: {self._folder.warning}", stacklevel=2)


class _Thread(threading.local):
    """What a Writer knows of the save that a thread is at."""

    path: Any = None
    #: Does this rank write .metadata for all, and is the folder kept for that?
    coordinates = False
    lock: _Open | None = None
    #: Files that were in the folder when it began.
    before: frozenset[str] = frozenset()


def why_torch_writes(path: Any, single_file_per_rank: bool = True, sync_files: bool = True,
                     thread_count: int = 1, per_thread_copy_ahead: int = 0,
                     cache_staged_state_dict: bool = False, overwrite: bool = True,
                     _extensions: Any = None, serialization_format: Any = None) -> str:
    """Why a FileSystemWriter with these arguments is torch's own; "" if it can be ours."""
    if not isinstance(path, (str, os.PathLike)) or "://" in os.fspath(path):
        return "it is not the name of a folder"
    if not single_file_per_rank:
        return "a file for each tensor is torch's"
    if _extensions:
        return "what goes through extensions is torch's"
    if serialization_format not in (None, filesystem.SerializationFormat.TORCH_SAVE):
        return "only the format of torch.save is written"
    return ""


def why_torch_reads(path: Any, _extension_registry: Any = None) -> str:
    """The same of a FileSystemReader."""
    if not isinstance(path, (str, os.PathLike)) or "://" in os.fspath(path):
        return "it is not the name of a folder"
    return "what goes through extensions is torch's" if _extension_registry is not None else ""


#: A folder, as a process has it: what its parent had when it forked is not under way there.
_Own = tuple[int, str]
#: Folders that are being written to.
_under_way: set[_Own] = set()
#: Folders that are locked: while a save has one, or has failed and was followed by no other.
_locked: weakref.WeakValueDictionary[_Own, _Open] = weakref.WeakValueDictionary()
_lock = Lock()


def _lock_of(folder: str) -> _Open:
    """Refuses where another program has it."""
    own = os.getpid(), folder
    with _lock:
        found = _locked.get(own)
        if found is None:
            found = _locked[own] = _Open(folder, True)
        return found


class Writer(filesystem.FileSystemWriter):
    """Storage for ``torch.distributed.checkpoint.save`` and ``async_save``.

    ``path`` and the other arguments are those of torch's FileSystemWriter, whose files it writes:
    ``sync_files``, ``thread_count``, ``per_thread_copy_ahead`` and ``cache_staged_state_dict`` are
    taken and mean nothing. Files are always durable; one of a rank is written in one job. A file
    for each tensor, extensions and safetensors files are torch's, and refused.

    A checkpoint that exists stays whole until the new one is, whatever happens; then its files go.
    ``overwrite=False`` refuses to replace one. ``transfer`` and ``memory_limit`` are as in
    ``penstock.save``. With ``async_save`` training waits until the bytes have been copied to host
    memory, at most ``memory_limit`` of them ahead of the disk; left out, it is what memory is
    plentiful, half of what is available, divided by LOCAL_WORLD_SIZE. ``report`` is about the last
    save.
    """

    _synchronize_after_execute = True

    def __init__(self, path: str | os.PathLike, *args: Any, transfer: str | int = "auto",
                 memory_limit: int | None = None, **kwargs: Any) -> None:
        """Nothing is written yet."""
        reason = why_torch_writes(path, *args, **kwargs)
        if reason:
            raise refuse("write to", str(path), reason,
                         "Use torch.distributed.checkpoint.FileSystemWriter for that")
        self._transfer, self._limit, _ = options(transfer, memory_limit)
        self._plenty = memory_limit is None
        self._path: Any = None
        self._thread = _Thread()
        self._staging: _Staging | None = None
        #: A Report: what this process did in the last save; None: there was none.
        self.report: _report.Report | None = None
        super().__init__(path, *args, **kwargs)

    def __getstate__(self) -> dict:
        """Another process may write what it is given, but cannot know when this one's memory may
        change."""
        staging = self._staging
        if staging is not None:
            self._staging = None
            failure = refuse("save in", "another process", "the Writer stages the state itself, "
                             "which needs a thread of this one",
                             "Leave async_checkpointer_type out, or give "
                             "async_stager=DefaultStager()")
            staging.end(failure)
            raise failure
        state = self.__dict__.copy()
        del state["_thread"]
        return state

    def __setstate__(self, state: dict) -> None:
        """Of a Writer that was sent here."""
        self.__dict__.update(state)
        self._thread = _Thread()

    @property
    def path(self) -> Any:      # type: ignore[override]
        """The folder: of the calling thread's save, or the one that was named last."""
        return self._path if self._thread.path is None else self._thread.path

    @path.setter
    def path(self, path: Any) -> None:
        self._path = path

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """A save begins in this thread, into the folder that is named, if one is."""
        super().reset(checkpoint_id)
        self._thread.path = self._path if checkpoint_id else None
        self._thread.lock = None

    # ------------------------------------------------------------------------------- staging --

    def stage(self, state_dict: Any) -> Any:
        """The state as it is: the engine copies the bytes when it takes them."""
        self._staging = _Staging()
        return state_dict

    def synchronize_staging(self) -> None:
        """Wait until the state may change. Called by async_save before it returns."""
        staging = self._staging
        if staging is None:
            return
        try:
            staging.wait()
        finally:
            if self._staging is staging:
                self._staging = None

    def _claimed(self) -> _Staging | None:
        staging = self._staging
        return staging if staging is not None and staging.claim() else None

    # -------------------------------------------------------------------------------- saving --

    def storage_meta(self) -> Any:
        """Asked for at the beginning of a save: from here on its thread is known."""
        self._claimed()
        return super().storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Who has a checkpoint of its own among others in a folder, coordinates nobody."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._thread.coordinates = is_coordinator and self.use_collectives

    def prepare_local_plan(self, plan: planning.SavePlan) -> planning.SavePlan:
        """The folder is there from now on, and no other program's until the save ends."""
        folder = os.path.realpath(self.path)
        if self._thread.coordinates:
            self._thread.lock = _lock_of(folder)
        else:
            _Open(folder, False)
        if self._metadata_exists() and not self.overwrite:
            raise RuntimeError(f"Checkpoint already exists and {self.overwrite=}.")
        if self.rank is not None and not self.use_collectives:
            plan = dataclasses.replace(plan,
                                       storage_data=filesystem._StoragePrefix(f"__{self.rank}_"))
        return plan

    def write_data(self, plan: planning.SavePlan, planner: planning.SavePlanner
                   ) -> Future[list[storage.WriteResult]]:
        """This rank's items, into one file that is durable afterwards."""
        staging = self._claimed()
        folder = os.path.realpath(self.path)
        own = os.getpid(), folder
        with _lock:
            if own in _under_way:
                raise refuse("save in", folder, "another save into this folder is under way",
                             "Wait for it, or give each its own checkpoint_id")
            _under_way.add(own)
        try:
            with serving():
                results = self._write(folder, plan, planner, staging)
        finally:
            # Also where it failed: the future tells why.
            if staging is not None:
                staging.end()
            with _lock:
                _under_way.discard(own)
        future: Future[list[storage.WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, folder: str, plan: planning.SavePlan, planner: planning.SavePlanner,
               staging: _Staging | None) -> list[storage.WriteResult]:
        self._thread.before = frozenset(filter(_FILE.fullmatch, os.listdir(folder)))
        prefix = plan.storage_data.prefix
        found = [_FILE.fullmatch(name) for name in self._thread.before if name.startswith(prefix)]
        name = f"{prefix}{max((int(one[2]) + 1 for one in found if one), default=0)}.distcp"
        # Bytes come first, as in files of torch's.
        ordered = sorted(plan.items, key=lambda item: item.type != _BYTES)
        wanted = _Items()
        with contextlib.ExitStack() as stack:
            for stream in staging.after if staging is not None else []:
                stack.enter_context(torch.cuda.stream(stream))
            for item in ordered:
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    wanted.add_tensor(data)
                else:
                    wanted.add_bytes(data.getvalue())
            after = streams(torch, wanted.devices)
        if not ordered:
            return []
        job, places = _penstock.torch_pack(
            file_name(os.path.join(folder, name)), open_device("host"), wanted.items,
            wanted.keeps, self._transfer, self._room(staging), after, staging is not None)
        wanted.keeps = []
        if staging is not None:
            job.wait_gathered()
            staging.end()
        report = wait_or_stop(job, name, False)
        report["device"] = "+".join(sorted(wanted.devices or {"host"}))
        _report.keep(report)
        self.report = _report.last_report()
        return [storage.WriteResult(index=item.index, size_in_bytes=size,
                                    storage_data=filesystem._StorageInfo(name, offset, size))
                for item, (offset, size) in zip(ordered, places)]

    def _room(self, staging: _Staging | None) -> int | Literal["auto"]:
        """Most host memory for a save: of one that training waits for, what is plentiful, and this
        rank's share of it."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if staging is None or not self._plenty:
            return self._limit
        if ranks <= 1:
            return "auto"
        return max(self._limit, _penstock.memory_available() // 2 // ranks)

    def finish(self, metadata: Any, results: list[list[storage.WriteResult]]) -> None:
        """Now the checkpoint exists, in place of the one before."""
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data
                                 for of_rank in results for result in of_rank}
        metadata.storage_meta = self.storage_meta()
        own = self.rank if not self.use_collectives else None
        path = os.path.abspath(self._get_metadata_path(own))
        job, _ = _penstock.torch_pack(file_name(path), open_device("host"),
                                      [pickle.dumps(metadata)], None)
        wait_or_stop(job, "", False)
        named = {info.relative_path for info in metadata.storage_data.values()}
        for name in self._thread.before - named:
            found = _FILE.fullmatch(name)
            if own is None or (found and int(found[1]) == own):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(os.path.dirname(path), name))
        self._thread.lock = None


_BYTES = planning.WriteItemType.BYTE_IO

# -------------------------------------------------------------------------------------- loading --

#: What the pickle of a tensor may name. All else is torch's to make something of.
_KNOWN = re.compile(r"torch\._utils _rebuild_(tensor_v[23]|parameter)|collections OrderedDict"
                    r"|torch\.storage UntypedStorage|torch \w+")


@lru_cache(maxsize=4096)
def _is_plain(content: bytes) -> bool:
    """Is the tensor of this data.pkl no more than numbers at strides?"""
    for code, argument, _ in pickletools.genops(content):
        if code.name == "GLOBAL" and not _KNOWN.fullmatch(str(argument)):
            return False
        if code.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4") \
                or argument in ("conj", "neg"):
            return False
    return True


class _Stored(NamedTuple):
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    #: Of its first element, in the file.
    offset: int


def _stored(items: _penstock.TorchItems, index: int) -> _Stored | None:
    """None where torch has to read it."""
    try:
        found = items.tensor(index)
    except Error as error:
        if error.errno == errno.EILSEQ:
            raise
        return None     # in the format before zip, or damaged: torch knows, or says so
    if found is None or not _is_plain(found[4]):
        return None
    dtype = getattr(torch, found[0], None)
    return _Stored(dtype, *found[1:4]) if isinstance(dtype, torch.dtype) else None


class _Part(NamedTuple):
    """What a ReadItem wants of a tensor in a file, and where it goes."""

    item: Any
    stored: _Stored
    target: torch.Tensor

    def is_alike(self) -> bool:
        """Can bytes of the file be numbers of the target?"""
        target = self.target
        return type(target) is torch.Tensor and target.dtype == self.stored.dtype \
            and target.layout == torch.strided and not target.is_conj() and not target.is_neg()

    def first(self) -> int:
        """Elements before the first one that is wanted."""
        return sum(offset * stride for offset, stride in zip(self.item.storage_offsets,
                                                             self.stored.stride))

    def span(self) -> int:
        """Elements from the first to the last, with those in between."""
        return 1 + sum((length - 1) * stride for length, stride in zip(self.item.lengths,
                                                                       self.stored.stride))

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(elements after the first in the file, and in the target, how many): what is in one piece
        in both. Nothing where that is too little of too many."""
        lengths, there, here = self.item.lengths, self.stored.stride, self.target.stride()
        whole, outer = 1, len(lengths)
        while outer and (lengths[outer - 1] == 1
                         or there[outer - 1] == here[outer - 1] == whole):
            outer -= 1
            whole *= lengths[outer]
        count = math.prod(lengths[:outer])
        if count > 1 and (count > _PARTS or whole * self.stored.dtype.itemsize < _PART):
            return
        for index in itertools.product(*map(range, lengths[:outer])):
            yield (sum(map(int.__mul__, index, there)), sum(map(int.__mul__, index, here)), whole)


class _Reading:
    """Parts of tensors of one file, read by as few jobs as the memory allows that is needed for
    those which cannot be read straight to their places."""

    def __init__(self, reader: Reader, planner: planning.LoadPlanner, items: _penstock.TorchItems):
        self.reader, self.planner, self.items = reader, planner, items
        self.reports: list[dict] = []
        self._clear()

    def _clear(self) -> None:
        self._wanted: list[tuple[int, int, int, _penstock.Device]] = []
        self._parts: list[tuple[_Part, torch.Tensor | None]] = []
        self._devices: set[str] = set()
        self._aside = 0

    def add(self, part: _Part) -> None:
        """Something more to read."""
        target, stored = part.target, part.stored
        if not target.numel():
            return self.planner.commit_tensor(part.item, target)
        device, aside = _engine_device(target), None
        runs = list(part.runs()) if device and part.is_alike() else []
        device = device or "host"
        if not runs:
            aside = torch.empty(part.span(), dtype=stored.dtype,
                                device="cpu" if device == "host" else device)
            self._aside += aside.nbytes
            runs = [(0, 0, part.span())]
        size, memory = stored.dtype.itemsize, target if aside is None else aside
        for there, here, count in runs:
            self._wanted.append((stored.offset + (part.first() + there) * size, count * size,
                                 memory.data_ptr() + here * size, open_device(device)))
        self._devices.add(device)
        self._parts.append((part, aside))
        if self._aside >= _ASIDE:
            self.run()
        return None

    def run(self) -> None:
        """Read what was added."""
        if not self._parts:
            return
        reader = self.reader
        job = self.items.load(open_device("host"), self._wanted, self._parts, reader._verify,
                              reader._transfer, reader._limit, streams(torch, self._devices),
                              reader._cache)
        try:
            report = wait_or_stop(job, "", False)
        except Error as error:
            raise self._named(error) from None
        report["device"] = "+".join(sorted(self._devices))
        self.reports.append(report)
        for part, aside in self._parts:
            if aside is not None:
                part.target.copy_(aside.as_strided(part.item.lengths, part.stored.stride))
            self.planner.commit_tensor(part.item, part.target)
        self._clear()

    def _named(self, error: Error) -> Error:
        """With the name that the damaged tensor has in the state."""
        near = [part for part, _ in self._parts if part.stored.offset <= (error.offset or -1)]
        if error.errno != errno.EILSEQ or not near:
            return error
        name = max(near, key=lambda part: part.stored.offset).item.storage_index.fqn
        return from_engine(-errno.EILSEQ, "format", 0, "verify", error.object, error.offset or -1,
                           f"tensor {name}: the bytes from here on are not those that were saved",
                           "The file is damaged: take another copy of it")


class Reader(filesystem.FileSystemReader):
    """Storage for ``torch.distributed.checkpoint.load``: checkpoints that Writer or torch's
    FileSystemWriter wrote, by any number of ranks.

    Tensors are read straight to where the state has them, on any device, parts as well. Digests in
    the files, or the CRC32s of their zips, are compared as the bytes pass; a difference is an error
    that names the file, the tensor and the byte. What went through extensions or is not a plain
    tensor is read by torch. ``transfer``, ``memory_limit``, ``cache`` and ``verify`` are as in
    ``penstock.load``; what happened is in ``last_report()``.
    """

    def __init__(self, path: str | os.PathLike, *args: Any, transfer: str | int = "auto",
                 memory_limit: int | None = None, cache: str | None = None, verify: bool = True,
                 **kwargs: Any) -> None:
        """Nothing is read yet."""
        self._transfer, self._limit, self._cache = options(transfer, memory_limit, cache)
        self._verify = verify
        super().__init__(path, *args, **kwargs)

    def read_data(self, plan: planning.LoadPlan, planner: planning.LoadPlanner
                  ) -> Future[None]:
        """Fill in all that the plan names."""
        by_torch = [item for item in plan.items if item.type == _LOADS_BYTES
                    or self.storage_data[item.storage_index].transform_descriptors]
        left = set(map(id, by_torch))
        files: dict[str, list] = {}
        for item in plan.items:
            if id(item) not in left:
                name = self.storage_data[item.storage_index].relative_path
                files.setdefault(name, []).append(item)
        reports = []
        for name, items in files.items():
            reading = self._read_file(name, items, planner, by_torch)
            reports += reading.reports
        if by_torch:
            with serving():
                super().read_data(dataclasses.replace(plan, items=by_torch), planner).wait()
        if reports:
            _report.keep(_report.merge(reports, sum(report["seconds"] for report in reports),
                                       "+".join(sorted({r["device"] for r in reports}))))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, name: str, wanted: list, planner: planning.LoadPlanner,
                   by_torch: list) -> _Reading:
        """What cannot be read is added to what torch has to."""
        places = {item: (info.offset, info.length) for item in {
            item.storage_index for item in wanted} for info in [self.storage_data[item]]}
        spans = sorted(set(places.values()))
        numbers = {span: number for number, span in enumerate(spans)}
        items = _penstock.TorchItems(
            file_name(os.path.abspath(self.fs.concat_path(self.path, name))), spans)
        found = [_stored(items, number) for number in range(len(spans))]
        reading = _Reading(self, planner, items)
        for item in sorted(wanted, key=lambda item: places[item.storage_index]):
            stored = found[numbers[places[item.storage_index]]]
            if stored is None:
                by_torch.append(item)
                continue
            target = planner.resolve_tensor(item).detach()
            if target.size() != item.lengths:
                raise refuse("load", item.storage_index.fqn,
                             f"{tuple(item.lengths)} of it do not fit into "
                             f"{tuple(target.size())}", "Load into a state of the same shape")
            reading.add(_Part(item, stored, target))
        reading.run()
        return reading


_LOADS_BYTES = planning.LoadItemType.BYTE_IO
