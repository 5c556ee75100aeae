# SPDX-License-Identifier: MIT
"""Which files a model has, and where its tensors lie in them.

A reader of safetensors headers of its own, so that the reference bytes do not come from one of the
loaders that are compared.
"""
from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

HEADER_LIMIT = 100_000_000


class ModelError(Exception):
    """The model cannot be compared: words for people."""


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Model:
    path: str
    files: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def file_bytes(self) -> int:
        return sum(Path(file).stat().st_size for file in self.files)


def model_open(path: str | Path) -> Model:
    """The model at `path`: a .safetensors file, an index file, or a folder with either."""
    path = Path(path)
    files = model_files(path)
    tensors = [tensor for file in files for tensor in header_read(file)[1]]
    if not tensors:
        raise ModelError(f"{path} holds no tensors")
    return Model(str(path), tuple(str(file) for file in files), tuple(tensors))


def model_files(path: Path) -> list[Path]:
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        preferred = path / "model.safetensors.index.json"
        if preferred in indices or len(indices) == 1:
            return index_files(preferred if preferred in indices else indices[0])
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{path} holds no .safetensors files; make a model with "
                             f"`penstock make-model 0.6b {path}`")
        return files
    if not path.is_file():
        raise ModelError(f"there is no file or folder {path}")
    return index_files(path) if path.name.endswith(".index.json") else [path]


def index_files(index: Path) -> list[Path]:
    names = json.loads(index.read_text())["weight_map"].values()
    files = [index.parent / name for name in sorted(set(names))]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{index} names {file.name}, which is not there")
    return files


def header_read(file: str | Path) -> tuple[int, list[Tensor]]:
    """Where the tensors of a file begin, and the tensors in the order in which they lie."""
    with open(file, "rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else HEADER_LIMIT + 1
        if length > HEADER_LIMIT:
            raise ModelError(f"{file} is not a safetensors file")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ModelError(f"the header of {file} is damaged: {error}") from None
    data = 8 + length
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        tensors.append(Tensor(name, entry["dtype"], tuple(entry["shape"]), str(file),
                              data + start, stop - start))
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.bytes))
    return data, tensors
