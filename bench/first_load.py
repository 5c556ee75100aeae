# SPDX-License-Identifier: MIT
"""What makes the first load of a process slower than the next, and memory that is new slower than
memory that is not: the same warm load, in fresh processes, under one condition at a time.

    PYTHONPATH=build/python python3 bench/first_load.py MODEL [ROUNDS]

Conditions take turns; medians at the end. Each process makes a context first, then:

    first          the first job of the process, into new memory of torch
    again          a second job into the memory of the first
    beside         a second job into new memory, while the first memory is kept
    after-free     a second job into memory that was just given back to the driver
    engine-first   the first job, into memory that the engine allocated
    engine-again   a second job of that kind, the first memory kept
"""
from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

CONDITIONS = ("first", "again", "beside", "after-free", "engine-first", "engine-again")


def load(path: str, **how) -> tuple[dict, dict]:
    """Load; the tensors, and what it took outside and inside the engine."""
    import penstock

    start = time.perf_counter()
    tensors = penstock.load_model(path, "cuda:0", **how)
    seconds = time.perf_counter() - start
    report = penstock.last_report()
    return tensors, {"outside": seconds, "engine": report.seconds, "setup": report.setup_seconds,
                     "cpu": report.cpu_seconds, "lanes": report.lanes,
                     "p50": report.latency_us_p50, "gb_per_s": report.bytes / seconds / 1e9}


def measure(condition: str, path: str) -> dict:
    """One condition, in this process."""
    import torch

    torch.zeros(1, device="cuda:0")
    torch.cuda.synchronize()
    if condition.startswith("engine"):
        tensors, took = load(path, framework="dlpack")
        return took if condition == "engine-first" else load(path, framework="dlpack")[1]
    tensors, took = load(path)
    if condition == "first":
        return took
    if condition == "again":
        return load(path, into=tensors)[1]
    if condition == "after-free":
        del tensors
        torch.cuda.empty_cache()
    return load(path)[1]


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] == "--one":
        print(json.dumps(measure(sys.argv[2], sys.argv[3])))
        return 0
    path, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    found: dict[str, list[dict]] = {condition: [] for condition in CONDITIONS}
    for turn in range(rounds):
        for condition in CONDITIONS:
            done = subprocess.run([sys.executable, __file__, "--one", condition, path], text=True,
                                  stdout=subprocess.PIPE, check=True)
            found[condition].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'condition':14} {'outside s':>10} {'engine s':>10} {'setup s':>9} {'CPU s':>7} "
          f"{'lanes':>6} {'p50 us':>7} {'GB/s':>6}")
    for condition, runs in found.items():
        median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(f"{condition:14} {median['outside']:10.4f} {median['engine']:10.4f} "
              f"{median['setup']:9.4f} {median['cpu']:7.2f} {median['lanes']:6.0f} "
              f"{median['p50']:7.0f} {median['gb_per_s']:6.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
