# SPDX-License-Identifier: MIT
"""The names of safetensors.numpy, over Penstock."""
from __future__ import annotations

import os
from collections.abc import Mapping

import numpy

from .. import _load
from .._bytes import tensors_in
from .._frameworks import adapter
from .._save import save_bytes
from .._save import save_file as _save_file

__all__ = ["load", "load_file", "save", "save_file"]


def save(tensor_dict: Mapping[str, numpy.ndarray],
         metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file with these arrays."""
    return save_bytes(tensor_dict, metadata)


def save_file(tensor_dict: Mapping[str, numpy.ndarray], filename: str | os.PathLike,
              metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; it appears when it is complete and durable."""
    _save_file(tensor_dict, filename, metadata)


def load(data: bytes) -> dict[str, numpy.ndarray]:
    """The arrays in the bytes of a safetensors file."""
    target, found = adapter("np", "cpu"), {}
    for tensor, _, content in tensors_in(data):
        target.check(tensor.name, tensor.dtype)
        found[tensor.name] = target.from_bytes(content, tensor.dtype, tensor.shape)
    return found


def load_file(filename: str | os.PathLike, *, backend: str = "mmap") -> dict[str, numpy.ndarray]:
    """The arrays of a safetensors file. "pread" reads them into memory of their own where "mmap"
    looks into the file."""
    return _load.load_file(filename, framework="np", backend=backend)
