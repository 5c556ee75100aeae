# SPDX-License-Identifier: MIT
"""What a worker measures around one load: the clock, CPU time, memory, and the bytes that came.

Memory is watched by a thread that looks every few milliseconds. That costs the loader a little, so
runs that are timed are not watched, and runs that are watched are not timed.

Host memory is what the process holds that no file backs: its anonymous pages, and what the driver
mapped into it (cudaHostAlloc's memory is no part of the resident set). Pages of the model that are
merely mapped from the page cache are told separately; the kernel takes them back when it likes.
"""
from __future__ import annotations

import re
import resource
import threading
import time
import zlib
from contextlib import contextmanager
from typing import Any, Iterator

PERIOD = 0.002
ASK_PERIOD = 0.02
SAMPLE = 4096
PAGE = 4096
# Memory that the driver shares with the process: a range of /dev/nvidia0, /dev/nvidiactl or of
# /dev/zero. What is managed (/dev/nvidia-uvm) may lie on the GPU.
DRIVER_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw-s .*/dev/(?:nvidia[^-\s]|zero)", re.M)
FIELDS = ("RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def process_memory() -> dict[str, int]:
    """Bytes by the kernel's names, and "driver": what a device driver mapped for both sides."""
    memory = {}
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            key, _, rest = line.partition(":")
            if key in FIELDS:
                memory[key] = int(rest.split()[0]) << 10
    with open("/proc/self/maps", "rb") as maps:
        memory["driver"] = sum(int(stop, 16) - int(start, 16)
                               for start, stop in DRIVER_MAPPING.findall(maps.read()))
    return memory


def available_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


class Watch(threading.Thread):
    """The most memory seen between start() and finish(), beyond what there was before."""

    def __init__(self, device: str) -> None:
        super().__init__(daemon=True)
        self.device = device if device.startswith("cuda") else None
        self.over = threading.Event()
        self.first = self.look()
        self.peak = dict.fromkeys(self.first, 0)

    def look(self) -> dict[str, int]:
        seen = process_memory()
        seen["held"] = seen["RssAnon"] + max(seen["driver"], seen.get("RssShmem", 0))
        seen["system"] = -available_memory()
        if self.device:
            import torch
            seen["gpu"] = -torch.cuda.mem_get_info(self.device)[0]
        return seen

    def run(self) -> None:
        while not self.over.wait(PERIOD):
            self.take()

    def take(self) -> None:
        for key, value in self.look().items():
            self.peak[key] = max(self.peak.get(key, 0), value - self.first.get(key, 0))

    def finish(self) -> dict[str, int]:
        self.over.set()
        self.join()
        self.take()
        return self.peak


def device_ready(device: str) -> None:
    """torch is imported; the CUDA context is there, and the allocator has been used once."""
    import torch
    touch({"": torch.zeros(PAGE + 1)})
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            from .loaders import Unavailable
            raise Unavailable("torch finds no CUDA device; use --device cpu")
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)


def device_sync(device: str) -> None:
    if device.startswith("cuda"):
        import torch
        torch.cuda.synchronize(device)


def touch(tensors: dict[str, Any]) -> int:
    """Look at one byte of every page, so that what is only mapped has to be read. Returns their
    sum, which nobody needs."""
    import torch
    total = 0
    for tensor in tensors.values():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel():
            total += int(flat[::PAGE].sum()) + int(flat[-1])
    return total


def word_sum(flat: Any) -> Any:
    """The sum of all bytes taken as 64-bit words, modulo 2^64, and of those that are left over.
    Summing single bytes would be a hundred times slower on a CPU."""
    import torch
    words = flat.numel() // 8 * 8
    front = flat[:words]
    if front.data_ptr() % 8 or front.storage_offset() % 8:
        front = front.clone()
    return front.view(torch.int64).sum() + flat[words:].sum(dtype=torch.int64)


def fingerprints(tensors: dict[str, Any]) -> dict[str, list[int]]:
    """For each tensor its length, the sum of its words, and a CRC of three pages of it: cheap on
    a GPU, and enough to tell right bytes from others."""
    import torch
    rows, sums, samples = [], [], []
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        size = flat.numel()
        middle = max(0, size // 2 - SAMPLE // 2)
        picked = torch.cat([flat[:SAMPLE], flat[middle:middle + SAMPLE], flat[-SAMPLE:]])
        rows.append((name, size, picked.numel()))
        sums.append(word_sum(flat))
        samples.append(picked)
    if not rows:
        return {}
    totals = torch.stack(sums).cpu().tolist()
    joined = memoryview(torch.cat(samples).cpu().numpy()).cast("B")
    result, position = {}, 0
    for (name, size, length), total in zip(rows, totals):
        result[name] = [size, total, zlib.crc32(joined[position:position + length])]
        position += length
    return result


def reference(tensors: list[dict]) -> dict[str, list[int]]:
    """The fingerprints of the bytes as they lie in the files."""
    import torch
    by_file: dict[str, list[dict]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor["file"], []).append(tensor)
    result = {}
    for file, inside in by_file.items():
        size = max(tensor["offset"] + tensor["bytes"] for tensor in inside)
        data = torch.from_file(file, size=size, dtype=torch.uint8)
        result.update(fingerprints({
            tensor["name"]: data[tensor["offset"]:tensor["offset"] + tensor["bytes"]]
            for tensor in inside}))
    return result


def differences(expected: dict[str, list[int]], found: dict[str, list[int]]) -> str:
    """What is wrong, in words; empty if nothing is."""
    missing = [name for name in expected if name not in found]
    if missing:
        return f"{len(missing)} tensors are missing, {missing[0]} first"
    wrong = [name for name in expected if found[name] != expected[name]]
    if wrong:
        size = found[wrong[0]][0]
        if size != expected[wrong[0]][0]:
            return f"{wrong[0]} has {size} bytes instead of {expected[wrong[0]][0]}"
        return f"{len(wrong)} tensors hold other bytes than the file, {wrong[0]} first"
    return ""


@contextmanager
def busy(device: str) -> Iterator[None]:
    """Meanwhile a thread asks the driver what memory is free, as monitors do."""
    import torch
    over = threading.Event()

    def ask() -> None:
        while not over.wait(ASK_PERIOD):
            torch.cuda.mem_get_info(device)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def clocked(load, device: str) -> tuple[Any, float, float]:
    """Run it; what it returned, and the seconds and CPU seconds until that was usable. On the CPU
    some loaders map the files and leave the reading for later: all are asked for every page."""
    device_sync(device)
    cpu, start = cpu_seconds(), time.monotonic()
    tensors = load()
    if device.startswith("cuda"):
        device_sync(device)
    else:
        touch(tensors)
    return tensors, time.monotonic() - start, cpu_seconds() - cpu
