# SPDX-License-Identifier: MIT
"""Which tensors of a model are wanted, and which box of each."""
from __future__ import annotations

import errno
import os
import re

from . import _penstock
from ._error import refuse

_GLOB = re.compile(r"[*?\[]")


class Tensor:
    """A tensor of a model as its file has it."""

    __slots__ = ("index", "name", "dtype", "shape", "nbytes", "file", "offset")

    def __init__(self, index: int, fields: tuple):
        """From what the engine tells."""
        self.index = index
        self.name, self.dtype, self.shape, self.nbytes, self.file, self.offset = fields


class Choice:
    """A tensor, or a box of it, that is to be loaded; ``shape`` is that of the result."""

    __slots__ = ("tensor", "start", "stop", "shape")

    def __init__(self, tensor: Tensor, start=None, stop=None, shape=None):
        """The whole tensor, unless a box is given."""
        self.tensor, self.start, self.stop = tensor, start, stop
        self.shape = tensor.shape if shape is None else shape

    def as_tuple(self) -> tuple:
        """For Model.select()."""
        return self.tensor.index, self.start, self.stop


def open_model(path) -> _penstock.Model:
    """The model; what is odd about it, but no error, becomes a warning."""
    model = _penstock.Model(os.fspath(path))
    for text in model.warnings():
        import warnings

        warnings.warn(text, stacklevel=4)
    return model


def tensors_of(model: _penstock.Model) -> dict[str, Tensor]:
    """All tensors by name, in the order of files and offsets."""
    return {fields[0]: Tensor(i, fields) for i, fields in enumerate(model.tensors())}


def wanted(names, keys) -> list[str]:
    """Those of `names` that `keys` asks for: a glob, names and globs, or a function."""
    if keys is None:
        return list(names)
    if callable(keys):
        return [name for name in names if keys(name)]
    from fnmatch import translate

    patterns = [keys] if isinstance(keys, str) else list(keys)
    found = set()
    for pattern in patterns:
        if pattern in names:
            found.add(pattern)
            continue
        match = re.compile(translate(pattern)).match if _GLOB.search(pattern) else None
        more = [name for name in names if match(name)] if match else []
        if not more:
            raise no_tensor(names, pattern)
        found.update(more)
    return [name for name in names if name in found]


def no_tensor(names, name: str):
    """The error for a name that is not there, with some that are."""
    from difflib import get_close_matches

    some = get_close_matches(name, names, 3, 0.5) or list(names)[:3]
    hint = f"There are for instance {', '.join(some)}" if some else "The model has no tensors"
    return refuse("find tensor", name, "the model has none of this name", hint, errno.ENOENT)


def box(tensor: Tensor, index) -> Choice:
    """The box that ``tensor[index]`` means: slices without a step, numbers, an ellipsis."""
    def wrong(message: str):
        return refuse("slice", tensor.name, message, "Ranges with step 1, numbers and ... are "
                      "read from the file; index further in memory")

    index = index if isinstance(index, tuple) else (index,)
    rank = len(tensor.shape)
    if index.count(Ellipsis) > 1:
        raise wrong("more than one ellipsis")
    if Ellipsis in index:
        at = index.index(Ellipsis)
        filler = (slice(None),) * (rank - len(index) + 1)
        index = index[:at] + filler + index[at + 1:]
    if len(index) > rank:
        raise wrong(f"{len(index)} indices for {rank} dimensions")
    start, stop, shape = [0] * rank, list(tensor.shape), []
    for axis, length in enumerate(tensor.shape):
        entry = index[axis] if axis < len(index) else slice(None)
        if isinstance(entry, slice):
            first, last, step = entry.indices(length)
            if step != 1:
                raise wrong(f"step {step} in dimension {axis}")
            start[axis], stop[axis] = first, max(first, last)
            shape.append(stop[axis] - first)
            continue
        try:
            number = entry.__index__()
        except AttributeError:
            raise wrong(f"{entry!r} in dimension {axis}") from None
        if not -length <= number < length:
            raise refuse("slice", tensor.name, f"index {number} is out of range for dimension "
                         f"{axis} of size {length}", code=errno.ERANGE)
        start[axis] = number % length
        stop[axis] = start[axis] + 1
    return Choice(tensor, tuple(start), tuple(stop), tuple(shape))


def cover(tensor: Tensor, index) -> tuple[Choice, tuple] | None:
    """For any index that a framework knows: the smallest box that holds what it means, and what to
    index that box with. None where the whole tensor has to be looked at."""
    index = index if isinstance(index, tuple) else (index,)
    if any(not (entry is None or entry is Ellipsis or isinstance(entry, slice)
                or hasattr(entry, "__index__") and not hasattr(entry, "shape")
                and not isinstance(entry, bool)) for entry in index):
        return None
    rank, given = len(tensor.shape), sum(e is not None and e is not Ellipsis for e in index)
    if given > rank or sum(entry is Ellipsis for entry in index) > 1:
        raise IndexError(f"too many indices for tensor of dimension {rank}: {tensor.name}")
    if Ellipsis not in index:
        index += (Ellipsis,)
    start, stop, rest, axis = [], [], [], 0
    for entry in index:
        if entry is None:
            rest.append(None)
            continue
        if entry is Ellipsis:
            for length in tensor.shape[axis:axis + rank - given]:
                start.append(0)
                stop.append(length)
                rest.append(slice(None))
            axis += rank - given
            continue
        length = tensor.shape[axis]
        if isinstance(entry, slice):
            first, last, step = entry.indices(length)
            if step < 1:
                raise ValueError("step must be greater than zero")
            count = len(range(first, last, step))
            start.append(first)
            stop.append(first + (count - 1) * step + 1 if count else first)
            rest.append(slice(None, None, step))
        else:
            number = entry.__index__()
            if not -length <= number < length:
                raise IndexError(f"index {number} is out of bounds for dimension {axis} with size "
                                 f"{length}: {tensor.name}")
            start.append(number % length)
            stop.append(number % length + 1)
            rest.append(0)
        axis += 1
    shape = tuple(last - first for first, last in zip(start, stop))
    return Choice(tensor, tuple(start), tuple(stop), shape), tuple(rest)


def choose(tensors: dict[str, Tensor], keys, slices, into) -> list[Choice]:
    """What a load is asked for, in the order of files and offsets."""
    if keys is None and into is not None:
        keys = list(into)
        for name in keys:
            if name not in tensors:
                raise no_tensor(tensors, name)
    names = wanted(tensors, keys) if keys is not None else list(tensors)
    for name in names if into is not None else ():
        if name not in into:
            raise refuse("load into", name, "into= has no tensor for it")
    slices = dict(slices or {})
    choices = []
    for name in names:
        index = slices.pop(name, None)
        tensor = tensors[name]
        choices.append(Choice(tensor) if index is None else box(tensor, index))
    for name in slices:
        if name not in tensors:
            raise no_tensor(tensors, name)
        raise refuse("slice", name, "keys= does not ask for this tensor")
    return choices
