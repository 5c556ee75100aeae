# SPDX-License-Identifier: MIT
"""The names of the safetensors package, over Penstock.

    from penstock.safetensors import safe_open
    from penstock.safetensors.torch import load_file, save_file

Programs written for safetensors find here, and in the modules torch, numpy and flax beside, the
functions that they import from there, with the same arguments. docs/python.md says what differs.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .._error import SafetensorError
from .._safe_open import safe_open
from .._spec import TensorSpec

__all__ = ["SafetensorError", "TensorSpec", "deserialize", "safe_open", "serialize",
           "serialize_file"]

#: The release of safetensors whose names and behaviour these are.
__version__ = "0.8.0"


class _safe_open_handle(safe_open):  # noqa: N801 - the name that people know
    """safe_open for a file that is open already, by its name."""

    def __init__(self, f: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap"):
        """`f` has a descriptor and a name, as what open() gives."""
        f.fileno  # noqa: B018 - what is no file is refused here
        super().__init__(f.name, framework, device, backend=backend)


def _checked(tensor_dict: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
    if not isinstance(tensor_dict, Mapping):
        raise TypeError(f"tensor_dict is a dict of str to TensorSpec, not a "
                        f"{type(tensor_dict).__name__}")
    for name, spec in tensor_dict.items():
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"tensor_dict is a dict of str to TensorSpec; {name!r} has a "
                            f"{type(spec).__name__}")
    return tensor_dict


def serialize(tensor_dict: Mapping[str, TensorSpec],
              metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file with these tensors."""
    from .._save import save_bytes

    return save_bytes(_checked(tensor_dict), metadata)


def serialize_file(tensor_dict: Mapping[str, TensorSpec], filename: str | os.PathLike,
                   metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with these tensors; it appears when it is complete and durable."""
    from .._save import save_file

    save_file(_checked(tensor_dict), filename, metadata)


def deserialize(bytes: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The tensors in the bytes of a safetensors file: for each its name and a dict of "shape",
    "dtype" and "data", a bytearray."""
    from .._bytes import tensors_in

    return [(tensor.name, {"shape": list(tensor.shape), "dtype": dtype, "data": data})
            for tensor, dtype, data in tensors_in(bytes)]
