#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How much faster is a model that is stored coded?

    PYTHONPATH=build/python bench/coded.py PLAIN CODED [--small PLAIN CODED] [--rounds N]
        [--limit SECONDS] [--only WORD,...] [--device cuda:0] [--json FILE]

CODED is what `penstock pack PLAIN CODED` made; where it is not there, it is made first, by the
program that PENSTOCK names or build/penstock. The same loads of both take turns, each in a process
of its own that has its CUDA context: its first load, kernels included, and with "-again" a second
one after the first was given back. CPU seconds are those of the whole process meanwhile. All
tensors of both must have the same fingerprints, or the bench fails. "bus" is what as many bytes as
the tensors have would take from pinned memory to the GPU, measured in the same round.

How rounds go is told in bench/rounds.py.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from penstock.compare.cache import set_state
from penstock.compare.model import Model, model_open
from rounds import Case, Contender, Figures, Line, NotMeasured, Play, chosen, tell

ROOT = Path(__file__).resolve().parent.parent
# A process that takes longer hangs.
SECONDS = 180.0
TWO_CORES = "0,1"


def one(path: str, device: str) -> dict:
    """Two loads of a model, in this process."""
    import penstock
    import torch
    from penstock.compare.measure import clocked, device_ready, fingerprints

    device_ready(device)
    found: dict = {}
    for word in ("", "-again"):
        tensors, seconds, cpu = clocked(
            lambda: penstock.load_model(path, device, copy=True, cache="off"), device)
        report = penstock.last_report()
        assert report
        found |= {f"{word}": seconds, f"{word}-cpu": cpu}
        if not word:
            found["report"] = report.as_dict()
            found["fingerprints"] = fingerprints(tensors)
        del tensors
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    return found


def bus(device: str) -> dict:
    """The rate from pinned memory, in this process."""
    from penstock.compare.ceilings import copy
    from penstock.compare.measure import device_ready

    device_ready(device)
    return {"gb_per_s": max(row["gb_per_s"] for row in copy(device))}


@dataclass
class Bench:
    """The models, and the runs that cases are made of."""

    models: dict[str, Model]
    device: str
    bytes: int
    seen: dict[str, dict] = field(default_factory=dict)
    reports: dict[str, dict] = field(default_factory=dict)

    def child(self, *arguments: str, cores: str = "") -> dict:
        command = [sys.executable, __file__, *arguments, self.device]
        if cores:
            command = ["taskset", "-c", cores, *command]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, timeout=SECONDS,
                              stdin=subprocess.DEVNULL)
        if done.returncode:
            raise NotMeasured(f"a process ended with {done.returncode}")
        return json.loads(done.stdout.splitlines()[-1])

    def load(self, name: str, state: str, cores: str = "") -> Figures:
        """One of the models, "plain", "coded", "small-plain" or "small-coded"."""
        model = self.models.get(name)
        if not model:
            raise NotMeasured("no such model was given")
        set_state(state, model.files)
        found = self.child("--load", model.path, cores=cores)
        size, word = name.rpartition("-")[0], name.rpartition("-")[2]
        marks = self.seen.setdefault(size, found["fingerprints"])
        if marks != found["fingerprints"]:
            raise SystemExit(f"{name}: other bits than the other model has")
        self.reports.setdefault(f"{name} {state}", found["report"])
        figures = {word: found[""], f"{word}-cpu": found["-cpu"]}
        # A second load finds what the first left in the page cache.
        if state == "warm":
            figures |= {f"{word}-again": found["-again"]}
        return figures

    def copy(self) -> Figures:
        if not self.device.startswith("cuda"):
            raise NotMeasured("there is no bus to the host's own memory")
        return {"bus": self.bytes / self.child("--bus")["gb_per_s"] / 1e9}


def case(word: str, state: str, wanted: float, size: str = "", cores: str = "",
         cpu: float | None = None, others: tuple[Contender, ...] = (),
         lines: tuple[Line, ...] = ()) -> Case:
    """Both models in one state of the page cache."""
    rate = 20.0 if state == "warm" else 2.0
    return Case(word, "s", (
        Contender("plain", lambda bench: bench.load(size + "plain", state, cores), rate / 4),
        Contender("coded", lambda bench: bench.load(size + "coded", state, cores), rate / 4),
        *others,
    ), (
        Line("coded / plain: time", "coded", "plain", wanted),
        *lines,
        *([Line("coded / plain: time of a second load", "coded-again", "plain-again")]
          if state == "warm" else []),
        Line("coded / plain: CPU time", "coded-cpu", "plain-cpu", cpu),
    ), {"cpu": "CPU"}, not size)


CASES = (
    case("warm", "warm", 0.80, cpu=0.70,
         others=(Contender("bus", Bench.copy, 5.0),),
         lines=(Line("coded / pinned copies of as much: rate", "bus", "coded", 1.10, True),)),
    case("cold", "cold", 0.72),
    case("two-cores", "warm", 0.78, cores=TWO_CORES),
    case("half", "mixed", 0.77),
    case("small", "warm", 1.00, size="small-"),
)


def need_coded(plain: str, coded: str) -> None:
    program = os.environ.get("PENSTOCK", str(ROOT / "build/penstock"))
    if not Path(coded).exists():
        subprocess.run([program, "pack", plain, coded], check=True, stdin=subprocess.DEVNULL)


def sizes(bench: Bench) -> str:
    stored = {name: sum(Path(file).stat().st_size for file in model.files)
              for name, model in bench.models.items()}
    return "; ".join(f"{name} {size / 1e9:.3f} GB" for name, size in stored.items())


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] == "--load":
        print(json.dumps(one(sys.argv[2], sys.argv[3])))
        return 0
    if len(sys.argv) == 3 and sys.argv[1] == "--bus":
        print(json.dumps(bus(sys.argv[2])))
        return 0
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("plain")
    parser.add_argument("coded")
    parser.add_argument("--small", nargs=2, metavar=("PLAIN", "CODED"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=540.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    end = time.monotonic() + asked.limit
    cases = chosen(parser, CASES, asked.only)
    if not asked.small:
        cases = [each for each in cases if each.word != "small"]
    if not shutil.which("taskset"):
        cases = [each for each in cases if each.word != "two-cores"]
    models: dict[str, Model] = {}
    for size, pair in (("", (asked.plain, asked.coded)), ("small-", asked.small)):
        if pair:
            need_coded(*pair)
            models |= {size + "plain": model_open(pair[0]), size + "coded": model_open(pair[1])}
    bench = Bench(models, asked.device, models["plain"].tensor_bytes)
    play = Play(bench, cases, end)
    play.play(asked.rounds)
    tell(play, (f"{bench.bytes / 1e9:.3f} GB of tensors to {bench.device}; medians and ranges",
                sizes(bench)))
    if asked.json:
        asked.json.write_text(json.dumps(
            {"bytes": bench.bytes, "device": bench.device, "rounds": play.rounds,
             "reports": bench.reports, "trouble": play.trouble, "left_out": play.left_out},
            indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
