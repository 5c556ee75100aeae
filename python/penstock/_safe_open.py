# SPDX-License-Identifier: MIT
"""The interface of safetensors.safe_open, over the engine."""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from . import _penstock, _report
from ._choose import Choice, box, cover, no_tensor, tensors_of
from ._error import Error, misuse
from ._fork import Lock
from ._frameworks import BITS, DTYPES, Dlpack, Torch, adapter
from ._load import (NOT_AS_THEY_LIE, Group, Model, Part, _groups, _label, _Moves, _run, _to_convert,
                    load_parts, load_plain, maps_files, open_files)
from ._mapped import Maps, Opened, Unread, fits, is_one_stretch, span
from ._names import model_name
from ._options import copies
from ._rules import Tensor
from ._slices import narrow


class Slice:
    """A tensor that is not read yet; indexing it reads that part of the file and no more. It keeps
    the file open, also when that was closed in the meantime."""

    def __init__(self, read: Callable[[Choice], Any], tensor: Tensor, target: Dlpack, narrow: bool,
                 looks: bool):
        """Made by get_slice(). `narrow`: it is indexed as safetensors does, not as the framework
        does. `looks`: the whole tensor is to be had without reading it."""
        self._read, self._tensor, self._target = read, tensor, target
        self._narrow, self._looks = narrow, looks

    def get_shape(self) -> list[int]:
        """Of the whole tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """By safetensors' name, such as "BF16"."""
        return DTYPES[self._tensor.dtype]

    def __getitem__(self, index: Any) -> Any:
        """Read a part. Of a torch tensor it is what indexing that would give: only the box around
        it is read, or, for what cannot be told beforehand (lists, masks), the whole; of one that
        looks into its file, parts do the same. Of others it is what safetensors takes: numbers,
        ranges and an ellipsis."""
        if self._narrow:
            choice, rest = narrow(self._tensor, index)
            # With the dots an array without dimensions stays one.
            return self._target.compact(self._read(choice)[(*rest, ...)])
        if self._target.name == "dlpack":
            # Arrays cannot be indexed further, so the file must have it as it is asked for.
            return self._read(box(self._tensor, index))
        found = self._cover(index)
        if found is None:
            return self._read(Choice(self._tensor))[index]
        choice, rest = found
        if self._looks and not is_one_stretch(choice):
            return self._read(Choice(self._tensor))[index]
        part = self._read(choice)
        plain = all(entry == slice(None, None, 1) or entry == slice(None) for entry in rest)
        return part if plain else part[rest]

    def _cover(self, index: Any) -> tuple[Choice, tuple] | None:
        """The box around an index, None for the whole. On what we refuse torch has the last word:
        it is asked with a tensor of the same shape, and raises its own errors."""
        try:
            found = cover(self._tensor, index)
        except (IndexError, OverflowError, TypeError, ValueError):
            if not isinstance(self._target, Torch):
                raise
            self._target.torch.empty((), dtype=self._target.torch.uint8).expand(
                self._tensor.shape)[index]
            return None
        # Of steps that are larger than any tensor torch has an idea of its own.
        large = found is not None and any(isinstance(entry, slice) and (entry.step or 1) >= 1 << 31
                                          for entry in found[1])
        return None if large else found


#: Who reads tensor after tensor gets the next ones read ahead, this many bytes in two groups.
_AHEAD = 256 << 20
#: After so many in a row.
_IN_A_ROW = 3


