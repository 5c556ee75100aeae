# SPDX-License-Identifier: MIT
"""What a call did: which paths the bytes took, how many, how long, and why."""
from __future__ import annotations

import threading
from typing import Any, NamedTuple


class Path(NamedTuple):
    """A way that carried bytes, or one that could not be had, and why."""

    path: str
    bytes: int
    reason: str


_SUMS = ("bytes", "storage_bytes", "cpu_seconds", "requests", "retries", "warming_bytes",
         "digested_bytes", "unverified_bytes", "made_bytes", "delivered_bytes", "coded_bytes",
         "decode_seconds", "core_decoded_bytes")
_LARGEST = ("pinned_bytes", "lanes", "request_size", "depth", "latency_us_p50", "latency_us_p95",
            "latency_us_p99", "latency_us_max", "gathered_seconds", "stored_seconds",
            "device_staging_bytes")

#: The way of tensors that look into a mapped file, and why it was taken.
MAPPED = "mapped-file"
#: The way of files that torch itself reads or writes.
TORCH = "torch"
_WHY_MAPPED = ("host tensors look into the file's own pages, which come when they are looked at; "
               "copy=True reads them into other memory")


class Report:
    """The report of one call; ``print(report)`` is for people, ``as_dict()`` for programs.

    ``bytes`` arrived in memory (or in the file), ``storage_bytes`` crossed the store; of bytes
    that were mapped, path "mapped-file", none moved yet: they are in ``bytes`` alone;
    ``seconds`` is wall time, of which ``setup_seconds`` passed before the device could take its
    first byte; ``cpu_seconds`` is what the threads that moved bytes used; ``pinned_bytes`` the most
    staging memory held at once. ``paths`` carried the bytes, ``refused`` are better paths that
    could not be had; both are lists of Path(path, bytes, reason). ``warming_bytes`` are being
    brought into the page cache; ``cache_reason`` says what becomes of bytes that were read around
    it, and why. Where digests are looked at, ``digested_bytes`` have one and, on a load, match it;
    ``unverified_bytes`` moved without. ``delivered_bytes`` is what ``bytes`` are in memory: more or
    fewer where tensors were decoded or given another dtype on their way. ``coded_bytes`` are those
    of ``bytes`` that were decoded, ``core_decoded_bytes`` of these by threads, which took
    ``decode_seconds`` for it, all together. The others a GPU decoded in the place of copies, for
    which it needs no memory to stage in: ``device_staging_bytes`` is 0.

    Of a save that lets its memory change before the end, ``gathering`` is "ahead" where all of it
    found room in staging memory, and "streamed" where some had to wait for the store; of any other
    it is "". ``gathered_seconds`` is when the memory might change, ``stored_seconds`` when all was
    written, not yet durable; ``made_bytes`` is staging memory that was not there before.
    """

    bytes: int
    storage_bytes: int
    seconds: float
    setup_seconds: float
    gb_per_s: float
    cpu_seconds: float
    pinned_bytes: int
    device: str
    lanes: int
    requests: int
    retries: int
    request_size: int
    depth: int
    latency_us_p50: float
    latency_us_p95: float
    latency_us_p99: float
    latency_us_max: float
    paths: list[Path]
    refused: list[Path]
    warming_bytes: int
    cache_reason: str
    digested_bytes: int
    unverified_bytes: int
    gathering: str
    gathered_seconds: float
    stored_seconds: float
    made_bytes: int
    delivered_bytes: int
    coded_bytes: int
    decode_seconds: float
    device_staging_bytes: int
    core_decoded_bytes: int

    def __init__(self, fields: dict):
        """From the dict that the engine gives."""
        self.__dict__.update(fields)
        self.paths = [Path(*path) for path in fields["paths"]]
        self.refused = [Path(*path) for path in fields["refused"]]

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, texts and lists, ready for JSON."""
        fields = dict(self.__dict__)
        for name in ("paths", "refused"):
            fields[name] = [path._asdict() for path in fields[name]]
        return fields

    def __str__(self) -> str:
        """A few lines for people."""
        speed = f", {self.gb_per_s:.2f} GB/s" if self.gb_per_s else ""
        lines = [f"{self.bytes / 1e9:.3f} GB in {self.seconds:.3f} s{speed} "
                 f"to or from {self.device}; {self.cpu_seconds:.2f} s of CPU, "
                 f"{self.pinned_bytes / 2**20:.0f} MiB of staging memory"]
        if self.coded_bytes:
            cores = f"cores, {self.decode_seconds:.2f} s of them"
            by = "the GPU"
            if self.core_decoded_bytes == self.coded_bytes:
                by = cores
            elif self.core_decoded_bytes:
                by = f"the GPU, {self.core_decoded_bytes / 1e9:.3f} GB of that by {cores}"
            lines.append(f"  decoded: {self.coded_bytes / 1e9:.3f} GB of it, by {by}; "
                         f"{self.delivered_bytes / 1e9:.3f} GB were delivered")
        if self.unverified_bytes:
            lines.append(f"  unverified: {self.unverified_bytes / 1e9:.3f} GB")
        lines += [f"  {p.path}: {p.bytes / 1e9:.3f} GB ({p.reason})" for p in self.paths]
        lines += [f"  not {p.path}: {p.reason}" for p in self.refused]
        if self.cache_reason:
            warming = f"{self.warming_bytes / 1e9:.3f} GB " if self.warming_bytes else ""
            lines.append(f"  page cache: {warming}{self.cache_reason}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<penstock.Report {self.bytes} bytes in {self.seconds:.6f} s>"


def merge(reports: list[dict], seconds: float, device: str) -> dict:
    """One report for a call that took several jobs."""
    merged = {name: sum(r[name] for r in reports) for name in _SUMS}
    for name in _LARGEST:
        merged[name] = max((r[name] for r in reports), default=0)
    for name in ("paths", "refused"):
        found: dict[tuple[str, str], int] = {}
        for report in reports:
            for path, count, reason in report[name]:
                found[path, reason] = found.get((path, reason), 0) + count
        merged[name] = [(path, count, reason) for (path, reason), count in found.items()]
    # One job may find memory plentiful, and a later one no more.
    reasons = dict.fromkeys(r["cache_reason"] for r in reports if r["cache_reason"])
    merged["cache_reason"] = "; ".join(reasons)
    merged["gathering"] = max((r["gathering"] for r in reports), default="")
    merged["device"] = device
    merged["seconds"] = seconds
    merged["setup_seconds"] = reports[0]["setup_seconds"] if reports else 0.0
    moved = merged["bytes"] - sum(count for path, count, _ in merged["paths"] if path == MAPPED)
    merged["gb_per_s"] = moved / seconds / 1e9 if seconds > 0 else 0.0
    return merged


def _one_path(count: int, seconds: float, path: str, reason: str) -> dict:
    """A report about bytes that the engine did not move."""
    fields = dict.fromkeys(_SUMS + _LARGEST, 0)
    fields.update(bytes=count, delivered_bytes=count, seconds=seconds, setup_seconds=0.0,
                  gb_per_s=0.0, device="host", paths=[(path, count, reason)], refused=[],
                  cache_reason="", gathering="")
    return fields


def mapped(count: int, seconds: float) -> dict:
    """The report about bytes that tensors look at in the page cache: nothing has moved."""
    return _one_path(count, seconds, MAPPED, _WHY_MAPPED)


def by_torch(count: int, seconds: float, reason: str) -> dict:
    """The report about a file that torch itself has read or written."""
    fields = _one_path(count, seconds, TORCH, reason)
    fields.update(gb_per_s=count / seconds / 1e9, unverified_bytes=count)
    return fields


_last = threading.local()


def keep(fields: dict) -> None:
    """Make this the last report of the calling thread."""
    _last.report = Report(fields)


def keep_other(report: Report) -> None:
    """The same with the report of another thread, which worked for this one."""
    _last.report = report


def keep_mapped(count: int, seconds: float) -> None:
    """The same for one mapped tensor, which takes less time than to write a report about it."""
    _last.report = count, seconds


def last_report() -> Report | None:
    """What the last call of this thread did; None if there was none."""
    found = getattr(_last, "report", None)
    if isinstance(found, tuple):
        keep(mapped(*found))
        found = _last.report
    return found
