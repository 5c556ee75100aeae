# SPDX-License-Identifier: MIT
"""Saving safetensors files, byte for byte as the safetensors package writes them."""
from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from . import _penstock, _report
from ._device import device_name, open_device
from ._error import Error, refuse, shown
from ._frameworks import DTYPES, STREAM_LEGACY, Numpy, Torch, in_the_way, is_of
from ._names import file_name
from ._options import options
from ._progress import wait

_WRITE = 2
_HEADER_MAX = 100_000_000


class _Piece:
    """A tensor to be written: what it is and where its bytes are."""

    def __init__(self, name: str, tensor: Any):
        """Looks at a torch tensor or a numpy array; refuses what safetensors refuses."""
        if not isinstance(name, str):
            raise TypeError(f"names are texts; {name!r} is not")
        if name == "__metadata__":
            raise ValueError("the format keeps the name __metadata__ for itself")
        _check_text(name)
        self.name, self.tensor, self.stream = name, tensor, None
        #: Of a torch tensor, the bytes that no other may have.
        self.span: tuple[str, int, int] | None = None
        if is_of("torch", "Tensor", tensor):
            self._from_torch(tensor)
        elif is_of("numpy", "ndarray", tensor) or is_of("numpy", "generic", tensor):
            self._from_numpy(tensor)
        else:
            raise ValueError(f"Key `{shown(name)}` is invalid, expected a torch.Tensor or a "
                             f"numpy array but received {type(tensor)}")

    def _from_torch(self, tensor) -> None:
        import torch

        given = tensor
        if tensor.layout == torch.strided and not tensor.is_nested:
            # A view that only says "conjugate" or "negate" has other numbers in memory.
            self.tensor = tensor = tensor.resolve_conj().resolve_neg()
        problem = in_the_way(tensor)
        if problem is not None:
            raise refuse("save", self.name, *problem)
        self.device = device_name(tensor.device)
        self.span = self.device, given.data_ptr(), tensor.numel() * tensor.element_size()
        kind = str(tensor.dtype).removeprefix("torch.")
        names = {theirs: ours for ours, theirs in Torch._names.items()}
        if kind not in names:
            raise refuse("save", self.name, f"safetensors has no dtype for {tensor.dtype}",
                         "Take .dequantize(), or .int_repr() and its scale" if tensor.is_quantized
                         else "")
        self.dtype = DTYPES.index(names[kind])
        self.shape = list(tensor.shape)
        if names[kind] == "F4":
            if not self.shape:
                raise refuse("save", self.name, "two 4-bit numbers share a byte, and a tensor "
                             "without dimensions has room for one", "Use .reshape(1)")
            self.shape[-1] *= 2
        self.nbytes = tensor.numel() * tensor.element_size()
        self.address = tensor.data_ptr()
        if self.device != "host":
            self.stream = torch.cuda.current_stream(tensor.device).cuda_stream or STREAM_LEGACY

    def _from_numpy(self, array) -> None:
        import numpy

        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        self.tensor = array = numpy.asarray(array, order="C")
        names = {theirs: ours for ours, theirs in {**Numpy._plain, **Numpy._extra}.items()}
        if array.dtype.name not in names:
            raise refuse("save", self.name, f"safetensors has no dtype for {array.dtype}")
        self.dtype = DTYPES.index(names[array.dtype.name])
        self.shape = list(array.shape)
        self.nbytes = array.nbytes
        self.address = array.ctypes.data
        self.device = "host"


