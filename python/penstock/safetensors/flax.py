# SPDX-License-Identifier: MIT
"""The names of safetensors.flax, over Penstock: arrays of JAX."""
from __future__ import annotations

import os
from collections.abc import Mapping

import jax

from .. import _load
from .._save import save_bytes
from .._save import save_file as _save_file
from . import numpy

__all__ = ["load", "load_file", "save", "save_file"]


def save(tensors: Mapping[str, jax.Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file with these arrays."""
    return save_bytes(tensors, metadata)


def save_file(tensors: Mapping[str, jax.Array], filename: str | os.PathLike,
              metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; it appears when it is complete and durable."""
    _save_file(tensors, filename, metadata)


def load(data: bytes) -> dict[str, jax.Array]:
    """The arrays in the bytes of a safetensors file."""
    return {name: jax.numpy.array(array) for name, array in numpy.load(data).items()}


def load_file(filename: str | os.PathLike, *, backend: str = "mmap") -> dict[str, jax.Array]:
    """The arrays of a safetensors file. "pread" reads them into memory of their own where "mmap"
    looks into the file."""
    return _load.load_file(filename, framework="jax", backend=backend)
