# SPDX-License-Identifier: MIT
"""A program that uses everything public with types, as its readers would: mypy --strict has nothing
to say about it, and it runs (test_typing.py). Whoever adds a public name adds a use of it here.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import penstock


def files(folder: Path) -> int:
    """Bytes and arrays to files and back."""
    path = folder / "bytes.bin"
    buffer = bytearray(8)
    penstock.tofile(b"12345678", path)
    with penstock.File(path) as file:
        count: int = file.read(buffer)
        future = file.read_async(buffer, size=4)
        count += future.get()
        size: int = file.nbytes()
    array = penstock.fromfile(path, dtype="uint8", count=-1, like=None)
    return count + size + len(array)


def save(folder: Path) -> Path:
    """A model of one file."""
    import numpy

    path = folder / "model.safetensors"
    tensors = {"a": numpy.arange(6, dtype="float32").reshape(2, 3)}
    penstock.save_file(tensors, path, metadata={"format": "np"}, coded=True)
    return path


def loads(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensors by all ways there are."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in penstock.load_file(path, framework="np").items():
        shapes[name] = tuple(tensor.shape)
    shapes.update((name, tuple(tensor.shape)) for name, tensor in penstock.load_model(
        path, "cpu", framework="np", keys="*", copy=True).items())
    pairs: Iterator[tuple[str, object]] = penstock.stream(path, framework="np", window=1 << 20)
    names: list[str] = [name for name, _ in pairs]
    with penstock.safe_open(path, framework="np") as file:
        metadata: dict[str, str] | None = file.metadata()
        assert metadata is not None and file.keys() == names
        part = file.get_slice("a")
        shapes["part"] = tuple(part[:1].shape)
        dtype: str = part.get_dtype()
        shapes[dtype] = tuple(part.get_shape())
    return shapes


def halved(name: str, tensor: penstock.TensorInfo) -> str | None:
    """What a function for dtype= is told."""
    return "F16" if tensor.dtype == "F32" and len(tensor.shape) > 1 and name else None


def cache() -> int:
    """What is read into the page cache afterwards."""
    now: penstock.Warming = penstock.warming()
    now.wait(timeout=1)
    now.stop()
    return now.left + now.brought


def ahead(path: Path) -> None:
    """Reading before it is needed."""
    running: penstock.Prefetch = penstock.prefetch(path)
    running.wait()
    running.cancel()


def address(array: penstock.Array) -> int:
    """What a framework of its own would ask an array."""
    shape: tuple[int, ...] = array.shape
    kind, number = array.__dlpack_device__()
    return array.address + array.nbytes * len(shape) * (kind + number)


def reports() -> list[str]:
    """What the last call did."""
    report: penstock.Report | None = penstock.last_report()
    assert report is not None
    paths: list[penstock.Path] = report.paths + report.refused
    return [f"{path.path}: {path.bytes} bytes, {path.reason}" for path in paths]


def errors(folder: Path) -> str:
    """What goes wrong says what to do."""
    try:
        penstock.load_file(folder / "absent.safetensors", framework="np")
    except penstock.Error as error:
        offset: int | None = error.offset
        return f"{error.operation} {error.object} {offset}: {error.message}. {error.hint}"
    return ""


def in_place_of_others(path: Path, folder: Path) -> int:
    """Programs of others are served for a while; models go into folders."""
    patched: penstock.Patch = penstock.patch()
    penstock.unpatch()
    tensors: dict[str, object] = penstock.load_model(path, framework="np")
    penstock.save_model(tensors, folder, max_shard_size="1GB", metadata={"by": "us"})
    penstock.save_model(tensors, folder / "one.safetensors", {"by": "us"}, align=4096)
    penstock.save({"tensors": 1}, folder / "state.pt", transfer="auto")
    state: object = penstock.load(folder / "state.pt", map_location="cpu", weights_only=True)
    assert state == {"tensors": 1}
    return sum(patched.served.values())


def checkpoints(folder: Path) -> int:
    """A training that goes on while it is saved."""
    state: dict[str, object] = {"random": penstock.RandomState(), "epoch": 1}
    with penstock.Checkpointer(folder, keep=2, memory_limit="auto", snapshot="host") as ckpt:
        report: penstock.CheckpointReport = ckpt.save(1, state, user={"note": "first"})
        ckpt.wait()
        ckpt.restore(into=state, strict=True, fallback=True, map_location="cpu")
        steps: list[int] = ckpt.steps()
        latest: int | None = ckpt.latest()
        checked: dict[str, int] = ckpt.verify(latest)
        assert ckpt.show()["user"] == {"note": "first"} and ckpt.report() is not None
        skipped: list[tuple[int, str]] = report.skipped
        seconds: float = report.stall_seconds + report.durable_seconds
    return len(steps) + checked["files"] + len(skipped) + int(seconds < 0)


def ranks(folder: Path) -> int:
    """Storage for torch.distributed.checkpoint."""
    from penstock.dcp import Reader, Writer

    writer = Writer(folder / "sharded", overwrite=False, transfer="auto", memory_limit=1 << 26)
    reader = Reader(folder / "sharded", cache="drop", verify=True)
    report: penstock.Report | None = writer.report
    return int(report is None) + int(reader is not None)


def model(path: Path) -> object:
    """The one thing that is checked here and not run: it wants a model of transformers."""
    return penstock.from_pretrained(path, "cuda:0", dtype="bfloat16", progress=True)


def main(folder: Path) -> None:
    """All of it, in a folder of its own."""
    path = save(folder)
    print(files(folder), loads(path), *reports(), errors(folder))
    print(penstock.load_file(path, framework="np", dtype=halved)["a"].dtype, cache())
    ahead(path)
    print(in_place_of_others(path, folder / "model"), checkpoints(folder / "checkpoints"),
          ranks(folder))
    penstock.trim()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
