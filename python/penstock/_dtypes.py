# SPDX-License-Identifier: MIT
"""Which dtype a caller means, and which tensors are to have it.

A dtype for all tensors is not meant for quantised ones: 8-bit and packed weights mean nothing
without their scales, nor in another dtype. Where a model has such weights, they and what belongs to
them stay as they are. Who names tensors, by a mapping or a function, has said what to do with them.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from . import _penstock
from ._error import refuse
from ._rules import Rules, Tensor, is_function

_NAMES = [name for name, _ in _penstock.DTYPES]
_BITS = [bits for _, bits in _penstock.DTYPES]

#: What people write, in small letters, beside the names of safetensors.
_WORDS = {
    "BOOL": ["bool"], "U8": ["uint8"], "I8": ["int8"], "I16": ["int16"], "U16": ["uint16"],
    "I32": ["int32"], "U32": ["uint32"], "I64": ["int64"], "U64": ["uint64"],
    "C64": ["complex64"],
    "F16": ["float16", "fp16", "half"], "BF16": ["bfloat16", "bf16"],
    "F32": ["float32", "fp32", "float", "single"], "F64": ["float64", "fp64", "double"],
    "F8_E4M3": ["float8_e4m3fn", "float8_e4m3", "fp8_e4m3"],
    "F8_E5M2": ["float8_e5m2", "fp8_e5m2"], "F8_E8M0": ["float8_e8m0fnu"],
    "F8_E4M3FNUZ": ["float8_e4m3fnuz"], "F8_E5M2FNUZ": ["float8_e5m2fnuz"],
    "F4": ["float4_e2m1fn_x2"],
}
_KNOWN = {word: _NAMES.index(name) for name in _NAMES
          for word in (name.lower(), *_WORDS.get(name, []))}

#: Weights that are packed into numbers of another width, by name.
_PACKED = re.compile(r"(^|[._])(qweight|weight_packed)$")
#: What belongs to quantised weights and must keep its precision.
_SCALE = re.compile(r"(^|[._])(scales?|scale_inv|scale_\d|zero_point|zeros|absmax|quant_map|SCB)$")


def dtype_index(dtype: Any) -> int | None:
    """The number of a dtype of torch, numpy or ml_dtypes, or of a word for one; None: unknown."""
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    return None if dtype is float else _KNOWN.get(text.rpartition(".")[2].lower())


def known_dtype(dtype: Any) -> int:
    """The same, or an error that says what is known."""
    found = dtype_index(dtype)
    if found is not None:
        return found
    if dtype is float:
        raise refuse("convert to", "float", "Python's float has 64 bits and torch's has 32",
                     "Say 'float32' or 'float64'")
    words = [" = ".join(_WORDS[name]) for name in ("F16", "BF16", "F32", "F64", "F8_E4M3",
                                                   "F8_E5M2")]
    raise refuse("convert to", str(dtype), "there is no such dtype",
                 f"Take a dtype of torch or numpy, or a word: {', '.join(words)}")


class Dtypes:
    """What dtype= says of each tensor."""

    def __init__(self, dtype: Any, tensors: Iterable[Tensor]):
        """`tensors`: all of the model, whether asked for or not."""
        told = isinstance(dtype, Mapping) or is_function(dtype)
        self.rules = Rules("dtype", dtype, "dtypes", parts=True) if told else None
        self.dtype = None if told else dtype
        self.quantised = self.dtype is not None and any(
            _BITS[tensor.dtype] <= 8 and _NAMES[tensor.dtype] != "BOOL"
            or _PACKED.search(tensor.name) for tensor in tensors)

    def of(self, tensor: Tensor) -> Any:
        """The dtype, as the caller gave it; None: as it is."""
        if self.rules is not None:
            return self.rules.of(tensor)
        kept = _BITS[tensor.dtype] <= 8 or self.quantised and _SCALE.search(tensor.name)
        return None if kept else self.dtype
