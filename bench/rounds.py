# SPDX-License-Identifier: MIT
"""What the benches of saving share: contenders in rounds, and the raw disk that they are held
against.

In a round all contenders of a case take turns, in the next one in the opposite order; ratios are
taken within a round, and their median and range are told beside what is wanted. Rounds go over all
cases before the next begins, slow contenders do not take part in all of them, and a run that would
not end before the limit is left out and named.
"""
from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.compare.cache import CacheError
from penstock.compare.ceilings import huge_memory

MIB = 1 << 20
BLOCK = 4096
# threads x MiB of the raw writes; the first raw run of a process takes the better one.
GEOMETRIES = ((8, 4), (16, 1))

# What one run found, by name: seconds, or what the case counts.
Figures = dict[str, float]


class NotMeasured(Exception):
    """Words that say why."""


def sync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_raw(path: Path, size: int, threads: int, request: int) -> float:
    """The seconds that plain threads take to write and sync a file of `size` bytes, around the page
    cache."""
    size = -(-size // BLOCK) * BLOCK
    memory = huge_memory(threads * request)
    # A disk may be a program, to which zeros are nothing.
    for position in range(0, len(memory), MIB):
        memory[position:position + MIB] = os.urandom(MIB)
    offsets = itertools.count(0, request)

    def lane(number: int) -> None:
        buffer = memory[number * request:(number + 1) * request]
        while (offset := next(offsets)) < size:
            piece = buffer[:min(request, size - offset)]
            if os.pwrite(file, piece, offset) != len(piece):
                raise OSError("the disk took a part of a write only")

    start = time.monotonic()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        # As any writer does that knows the size; writes that extend a file wait for each other.
        os.posix_fallocate(file, 0, size)
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lane, range(threads)):
                pass
        os.fsync(file)
        return time.monotonic() - start
    finally:
        os.close(file)


class Raw:
    """The disk's own rate, by the better of some ways to write, which the first run finds."""

    def __init__(self, place: Path, size: int) -> None:
        self.place, self.size = place, size
        self.geometry: tuple[int, int] | None = None
        self.geometries: dict[str, float] = {}

    def write(self, threads: int, mib: int) -> float:
        path = self.place / "raw"
        try:
            return write_raw(path, self.size, threads, mib * MIB)
        finally:
            path.unlink(missing_ok=True)
            sync_path(self.place)

    def run(self) -> Figures:
        if self.geometry is None:
            found = {geometry: self.write(*geometry) for geometry in GEOMETRIES}
            self.geometry = min(found, key=found.__getitem__)
            self.geometries = {f"{threads} threads, {mib} MiB": seconds
                               for (threads, mib), seconds in found.items()}
            return {"raw": found[self.geometry]}
        return {"raw": self.write(*self.geometry)}

    def words(self) -> str:
        tried = "; ".join(f"{words} {seconds:.3f} s" for words, seconds in self.geometries.items())
        return self.geometry and (f"raw writes by {self.geometry[0]} threads of "
                                  f"{self.geometry[1]} MiB, the better of: {tried}") or ""


@dataclass(frozen=True)
class Contender:
    word: str
    run: Callable[[Any], Figures]
    # A careful guess of its rate, for the time before it has run once.
    gb_per_s: float
    # The most rounds it takes part in.
    rounds: int = 99


@dataclass(frozen=True)
class Line:
    """One line of the last table: a ratio of two figures of a round, and what is wanted of it."""
    title: str
    over: str
    under: str
    wanted: float | None = None
    # Is the wanted ratio the least that is good, or the most?
    least: bool = False


@dataclass(frozen=True)
class Case:
    word: str
    unit: str
    contenders: tuple[Contender, ...]
    lines: tuple[Line, ...]
    # Of figures whose names end so.
    units: dict[str, str] = field(default_factory=dict)
    # Are seconds those of all bytes of the bench?
    rates: bool = True

    def unit_of(self, word: str) -> str:
        return self.units.get(word.rpartition("-")[2], self.unit)


