# SPDX-License-Identifier: MIT
"""Models in host memory without a copy: their files mapped, and tensors that look into the maps.

A map is private: what is written to a tensor goes to pages of its own and never to the file. Pages
that nobody writes to are the page cache itself, shared with every other process. A map lives as
long as something looks into it, and holds no descriptor.

What the header of a model says and what is mapped must be of the same file. Both are opened by
name, so the name is looked at on both sides of the opening: a file that was there before and
is the same afterwards was there in between.
"""
from __future__ import annotations

import os
import stat
from typing import Any, NamedTuple

from . import _penstock
from ._choose import Choice, open_model
from ._device import open_device
from ._frameworks import BITS, Dlpack
from ._names import model_name

#: How often a model is opened again whose files change at that moment.
_TRIES = 3
#: Ranges with less than this between them are read ahead as one.
_GAP = 1 << 20
#: So much is read ahead without a look at how much memory is free.
_ALWAYS_FITS = 1 << 30
#: A tensor of this size that is asked for alone is read ahead as a whole ...
_LARGE = 1 << 20
#: ... and smaller ones by zones of the file: the next ones when two neighbours were looked into.
_ZONE = 16 << 20
_ZONES_AHEAD = 4


def _identity(found: os.stat_result) -> tuple:
    """Differs when a file was replaced or changed in between."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _named(path) -> dict[str, tuple]:
    """The files that a model may be made of, as they are now."""
    name = model_name(path)
    try:
        if not isinstance(name, str):
            names = list(name)
        elif os.path.isdir(name) or name.endswith(".json"):
            folder = name if os.path.isdir(name) else os.path.dirname(name)
            names = [os.path.join(folder, entry) for entry in os.listdir(folder)
                     if entry.endswith(".safetensors")]
        else:
            names = [name]
        return {each: _identity(os.stat(each)) for each in names}
    except OSError:
        return {}       # the engine says what is wrong


class Maps:
    """The mapped files of a model."""

    def __init__(self) -> None:
        """None yet; see open_mapped()."""
        self.files: list[_penstock.Memory] = []
        #: Does the kernel tell us what of each file is cached?
        self.told: list[bool] = []
        self.zones: set[tuple[int, int]] = set()

    def add(self, name: str, size: int) -> tuple:
        """Map one more file, if it has the size that it should have; its identity."""
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError("it is no regular file")
            if found.st_size == size:
                self.files.append(_penstock.map_file(open_device("host"), fd, size))
        finally:
            os.close(fd)
        self.told.append(found.st_uid == os.geteuid()
                         or os.access(name, os.W_OK, effective_ids=True))
        return _identity(found)

    def read_ahead(self, choices: list[Choice]) -> None:
        """Have what these need brought into the page cache, unless it is there."""
        ranges: list[list[tuple[int, int]]] = [[] for _ in self.files]
        for choice in choices:
            first, size = span(choice)
            if not size:
                continue
            of_file = ranges[choice.tensor.file]
            if of_file and first - sum(of_file[-1]) < _GAP:
                first, size = of_file[-1][0], max(first + size, sum(of_file[-1])) - of_file[-1][0]
                of_file.pop()
            of_file.append((first, size))
        room = sum(size for of_file in ranges for _, size in of_file)
        if room > _ALWAYS_FITS:
            room = min(room, _penstock.memory_available() // 2)
        for file, of_file in enumerate(ranges):
            part = _cut(of_file, room)
            room -= sum(size for _, size in part)
            if part:
                self._fetch(file, part)

    def _fetch(self, file: int, ranges: list[tuple[int, int]]) -> bool:
        return self.files[file].read_ahead(ranges, self.told[file])

    def look(self, choice: Choice) -> None:
        """A tensor was asked for, and others may follow."""
        (start, size), file = span(choice), choice.tensor.file
        first, last = start // _ZONE, (start + size) // _ZONE
        if size >= _LARGE:
            self._fetch(file, [(start, size)])
        elif (file, last) not in self.zones and (file, last - 1) in self.zones:
            end = min((last + _ZONES_AHEAD) * _ZONE, self.files[file].size)
            self._fetch(file, [(last * _ZONE, end - last * _ZONE)])
        self.zones.add((file, first))
        self.zones.add((file, last))

    def reading(self) -> bool:
        """Are pages still on their way?"""
        return any(file.reading() for file in self.files)

    def tensor(self, choice: Choice, target: Dlpack) -> Any:
        """A tensor that looks into its file; for those that fits() is true of."""
        tensor = choice.tensor
        offset = tensor.offset if choice.start is None else span(choice)[0]
        return target.view(self.files[tensor.file], offset, tensor.dtype, choice.shape)

    def tensors(self, choices: list[Choice], target: Dlpack) -> dict[str, Any]:
        """Of several, by name."""
        view, files, found = target.view, self.files, {}
        for choice in choices:
            tensor = choice.tensor
            offset = tensor.offset if choice.start is None else span(choice)[0]
            found[tensor.name] = view(files[tensor.file], offset, tensor.dtype, choice.shape)
        return found


class Unread(Maps):
    """Of a model whose tensors are wanted without their bytes."""

    def read_ahead(self, choices: list[Choice]) -> None:
        """Nothing is read."""

    def look(self, choice: Choice) -> None:
        """Nothing is read."""

    def tensor(self, choice: Choice, target: Dlpack) -> Any:
        """Its dtype and shape."""
        return target.view(None, 0, choice.tensor.dtype, choice.shape)

    def tensors(self, choices: list[Choice], target: Dlpack) -> dict[str, Any]:
        """Of several, by name."""
        return {choice.tensor.name: self.tensor(choice, target) for choice in choices}


def _cut(ranges: list[tuple[int, int]], room: int) -> list[tuple[int, int]]:
    """No more than `room` bytes of them: what is read further ahead would push out the first."""
    kept = []
    for first, size in ranges:
        if room <= 0:
            break
        kept.append((first, min(size, room)))
        room -= size
    return kept


def span(choice: Choice) -> tuple[int, int]:
    """(first byte in the file, bytes) of a tensor or of a box that fits()."""
    tensor = choice.tensor
    if choice.start is None:
        return tensor.offset, tensor.nbytes
    bits, first, step = BITS[tensor.dtype], 0, 1
    count = 1
    for start, stop, length in zip(reversed(choice.start), reversed(choice.stop),
                                   reversed(tensor.shape)):
        first += start * step
        count *= stop - start
        step *= length
    return tensor.offset + first * bits // 8, count * bits // 8


def is_one_stretch(choice: Choice) -> bool:
    """Do the bytes of a box follow each other in the file?"""
    if choice.start is None:
        return True
    if BITS[choice.tensor.dtype] < 8:
        return False
    cut = False     # has a dimension behind this one been cut?
    for start, stop, length in zip(reversed(choice.start), reversed(choice.stop),
                                   reversed(choice.tensor.shape)):
        if cut and stop - start > 1:
            return False
        cut |= stop - start < length
    return True


def fits(choice: Choice, target: Dlpack) -> bool:
    """Can a tensor of the framework look at these bytes where they are?"""
    if not target.has_bytes:
        return True
    if choice.dtype != choice.tensor.dtype or not is_one_stretch(choice):
        return False
    alignment = target.alignment(choice.tensor.dtype)
    return alignment == 1 or span(choice)[0] % alignment == 0


class Opened(NamedTuple):
    """A model, and its files as memory; None and the reason where they are not mapped."""

    model: _penstock.Model
    maps: Maps | None
    reason: str


def open_mapped(path) -> Opened:
    """Open a model and map its files."""
    before = _named(path)
    for _ in range(_TRIES):
        model, maps = open_model(path), Maps()
        if model.coded():
            return Opened(model, None, "the file is packed, and has to be decoded")
        try:
            found = {name: maps.add(name, size) for name, _, size, *_ in model.files()}
        except OSError as error:
            return Opened(model, None, f"the file cannot be mapped: {error.strerror or error}")
        if len(maps.files) == len(found) and before.items() >= found.items():
            return Opened(model, maps, "")
        before = found
    return Opened(model, None, "the file changes while it is opened")
