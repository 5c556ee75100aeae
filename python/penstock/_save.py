# SPDX-License-Identifier: MIT
"""Saving safetensors files, byte for byte as the safetensors package writes them.

What is written, and in which order it gets its names, is the library's affair (src/format/save.c).
Here tensors of all frameworks become names, kinds, shapes and addresses.
"""
from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from . import _penstock, _report
from ._device import device_name, open_device
from ._error import SafetensorError, misuse, raising, refuse, shown
from ._frameworks import DTYPES, STREAM_LEGACY, Numpy, Torch, in_the_way, is_of
from ._modules import tensors_of
from ._names import file_name
from ._options import options
from ._progress import wait_or_stop
from ._spec import TensorSpec, check_length, is_spec

_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}


class _Piece:
    """A tensor to be written: what it is and where its bytes are."""

    def __init__(self, name: str, tensor: Any):
        """Looks at a tensor of a framework, or a TensorSpec; refuses what safetensors refuses."""
        if not isinstance(name, str):
            raise TypeError(f"names are texts; {name!r} is not")
        if name == "__metadata__":
            raise ValueError("the format keeps the name __metadata__ for itself")
        _check_text(name)
        self.name, self.tensor, self.stream = name, tensor, None
        if is_of("torch", "Tensor", tensor):
            self._from_torch(tensor)
        elif is_of("numpy", "ndarray", tensor) or is_of("numpy", "generic", tensor):
            self._from_numpy(tensor)
        elif is_of("jax", "Array", tensor):
            self._from_jax(tensor)
        elif is_of("cupy", "ndarray", tensor):
            self._from_cupy(tensor)
        elif isinstance(tensor, _penstock.Array):
            self._from_array(tensor)
        elif is_spec(tensor):
            self._from_spec(tensor)
        else:
            raise ValueError(f"Key `{shown(name)}` is invalid, expected a torch.Tensor or an "
                             f"array of numpy, JAX, CuPy or Penstock but received {type(tensor)}")

    def _from_torch(self, tensor) -> None:
        import torch

        if tensor.device.type == "meta":
            # torch's words and class: so safetensors fails, and programs know it by them.
            problem, hint = in_the_way(tensor)
            raise refuse("save", self.name, f"Cannot copy out of meta tensor: {problem}", hint,
                         also=(NotImplementedError,))
        if tensor.layout == torch.strided and not tensor.is_nested:
            # A view that only says "conjugate" or "negate" has other numbers in memory.
            self.tensor = tensor = tensor.resolve_conj().resolve_neg()
        problem = in_the_way(tensor)
        if problem is not None:
            raise refuse("save", self.name, *problem)
        self.device = device_name(tensor.device)
        kind = str(tensor.dtype).removeprefix("torch.")
        names = {theirs: ours for ours, theirs in Torch._names.items()}
        if kind not in names:
            raise misuse("save", self.name, f"safetensors has no dtype for {tensor.dtype}",
                         "Take .dequantize(), or .int_repr() and its scale" if tensor.is_quantized
                         else "")
        self.dtype = DTYPES.index(names[kind])
        self.shape = list(tensor.shape)
        if names[kind] == "F4":
            if not self.shape:
                raise refuse("save", self.name, "two 4-bit numbers share a byte, and a tensor "
                             "without dimensions has room for one", "Use .reshape(1)")
            self.shape[-1] *= 2
        self.address = tensor.data_ptr()
        if self.device != "host":
            self.stream = torch.cuda.current_stream(tensor.device).cuda_stream or STREAM_LEGACY

    def _from_numpy(self, array) -> None:
        import numpy

        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        self.tensor = array = numpy.asarray(array, order="C")
        self._describe(array)
        self.address = array.ctypes.data
        self.device = "host"

    def _from_cupy(self, array) -> None:
        import cupy

        self.tensor = array = cupy.ascontiguousarray(array)
        self._describe(array)
        self.address = array.data.ptr
        self.device = f"cuda:{array.device.id}"
        self.stream = cupy.cuda.get_current_stream().ptr or STREAM_LEGACY

    def _describe(self, array) -> None:
        """What numpy and its kin say of an array."""
        names = {theirs: ours for ours, theirs in {**Numpy._plain, **Numpy._extra}.items()}
        if array.dtype.name not in names:
            raise misuse("save", self.name, f"safetensors has no dtype for {array.dtype}")
        self.dtype = DTYPES.index(names[array.dtype.name])
        self.shape = list(array.shape)

    def _from_array(self, array) -> None:
        self.dtype = DTYPES.index(array.dtype)
        self.shape = list(array.shape)
        self.address, self.device = array.address, array.device

    def _from_jax(self, array) -> None:
        """Its bytes where they are on the host, or a copy of what is on a GPU."""
        import numpy

        if not array.is_fully_addressable:
            raise refuse("save", self.name, "other processes have parts of this array",
                         "Gather it first, with jax.experimental.multihost_utils")
        self._from_numpy(numpy.asarray(array))

    def _from_spec(self, spec: TensorSpec) -> None:
        check_length(self.name, spec)
        self.dtype = DTYPES.index(spec.dtype)
        self.shape, self.address = spec.shape, spec.data_ptr
        self.device = "host"

    def described(self) -> tuple:
        """As the library takes it."""
        return (self.name, self.dtype, tuple(self.shape), self.address, open_device(self.device))

    def on_host(self, length: int) -> Any:
        """Its bytes, so many, as a buffer."""
        if self.device != "host":
            self.tensor = self.tensor.cpu()
            self.address, self.device = self.tensor.data_ptr(), "host"
        # An empty tensor has no address to look at.
        return (ctypes.c_char * length).from_address(self.address) if length else b""


