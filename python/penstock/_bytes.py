# SPDX-License-Identifier: MIT
"""A safetensors file that is in memory, as bytes.

Its header is read by what reads the headers of files: it is put at the beginning of a file that
exists in memory only, is as long as the bytes, and has a hole where the tensors would be.
"""
from __future__ import annotations

import os
from collections.abc import Iterator

from ._choose import open_model, tensors_of
from ._error import Error, from_engine, refuse
from ._frameworks import DTYPES
from ._rules import Tensor

_LENGTH = 8
#: What the engine says in place of the name of that file.
_NAME = "the bytes"


def _tensors(data: bytes) -> list[Tensor]:
    end = min(_LENGTH + int.from_bytes(data[:_LENGTH], "little"), len(data))
    fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
    try:
        written = 0
        while written < end:
            written += os.write(fd, memoryview(data)[written:end])
        os.ftruncate(fd, len(data))
        model = open_model(f"/proc/self/fd/{fd}")
        if model.coded():
            raise refuse("load", _NAME, "they are a packed file, which can be loaded from files "
                         "only", "Write them to a file, and load that")
        return list(tensors_of(model).values())
    except Error as error:
        _, fields = error.__reduce__()
        raise from_engine(*fields[:4], _NAME, *fields[5:]) from None
    finally:
        os.close(fd)


def tensors_in(data: bytes) -> Iterator[tuple[Tensor, str, bytearray]]:
    """Each tensor with the name of its dtype and its bytes, in the order of the file."""
    if not isinstance(data, bytes):
        raise TypeError(f"the content of a file is of the type bytes, not {type(data).__name__}")
    view = memoryview(data)
    for tensor in _tensors(data):
        yield (tensor, DTYPES[tensor.dtype],
               bytearray(view[tensor.offset:tensor.offset + tensor.nbytes]))
