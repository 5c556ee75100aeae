#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Is there an ordinary situation in which Penstock is slower than something else?

    PYTHONPATH=build/python bench/never_slower.py MODEL [--other MODEL] [--rounds N]
        [--limit SECONDS] [--only WORD,...] [--device cuda:0] [--path [LOADER=]FOLDER]
        [--json FILE]

Each case holds two things against each other, taking turns in fresh processes (A B B A, so that
what drifts hits both alike), and tells the median of the rounds' ratios with their range, beside
what is wanted. --other is a model that a neighbour reads; without it that case is left out.
"""
from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from penstock.compare import ceilings
from penstock.compare.__main__ import folder
from penstock.compare.cache import CacheError, set_state
from penstock.compare.model import Model, model_open
from penstock.compare.runner import Runner

MIB = 1 << 20
TIMEOUT = 300.0
# As a program that stays after its load; enough for 15 GB to be brought into the page cache.
STAY = 15.0
NEIGHBOUR_SECONDS = 3.0
# Loads, says so, and stays until it is told to go, or its input ends.
STAYS = """
import sys, penstock
tensors = penstock.load_model(sys.argv[1], device=sys.argv[2], cache=sys.argv[3])
print("loaded", flush=True)
sys.stdin.readline()
"""


class NotMeasured(Exception):
    """Words that say why."""


class Bench:
    """The runs that cases are made of."""

    def __init__(self, model: Model, other: Model | None, device: str, runner: Runner) -> None:
        self.model, self.other, self.device, self.runner = model, other, device, runner
        self.reference = runner.file("reference.json")
        self.ask({"kind": "reference", "reference": self.reference,
                  "tensors": [vars(tensor) for tensor in model.tensors]})

    def ask(self, job: dict, loader: str = "") -> dict:
        answer = self.runner.run(job, TIMEOUT, loader=loader)
        if answer["status"] != "ok":
            raise NotMeasured(f"{loader or job['kind']}: {answer['reason']}")
        return answer

    def load(self, state: str, loader: str = "penstock", *, busy: bool = False, stay: float = 0.0,
             cache: str = "") -> dict:
        set_state(state, list(self.model.files))
        return self.loaded(loader, busy=busy, stay=stay, cache=cache)

    def loaded(self, loader: str = "penstock", *, busy: bool = False, stay: float = 0.0,
               cache: str = "") -> dict:
        """A load in a fresh process, with the files wherever they are."""
        return self.ask({"kind": "load", "loader": loader, "state": "", "watch": False,
                         "model": self.model.path, "files": list(self.model.files),
                         "torch_files": [], "coded_files": [], "device": self.device,
                         "reference": self.reference, "busy": busy, "stay": stay,
                         "environment": {"PENSTOCK_CACHE": cache} if cache else {}}, loader)

    # Each of these gives the two sides of one round.

    def cold(self) -> tuple[float, float]:
        ours = self.load("cold")["seconds"]
        theirs = [self.load("cold", "fastsafetensors")["seconds"] for _ in range(2)]
        return (ours + self.load("cold")["seconds"]) / 2, sum(theirs) / 2

    def copies(self) -> tuple[float, float]:
        """Of the rate of pinned copies, as the first load of a process."""
        before = self.copy_rate()
        rate = self.model.tensor_bytes / self.load("warm")["seconds"] / 1e9
        return rate, (before + self.copy_rate()) / 2

    def copy_rate(self) -> float:
        rows = self.ask({"kind": "copy", "device": self.device})["rows"]
        return max(row["gb_per_s"] for row in rows)

    def cpu(self) -> tuple[float, float]:
        """CPU seconds, beside twelve threads that only read the files."""
        def plain() -> float:
            return self.ask({"kind": "reads", "files": list(self.model.files), "threads": 12,
                             "request": 4 * MIB})["row"]["cpu_seconds"]

        ours = self.load("warm")["cpu_seconds"]
        theirs = plain() + plain()
        return (ours + self.load("warm")["cpu_seconds"]) / 2, theirs / 2

    def busy(self) -> tuple[float, float]:
        if not self.device.startswith("cuda"):
            raise NotMeasured("there is no driver to ask")
        asked = self.load("warm", busy=True)["seconds"]
        quiet = self.load("warm")["seconds"] + self.load("warm")["seconds"]
        return (asked + self.load("warm", busy=True)["seconds"]) / 2, quiet / 2

    def second(self) -> tuple[float, float]:
        """The load after a cold one, beside one with everything in the page cache."""
        self.load("cold", stay=STAY)
        later = self.loaded()["seconds"]
        return later, self.load("warm")["seconds"]

    def keep(self) -> tuple[float, float]:
        """The rate of a cold load that leaves the files in the page cache, beside one that does
        not."""
        kept = self.load("cold", cache="keep")["seconds"]
        passed = [self.load("cold", cache="off")["seconds"] for _ in range(2)]
        kept += self.load("cold", cache="keep")["seconds"]
        return 2 / kept, 2 / sum(passed)

    def pretrained(self) -> tuple[float, float]:
        ours = self.load("warm", "penstock-pretrained")["seconds"]
        return ours, self.load("warm", "transformers")["seconds"]

    def neighbour(self) -> tuple[float, float]:
        """What a program that reads the same disk has, beside files that are brought into the page
        cache after a load, and beside a process that merely stays."""
        beside = self.neighbour_rate("after")
        alone = self.neighbour_rate("off") + self.neighbour_rate("off")
        return (beside + self.neighbour_rate("after")) / 2, alone / 2

    def neighbour_rate(self, cache: str) -> float:
        if self.other is None:
            raise NotMeasured("no model is there for the neighbour; see --other")
        set_state("cold", list(self.model.files))
        command = [sys.executable, "-c", STAYS, self.model.path, self.device, cache]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env=self.runner.environment(), text=True) as process:
            assert process.stdin and process.stdout
            if process.stdout.readline() != "loaded\n":
                raise NotMeasured("the process beside the neighbour could not load")
            row = ceilings.read_files(list(self.other.files), 4, MIB, True, NEIGHBOUR_SECONDS, 99)
            process.stdin.close()
        return row["gb_per_s"]


@dataclass(frozen=True)
class Case:
    word: str
    title: str
    # Both sides of a round; their quotient is what counts.
    run: Callable[[Bench], tuple[float, float]]
    unit: str
    wanted: float
    # Is the wanted ratio the least that is good, or the most?
    least: bool = False


CASES = (
    Case("copies", "warm, first load: its rate / pinned copies", Bench.copies, "GB/s", 0.92, True),
    Case("cpu", "warm: CPU time / twelve threads that read", Bench.cpu, "CPU-s", 1.12),
    Case("busy", "warm: a thread asks the driver / none does", Bench.busy, "s", 1.03),
    Case("pretrained", "warm: from_pretrained / transformers", Bench.pretrained, "s", 1.0),
    Case("cold", "cold: Penstock / fastsafetensors", Bench.cold, "s", 1.02),
    Case("keep", "cold: the rate of keep / of off", Bench.keep, "1/s", 0.75, True),
    Case("second", "the load after a cold one / warm", Bench.second, "s", 1.05),
    Case("neighbour", "a neighbour beside warming / beside none", Bench.neighbour, "GB/s", 0.97,
         True),
)


def play(bench: Bench, cases: list[Case], count: int, end: float) -> list[dict]:
    results = []
    for case in cases:
        rounds: list[tuple[float, float]] = []
        trouble = "there was no time"
        try:
            while len(rounds) < count and time.monotonic() < end:
                rounds.append(case.run(bench))
                ours, theirs = rounds[-1]
                print(f"{case.word:11} {len(rounds)}  {ours:8.3f} {theirs:8.3f} {case.unit}  "
                      f"{ours / theirs:.3f}", file=sys.stderr, flush=True)
        except (NotMeasured, CacheError) as error:
            trouble = str(error)
        results.append({"case": case.word, "rounds": rounds,
                        "trouble": "" if rounds else trouble})
    return results


def line(case: Case, rounds: list[tuple[float, float]], trouble: str) -> str:
    if not rounds:
        return f"{'-':8} {case.title:45} not measured: {trouble}"
    ratios = sorted(ours / theirs for ours, theirs in rounds)
    ratio = statistics.median(ratios)
    met = ratio >= case.wanted if case.least else ratio <= case.wanted
    ours, theirs = (statistics.median(side) for side in zip(*rounds))
    return (f"{'met' if met else 'NOT MET':8} {case.title:45} {ratio:.3f} ({ratios[0]:.3f}-"
            f"{ratios[-1]:.3f}, {len(rounds)} rounds), wanted {'>=' if case.least else '<='} "
            f"{case.wanted:.2f}; {ours:.3f} / {theirs:.3f} {case.unit}")


def main() -> int:
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("model")
    parser.add_argument("--other")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=540.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--path", type=folder, action="append", default=[])
    parser.add_argument("--json")
    asked = parser.parse_args()
    words = asked.only.split(",") if asked.only else [case.word for case in CASES]
    unknown = set(words) - {case.word for case in CASES}
    if unknown:
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are "
                     f"{', '.join(case.word for case in CASES)}")
    paths: dict[str, list[str]] = {}
    for name, path in asked.path:
        paths.setdefault(name, []).append(path)
    end = time.monotonic() + asked.limit
    cases = [case for case in CASES if case.word in words]
    with Runner(paths, True, None) as runner:
        bench = Bench(model_open(asked.model), model_open(asked.other) if asked.other else None,
                      asked.device, runner)
        results = play(bench, cases, asked.rounds, end)
    for case, result in zip(cases, results):
        print(line(case, result["rounds"], result["trouble"]))
    if asked.json:
        Path(asked.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
