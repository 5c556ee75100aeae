# SPDX-License-Identifier: MIT
"""Which part of a tensor an index means where safetensors reads the parts itself.

That is so for arrays of numpy and JAX, and for tensors of torch with ``backend="pread"``; tensors
of torch that look into a file are indexed by torch. safetensors has numbers, ranges forwards from
the beginning that stay within the tensor, and one ellipsis, and refuses all else. Programs may
count on either, so it is the same here, in the same words.
"""
from __future__ import annotations

from operator import index as as_number
from typing import Any

from ._choose import Choice, Tensor
from ._error import Error, misuse

_NUMBERS, _STEPS, _BOUNDS = 1 << 31, 1 << 63, 1 << 64


class _Range:
    """first:last:step, as it was written."""

    def __init__(self, first: int | None, last: int | None, step: int = 1):
        self.first, self.last, self.step = first, last, step

    def __str__(self) -> str:
        text = f"{'' if self.first is None else self.first}:"
        text += "" if self.last is None else str(self.last)
        return text if self.step == 1 else f"{text}:{self.step}"

    def within(self, length: int) -> tuple[int, int]:
        """The first number and the one after the last."""
        return self.first or 0, length if self.last is None else self.last


def _refused(tensor: Tensor, words: str) -> Error:
    return misuse("slice", tensor.name, words, "Numbers, forward ranges within the tensor and one "
                  "... are read from the file; index further in memory", words)


def _bound(value: Any) -> int | None:
    if value is None:
        return None
    number = as_number(value)
    if number < 0:
        raise OverflowError(f"can't convert negative int to unsigned: {number}, and ranges are "
                            "counted from the beginning")
    if number >= _BOUNDS:
        raise OverflowError(f"int too big to convert: {number}")
    return number


def _range(tensor: Tensor, entry: slice) -> _Range:
    first, last = _bound(entry.start), _bound(entry.stop)
    step = 1 if entry.step is None else as_number(entry.step)
    if not -_STEPS <= step < _STEPS:
        raise OverflowError(f"int too big to convert: {step}")
    if step < 1:
        raise _refused(tensor, f"Slice step must be a positive integer, got {step}")
    return _Range(first, last, step)


def _number(tensor: Tensor, entry: Any, axis: int) -> int:
    try:
        number = as_number(entry)
    except TypeError:
        number = None
    if number is None or not -_NUMBERS <= number < _NUMBERS:
        raise _refused(tensor, f"Unsupported slice index at position {axis}: expected slice, int, "
                       "or ellipsis")
    length = tensor.shape[axis] if axis < len(tensor.shape) else 0
    if number + length < 0:
        raise _refused(tensor, f"Invalid index {number} for dimension {axis} of size {length}")
    return number + length if number < 0 else number


def _entries(tensor: Tensor, index: Any) -> list[int | _Range]:
    """What is asked of each dimension, from the first on."""
    if isinstance(index, list):
        if index:
            raise _refused(tensor, "Non empty lists are not implemented")
        return [_Range(0, 0)]
    index = index if isinstance(index, tuple) else (index,)
    dots = sum(entry is Ellipsis for entry in index)
    if dots > 1:
        raise _refused(tensor, "Only one ellipsis (...) is allowed in slice index")
    found: list[int | _Range] = []
    for entry in index:
        if entry is Ellipsis:
            found += [_Range(None, None)] * (len(tensor.shape) - len(index) + dots)
        elif isinstance(entry, slice):
            found.append(_range(tensor, entry))
        else:
            found.append(_number(tensor, entry, len(found)))
    return found


def narrow(tensor: Tensor, index: Any) -> tuple[Choice, tuple]:
    """The box that holds what an index means, and what to index that with."""
    entries, shape = _entries(tensor, index), list(tensor.shape)

    def wrong(words: str) -> Error:
        asked = ", ".join(map(str, entries))
        return _refused(tensor, f"Error during slicing [{asked}] with shape {shape}: {words}")

    if len(entries) > len(shape):
        raise wrong("more slicing indexes than dimensions in tensor")
    start, stop, rest = [0] * len(shape), list(shape), [slice(None)] * len(shape)
    for axis in reversed(range(len(entries))):
        entry, length = entries[axis], shape[axis]
        first, last = (entry, entry + 1) if isinstance(entry, int) else entry.within(length)
        if first >= length or last > length:
            asked = first if first >= length else last - 1
            raise wrong(f"index {asked} out of bounds for tensor dimension #{axis} of size "
                        f"{length}")
        if last < first:
            raise wrong(f"the range of dimension #{axis} ends before it begins")
        start[axis], stop[axis] = first, last
        if isinstance(entry, int):
            rest[axis] = 0
        elif entry.step > 1 and last > first:
            stop[axis] = last - 1 - (last - 1 - first) % entry.step + 1
            rest[axis] = slice(None, None, entry.step)
    box = tuple(last - first for first, last in zip(start, stop))
    return Choice(tensor, tuple(start), tuple(stop), box), tuple(rest)
