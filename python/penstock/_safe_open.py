# SPDX-License-Identifier: MIT
"""The interface of safetensors.safe_open, over the engine."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import _penstock, _report
from ._choose import Choice, box, cover, no_tensor, tensors_of
from ._error import Error
from ._fork import Lock
from ._frameworks import BITS, DTYPES, adapter
from ._load import (NOT_AS_THEY_LIE, Model, _groups, _label, _load_plain, _Moves, _run, _to_convert,
                    load_choices, maps_files, open_files)
from ._mapped import Maps, Opened, fits, is_one_stretch, span
from ._names import model_name
from ._options import copies
from ._rules import Tensor


class Slice:
    """A tensor that is not read yet; indexing it reads that part of the file and no more. It keeps
    the file open, also when that was closed in the meantime."""

    def __init__(self, read: Callable[[Choice], Any], tensor: Tensor, framework: str, looks: bool):
        """Made by get_slice(). `looks`: the whole tensor is to be had without reading it."""
        self._read, self._tensor, self._framework = read, tensor, framework
        self._looks = looks

    def get_shape(self) -> list[int]:
        """Of the whole tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """By safetensors' name, such as "BF16"."""
        return DTYPES[self._tensor.dtype]

    def __getitem__(self, index) -> Any:
        """Read a part, as one would index the tensor: only the box around it is read. What
        cannot be told beforehand (lists, masks) reads the whole tensor. Of a tensor that looks
        into its file, parts do the same."""
        if self._framework == "dlpack":
            # Arrays cannot be indexed further, so the file must have it as it is asked for.
            return self._read(box(self._tensor, index))
        found = cover(self._tensor, index)
        if found is None:
            return self._read(Choice(self._tensor))[index]
        choice, rest = found
        if self._looks and not is_one_stretch(choice):
            return self._read(Choice(self._tensor))[index]
        part = self._read(choice)
        plain = all(entry == slice(None, None, 1) or entry == slice(None) for entry in rest)
        return part if plain else part[rest]


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


class safe_open:  # noqa: N801 - the name that people know
    """Open a safetensors file, a sharded model or a list of files, and read tensors one by one.

    What code written for ``safetensors.safe_open`` calls: keys, offset_keys, metadata, get_tensor,
    get_slice, as a context manager or not. ``framework``, ``device``, ``copy`` and ``cache`` are as
    in load_model(), which is faster where all tensors are wanted.
    """

    def __init__(self, filename: Model, framework: str = "pt", device: Any = "cpu",
                 *, copy: bool = False, transfer: str | int = "auto",
                 memory_limit: int | None = None, cache: str | None = None,
                 backend: str = "mmap"):
        """Reads the header only. (`backend` is safetensors': "pread" is copy=True.)"""
        copy = copies(backend) or copy
        self._target = adapter(framework, device)
        self._moves = transfer, memory_limit, False, cache
        mapped = maps_files(self._target, _Moves(*self._moves), copy)
        filename = model_name(filename)
        self._label = _label(filename)
        self._model, self._maps, self._reason = open_files(filename, mapped)
        self._tensors = tensors_of(self._model)
        self._ahead = _Ahead(_reader(self._model, self._target, self._moves, self._label),
                             self._tensors)

    def __enter__(self) -> safe_open:
        """Itself."""
        self._opened()
        return self

    def __exit__(self, *exception) -> None:
        """Close. Tensors stay."""
        if self._model is not None:
            self._ahead.stop()
        self._model = self._ahead = self._maps = None

    def __reduce__(self):
        """What it reads ahead is its own."""
        raise TypeError("a safe_open cannot be copied or pickled: open the file again")

    def _opened(self) -> _penstock.Model:
        if self._model is None:
            raise ValueError("the file is closed")
        return self._model

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
        found = [metadata for *_, metadata in self._opened().files() if metadata is not None]
        return {key: value for each in found for key, value in each.items()} if found else None

    def _tensor(self, name: str) -> Tensor:
        self._opened()
        if not isinstance(name, str) or name not in self._tensors:
            raise no_tensor(self._tensors, name)
        return self._tensors[name]

    def _read(self, opened: tuple[_penstock.Model, Maps | None], choice: Choice) -> Any:
        model, maps = opened
        if maps is not None and fits(choice, self._target):
            return self._look(maps, choice)
        moves = _Moves(*self._moves)
        moves.not_mapped([choice], NOT_AS_THEY_LIE if maps is not None else self._reason)
        found = _load_plain(model, [choice], self._target, None, True, moves, self._label)
        moves.keep_report(self._target.device)
        return found[choice.tensor.name]

    def _look(self, maps: Maps, choice: Choice) -> Any:
        """A tensor that looks into the file."""
        started = time.perf_counter()
        maps.look(choice)
        found = maps.tensor(choice, self._target)
        _report.keep_mapped(span(choice)[1], time.perf_counter() - started)
        return found

    def get_tensor(self, name: str) -> Any:
        """Read one tensor. Reading all of them, one after the other, is noticed and read ahead."""
        tensor = self._tensor(name)
        choice = Choice(tensor)
        self._target.check(name, tensor.dtype)
        if self._maps is not None and fits(choice, self._target):
            return self._look(self._maps, choice)
        found = self._ahead.take(name)
        return self._read((self._opened(), self._maps), choice) if found is None else found

    def get_tensors(self) -> dict[str, Any]:
        """Read all of them, at once."""
        moves = _Moves(*self._moves)
        choices = [Choice(tensor) for tensor in self._tensors.values()]
        opened = Opened(self._opened(), self._maps, self._reason)
        found = load_choices(opened, choices, self._target,
                             _to_convert(choices, self._target, None, None), None, True, moves,
                             self._label)
        moves.keep_report(self._target.device)
        return found

    def get_slice(self, name: str) -> Slice:
        """A tensor to read parts of."""
        opened, tensor = (self._opened(), self._maps), self._tensor(name)
        looks = self._maps is not None and not self._target.copies and BITS[tensor.dtype] >= 8 \
            and fits(Choice(tensor), self._target)
        return Slice(partial(self._read, opened), tensor, self._target.name, looks)