def _check_text(text: str) -> None:
    """What load_file() would refuse is not written."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"names and metadata are Unicode, which {ascii(text)} is not") from None


def _reach(name: str, tensor: Any) -> tuple[str, int, int, str] | None:
    """(device, first byte, byte after the last, name) of a torch tensor that has bytes."""
    if not is_of("torch", "Tensor", tensor) or tensor.is_nested or not tensor.numel() \
            or str(tensor.layout) != "torch.strided" or tensor.device.type == "meta":
        return None
    start = tensor.data_ptr()
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride()))
    return (str(tensor.device), start, start + (last + 1) * tensor.element_size(),
            name) if start else None


def _check_shared(tensors: Mapping[str, Any]) -> None:
    """Tensors of torch that share bytes are mostly tied, and would come back as two. Arrays of
    numpy may: nobody ties them."""
    found = sorted(filter(None, (_reach(name, tensor) for name, tensor in tensors.items())))
    for before, after in zip(found, found[1:]):
        if before[0] == after[0] and before[2] > after[1]:
            raise RuntimeError(
                f"Some tensors share memory, this will lead to duplicate memory on disk and "
                f"potential differences when loading them again: {{{before[3]!r}, {after[3]!r}}}. "
                "Save one of them only, or a .clone(); save_model() does so for a module")


def _pieces(tensors: Any) -> list[_Piece]:
    """What is to be written."""
    if not isinstance(tensors, Mapping):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    _check_shared(tensors)
    return [_Piece(name, tensor) for name, tensor in tensors.items()]


def _pairs(metadata: Mapping[str, str] | None) -> list[tuple[str, str]] | None:
    """Metadata as the library takes it."""
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is a dict of str to str, not a {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata is a dict of str to str; {key!r} is not")
        _check_text(key)
        _check_text(value)
    return list(metadata.items())


def _write(pieces: list[_Piece], path: str | os.PathLike, metadata: Mapping[str, str] | None,
           align: int, shard_size: int, transfer: str | int, memory_limit: int | None,
           progress: bool, coded: bool) -> None:
    """One save, from the looks at its tensors to the report."""
    kind, limit, _ = options(transfer, memory_limit)
    # Work that is queued on the caller's streams belongs to what is saved.
    streams = {piece.device: piece.stream for piece in pieces if piece.stream is not None}
    save = _penstock.save_safetensors(
        file_name(path), [piece.described() for piece in pieces], _pairs(metadata), align,
        shard_size,
        [(open_device(device), stream) for device, stream in streams.items()],
        pieces, kind, limit, coded=coded)
    report = wait_or_stop(save, os.path.basename(os.fsdecode(path)), progress)
    report["device"] = "+".join(sorted({piece.device for piece in pieces})) or "host"
    _report.keep(report)


@raising(SafetensorError)
def save_bytes(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """What save_file() would write."""
    pieces = _pieces(tensors)
    header, places = _penstock.layout_safetensors([piece.described() for piece in pieces],
                                                  _pairs(metadata))
    return b"".join([header, *(pieces[number].on_host(length) for number, length in places)])


@raising(SafetensorError)
def save_file(tensors: Mapping[str, Any], filename: str | os.PathLike,
              metadata: Mapping[str, str] | None = None, *, align: int = 0,
              transfer: str | int = "auto", memory_limit: int | None = None,
              progress: bool = False, coded: bool = False) -> None:
    """Save tensors as a safetensors file: a drop-in for ``safetensors.torch.save_file``.

    The file holds the same bytes that safetensors would write. It appears under its name only when
    it is complete and durable; until then, and after any error, what was there before stays.
    Tensors may be torch tensors on any device, which must not share memory, or arrays of numpy,
    JAX, CuPy and Penstock of any class and layout, of which the plain numbers are saved. With
    ``align=4096`` the header is filled up with spaces so that the first tensor begins at a multiple
    of that, as disks like it; every reader of safetensors takes such files.

    With ``coded=True`` the file is coded without loss, in two thirds of its bytes where its numbers
    are those of a trained model: what ``penstock pack`` makes of the file. Penstock loads it like
    any other; readers that do not know the coding find tensors of bytes.
    """
    _write(_pieces(tensors), filename, metadata, align, 0, transfer, memory_limit, progress, coded)


# -------------------------------------------------------------------------------------- models --

def _size(size: int | str) -> int:
    """Bytes, from a number or from "5GB" (powers of 1000) or "5GiB" (powers of 1024)."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(?:([KMGT])(I?)B)?\s*", str(size).upper())
    number = 0
    if found is not None and not isinstance(size, (bool, float)):
        value, unit, binary = found.groups()
        number = int(float(value) * (1024 if binary else 1000) ** _UNITS.get(unit, 0))
    if not 0 < number < 1 << 62:
        raise refuse("cut at", "max_shard_size", f"{size!r} is no size",
                     "Write '5GB', '500MB' or a number of bytes")
    return number