def _check_text(text: str) -> None:
    """What load_file() would refuse is not written."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"names and metadata are Unicode, which {ascii(text)} is not") from None


def _check_shared(pieces: list[_Piece]) -> None:
    """Tensors of torch that share bytes are mostly tied, and would come back as two. Arrays of
    numpy may: nobody ties them."""
    spans = sorted((*p.span, p.name) for p in pieces if p.span is not None and p.span[2])
    for before, after in zip(spans, spans[1:]):
        if before[0] == after[0] and before[1] + before[2] > after[1]:
            raise RuntimeError(
                f"Some tensors share memory, this will lead to duplicate memory on disk and "
                f"potential differences when loading them again: {{{before[3]!r}, {after[3]!r}}}. "
                "Save one of them only, or a .clone()")


def _header(pieces: list[_Piece], metadata: Mapping[str, str] | None) -> bytes:
    table: dict[str, Any] = {}
    if metadata is not None:
        if not isinstance(metadata, Mapping):
            raise TypeError(f"metadata is a dict of str to str, not a {type(metadata).__name__}")
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(f"metadata is a dict of str to str; {key!r} is not")
            _check_text(key)
            _check_text(value)
        table["__metadata__"] = dict(metadata)
    offset = 0
    for piece in pieces:
        table[piece.name] = {"dtype": DTYPES[piece.dtype], "shape": piece.shape,
                             "data_offsets": [offset, offset + piece.nbytes]}
        offset += piece.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_MAX:
        raise ValueError(f"the header would have {len(text)} bytes, and the format allows "
                         f"{_HEADER_MAX}: save fewer tensors or less metadata")
    return len(text).to_bytes(8, "little") + text


def _layout(target: Any, header: int, length: int,
            pieces: list[_Piece]) -> tuple[dict[str, list[tuple]], dict[str, int | None]]:
    """By device, what goes where in the file, and the stream to wait for."""
    extents = {"host": [(target, 0, header, length)]}
    streams: dict[str, int | None] = {"host": None}
    at = length
    for piece in pieces:
        extents.setdefault(piece.device, []).append((target, at, piece.address, piece.nbytes))
        streams[piece.device] = piece.stream
        at += piece.nbytes
    return extents, streams


def _end(job: Any) -> None:
    """Stop a job, if it was not waited for: its file can be closed then."""
    if job is not None:
        job.cancel()
        with suppress(Error, ValueError):
            job.wait()


def save_file(tensors: Mapping[str, Any], filename: str | os.PathLike,
              metadata: Mapping[str, str] | None = None, *, transfer: str | int = "auto",
              memory_limit: int | None = None, progress: bool = False) -> None:
    """Save tensors as a safetensors file: a drop-in for ``safetensors.torch.save_file``.

    The file holds the same bytes that safetensors would write. It appears under its name only when
    it is complete and durable; until then, and after any error, what was there before stays.
    Tensors may be torch tensors on any device, which must not share memory, or numpy arrays of any
    class and layout, of which the plain numbers are saved.
    """
    if not isinstance(tensors, Mapping):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    kind, limit, _ = options(transfer, memory_limit)
    pieces = [_Piece(name, tensor) for name, tensor in tensors.items()]
    _check_shared(pieces)
    # The largest alignment first, then by name: the order that safetensors has.
    pieces.sort(key=lambda piece: (-piece.dtype, piece.name))
    header = _header(pieces, metadata)
    size = len(header) + sum(piece.nbytes for piece in pieces)
    target, job = _penstock.Object(file_name(filename), _WRITE, size), None
    try:
        view = _penstock.view_of_buffer(header, False)
        extents, streams = _layout(target, view[1], len(header), pieces)
        reports = []
        started = time.perf_counter()
        for device, parts in extents.items():
            # The header is host memory whatever is asked for the tensors.
            how = kind if device != "host" or len(extents) == 1 else -1
            job = _penstock.start(_WRITE, open_device(device), parts, (view, pieces), how,
                                  limit, streams[device])
            reports.append(wait(job, os.path.basename(os.fsdecode(filename)), progress))
        target.commit()
    finally:
        # An exception that somebody keeps keeps all of this; not the space that was reserved.
        _end(job)
        target.close()
    _report.keep(_report.merge(reports, time.perf_counter() - started, "+".join(extents)))
