# SPDX-License-Identifier: MIT
"""Files for anything that has memory: torch, numpy, CuPy, JAX, Numba, bytearray.

Memory is found by asking torch for its own tensors, then by __cuda_array_interface__, by the
buffer protocol and by DLPack; no framework is imported for it.

Rules
  1. A future knows how it ended, and says so to everybody who asks. What nobody asked for is
     raised by close(), which then makes nothing visible.
  2. Of a file that is read and written, reads run beside reads and writes beside writes; the
     change from one to the other waits. So a read sees all that was written before it.
  3. Handles are closed when no job uses them any more.
"""
from __future__ import annotations

import errno
import os
import sys
import threading
import warnings
from operator import index

from . import _penstock, _report
from ._device import device_name, open_device
from ._error import Error, refuse
from ._frameworks import FILL_ANOTHER, STREAM_LEGACY, import_module, in_the_way, is_of
from ._fork import Lock
from ._names import file_name, is_synthetic
from ._options import options
from ._progress import wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_READ, _WRITE, _IN_PLACE = 1, 2, 3
_LAST = (1 << 63) - 1
_NOT_CONTIGUOUS = ("the memory is not contiguous. Write a copy, as numpy.ascontiguousarray() makes "
                   "it; read into a new array, and copy from there")


# ------------------------------------------------------------------------------------- memory --

class _Region:
    """Where the bytes of something are; they stay there as long as this lives."""

    def __init__(self, thing: Any, writable: bool):
        """Asks `thing` for its memory."""
        self.stream: int | None = None
        read_only = False
        if is_of("torch", "Tensor", thing):
            self._from_torch(thing, writable)
        else:
            interface = _interface(thing)
            if interface is not None:
                read_only = self._from_interface(thing, interface)
            else:
                read_only = self._from_host(thing)
        if is_of("jax", "Array", thing):
            # It may still be computed, on a stream that nobody tells of; and never changes.
            thing.block_until_ready()
            read_only = True
        if writable and read_only:
            raise ValueError(f"the memory of this {type(thing).__name__} is read-only")
        if self.device != "host" and self.stream is None:
            self.stream = self._current_stream(thing)

    def _from_torch(self, tensor, writable: bool) -> None:
        problem = in_the_way(tensor)
        if problem is not None:
            raise ValueError(f"the tensor cannot be used: {problem[0]}. "
                             f"{FILL_ANOTHER if writable else problem[1]}")
        self.keeps, self.device = tensor, device_name(tensor.device)
        self.address, self.nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()

    def _from_interface(self, thing, interface: dict) -> bool:
        shape, strides = interface["shape"], interface.get("strides")
        size = expected = int(interface["typestr"][2:])
        for length in shape:
            size *= length
        for length, step in zip(reversed(shape), reversed(strides or ())):
            if size and length != 1 and step != expected:
                raise ValueError(_NOT_CONTIGUOUS)
            expected *= length
        if interface.get("mask") is not None:
            raise ValueError("arrays with a mask cannot be used")
        self.keeps, self.device, self.nbytes = thing, f"cuda:{_ordinal(thing)}", size
        self.address, read_only = interface["data"]
        self.address = self.address or 0
        self.stream = interface.get("stream")
        return read_only

    def _from_host(self, thing) -> bool:
        """By the buffer protocol, or by DLPack, which may well lead to a GPU."""
        if getattr(getattr(thing, "dtype", None), "hasobject", False):
            raise ValueError("the elements are Python objects, not bytes")
        try:
            found = _penstock.view_of_buffer(_plain(thing), False)
        except (TypeError, BufferError) as error:
            if hasattr(thing, "__dlpack__") and not is_of("numpy", "ndarray", thing):
                found = _penstock.view_of_dlpack(_capsule(thing))
            elif isinstance(error, TypeError):
                raise TypeError(f"{type(thing).__name__} objects have no memory that bytes can "
                                "move to or from; take a tensor, an array or a bytearray") from None
            else:
                raise ValueError(_NOT_CONTIGUOUS) from None
        self.keeps, self.address, self.nbytes, self.device, read_only = found
        return read_only

    def _current_stream(self, thing) -> int:
        """Work that is queued on the framework's current stream comes first."""
        ordinal = int(self.device.partition(":")[2])
        if is_of("torch", "Tensor", thing):
            stream = sys.modules["torch"].cuda.current_stream(ordinal).cuda_stream
        elif is_of("cupy", "ndarray", thing):
            stream = sys.modules["cupy"].cuda.get_current_stream(ordinal).ptr
        else:
            stream = STREAM_LEGACY
        return stream or STREAM_LEGACY


