# SPDX-License-Identifier: MIT
"""Bytes that move before anybody asks for tensors.

A Prefetch has its job until somebody takes it: a load that joins, or cancel(). Whoever took it
finishes it; to all others the prefetch is over. wait() finishes it in place, and what came of it
stays here for the load.
"""
from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from typing import Any

from ._choose import Choice, open_model, tensors_of
from ._device import device_name, open_device
from ._error import Error, shown
from ._fork import Lock
from ._mapped import Maps, Opened, open_mapped
from ._names import model_name
from ._options import options
from ._progress import wait
from ._rules import Tensor

_begun: dict[tuple, Prefetch] = {}
_lock = Lock()
# A forked child has none of the threads that move the bytes.
os.register_at_fork(after_in_child=_begun.clear)


class Prefetch:
    """A model on its way to a device. The next load_model() or load_file() of the same path and
    device joins it and gets its tensors; until then, or until cancel(), it keeps the memory. On the
    host that is the mapped file, whose pages are brought in."""

    def __init__(self, path: str | tuple[str, ...], device: str, cache: int):
        """Starts at once."""
        self.path, self.device, self.cache = path, device, cache
        self.key = _key(path, device)
        self.error: OSError | None = None
        self._lock = Lock(self._inherited)
        self._job: Any = None
        self._done: tuple | None = None
        self.maps: Maps | None = None
        self._model: Any = None
        try:
            # Only the job keeps the model, and so the files are open until it ends and no longer;
            # what is mapped, a load that joins looks into.
            if device == "host":
                model, self.maps, _ = open_mapped(path)
            else:
                model = open_model(path)
            self.names = [file[0] for file in model.files()]
            self.files = self._stamps()
            self._tensors = tensors_of(model)
            if self.maps is not None:
                self._model = model
                self.maps.read_ahead([Choice(tensor) for tensor in self._tensors.values()])
                return
            selection = model.select([(i, None, None) for i in range(len(model.tensors()))])
            self.offsets = selection.offsets()
            self._job = selection.load(open_device(device), cache=cache)
        except OSError as error:
            self.error = error.with_traceback(None)

    def _inherited(self) -> None:
        """In a forked child: the bytes are the parent's."""
        self._job = self._done = None

    def _stamps(self) -> list[tuple]:
        """What tells whether a file has changed. The time of change moves along with rights and
        names too, which costs a load that begins anew; but unlike the other it cannot be set."""
        stats = [os.stat(name) for name in self.names]
        return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats]

    def current(self) -> bool:
        """Are the files under their names still those that are being read?"""
        try:
            return self.error is None and self._stamps() == self.files
        except OSError:
            return False

    def tensors(self) -> dict[str, Tensor]:
        """What is coming."""
        return self._tensors

    def opened(self) -> Opened | None:
        """The mapped model, on the host."""
        maps = self.maps
        return None if maps is None else Opened(self._model, maps, "")

    def finish(self, label: str, progress: bool) -> tuple[Any, dict] | None:
        """Take it: wait for the end; the memory and the report. None where it was taken before, or
        a file was changed on the way: the load begins anew."""
        with self._lock:
            job, self._job = self._job, None
            done, self._done = self._done, None
        if job is not None:
            try:
                report = wait(job, label, progress)
            except Error as error:
                if error.errno != errno.ESTALE:
                    raise
                return None
            done = job.memory(), report
        return done

    def cancel(self) -> None:
        """Stop, and free the memory, unless a load has joined. A later load starts anew."""
        _remove(self)
        with self._lock:
            if self._job is not None:
                self._job.cancel()
            self._job = self._done = self.maps = self._model = None

    def wait(self) -> None:
        """Until all bytes are on the device, or a load has joined; raises what went wrong."""
        if self.error is not None:
            _remove(self)
            raise self.error
        maps = self.maps
        while maps is not None and self.maps is maps and maps.reading():
            time.sleep(0.005)
        ended = False
        while not ended:
            with self._lock:
                if self._job is None:
                    return
                try:
                    ended = self._job.wait_for(0.02)
                    if ended:
                        report = self._job.wait()
                        self._done = self._job.memory(), report
                        self._job = None
                except BaseException as error:
                    # It failed, or was interrupted, which stops it: nobody can join it any more.
                    self._job = None
                    if isinstance(error, OSError):
                        self.error = error
                    _remove(self)
                    raise

    def __repr__(self) -> str:
        path = self.path if isinstance(self.path, str) else ", ".join(self.path)
        return f"<penstock.Prefetch {shown(path)} to {self.device}>"


def _key(path, device: str) -> tuple:
    """The same for all names of a file."""
    name = model_name(path)
    try:
        return (os.path.realpath(name) if isinstance(name, str)
                else tuple(map(os.path.realpath, name))), device
    except OSError:
        return name, device     # the working folder was removed


def _remove(prefetch: Prefetch) -> None:
    with _lock:
        if _begun.get(prefetch.key) is prefetch:
            del _begun[prefetch.key]


def _default_device() -> str:
    """The first GPU where there is a driver and a GPU, else the host."""
    try:
        device = open_device("cuda:0")
    except Error:
        return "host"
    if os.path.exists("/dev/nvidia0"):
        return "cuda:0"
    try:
        # A driver without the usual device file: ask it, which takes a moment.
        device.ready()
    except Error:
        return "host"
    return "cuda:0"


def prefetch(path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
             device: Any = None, *, cache: str | None = None) -> Prefetch:
    """Start to load a model; call it before ``import torch``, which takes longer than the load.

    Returns at once; what is under way already is not started twice. ``path`` and ``device`` are
    those of the load that follows, a list of files in the same order; without a device, the first
    GPU, or the host where there is none. ``cache`` is as in load_model(); a load that has another
    does not join. The memory is the engine's own until a load joins. What is wrong with the path is
    raised by that load, or by ``wait()``.
    """
    policy = options("auto", None, cache)[2]
    name = _default_device() if device is None else device_name(device)
    path = model_name(path)
    key = _key(path, name)
    found = _begun.get(key)
    if found is not None and found.error is None and (cache is None or found.cache == policy):
        return found
    made = Prefetch(path, name, policy)
    with _lock:
        found = _begun.get(key)
        if found is None or found.error is not None or found.cache != policy:
            _begun[key] = made
            found, made = made, found
    # What another thread has begun meanwhile, or what was begun with another policy.
    if made is not None:
        made.cancel()
    return found


def under_way(path, device: str) -> bool:
    """Was a load of this path to this device begun?"""
    return bool(_begun) and _key(path, device) in _begun


def take(path, device: str) -> Prefetch | None:
    """What was begun for this path and device, for a load to finish; once."""
    if not _begun:
        return None
    with _lock:
        begun = _begun.pop(_key(path, device), None)
    if begun is None:
        return None
    # What was wrong then may be right now; if not, the load says so.
    if not begun.current():
        begun.cancel()
        return None
    return begun


def drop(path, device: str) -> None:
    """A load that cannot use what was begun: its memory is better spent."""
    begun = take(path, device)
    if begun is not None:
        begun.cancel()