class _Ahead:
    """Notices that tensors are read one after the other, in one of the two usual orders, and has
    the next ones under way. Each has memory of its own, so that keeping one keeps no other."""

    def __init__(self, read: Callable[[list[Tensor]], Iterator], tensors: dict[str, Tensor]):
        """`read` gives (choice, tensor) for tensors as they land."""
        self.read, self.tensors = read, tensors
        self.orders = [list(tensors), sorted(tensors)]
        self.places = [{name: at for at, name in enumerate(order)} for order in self.orders]
        self.rows = [0] * len(self.orders)
        self.last: str | None = None
        self.lock = Lock(self._forget)
        self.coming: Iterator | None = None
        self.order = 0
        self.landed: dict[str, Any] = {}

    def _forget(self) -> None:
        """In a forked child: what is under way is the parent's, and may be in use there."""
        self.coming, self.landed = None, {}

    def take(self, name: str) -> Any | None:
        """The tensor, if it is under way; None: read it in the ordinary way."""
        with self.lock:
            for i, places in enumerate(self.places):
                follows = self.last is not None and places[name] == places[self.last] + 1
                self.rows[i] = self.rows[i] + 1 if follows else 0
            self.last = name
            best = self.rows.index(max(self.rows))
            if self.rows[best] < _IN_A_ROW:
                self._stop()
                return None
            if self.coming is None or best != self.order:
                self._start(best, self.places[best][name])
            while name not in self.landed:
                choice, tensor = next(self.coming, (None, None))
                if choice is None:
                    return None
                self.landed[choice.tensor.name] = tensor
            return self.landed.pop(name)

    def _start(self, order: int, at: int) -> None:
        self._stop()
        self.order = order
        self.coming = self.read([self.tensors[name] for name in self.orders[order][at:]])

    def _stop(self) -> None:
        if self.coming is not None:
            self.coming.close()
        self.coming, self.landed = None, {}

    def stop(self) -> None:
        """Nobody wants them any more."""
        with self.lock:
            self._stop()


