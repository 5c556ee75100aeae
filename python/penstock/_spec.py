# SPDX-License-Identifier: MIT
"""A tensor described by its address: what safetensors' serialize() and serialize_file() take."""
from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index

from ._error import misuse
from ._frameworks import BITS, DTYPES, Torch

#: By the names that numpy and torch have for them.
_BY_NAME = {theirs: ours for ours, theirs in Torch._names.items()}
_MOST = 1 << 64


def _unsigned(number: int) -> int:
    number = index(number)
    if not 0 <= number < _MOST:
        raise OverflowError(f"{number} is no size or address")
    return number


class TensorSpec:
    """Where the bytes of a tensor are in host memory, and what they mean. The caller keeps them
    there until they are saved."""

    __slots__ = ("_dtype", "_shape", "_data_ptr", "_data_len")

    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        """``dtype`` is a name such as "float32"; of 4-bit numbers, of which two share a byte,
        ``shape`` counts bytes, as torch does."""
        if not isinstance(dtype, str):
            raise TypeError(f"dtype is a text, not {dtype!r}")
        if dtype not in _BY_NAME:
            raise misuse("save", f"{dtype!r}", "safetensors has no such dtype",
                         f"It has {', '.join(sorted(_BY_NAME))}")
        self._dtype = _BY_NAME[dtype]
        self._shape = [_unsigned(length) for length in shape]
        if self._dtype == "F4" and self._shape:
            self._shape[-1] = _unsigned(2 * self._shape[-1])
        self._data_ptr, self._data_len = _unsigned(data_ptr), _unsigned(data_len)

    @property
    def dtype(self) -> str:
        """By the name that the format has, such as "F32"."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """In numbers, as the header has it."""
        return list(self._shape)

    @property
    def data_ptr(self) -> int:
        """The address of the first byte."""
        return self._data_ptr

    @property
    def data_len(self) -> int:
        """The number of bytes."""
        return self._data_len

    def __repr__(self) -> str:
        """As one would make it, in the words of the format."""
        return (f"TensorSpec(dtype={self._dtype!r}, shape={self._shape}, "
                f"data_ptr={self._data_ptr}, data_len={self._data_len})")


def check_length(name: str, spec: TensorSpec) -> None:
    """Refuse a number of bytes that is not that of the shape."""
    if math.prod(spec.shape) * BITS[DTYPES.index(spec.dtype)] != 8 * spec.data_len:
        raise misuse("save", name, f"{spec.data_len} bytes are no {spec.dtype} of shape "
                     f"{spec.shape}")


TensorSpec.__module__ = "penstock.safetensors"