class Play:
    """Rounds over cases, as many as there is time for."""

    def __init__(self, bench: Any, cases: Sequence[Case], end: float) -> None:
        self.bench, self.cases, self.end = bench, cases, end
        self.rounds: dict[str, list[Figures]] = {case.word: [] for case in cases}
        self.trouble: dict[str, str] = {}
        # The rounds that it had no time for, by contender.
        self.left_out: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}

    def play(self, count: int) -> None:
        for number in range(count):
            for case in self.cases:
                turn = [each for each in case.contenders if number < each.rounds]
                figures: Figures = {}
                for contender in turn if number % 2 == 0 else reversed(turn):
                    figures |= self.run(case, contender, number)
                if figures:
                    self.rounds[case.word].append(figures)

    def run(self, case: Case, contender: Contender, number: int) -> Figures:
        name = f"{case.word}:{contender.word}"
        if name in self.trouble:
            return {}
        guess = self.seconds.get(name, self.bench.bytes / contender.gb_per_s / 1e9)
        start = time.monotonic()
        if start + guess > self.end:
            self.left_out.setdefault(name, []).append(number + 1)
            return {}
        try:
            figures = contender.run(self.bench)
        except (NotMeasured, CacheError, OSError, RuntimeError, ImportError) as error:
            self.trouble[name] = f"{error}".split("\n")[0] or type(error).__name__
            print(f"{name}: {self.trouble[name]}", file=sys.stderr, flush=True)
            return {}
        self.seconds[name] = time.monotonic() - start
        for word, figure in figures.items():
            print(f"{case.word:15} {number + 1}  {word:24} {figure:9.3f} {case.unit_of(word)}",
                  file=sys.stderr, flush=True)
        return figures


def span(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def figure_lines(case: Case, rounds: list[Figures], size: int) -> list[str]:
    lines = []
    for word in dict.fromkeys(word for figures in rounds for word in figures):
        values = [figures[word] for figures in rounds if word in figures]
        unit = case.unit_of(word)
        rate = f"{size / statistics.median(values) / 1e9:8.2f} GB/s" \
            if unit == "s" and case.rates else ""
        lines.append(f"{case.word:15} {word:24} {span(values):28} {unit:4} {rate}".rstrip())
    return lines


def verdict_line(case: Case, line: Line, rounds: list[Figures]) -> str:
    title = f"{case.word:14} {line.title:42}"
    ratios = [figures[line.over] / figures[line.under] for figures in rounds
              if line.over in figures and line.under in figures]
    if not ratios:
        return f"{'-':8} {title} not measured"
    ratio = statistics.median(ratios)
    verdict, wanted = "", ""
    if line.wanted is not None:
        met = ratio >= line.wanted if line.least else ratio <= line.wanted
        verdict = "met" if met else "NOT MET"
        wanted = f", wanted {'>=' if line.least else '<='} {line.wanted:.2f}"
    return f"{verdict:8} {title} {span(ratios)} in {len(ratios)}{wanted}"


def tell(play: Play, head: Sequence[str]) -> None:
    """All figures, what is missing, and last the verdicts."""
    for text in head:
        if text:
            print(text)
    for case in play.cases:
        for text in figure_lines(case, play.rounds[case.word], play.bench.bytes):
            print(text)
    for name, words in play.trouble.items():
        print(f"{name} failed: {words}")
    if play.left_out:
        print("no time was left for " + "; ".join(
            f"{name} in round {', '.join(map(str, rounds))}"
            for name, rounds in play.left_out.items()))
    print()
    for case in play.cases:
        for line in case.lines:
            print(verdict_line(case, line, play.rounds[case.word]))


def chosen(parser: argparse.ArgumentParser, cases: Sequence[Case], only: str) -> list[Case]:
    """The cases that --only names; all of them if it names none."""
    words = only.split(",") if only else [case.word for case in cases]
    unknown = set(words) - {case.word for case in cases}
    if unknown:
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are "
                     f"{', '.join(case.word for case in cases)}")
    return [case for case in cases if case.word in words]