def _interface(thing: Any) -> dict | None:
    """What it says of its CUDA memory; None where it has none, or no words for its numbers."""
    try:
        return thing.__cuda_array_interface__
    except (AttributeError, TypeError, ValueError):
        return None


def _ordinal(thing: Any) -> int:
    """Which GPU; the interface itself does not say."""
    device = getattr(thing, "device", None)
    for name in ("index", "id"):
        number = getattr(device, name, None)
        if isinstance(number, int):
            return number
    return thing.__dlpack_device__()[1] if hasattr(thing, "__dlpack_device__") else 0


def _plain(thing: Any) -> Any:
    """Something whose buffer the buffer protocol has words for."""
    if is_of("numpy", "ndarray", thing):
        # bfloat16, dates and the like have none, as bytes they do.
        numpy = sys.modules["numpy"]
        if not thing.flags.c_contiguous:
            raise BufferError("not contiguous")
        flat = numpy.asarray(thing).reshape(-1)
        return flat.view(numpy.uint8) if flat.size else bytearray()
    with memoryview(thing) as view:
        if "O" in view.format:
            raise ValueError("the elements are Python objects, not bytes")
    return thing


def _capsule(thing: Any) -> Any:
    try:
        return thing.__dlpack__(max_version=(1, 0))
    except TypeError:
        return thing.__dlpack__()


# ------------------------------------------------------------------------------------ futures --

