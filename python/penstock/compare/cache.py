# SPDX-License-Identifier: MIT
"""Puts files into the page cache or out of it, and looks whether that worked.

Only the files of the model are touched: dropping all caches would also throw out the libraries
that each worker is about to import, and time would be spent on reading those again.
"""
from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from pathlib import Path

PIECE = 1 << 20
PAGE = mmap.PAGESIZE
# cachestat(2) has the same number on every architecture but alpha.
SYS_CACHESTAT = 451
COLD_ENOUGH = 0.001
WARM_ENOUGH = 0.9999

libc = ctypes.CDLL(None, use_errno=True)


class CacheError(Exception):
    """A state could not be reached: words for people."""


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class _Stat(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in
                ("cached", "dirty", "writeback", "evicted", "recently_evicted")]


def cached_pages(path: str, offset: int, length: int) -> int:
    """Pages of the range that the page cache holds."""
    with open(path, "rb") as file:
        if platform.machine() != "alpha":
            span, stat = _Range(offset, length), _Stat()
            if libc.syscall(SYS_CACHESTAT, file.fileno(), ctypes.byref(span),
                            ctypes.byref(stat), 0) == 0:
                return stat.cached
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(file.fileno(), offset + length - start, access=mmap.ACCESS_COPY,
                       offset=start) as view:
            pages = (ctypes.c_ubyte * ((len(view) + PAGE - 1) // PAGE))()
            anchor = ctypes.c_char.from_buffer(view)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)),
                                  ctypes.c_size_t(len(view)), pages)
            del anchor
            if failed:
                raise CacheError(f"neither cachestat nor mincore answer for {path}: "
                                 f"{os.strerror(ctypes.get_errno())}")
            return sum(page & 1 for page in pages)


def residency(spans: list[tuple[str, int, int]]) -> float:
    """Share of the (file, offset, length) spans that is in the page cache."""
    total = sum((length + PAGE - 1) // PAGE for _, _, length in spans)
    held = sum(cached_pages(*span) for span in spans if span[2])
    return min(1.0, held / total) if total else 0.0


def whole(files: list[str] | tuple[str, ...]) -> list[tuple[str, int, int]]:
    return [(file, 0, Path(file).stat().st_size) for file in files]


def halves(files: list[str] | tuple[str, ...]) -> tuple[list, list]:
    """The spans that are warm and those that are cold in the mixed state: every other shard, or
    the first and the second half where there is one file only."""
    spans = whole(files)
    if len(spans) > 1:
        return spans[::2], spans[1::2]
    file, _, size = spans[0]
    middle = size // 2 // (2 << 20) * (2 << 20) or size // 2 // PAGE * PAGE
    return [(file, 0, middle)], [(file, middle, size - middle)]


def evict(spans: list[tuple[str, int, int]], gently: bool = False) -> None:
    """Throw the spans out. `gently`: not by dropping all caches, and a huge page that reaches over
    the edge of a span may stay."""
    left, tries = 1.0, 0
    # Pages that some core has not listed yet stay at the first try.
    while left and (tries := tries + 1) <= 3:
        for path, offset, length in spans:
            with open(path, "rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_DONTNEED)
        left = residency(spans)
    if gently and left * sum(length for _, _, length in spans) <= 4 << 20:
        return
    if left > COLD_ENOUGH and os.geteuid() == 0 and not gently:
        os.sync()
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1")
        except OSError:
            pass
        left = residency(spans)
    if left > COLD_ENOUGH:
        raise CacheError(f"{left:.1%} of the files stay in the page cache; cold figures need a "
                         f"file system that lets go of them (tmpfs does not), or root")


def warm(spans: list[tuple[str, int, int]]) -> None:
    """Read what is missing, as cat does: from the front to the back, one thread for each file."""
    def read(path: str, offset: int, length: int) -> None:
        buffer = memoryview(bytearray(PIECE))
        file = os.open(path, os.O_RDONLY)
        try:
            end = offset + length
            while offset < end:
                count = os.preadv(file, [buffer[:min(PIECE, end - offset)]], offset)
                if count == 0:
                    break
                offset += count
        finally:
            os.close(file)

    cold = [span for span in spans if residency([span]) < WARM_ENOUGH]
    threads = [threading.Thread(target=read, args=span) for span in cold]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = residency(spans)
    if held < WARM_ENOUGH:
        raise CacheError(f"only {held:.1%} of the files fit into the page cache; warm figures "
                         f"need more memory")


def set_state(state: str, files: list[str] | tuple[str, ...]) -> None:
    """Bring files into the state "warm", "cold" or "mixed"; CacheError if that does not work."""
    if state == "warm":
        warm(whole(files))
    elif state == "cold":
        evict(whole(files))
    else:
        hot, cold = halves(files)
        # First by every means, which may throw all files out; then what reading ahead brought back.
        evict(cold, gently=len(files) == 1)
        warm(hot)
        evict(cold, gently=True)
