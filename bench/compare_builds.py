#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Two builds of Penstock beside each other, on a GPU server: is one slower anywhere?

    bench/compare_builds.py OLD NEW [--rounds N] [--limit SECONDS] [--only WORDS] [--device D]
                            [--data DIR]

OLD and NEW are build folders. Each round runs OLD, NEW and OLD again for each case, each in a
process of its own; told are medians, and the medians of the rounds' ratios NEW/OLD and OLD
again/OLD, the noise. 15 GB of models are made under DATA (default: a folder in NEW, removed
afterwards). The first load of a process counts from when its device could take bytes.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

TWO_CORES = ["taskset", "-c", "0,1"]


class Case:
    """A way to run a build; gives named seconds."""

    def __init__(self, name, run):
        self.name, self.run = name, run
        self.times = {}		# what -> [[old, new, again], ...]


def penstock(build, *arguments, before=()):
    done = subprocess.run([*before, build / "penstock", *map(str, arguments), "--json"],
                          capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{build}: {' '.join(map(str, arguments))}: {done.stderr}{done.stdout}")
    return json.loads(done.stdout)


def load(build, model, device, repeat, *options, before=()):
    return [run["seconds"] for run in
            runs(build, model, device, repeat, *options, before=before)]


def runs(build, model, device, repeat, *options, before=()):
    return penstock(build, "load", model, "--device", device, "--repeat", repeat, "--no-ceiling",
                    *options, before=before)["runs"]


def files(model):
    return sorted(model.glob("*.safetensors"))


def warm(model):
    for path in files(model):
        with open(path, "rb", buffering=0) as file:
            while file.read(16 << 20):
                pass


def cool(paths):
    os.sync()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def first_and_repeated(model, device, repeat, before=()):
    def run(build):
        first, *others = runs(build, model, device, repeat, before=before)
        return {"first": first["seconds"] - first["setup_seconds"],
                "repeated": statistics.median(run["seconds"] for run in others)}
    return run


def cold(model, device):
    def run(build):
        cool(files(model))
        return {"": load(build, model, device, 1)[0]}
    return run


def half(model, device):
    def run(build):
        warm(model)
        cool(files(model)[::2])
        return {"": load(build, model, device, 1)[0]}
    return run


def write(data, device):
    def run(build):
        target = data / "written"
        report = penstock(build, "copy", "--size", "8G", device, target)
        target.unlink()
        return {"": report["seconds"]}
    return run


def cases(small, large, data, device):
    return [
        Case("0.6B warm", first_and_repeated(small, device, 6)),
        Case("7B warm", first_and_repeated(large, device, 4)),
        Case("0.6B warm, two cores", first_and_repeated(small, device, 4, TWO_CORES)),
        Case("7B warm, two cores", first_and_repeated(large, device, 3, TWO_CORES)),
        # From here on the cache is not what it was.
        Case("7B half cached", half(large, device)),
        Case("7B cold", cold(large, device)),
        Case("8 GiB written", write(data, device)),
    ]


def play(all_cases, old, new, data, rounds, end):
    for number in range(rounds):
        if time.monotonic() > end:
            print(f"out of time after {number} rounds", flush=True)
            return
        for model in (data / "0.6b", data / "7b"):
            warm(model)
        for case in all_cases:
            runs = [case.run(build) for build in (old, new, old)]
            for what in runs[0]:
                case.times.setdefault(what, []).append([run[what] for run in runs])
            print(f"round {number + 1}: {case.name}: {runs}", flush=True)


def tell(all_cases):
    print(f"\n{'case':32} {'rounds':>6} {'old s':>9} {'new s':>9} {'new/old':>8} {'old/old':>8}"
          f" {'spread of old/old':>20}")
    for case in all_cases:
        for what, rows in case.times.items():
            new = [row[1] / row[0] for row in rows]
            noise = [row[2] / row[0] for row in rows]
            print(f"{(case.name + ' ' + what).strip():32} {len(rows):6}"
                  f" {statistics.median(row[0] for row in rows):9.4f}"
                  f" {statistics.median(row[1] for row in rows):9.4f}"
                  f" {statistics.median(new):8.3f} {statistics.median(noise):8.3f}"
                  f" {min(noise):9.3f} - {max(noise):.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("new", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=540, help="seconds for all of it")
    parser.add_argument("--only", default="", help="cases whose names hold these words")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--data", type=pathlib.Path)
    given = parser.parse_args()
    end = time.monotonic() + given.limit
    data = given.data or given.new / "compare-data"
    kept = data.exists()
    data.mkdir(parents=True, exist_ok=True)
    try:
        wanted = [case for case in cases(data / "0.6b", data / "7b", data, given.device)
                  if given.only in case.name]
        for size in ("0.6b", "7b"):
            if any(size.upper() in case.name for case in wanted) and not (data / size).exists():
                subprocess.run([given.new / "penstock", "make-model", size, data / size, "-q"],
                               check=True)
        play(wanted, given.old, given.new, data, given.rounds, end)
        tell(wanted)
    finally:
        if not kept:
            shutil.rmtree(data)


if __name__ == "__main__":
    main()
