# SPDX-License-Identifier: MIT
"""The interface of safetensors.safe_open, over the engine."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import _penstock
from ._choose import Choice, Tensor, box, cover, no_tensor, open_model, tensors_of
from ._error import Error
from ._fork import Lock
from ._frameworks import DTYPES, adapter
from ._load import _groups, _label, _load_plain, _Moves, _run
from ._options import check_backend


class Slice:
    """A tensor that is not read yet; indexing it reads that part of the file and no more. It keeps
    the file open, also when that was closed in the meantime."""

    def __init__(self, read: Callable[[Choice], Any], tensor: Tensor, framework: str):
        """Made by get_slice()."""
        self._read, self._tensor, self._framework = read, tensor, framework

    def get_shape(self) -> list[int]:
        """Of the whole tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """By safetensors' name, such as "BF16"."""
        return DTYPES[self._tensor.dtype]

    def __getitem__(self, index) -> Any:
        """Read a part, as one would index the tensor: only the box around it is read. What
        cannot be told beforehand (lists, masks) reads the whole tensor."""
        if self._framework == "dlpack":
            # Arrays cannot be indexed further, so the file must have it as it is asked for.
            return self._read(box(self._tensor, index))
        found = cover(self._tensor, index)
        if found is None:
            return self._read(Choice(self._tensor))[index]
        choice, rest = found
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
        return _run(model, groups, target, None, False, _Moves(*options, False), label)

    return read


class safe_open:  # noqa: N801 - the name that people know
    """Open a safetensors file, or a sharded model, and read tensors one by one.

    What code written for ``safetensors.safe_open`` calls: keys, offset_keys, metadata, get_tensor,
    get_slice, as a context manager or not. ``framework`` and ``device`` are as in load_model(),
    which is faster where all tensors are wanted.
    """

    def __init__(self, filename: str | os.PathLike, framework: str = "pt", device: Any = "cpu",
                 *, transfer: str | int = "auto", memory_limit: int | None = None,
                 backend: str = "mmap"):
        """Reads the header only. (`backend` is safetensors' and means nothing here.)"""
        check_backend(backend)
        self._target = adapter(framework, device)
        self._moves = transfer, memory_limit
        _Moves(transfer, memory_limit, False)
        self._label = _label(filename)
        self._model = open_model(filename)
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
        self._model = self._ahead = None

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

    def _read(self, model: _penstock.Model, choice: Choice) -> Any:
        moves = _Moves(*self._moves, False)
        found = _load_plain(model, [choice], self._target, None, True, moves, self._label)
        moves.keep_report(self._target.device)
        return found[choice.tensor.name]

    def get_tensor(self, name: str) -> Any:
        """Read one tensor. Reading all of them, one after the other, is noticed and read ahead."""
        tensor = self._tensor(name)
        found = self._ahead.take(name)
        return self._read(self._opened(), Choice(tensor)) if found is None else found

    def get_tensors(self) -> dict[str, Any]:
        """Read all of them, at once."""
        moves = _Moves(*self._moves, False)
        choices = [Choice(tensor) for tensor in self._tensors.values()]
        found = _load_plain(self._opened(), choices, self._target, None, True, moves, self._label)
        moves.keep_report(self._target.device)
        return found

    def get_slice(self, name: str) -> Slice:
        """A tensor to read parts of."""
        return Slice(partial(self._read, self._opened()), self._tensor(name), self._target.name)
