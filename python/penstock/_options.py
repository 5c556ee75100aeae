# SPDX-License-Identifier: MIT
"""The options that every call takes, as the engine wants them."""
from __future__ import annotations

from . import _penstock
from ._error import refuse

#: Most staging memory of one call, and the least that a job can do with.
MEMORY_LIMIT = 128 << 20
MEMORY_LIMIT_LEAST = 64 << 10
#: The transfer type that takes the best path for each range.
AUTO = 0
#: The cache policy of who wants nothing to be left in the page cache.
DROP = 2


def copies(backend: str) -> bool:
    """What safetensors calls a backend: "mmap" looks into the file, "pread" reads it."""
    if backend not in ("mmap", "pread"):
        raise refuse("use backend", repr(backend), "safetensors has 'mmap' and 'pread'",
                     "Leave it out, or name a path with transfer=")
    return backend == "pread"


def options(transfer: str | int, memory_limit: int | None,
            cache: str | None = "off") -> tuple[int, int, int]:
    """(transfer type, most bytes of staging memory, cache policy); refuses what makes no sense, in
    words."""
    if memory_limit is None:
        memory_limit = MEMORY_LIMIT
    elif type(memory_limit) is not int or not 0 < memory_limit < 1 << 63:
        raise refuse("keep within", "memory_limit", f"{memory_limit!r} is no number of bytes",
                     f"Give the most staging memory in bytes, {MEMORY_LIMIT_LEAST} or more")
    if "\0" in str(transfer) or not str(transfer).isascii():
        raise refuse("use transfer type", ascii(transfer), "there is no such type")
    if cache is not None and (not isinstance(cache, str) or "\0" in cache or not cache.isascii()):
        raise refuse("use cache policy", ascii(cache), "there is no such policy",
                     "Policies are auto, keep, after, drop and off")
    return _penstock.transfer_type(transfer), memory_limit, _penstock.cache_policy(cache)