class Future:
    """Bytes on their way; what read_async() and write_async() return."""

    def __init__(self, job: Any, count: int, label: str, writes: bool):
        """Made by File."""
        self._job, self._count, self._label, self._writes = job, count, label, writes
        self._report: dict | None = None
        self._error: Error | None = None
        self._told = False
        self._lock = Lock(self._inherited)

    def _inherited(self) -> None:
        """In a forked child: the job is the parent's."""
        self._job = None
        self._error = refuse("wait for", self._label, "it was started before this process was "
                             "forked", code=errno.ECHILD)

    def _interrupted(self) -> None:
        """Whatever broke into the waiting has stopped the job."""
        self._job = None
        self._error = refuse("wait for", self._label, "the waiting was interrupted and the "
                             "transfer stopped", code=errno.ECANCELED)

    def _finish(self, progress: bool = False) -> None:
        """Wait for the end, if nobody has done so yet; keep how it went."""
        with self._lock:
            if self._job is None:
                return
            try:
                self._report = wait(self._job, self._label, progress)
            except Error as error:
                self._error = error
            except BaseException:
                self._interrupted()
                raise
            self._job = None

    def done(self) -> bool:
        """Has it ended? get() returns, or raises, at once then."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._job is None or self._job.wait_for(0)
        except BaseException:
            self._interrupted()
            raise
        finally:
            self._lock.release()

    def get(self, *, progress: bool = False) -> int:
        """Wait for the end; the number of bytes. Raises what went wrong, however often asked."""
        self._finish(progress)
        self._told = True
        if self._error is not None:
            raise self._error.with_traceback(None)
        _report.keep(self._report)
        return self._count

    def cancel(self) -> None:
        """Ask it to stop; get() then raises, unless it had ended already."""
        job = self._job
        if job is not None:
            job.cancel()


# --------------------------------------------------------------------------------------- files --

class File:
    """A file whose bytes move straight between storage and the memory of any framework.

    Modes: "r" reads; "w" writes a new file, which appears under its name, complete and durable, at
    close() and not at all after an error in the ``with`` block; "r+" reads and overwrites in place,
    and grows the file where a write goes beyond its end.

        with penstock.File("weights.bin") as file:
            file.read(tensor, file_offset=4096)

    Buffers are torch tensors, numpy, CuPy and Numba arrays, bytearrays, whatever speaks DLPack,
    __cuda_array_interface__ or the buffer protocol; JAX arrays and bytes can be written to a file
    but not read into. They must be contiguous. To measure without a store, the texts "null:" and
    "pattern:SIZE" name one that swallows bytes or makes them up; a file that is really called so
    is given as "./null:" or as a pathlib.Path. What code written for KvikIO's CuFile calls - read,
    write, pread, pwrite, raw_read, raw_write - is here too.
    """

    def __init__(self, path: str | os.PathLike, mode: str = "r", *, size: int = 0,
                 transfer: str | int = "auto", memory_limit: int | None = None,
                 cache: str = "off"):
        """Opens the file; a missing one is an error, except for "w".

        `size`, for "w", is how large the file will be: its space is reserved at once, so that a
        full disk shows now. Writes beyond it are refused then. `cache` is as in load_model(), but
        "off" unless it is asked for: bytes are often read once, and of files of any size.
        """
        if mode not in ("r", "w", "r+"):
            raise ValueError(f"mode is 'r', 'w' or 'r+', not {mode!r}; a new file can be read "
                             "after close(), and nothing is appended")
        size = index(size)
        if not 0 <= size <= _LAST or size and mode != "w":
            raise ValueError(f"size is that of a new file, mode 'w', in bytes; {size} is none")
        self.path, self.mode = os.fspath(path), mode
        self._synthetic = is_synthetic(path)
        self._where = path if self._synthetic else file_name(path)
        self._options = options(transfer, memory_limit, cache)
        self._lock = Lock(self._inherited, threading.RLock)
        self._futures: list[Future] = []
        self._reader = self._writer = None
        self._end = size
        self._seen = self._identity()
        if mode == "w":
            self._writer = _penstock.Object(self._where, _WRITE, self._end)
        else:
            self._reader = _penstock.Object(self._where, _READ)
        if mode == "r+":
            self._writer = _penstock.Object(self._where, _IN_PLACE)
        self._closed = False

    def _identity(self) -> tuple | None:
        """Which file is there and in which state; None where there is none."""
        if self._synthetic:
            return self._where, None
        try:
            found = os.stat(self._where)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _inherited(self) -> None:
        """In a forked child: what is under way, and what is to be committed, is the parent's."""
        self._futures = []
        self._writer = None

    def __enter__(self) -> File:
        """Itself."""
        self._check_open()
        return self

    def __exit__(self, kind, value, trace) -> None:
        """Close; after an exception, without making a new file visible."""
        if kind is None:
            self.close()
        else:
            self._close(commit=False, stop=self.mode != "r+" or not issubclass(kind, Exception))

    def __del__(self, _warn=warnings.warn) -> None:
        """Nobody closed it: say so, as Python's files do."""
        if getattr(self, "_closed", True):
            return
        if self.mode == "w":
            # Python's files are flushed here. Ours cannot know whether all was written that should
            # be, so its bytes are lost; a ResourceWarning would not be shown.
            _warn(f"{self.path!r} was opened for writing and never closed: it does not exist, or "
                  "is as it was before", RuntimeWarning, stacklevel=2)
        else:
            _warn(f"unclosed file {self!r}", ResourceWarning, stacklevel=2, source=self)

    def __reduce__(self):
        """Two of them would close the same file."""
        raise TypeError("a penstock.File cannot be copied or pickled: open the file again")

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<penstock.File {self.path!r} mode {self.mode!r}{state}>"

    @property
    def closed(self) -> bool:
        """Is it?"""
        return self._closed

    def nbytes(self) -> int:
        """The size of the file now; of a new one, as far as it was written or reserved."""
        with self._lock:
            self._check_open()
            return self._end if self.mode == "w" else self._current().size

    def _check_open(self, mode: str = "") -> None:
        if self._closed:
            raise ValueError(f"{self.path!r} is closed")
        if mode not in self.mode and self.mode != "r+":
            raise ValueError(f"{self.path!r} was opened with mode {self.mode!r}")

    def _reopen(self, mode: int) -> _penstock.Object:
        """A new handle of the same file; not of another that has taken its name."""
        seen = self._identity()
        if seen is None or self._seen is None or seen[:2] != self._seen[:2]:
            raise refuse("open", os.fsdecode(self.path), "it was removed, or another file has its "
                         "name now", "Open it again", errno.ESTALE)
        if mode == _READ:
            self._seen = seen
        return _penstock.Object(self._where, mode)

    def _current(self) -> _penstock.Object:
        """For reading: the file as it is now, after all that was written through this one."""
        self._wait(writes=True)
        now = self._identity()
        # One that was removed or replaced is still the file that was opened, if nothing was
        # written to it; one that has changed is not what the handle knows.
        if now != self._seen and (self.mode == "r+" or now and self._seen
                                  and now[:2] == self._seen[:2]):
            self._reader = self._reopen(_READ)
        return self._reader

    def _wait(self, writes: bool) -> None:
        """Until no reads, or writes, are under way; how they ended, they tell themselves."""
        for future in self._futures:
            if future._writes == writes:
                future._finish()

    def _start(self, writes: bool, buffer: Any, size: int | None, file_offset: int,
               dev_offset: int) -> Future:
        region = _Region(buffer, not writes)
        at, skip = index(file_offset), index(dev_offset)
        room = region.nbytes - skip
        if skip < 0 or room < 0:
            raise ValueError(f"dev_offset {skip} is outside of the buffer's {region.nbytes} bytes")
        count = room if size is None else index(size)
        if not 0 <= count <= room:
            raise ValueError(f"size {count} is outside of the buffer's {room} bytes from "
                             f"dev_offset on")
        if not 0 <= at <= _LAST - count:
            raise ValueError(f"file_offset {at} is outside of any file")
        with self._lock:
            self._check_open("w" if writes else "r")
            if writes:
                self._wait(writes=False)
                if self._writer is None:
                    self._writer = self._reopen(_IN_PLACE)
                handle, direction = self._writer, _WRITE if self.mode == "w" else _IN_PLACE
            else:
                handle, direction = self._current(), _READ
                left = max(handle.size - at, 0)
                if size is None:
                    count = min(count, left)
                elif count > left:
                    raise refuse("read", os.fsdecode(self.path), f"bytes {at} to {at + count} were "
                                 f"asked for, it ends at {handle.size}",
                                 "Leave size out to read as many as there are", errno.ERANGE)
            if not count:
                at = 0      # nothing to move, wherever that is
            job = _penstock.start(direction, open_device(region.device),
                                  [(handle, at, region.address + skip, count)], region,
                                  *self._options[:2], region.stream, self._options[2])
            if writes:
                self._end = max(self._end, at + count)
            future = Future(job, count, os.fsdecode(os.path.basename(self.path)), writes)
            self._futures = [f for f in self._futures if f._job is not None
                             or f._error is not None and not f._told] + [future]
        return future

    def read_async(self, buffer: Any, size: int | None = None, file_offset: int = 0,
                   dev_offset: int = 0, *, task_size: int | None = None) -> Future:
        """Start to fill `buffer`, from its byte `dev_offset` on, with the file's bytes from
        `file_offset` on.

        Without `size` these are as many as there is room and file for: 0 at the end. A `size` that
        goes beyond the end is an error. Leave the buffer alone until get() has returned; it is kept
        from going away. (`task_size` is KvikIO's and means nothing here.)
        """
        return self._start(False, buffer, size, file_offset, dev_offset)

    def write_async(self, buffer: Any, size: int | None = None, file_offset: int = 0,
                    dev_offset: int = 0, *, task_size: int | None = None) -> Future:
        """Start to write `buffer`, from its byte `dev_offset` on, to the file from `file_offset`
        on. Writes that are under way at the same time should not overlap."""
        return self._start(True, buffer, size, file_offset, dev_offset)

    def read(self, buffer: Any, size: int | None = None, file_offset: int = 0, dev_offset: int = 0,
             *, task_size: int | None = None, progress: bool = False) -> int:
        """Fill `buffer`; returns the number of bytes. See read_async()."""
        return self.read_async(buffer, size, file_offset, dev_offset).get(progress=progress)

    def write(self, buffer: Any, size: int | None = None, file_offset: int = 0,
              dev_offset: int = 0, *, task_size: int | None = None, progress: bool = False) -> int:
        """Write `buffer`; returns the number of bytes. See write_async()."""
        return self.write_async(buffer, size, file_offset, dev_offset).get(progress=progress)

    # The names that users of KvikIO know.
    pread, pwrite, raw_read, raw_write = read_async, write_async, read, write

    def _raise_untold(self) -> None:
        for future in self._futures:
            if future._error is not None and not future._told:
                future.get()

    def flush(self) -> None:
        """Of "r+": wait, and make durable what was written so far. A new file has close()."""
        with self._lock:
            self._check_open()
            if self.mode != "r+" or self._writer is None:
                return
            self._wait(writes=True)
            self._raise_untold()
            self._writer.commit()
            self._writer = None

    def close(self) -> None:
        """Wait for all that is under way, make what was written durable and visible, close.

        If something that was under way has failed and nobody was told, it is raised here and a
        new file does not appear.
        """
        self._close(commit=True, stop=False)

    def _close(self, commit: bool, stop: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if stop:
                    self._stop()
                for future in self._futures:
                    future._finish()
                if commit:
                    self._raise_untold()
                    if self._writer is not None:
                        self._writer.commit()
            finally:
                self._stop()
                ended = all(future._job is None for future in self._futures)
                for handle in (self._reader, self._writer):
                    if ended and handle is not None:
                        handle.close()
                self._reader = self._writer = None

    def _stop(self) -> None:
        for future in self._futures:
            future.cancel()


# -------------------------------------------------------------------------------------- arrays --

def fromfile(path: str | os.PathLike, dtype: Any = float, count: int = -1, offset: int = 0, *,
             like: Any = None, device: Any = None, transfer: str | int = "auto",
             memory_limit: int | None = None, cache: str = "off", progress: bool = False) -> Any:
    """A flat array of the file's bytes, as numpy.fromfile gives it, on the host or a GPU.

    ``like`` is "numpy" (also None), "cupy" or "torch", or an array of one of these; ``device`` is
    where it goes, for the last two. `count` elements, or all, from byte `offset` on; a `count` that
    the file does not have is an error.
    """
    at, count = index(offset), index(count)
    if at < 0:
        raise ValueError(f"offset {at} is negative")
    empty, itemsize = _maker(like, dtype, device)
    with File(file_name(path), "r", transfer=transfer, memory_limit=memory_limit,
              cache=cache) as file:
        left = max(file.nbytes() - at, 0)
        if count < 0:
            count = left // itemsize
        elif count * itemsize > left:
            raise refuse("read", os.fsdecode(path), f"{count} elements are {count * itemsize} "
                         f"bytes, the file has {left} from byte {at} on", code=errno.ERANGE)
        array = empty(count)
        file.read(array, count * itemsize, file_offset=at, progress=progress)
    return array


def _maker(like, dtype, device):
    """A function that makes an empty array of so many elements, and the size of one."""
    if like is not None and not isinstance(like, str):
        if device is None and not is_of("numpy", "ndarray", like):
            device = getattr(like, "device", None)
        like = type(like).__module__.partition(".")[0]
    if like is None and is_of("torch", "dtype", dtype):
        like = "torch"
    if like in ("torch", "pt"):
        torch = import_module("torch")
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if kind is not float and not isinstance(kind, torch.dtype):
            raise refuse("read as", str(dtype), "torch has no such dtype",
                         "Take torch.float32, or \"float32\"")
        name = device_name(device)
        where = torch.device("cpu" if name == "host" else name)
        sample = torch.empty(0, dtype=kind)
        return (lambda n: torch.empty(n, dtype=kind, device=where)), sample.element_size()
    if like not in (None, "numpy", "np", "cupy"):
        raise refuse("use", str(like), "like is 'numpy', 'cupy' or 'torch'")
    numpy = import_module("numpy")
    kind = numpy.dtype(dtype)
    if kind.hasobject or not kind.itemsize:
        raise ValueError(f"a file cannot hold elements of {kind!r}")
    if like == "cupy":
        cupy = import_module("cupy", "cupy-cuda13x")
        gpu = getattr(device, "id", None)
        if gpu is None:
            gpu = int(device_name("cuda:0" if device is None else device).partition(":")[2])

        def empty(n):
            with cupy.cuda.Device(gpu):
                return cupy.empty(n, kind)
        return empty, kind.itemsize
    if device is not None and device_name(device) != "host":
        raise refuse("read to", str(device), "numpy arrays are in host memory",
                     "Use like='torch' or like='cupy'")
    return (lambda n: numpy.empty(n, kind)), kind.itemsize


def tofile(array: Any, path: str | os.PathLike, *, transfer: str | int = "auto",
           memory_limit: int | None = None, progress: bool = False) -> None:
    """Write the bytes of an array to a file; it appears when it is complete and durable."""
    size = _Region(array, writable=False).nbytes
    with File(file_name(path), "w", size=size, transfer=transfer,
              memory_limit=memory_limit) as file:
        file.write(array, progress=progress)
