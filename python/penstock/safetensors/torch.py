# SPDX-License-Identifier: MIT
"""The names of safetensors.torch, over Penstock."""
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from .. import _load
from .._bytes import tensors_in
from .._error import refuse
from .._frameworks import adapter
from .._modules import end_ptr as _end_ptr  # noqa: F401 - names that other packages import
from .._modules import find_shared_tensors as _find_shared_tensors  # noqa: F401
from .._modules import is_complete as _is_complete  # noqa: F401
from .._modules import load_module as load_model
from .._modules import remove_duplicate_names as _remove_duplicate_names  # noqa: F401
from .._modules import save_module as _save_module
from .._modules import storage_ptr, storage_size
from .._save import save_bytes
from .._save import save_file as _save_file

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model", "storage_ptr",
           "storage_size"]


def _checked(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """These save tensors of torch only, and name all sparse ones at once, in known words."""
    if not isinstance(tensors, Mapping):
        return tensors      # refused by those who save
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"Key `{name}` is invalid, expected torch.Tensor but received "
                             f"{type(tensor)}")
    sparse = [name for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if sparse:
        raise refuse("save", str(sparse[0]), "it is sparse", "Make it dense with .to_dense()",
                     words=f"You are trying to save a sparse tensors: `{sparse}` which this "
                     "library does not support. You can make it a dense tensor before saving with "
                     "`.to_dense()` but be aware this might make a much larger file than needed.")
    return tensors


def save(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file with these tensors."""
    return save_bytes(_checked(tensors), metadata)


def save_file(tensors: Mapping[str, torch.Tensor], filename: str | os.PathLike,
              metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; it appears when it is complete and durable."""
    _save_file(_checked(tensors), filename, metadata)


def save_model(model: torch.nn.Module, filename: str | os.PathLike,
               metadata: dict[str, str] | None = None, force_contiguous: bool = True) -> None:
    """Write a module's state as one safetensors file; see ``penstock.save_model``."""
    _save_module(model, filename, metadata, force_contiguous)


def load(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors in the bytes of a safetensors file, on the host."""
    target, found = adapter("pt", "cpu"), {}
    for tensor, _, content in tensors_in(data):
        target.check(tensor.name, tensor.dtype)
        found[tensor.name] = target.from_bytes(content, tensor.dtype, tensor.shape)
    return found


def load_file(filename: str | os.PathLike, device: Any = "cpu", *,
              backend: str = "mmap") -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on a device. "pread" reads them into memory of their own
    where "mmap" looks into the file."""
    return _load.load_file(filename, device, backend=backend)
