# SPDX-License-Identifier: MIT
"""Helpers of the Python tests: comparing bit for bit, files made by hand, processes, memory."""
import gc
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy
import torch
from safetensors.torch import _SIZE

import penstock

PACKAGE = Path(penstock.__file__).resolve().parent.parent

# Every kind of number that torch and safetensors share.
DTYPES = sorted((dtype for dtype in _SIZE if dtype is not None), key=str)
F4 = getattr(torch, "float4_e2m1fn_x2", None)

# What a wrong argument may be answered with.
REFUSED = (penstock.Error, ValueError, TypeError, KeyError, IndexError)

MIB = 1 << 20


def random_tensor(dtype: torch.dtype, shape: tuple, seed: int = 0) -> torch.Tensor:
    """Random bits, so that a copy that goes through numbers does not pass."""
    count = int(numpy.prod(shape, dtype=numpy.int64)) * _SIZE[dtype]
    data = numpy.frombuffer(bytearray(numpy.random.default_rng(seed).bytes(count)), numpy.uint8)
    if dtype == torch.bool:
        data = data & 1
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, on the host."""
    tensor = tensor.detach()
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu()


def same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return (mine.dtype == theirs.dtype and mine.shape == theirs.shape
            and torch.equal(raw(mine), raw(theirs)))


def assert_same(mine: dict, theirs: dict) -> None:
    """The same names with the same dtypes, shapes and bits."""
    assert set(mine) == set(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert mine[name].shape == tensor.shape, name
        assert same(mine[name], tensor), f"{name}: other bits"


def one_nan(tensors: dict) -> dict:
    """With every NaN the same: which bits it has after a conversion, nobody promises."""
    return {name: torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
            if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def write_raw(path, tensors: dict, *, header_length: int = 0, metadata: dict | None = None,
              header: bytes | None = None) -> None:
    """A safetensors file by hand: {name: (dtype, shape, bytes)}, in that order.

    The header is filled up with spaces to at least `header_length`, so that the data can begin
    anywhere.
    """
    entries, data = {}, b""
    if metadata is not None:
        entries["__metadata__"] = metadata
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape),
                         "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(entries).encode() if header is None else header
    text = text.ljust(header_length)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_holes(path, sizes: dict) -> None:
    """A sparse file of bytes: each tensor is zero but for its first byte, its number plus one."""
    entries, end = {}, 0
    for name, size in sizes.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries).encode()
    text = text.ljust((len(text) + 7) // 8 * 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        file.truncate(start + end)
        for number, entry in enumerate(entries.values()):
            file.seek(start + entry["data_offsets"][0])
            file.write(bytes([number % 255 + 1]))


def environment(**more: str) -> dict:
    """For a process of ours: it finds the package."""
    env = dict(os.environ, **more)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")]))
    return env


def python(code: str, *arguments, timeout: float = 60, check: bool = True,
           env: dict | None = None) -> subprocess.CompletedProcess:
    """Run code in an interpreter of its own; sys.argv[1:] are the arguments."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
                          env=env or environment(), text=True, capture_output=True,
                          timeout=timeout)
    if check:
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done


class Talk:
    """A running interpreter that is spoken to by lines: its own say, a deadline, signals."""

    def __init__(self, code: str, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(code), *map(str, arguments)],
            env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.default_int_handler))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        """The next line; a process that ended is a failure with its last words."""
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise AssertionError(f"exit {self.process.returncode}: {self.process.stderr.read()}")
        return line.strip()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self, timeout: float = 30) -> tuple[str, str]:
        """What it says until it ends, which it must do well."""
        out, err = self.process.communicate(timeout=timeout)
        assert self.process.returncode == 0, f"exit {self.process.returncode}\n{out}{err}"
        return out, err


def anonymous(pid: int | str = "self") -> int:
    """Anonymous memory of a process that is in RAM, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc")


def in_use(device: str) -> int:
    """Memory in use where the tensors of this device are."""
    gc.collect()
    if device == "cpu":
        return anonymous()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def settled(device: str, limit: int, seconds: float = 5) -> int:
    """Memory in use, once it is below a limit or has had time to get there."""
    deadline = time.monotonic() + seconds
    while in_use(device) > limit and time.monotonic() < deadline:
        time.sleep(0.05)
    return in_use(device)


def held_below(folder) -> list[str]:
    """Files of a folder that this process has open, removed ones too."""
    links = [outcome(lambda entry=entry: os.readlink(entry))[0]
             for entry in Path("/proc/self/fd").iterdir()]
    return [link for link in links if link is not None and link.startswith(f"{folder}/")]


def outcome(call):
    """What a call gives: (result, None) or (None, the exception)."""
    try:
        return call(), None
    except Exception as error:  # compared by the caller, whatever it is
        return None, error