@raising(SafetensorError)
def save_folder(model: Any, folder: str | os.PathLike, max_shard_size: int | str = "5GB",
               metadata: Mapping[str, str] | None = None, *, align: int = 4096,
               transfer: str | int = "auto", memory_limit: int | None = None,
               progress: bool = False, coded: bool = False) -> None:
    """Save a model into a folder, in files of at most ``max_shard_size`` and an index.

    ``model`` is a dict of tensors as for ``save_file``, or a torch module, whose tied tensors are
    saved once. Files are cut and named as the Hugging Face libraries do it, and their headers are
    padded (``align``). The folder is made if it is not there. All files are durable before one
    of them gets its name, the index comes last, and then what is left of an older model goes.
    With ``coded=True`` the files are coded, as ``save_file`` does it.
    """
    size = _size(max_shard_size)
    dropped: dict[str, str] = {}
    if is_of("torch.nn", "Module", model):
        # What the module itself calls tied goes; else the first name stays, as with safetensors.
        model, dropped = tensors_of(model, getattr(model, "_tied_weights_keys", None))
        model = {name: tensor.contiguous() for name, tensor in model.items()}
    pieces = _pieces(model)
    if metadata is None or isinstance(metadata, Mapping):
        told = {"format": "pt"} if any(is_of("torch", "Tensor", piece.tensor)
                                       for piece in pieces) else {}
        metadata = {**told, **dropped, **(metadata or {})} or None
    made = not os.path.lexists(folder)
    if made:
        os.makedirs(folder)
    try:
        _write(pieces, folder, metadata, align, size, transfer, memory_limit, progress, coded)
    except BaseException:
        if made:
            with suppress(OSError):
                os.rmdir(folder)
        raise
