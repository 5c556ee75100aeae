# SPDX-License-Identifier: MIT
"""What the hardware gives to the plainest code there is. Nothing here uses Penstock.

  copy   pinned host memory to the GPU, by torch, in pieces of several sizes: the best of them
  disk   threads that read the model's files with O_DIRECT into huge-page memory
  cache  threads that read the model's files from the page cache into host memory

The reads are preadv calls of Python threads; preadv lets the interpreter lock go, and at these
request sizes the interpreter is not what they wait for. One read of a small model is over before
it says much: it is read several times, the geometries taking turns, and medians count.
"""
from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import time
from pathlib import Path

from .measure import cpu_seconds

MIB = 1 << 20
HUGE = 2 * MIB
# threads x MiB; the knee of a disk lies somewhere in between, and nobody knows where beforehand.
GEOMETRIES = ((4, 1), (8, 1), (16, 1), (4, 4), (8, 4), (16, 4), (32, 4), (16, 16))
CACHE_GEOMETRIES = ((8, 1), (8, 4), (16, 4))
COPY_SIZES = (4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
COPY_BYTES = 2 << 30
# From the page cache a model is read as many times on end as this takes.
CACHE_BYTES = 4 << 30
CACHE_TIMES = 16


def huge_memory(size: int) -> memoryview:
    """Touched memory that the kernel was asked to make of huge pages, and that begins on one."""
    memory = mmap.mmap(-1, size + HUGE)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass
    view = memoryview(memory)
    anchor = ctypes.c_char.from_buffer(memory)
    start = -ctypes.addressof(anchor) % HUGE
    del anchor
    for position in range(start, start + size, mmap.PAGESIZE):
        memory[position] = 1
    return view[start:start + size]


def read_files(files: list[str], threads: int, request: int, direct: bool,
               seconds: float, times: int = 1) -> dict:
    """Read the files front to back, `times` on end, by `threads`, for at most `seconds`."""
    opened = [os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for file in files]
    try:
        sizes = [os.fstat(file).st_size for file in opened]
        pieces = [(file, offset) for file, size in zip(opened, sizes)
                  for offset in range(0, size, request)] * times
        memory = huge_memory(threads * request)
        turn = itertools.count()
        done = [0] * threads
        failures: list[OSError] = []
        ready = threading.Event()

        def lane(number: int) -> None:
            buffer = [memory[number * request:(number + 1) * request]]
            ready.wait()
            try:
                while (mine := next(turn)) < len(pieces) and time.monotonic() < stop:
                    done[number] += os.preadv(pieces[mine][0], buffer, pieces[mine][1])
            except OSError as error:
                failures.append(error)

        lanes = [threading.Thread(target=lane, args=(number,)) for number in range(threads)]
        for thread in lanes:
            thread.start()
        start, cpu = time.monotonic(), cpu_seconds()
        stop = start + seconds
        ready.set()
        for thread in lanes:
            thread.join()
        if failures:
            raise failures[0]
        spent = time.monotonic() - start
        return {"threads": threads, "request": request, "bytes": sum(done), "seconds": spent,
                "cpu_seconds": cpu_seconds() - cpu, "gb_per_s": sum(done) / spent / 1e9}
    finally:
        for file in opened:
            os.close(file)


def disk(files: list[str], geometries: list[list[int]], seconds: float, reads: int) -> list[dict]:
    return [read_files(files, threads, request, True, seconds)
            for _ in range(reads) for threads, request in geometries]


def cache(files: list[str], seconds: float, reads: int) -> list[dict]:
    times = 1 + CACHE_BYTES // max(1, sum(Path(file).stat().st_size for file in files))
    return [read_files(files, threads, size * MIB, False, seconds, min(times, CACHE_TIMES))
            for _ in range(reads) for threads, size in CACHE_GEOMETRIES]


def copy(device: str) -> list[dict]:
    import torch
    source = torch.empty(max(COPY_SIZES), dtype=torch.uint8, pin_memory=True)
    target = torch.empty(max(COPY_SIZES), dtype=torch.uint8, device=device)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    rows = []
    for size in COPY_SIZES:
        count = COPY_BYTES // size
        slots = max(COPY_SIZES) // size
        start = time.monotonic()
        for turn in range(count):
            at = turn % slots * size
            target[at:at + size].copy_(source[at:at + size], non_blocking=True)
        torch.cuda.synchronize(device)
        spent = time.monotonic() - start
        rows.append({"request": size, "bytes": count * size, "seconds": spent,
                     "gb_per_s": count * size / spent / 1e9})
    return rows
