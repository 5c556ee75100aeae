# SPDX-License-Identifier: MIT
"""Bytes that move before anybody asks for tensors."""
from __future__ import annotations

import os
import threading
from typing import Any

from . import _penstock
from ._choose import Tensor, tensors_of
from ._device import device_name, open_device
from ._error import Error

_lock = threading.Lock()
_begun: dict[tuple[str, str], Prefetch] = {}
# A forked child has none of the threads that move the bytes.
os.register_at_fork(after_in_child=_begun.clear)


class Prefetch:
    """A model on its way to a device. The next load_model() or load_file() of the same path and
    device joins it and gets its tensors; cancel() stops it and frees its memory."""

    def __init__(self, path: str, device: str):
        """Starts at once."""
        self.path, self.device = path, device
        self.key = os.path.realpath(path), device
        self.error: OSError | None = None
        try:
            self.model = _penstock.Model(path)
            selection = self.model.select([(i, None, None)
                                           for i in range(len(self.model.tensors()))])
            self.offsets = selection.offsets()
            self.files = self._stamps()
            self.job = selection.load(open_device(device))
        except OSError as error:
            self.error = error

    def _stamps(self) -> list[tuple]:
        stats = [os.stat(file[0]) for file in self.model.files()]
        return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats]

    def current(self) -> bool:
        """Are the files under their names still those that are being read?"""
        try:
            return self._stamps() == self.files
        except OSError:
            return False

    def tensors(self) -> dict[str, Tensor]:
        """What is coming."""
        return tensors_of(self.model)

    def cancel(self) -> None:
        """Stop, and free the memory. A load that comes later starts from the beginning."""
        with _lock:
            if _begun.get(self.key) is self:
                del _begun[self.key]
        if self.error is None and self.job is not None:
            self.job.cancel()
            self.job = None

    def wait(self) -> None:
        """Until all bytes are on the device; raises what went wrong, if it is known by then."""
        if self.error is not None:
            raise self.error
        while self.job is not None and not self.job.wait_for(0.1):
            pass

    def __repr__(self) -> str:
        return f"<penstock.Prefetch {self.path} to {self.device}>"


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


def prefetch(path: str | os.PathLike, device: Any = None) -> Prefetch:
    """Start to load a model; call it before ``import torch``, which takes longer than the load.

    Returns at once; what is under way already is not started twice. ``device`` is that of the load
    that follows; without one, the first GPU, or the host where there is none. The memory is the
    engine's own until a load joins. What is wrong with the path is raised by that load, or by
    ``wait()``.
    """
    name = _default_device() if device is None else device_name(device)
    path = os.fspath(path)
    with _lock:
        begun = _begun.get((os.path.realpath(path), name))
        if begun is None or begun.error is not None:
            begun = Prefetch(path, name)
            _begun[begun.key] = begun
    return begun


def take(path, device: str) -> Prefetch | None:
    """What was begun for this path and device, for a load to finish; once."""
    if not _begun:
        return None
    with _lock:
        begun = _begun.pop((os.path.realpath(os.fspath(path)), device), None)
    if begun is None:
        return None
    # What was wrong then may be right now; if not, the load says so.
    if begun.error is not None or not begun.current():
        begun.cancel()
        return None
    return begun


def drop(path, device: str) -> None:
    """A load that cannot use what was begun: its memory is better spent."""
    if _begun:
        begun = _begun.get((os.path.realpath(os.fspath(path)), device))
        if begun is not None:
            begun.cancel()
