# SPDX-License-Identifier: MIT
"""How long a training stands still for a checkpoint, and when that is durable.

    PYTHONPATH=build/python python3 bench/stall.py FOLDER [--device cuda:0] [--gb 15.2]
        [--tensors 339] [--saves 4] [--limit 1073741824] [--json FILE]

A state of so many tensors is saved several times with all the memory that is plentiful, then with
a memory limit. The stall is from the call to the moment when the tensors may change, pickling
included; the next thing that happens to them is a kernel that overwrites them, and the last file of
each kind is read back to see that it has the old values. The first save makes the staging memory
that the others use again. Beside it: what one copy from the device to pinned memory reaches.
"""
from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import statistics
import sys
import time

#: The stall that is asked for, from the second save on with enough memory: at this rate, and this
#: many seconds more.
RATE, MORE = 45e9, 0.050


def make_state(torch, device: str, size: float, count: int) -> dict:
    """So many tensors of so many bytes in all."""
    each = max(1, int(size) // count // 2)
    return {f"layer.{i}.weight": torch.zeros(each, dtype=torch.bfloat16, device=device)
            for i in range(count)}


def settle(torch, device: str) -> None:
    """Nothing is under way on the device any more."""
    if device != "cpu":
        torch.cuda.synchronize()


def overwrite(state: dict, value: int) -> None:
    """What a training step does to its weights."""
    for tensor in state.values():
        tensor.fill_(value)


def save(torch, state: dict, path: str, limit: int | str, value: int) -> dict:
    """One save of a state that changes at once; what it took."""
    from penstock import _penstock
    from penstock._device import open_device
    from penstock._torch import streams
    from penstock._torch_save import _Storages

    start = time.perf_counter()
    storages, content = _Storages(torch), io.BytesIO()
    pickler = pickle.Pickler(content, protocol=2)
    pickler.persistent_id = storages.persistent_id
    pickler.dump(state)
    placed = storages.on_devices()
    pickled = time.perf_counter()
    job = _penstock.torch_save(
        path, open_device("host"), [("data.pkl", content.getvalue())],
        [(storage.data_ptr(), storage.nbytes(), open_device(name)) for storage, name in placed],
        placed, 0, limit, streams(torch, {name for _, name in placed}), True)
    started = time.perf_counter()
    job.wait_gathered()
    stall = time.perf_counter() - start
    overwrite(state, value)
    report = job.wait()
    return {"stall": stall, "pickle": pickled - start, "start": started - pickled,
            "gathered": report["gathered_seconds"], "stored": report["stored_seconds"],
            "durable": time.perf_counter() - start, "bytes": report["bytes"],
            "pinned": report["pinned_bytes"], "made": report["made_bytes"],
            "gathering": report["gathering"],
            "path": "+".join(path for path, _, _ in report["paths"])}


def check(torch, path: str, value: int) -> None:
    """Does the file hold this value everywhere?"""
    for name, tensor in torch.load(path, mmap=True).items():
        if not bool((tensor == value).all()):
            raise SystemExit(f"{name} in {path} changed while it was saved")


def copy_rate(torch, device: str) -> float:
    """Bytes a second from the device to pinned memory, in one large copy; 0: there is no GPU."""
    if device == "cpu":
        return 0.0
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    target = torch.zeros(1 << 30, dtype=torch.uint8, pin_memory=True)
    rates = []
    for _ in range(5):
        settle(torch, device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        settle(torch, device)
        rates.append((1 << 30) / (time.perf_counter() - start))
    return statistics.median(rates)


def row(name: str, took: dict) -> str:
    """A line of the table."""
    return (f"{name:<22}{took['stall']:9.3f}{took['bytes'] / took['stall'] / 1e9:9.1f}"
            f"{took['pickle'] * 1e3:8.0f}{took['start'] * 1e3:8.0f}{took['durable']:9.3f}"
            f"{took['bytes'] / took['durable'] / 1e9:8.2f}{took['pinned'] / 2**20:9.0f}"
            f"{took['made'] / 2**20:9.0f}  {took['gathering']}, {took['path']}")


def main() -> int:
    """Measure, print the table; 1 if the stall is longer than is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--gb", type=float, default=15.2)
    parser.add_argument("--tensors", type=int, default=339)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--limit", type=int, default=1 << 30)
    parser.add_argument("--json")
    asked = parser.parse_args()

    import torch

    state = make_state(torch, asked.device, asked.gb * 1e9, asked.tensors)
    size = sum(tensor.nbytes for tensor in state.values())
    rate = copy_rate(torch, asked.device)
    print(f"{size / 1e9:.2f} GB in {asked.tensors} tensors on {asked.device}"
          + (f"; one copy to pinned memory: {rate / 1e9:.1f} GB/s" if rate else ""))
    print(f"{'':<22}{'stall s':>9}{'GB/s':>9}{'pickle':>8}{'start':>8}{'durable':>9}{'GB/s':>8}"
          f"{'pinned':>9}{'made':>9}    (pickle, start: ms; pinned, made: MiB)")
    path, value, taken = os.path.join(asked.folder, "stall.pt"), 0, {}
    for name, limit in (("enough memory", "auto"), (f"{asked.limit >> 20} MiB", asked.limit)):
        taken[name] = []
        for number in range(asked.saves):
            settle(torch, asked.device)
            took = save(torch, state, path, limit, value + 1)
            taken[name].append(took)
            print(row(f"{name} {number + 1}" if number else f"{name}, first", took), flush=True)
            value = (value + 1) % 100
        check(torch, path, value - 1 if value else 99)
    os.unlink(path)
    later = [took["stall"] for took in taken["enough memory"][1:]]
    worst, most = max(later, default=0), size / RATE + MORE
    if rate:
        print(f"stall from the second save on: {worst:.3f} s at most; asked for: {most:.3f} s")
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as out:
            json.dump({"bytes": size, "tensors": asked.tensors, "copy_rate": rate,
                       "saves": taken}, out, indent=1)
    return int(bool(rate) and worst > most)


if __name__ == "__main__":
    sys.exit(main())