def _reader(model, target, options: tuple, label: str) -> Callable[[list[Tensor]], Iterator]:
    """What _Ahead reads with. Tensors that the framework cannot have are left out: who asks for
    one of them is told."""
    def possible(tensor: Tensor) -> bool:
        try:
            target.check(tensor.name, tensor.dtype)
        except Error:
            return False
        return True

    def read(tensors: list[Tensor]) -> Iterator:
        groups = _groups([Choice(tensor) for tensor in tensors if possible(tensor)], _AHEAD // 2)
        return _run(model, groups, target, None, False, _Moves(*options), label)

    return read


class _Open(NamedTuple):
    """What an open safe_open has: taken once by each call, so that closing it in another thread
    takes nothing away in the middle."""

    model: _penstock.Model
    maps: Maps | None
    reason: str
    ahead: _Ahead


class safe_open:  # noqa: N801 - the name that people know
    """Open a safetensors file, a sharded model or a list of files, and read tensors one by one.

    What code written for ``safetensors.safe_open`` calls: keys, offset_keys, metadata, get_tensor,
    get_tensors, get_slice, as a context manager or not. ``framework``, ``device``, ``copy`` and
    ``cache`` are as in load_model(), which is faster where all tensors are wanted. Threads may
    share one.
    """

    def __init__(self, filename: Model, framework: str = "pt", device: Any = "cpu",
                 *, copy: bool = False, transfer: str | int = "auto",
                 memory_limit: int | None = None, cache: str | None = None,
                 backend: str = "mmap"):
        """Reads the header only. (`backend` is safetensors': "pread" is copy=True, and slices that
        safetensors reads itself.)"""
        copy = copies(backend) or copy
        self._target = target = adapter(framework, device)
        self._moves = transfer, memory_limit, False, cache
        self._narrow = target.narrow or copies(backend)
        #: Names of arrays that were handed out, look into the file and can be written to.
        self._given: set[str] = set()
        self._apart = target.narrow and not target.copies
        mapped = maps_files(target, _Moves(*self._moves), copy)
        name = model_name(filename)
        self._label = _label(name)
        try:
            model, maps, reason = open_files(name, mapped)
        except FileNotFoundError as error:
            # It may be a shard that is missing.
            if isinstance(name, str) and not os.path.exists(name):
                error.words = f"No such file or directory: {os.fsdecode(filename)}"
            raise
        if not target.has_bytes:
            maps = Unread()
        self._tensors = tensors_of(model)
        ahead = _Ahead(_reader(model, target, self._moves, self._label), self._tensors)
        self._open: _Open | None = _Open(model, maps, reason, ahead)

    def __enter__(self) -> safe_open:
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close. Tensors stay, and slices can be read on."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.ahead.stop()

    def __reduce__(self):
        """What it reads ahead is its own."""
        raise TypeError("a safe_open cannot be copied or pickled: open the file again")

    def _opened(self) -> _Open:
        opened = self._open
        if opened is None:
            raise misuse("read", self._label, "the file is closed",
                         "Read within the with block, or open it again")
        return opened

    def keys(self) -> list[str]:
        """All names, sorted."""
        self._opened()
        return sorted(self._tensors)

    def offset_keys(self) -> list[str]:
        """All names, in the order of the file."""
        self._opened()
        return list(self._tensors)

    def metadata(self) -> dict[str, str] | None:
        """Of the file, or None where it has none; of a sharded model, those of all shards."""
        found = [metadata for *_, metadata in self._opened().model.files() if metadata is not None]
        return {key: value for each in found for key, value in each.items()} if found else None

    def _tensor(self, name: str) -> Tensor:
        if not isinstance(name, str) or name not in self._tensors:
            raise no_tensor(self._tensors, name)
        return self._tensors[name]

    def _looks(self, opened: _Open, choice: Choice) -> bool:
        """Can a tensor look into the file? Arrays of numpy are each the caller's own, as with
        safetensors: the second of the same name is a copy, that none sees what is written to
        another."""
        if opened.maps is None or not fits(choice, self._target):
            return False
        return not self._apart or choice.tensor.name not in self._given

    def _read(self, opened: _Open, choice: Choice) -> Any:
        if self._looks(opened, choice):
            return self._look(opened.maps, choice)
        moves = _Moves(*self._moves)
        moves.not_mapped([choice], NOT_AS_THEY_LIE if opened.maps is not None else opened.reason)
        group = Group(opened.model, [choice], self._target, True)
        found = load_plain(opened.model, [group], moves, self._label)
        moves.keep_report(self._target.device)
        return found[choice.tensor.name]

    def _look(self, maps: Maps, choice: Choice) -> Any:
        """A tensor that looks into the file."""
        started = time.perf_counter()
        maps.look(choice)
        if self._apart:
            self._given.add(choice.tensor.name)
        found = maps.tensor(choice, self._target)
        count = span(choice)[1] if self._target.has_bytes else 0
        _report.keep_mapped(count, time.perf_counter() - started)
        return found

    def get_tensor(self, name: str) -> Any:
        """Read one tensor. Reading all of them, one after the other, is noticed and read ahead."""
        opened, tensor = self._opened(), self._tensor(name)
        choice = Choice(tensor)
        self._target.check(name, tensor.dtype)
        if self._looks(opened, choice):
            return self._look(opened.maps, choice)
        found = opened.ahead.take(name)
        return self._read(opened, choice) if found is None else found

    def get_tensors(self) -> dict[str, Any]:
        """Read all of them, at once."""
        if self._given:
            return {name: self.get_tensor(name) for name in self.offset_keys()}
        opened = self._opened()
        moves = _Moves(*self._moves)
        choices = [Choice(tensor) for tensor in self._tensors.values()]
        if self._apart:
            self._given.update(self._tensors)
        part = Part(Opened(*opened[:3]), choices, self._target,
                    _to_convert(choices, self._target, None, None), None)
        found = load_parts([part], True, moves, self._label)
        moves.keep_report(self._target.device)
        return found

    def get_slice(self, name: str) -> Slice:
        """A tensor to read parts of."""
        opened, tensor = self._opened(), self._tensor(name)
        looks = not self._target.copies and BITS[tensor.dtype] >= 8 \
            and self._looks(opened, Choice(tensor))
        return Slice(partial(self._read, opened), tensor, self._target, self._narrow, looks)
