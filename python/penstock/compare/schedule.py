# SPDX-License-Identifier: MIT
"""Who runs when: states, rounds, turns, and what to leave out when the time is up.

All rounds of one state come together, since bringing 15 GB back into the page cache costs seconds;
inside a state the loaders take turns, and the ceiling that belongs to the state is measured in
the same rounds, next to Penstock. The first warm round is run with memory watched; where that load
was so short that being watched could show in its time, it is run once more, unwatched, and only
that run counts.

With a limit, what matters most comes first: all rounds of the loaders of the first class, in every
state; then the others once each; then their other rounds and a look at their memory. Each time a
state gets a share of what is left, a run that would not end in time is left out, and what was left
out is made up for before the next class begins, where time remains. The rest is said to be missing.
How long a run takes is guessed by the size of the model until it is known.
"""
from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Callable, Iterator

from .cache import CacheError, set_state
from .ceilings import GEOMETRIES, MIB
from .loaders import BY_NAME, Loader
from .model import Model
from .runner import Runner
from .states import BY_STATE

# Each geometry of the sweep, each of the times: a shared disk has its moments.
DISK_SECONDS = 0.75
DISK_SWEEPS = 2
DISK_FINAL_SECONDS = 20.0
CACHE_SECONDS = 0.4
DISK_FINALISTS = 2
SMALL_FINALISTS = 3
CEILING_ROUNDS = 3
# Reading a small model is too short to say much: in the first round it is read several times,
# in more ways.
SMALL_BYTES = 6 << 30
SMALL_READS = (3, 9)
CACHE_READS = 3
# What a slow loader does, for guessing how long a run may take.
GUESS_BYTES_PER_S = 1.5e9
WARM_CEILINGS_SECONDS = 5.0
# Importing torch takes seconds and varies little; a bare context takes a tenth and varies more.
STARTUP_ROUNDS = 7
STARTUP_HEAVY_ROUNDS = 2
STARTUP_SECONDS = 45.0
TP_SECONDS = 10.0
# A load that takes longer does not feel a look at its memory every few milliseconds.
WATCHED_SECONDS = 1.5


@dataclass
class Options:
    device: str
    states: list[str]
    rounds: int
    rounds_of: dict[str, int] = field(default_factory=dict)
    loaders: list[str] = field(default_factory=list)
    timeout: float = 300.0
    limit: float | None = None
    # Folders of files that some loaders need.
    torch_files: str | None = None
    coded_files: str | None = None
    startup: bool = False
    tensor_parallel: bool = False
    memory: bool = True
    ceilings: bool = True
    # How long a process stays after a load before the second one begins.
    pause: float = 20.0
    say: Callable[[str], None] = lambda text: None


@dataclass
class Row:
    """Everything about one loader."""
    loader: Loader
    status: str = "ok"
    reason: str = ""
    version: str = ""
    runs: list[dict] = field(default_factory=list)
    memory: dict | None = None
    left_out: list[dict] = field(default_factory=list)
    # The longest run in each state, and what of a run is not loading: seconds.
    walls: dict[str, float] = field(default_factory=dict)
    overhead: float = 0.0

    def fail(self, answer: dict) -> None:
        self.status, self.reason = answer["status"], answer.get("reason", "")


class Schedule:
    def __init__(self, model: Model, options: Options, runner: Runner) -> None:
        self.model, self.options, self.runner = model, options, runner
        self.rows = [Row(BY_NAME[name]) for name in options.loaders]
        self.ceilings: dict[str, list[dict]] = {"copy": [], "disk": [], "cache": []}
        self.notes: list[str] = []
        self.startup: dict[str, list[dict]] = {}
        self.tensor_parallel: dict | None = None
        self.torch_files: list[str] = []
        self.coded_files: list[str] = []
        self.reference = runner.file("reference.json")
        self.started = time.monotonic()
        self.cuda = options.device.startswith("cuda")
        self.ceilings_done: set[tuple[str, int]] = set()
        # Seconds by what they were spent on; see phase().
        self.phases: dict[str, float] = {}
        self.phase_now, self.phase_since = "rest", self.started

    # ------------------------------------------------------------------------------- the whole

    def run(self) -> None:
        self.refuse_states()
        if self.cuda:
            with self.phase("device"):
                self.check_device()
        with self.phase("reference"):
            self.make_reference()
        with self.phase("files"):
            self.refuse_early()
        if self.options.limit is None:
            self.run_states("", self.rows)
        else:
            self.run_by_class()
        if self.options.tensor_parallel:
            with self.reaching("half of each tensor"), self.phase("half of each tensor"):
                self.run_tensor_parallel()
        if self.options.startup:
            with self.reaching("start-ups"), self.phase("start-ups"):
                self.run_startup()
        self.enter("rest")

    def run_by_class(self) -> None:
        """What matters most first; see the top of this file."""
        first = [row for row in self.rows if row.loader.first]
        others = [row for row in self.rows if not row.loader.first]
        self.run_states("", first)
        self.catch_up(first)
        self.run_states("others ", others, most=1)
        self.catch_up(others)
        self.run_states("others ", others, skip=1)
        self.catch_up(others)
        self.watch_rest()

    def run_states(self, phase: str, rows: list[Row], skip: int = 0,
                   most: int | None = None) -> None:
        """Rounds `skip` to `most` of these loaders, state by state."""
        weights = {state: BY_STATE[state].share for state in self.options.states}
        for state in self.options.states:
            deadline = self.share(weights.pop(state), sum(weights.values()))
            count = max((self.rounds_of(row, state) for row in rows), default=0)
            if most is not None:
                count = min(count, most)
            with self.reaching(state), self.phase(phase + state):
                for turn in range(skip, count):
                    self.run_round(rows, state, turn, deadline)

    def catch_up(self, rows: list[Row]) -> None:
        """Run what was left out, round by round, for as long as there is time."""
        for state in self.options.states:
            missed = sorted((run["round"], place) for place, row in enumerate(rows)
                            for run in row.left_out if run["state"] == state)
            with self.reaching(state), self.phase("left over"):
                for turn, place in missed:
                    row = rows[place]
                    if row.status == "ok":
                        self.run_one(row, state, turn - 1, self.share(1.0, 0.0))
                    # Only now: what cannot be run again, or has no time again, stays left out.
                    row.left_out.remove({"state": state, "round": turn})

    def watch_rest(self) -> None:
        """Watch the memory of those that were not watched in their first round."""
        if "warm" not in self.options.states or not self.options.memory:
            return
        with self.reaching("warm"), self.phase("memory"):
            for row in self.rows:
                if row.status == "ok" and row.memory is None and "warm" in row.walls and \
                        self.fits(row, "warm", self.share(1.0, 0.0)):
                    self.run_one(row, "warm", 0, None, watch=True, count=False)

    @contextmanager
    def reaching(self, state: str) -> Iterator[None]:
        """Where the files cannot be brought into a state, the rest goes on without it."""
        try:
            yield
        except CacheError as error:
            note = f"{state}: not measured, {error}"
            if note not in self.notes:
                self.notes.append(note)
                self.options.say(note)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time in here is spent on `name`, except for phases inside."""
        outer = self.enter(name)
        try:
            yield
        finally:
            self.enter(outer)

    def enter(self, name: str) -> str:
        now = time.monotonic()
        before = self.phase_now
        self.phases[before] = self.phases.get(before, 0.0) + now - self.phase_since
        self.phase_now, self.phase_since = name, now
        return before

    def share(self, weight: float, others: float) -> float | None:
        if self.options.limit is None:
            return None
        left = self.started + self.options.limit - time.monotonic()
        later = (STARTUP_SECONDS * self.options.startup
                 + TP_SECONDS * self.options.tensor_parallel)
        left -= min(later, left / 2)
        return time.monotonic() + left * weight / (weight + others)

    def check_device(self) -> None:
        answer = self.runner.run({"kind": "device", "device": self.options.device},
                                 self.options.timeout)
        if answer["status"] != "ok":
            raise RuntimeError(f"{self.options.device} cannot be used: {answer['reason']}")

    def make_reference(self) -> None:
        self.options.say("reading the model once, for the reference")
        try:
            # Several readers are faster than the one that sums; what does not fit is read twice.
            set_state("warm", self.model.files)
        except CacheError:
            pass
        answer = self.runner.run({"kind": "reference", "reference": self.reference,
                                  "tensors": [asdict(tensor) for tensor in self.model.tensors]},
                                 self.options.timeout)
        if answer["status"] != "ok":
            raise RuntimeError(f"the reference could not be read: {answer['reason']}")

    def refuse_states(self) -> None:
        for state in list(self.options.states):
            if reason := BY_STATE[state].refusal(self.options.device):
                self.options.states.remove(state)
                self.notes.append(f"{state}: not measured, {reason}")

    def refuse_early(self) -> None:
        """Name the loaders that cannot run here at all."""
        for row in self.rows:
            if row.loader.cuda_only and not self.cuda:
                row.fail({"status": "unavailable", "reason": "it loads to CUDA devices only"})
            elif row.loader.torch_files and not self.torch_files:
                self.torch_files = self.make_files(row, self.options.torch_files, "torch", ".pt")
            elif row.loader.coded_files and not self.coded_files:
                self.coded_files = self.make_files(row, self.options.coded_files, "coded",
                                                   ".safetensors")

    def make_files(self, row: Row, where: str | None, kind: str, suffix: str) -> list[str]:
        """The model's files as another kind of file, made where they are not there or older."""
        if where is None:
            row.fail({"status": "skipped", "reason": f"it needs {kind} files; --{kind}-files DIR "
                      "makes them"})
            return []
        folder = Path(where).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        made = []
        for file in self.model.files:
            target = folder / (Path(file).stem + suffix)
            if target == Path(file).resolve():
                row.fail({"status": "skipped", "reason": "its files would replace the model's"})
                return []
            if not target.exists() or target.stat().st_mtime < Path(file).stat().st_mtime:
                self.options.say(f"writing {target}")
                answer = self.runner.run({"kind": f"save-{kind}", "source": file,
                                          "target": str(target)}, self.options.timeout)
                if answer["status"] != "ok":
                    row.fail({"status": "skipped", "reason": f"its files could not be written: "
                              f"{answer['reason']}"})
                    return []
            made.append(str(target))
        return made

    # --------------------------------------------------------------------------------- a state

    def run_round(self, rows: list[Row], state: str, turn: int, deadline: float | None) -> None:
        if turn < CEILING_ROUNDS and (state, turn) not in self.ceilings_done:
            self.ceilings_done.add((state, turn))
            with self.phase("ceilings"):
                self.run_ceilings(state, turn, deadline)
        for row in rows:
            if row.status != "ok" or turn >= self.rounds_of(row, state):
                continue
            # Where time is short the others are timed first, and watched at the end.
            watch = state == "warm" and turn == 0 and self.options.memory and \
                (row.loader.first or self.options.limit is None)
            if not watch or not self.run_one(row, state, turn, deadline, watch=True):
                self.run_one(row, state, turn, deadline)

    def fits(self, row: Row, state: str, deadline: float | None) -> bool:
        if deadline is None:
            return True
        guess = (row.overhead or row.loader.start_seconds) + self.reading_seconds()
        if BY_STATE[state].second:
            guess = 2 * guess + self.options.pause
        return time.monotonic() + row.walls.get(state, guess) <= deadline

    def reading_seconds(self) -> float:
        return self.model.file_bytes / GUESS_BYTES_PER_S

    def rounds_of(self, row: Row, state: str) -> int:
        if row.loader.cuda_only and not BY_STATE[state].device(self.options.device).startswith(
                "cuda"):
            return 0
        special = self.options.rounds_of
        name = row.loader.name
        return special.get(f"{state}:{name}", special.get(name, self.options.rounds))

    def files_of(self, row: Row) -> list[str]:
        if row.loader.coded_files:
            return self.coded_files
        return self.torch_files if row.loader.torch_files else list(self.model.files)

    def run_one(self, row: Row, state: str, turn: int, deadline: float | None,
                watch: bool = False, count: bool = True) -> bool:
        """Run a loader once. False if it was watched too closely for its time to count."""
        name = row.loader.name
        if not self.fits(row, state, deadline):
            row.left_out.append({"state": state, "round": turn + 1})
            return True
        start = time.monotonic()
        about = BY_STATE[state]
        set_state(about.cache, self.files_of(row))
        job = {"kind": "load", "loader": name, "state": state, "model": self.model.path,
               "files": list(self.model.files), "torch_files": self.torch_files,
               "coded_files": self.coded_files,
               "device": about.device(self.options.device), "reference": self.reference,
               "watch": watch, "busy": about.busy, "stay": 0.0}
        if about.second:
            answer = self.runner.run({**job, "stay": self.options.pause},
                                     self.options.timeout + self.options.pause, loader=name)
        if not about.second or answer["status"] == "ok":
            answer = self.runner.run(job, self.options.timeout, loader=name)
        wall = time.monotonic() - start
        row.walls[state] = max(row.walls.get(state, 0.0), wall)
        row.overhead = max(row.overhead, wall - answer.get("seconds", wall))
        row.version = answer.get("version", row.version)
        if answer["status"] != "ok":
            row.fail(answer)
            self.options.say(f"{state:6} {turn + 1}  {name:24} {row.status}: {row.reason}")
            return True
        if watch:
            row.memory = answer["memory"] | {"tensors": self.model.tensor_bytes,
                                             "report": answer.get("report")}
            self.options.say(f"memory   {name:24} {answer['memory']['held'] / 1e6:.0f} MB held")
            if not count or answer["seconds"] < WATCHED_SECONDS:
                return False
        row.runs.append({"state": state, "round": turn + 1, **{
            key: answer[key] for key in ("seconds", "cpu_seconds", "wall", "report")
            if key in answer}})
        self.options.say(f"{state:6} {turn + 1}  {name:24} {answer['seconds']:8.3f} s  "
                         f"{answer['cpu_seconds']:6.2f} CPU-s")
        return True

    # ------------------------------------------------------------------------------- ceilings

    def run_ceilings(self, state: str, turn: int, deadline: float | None) -> None:
        if not self.options.ceilings:
            return
        if deadline is not None and time.monotonic() + self.ceilings_guess(state, turn) > deadline:
            if turn == 0 and state in ("warm", "cold"):
                self.notes.append(f"there was no time for the ceilings of {state} files")
            return
        files = list(self.model.files)
        reads = self.reads_of(turn)
        if state == "warm":
            if self.cuda:
                self.add_ceiling("copy", turn, {"kind": "copy", "device": self.options.device})
            set_state("warm", files)
            self.add_ceiling("cache", turn, {"kind": "cache", "files": files,
                                             "reads": min(reads, CACHE_READS),
                                             "seconds": CACHE_SECONDS})
        elif state == "cold":
            set_state("cold", files)
            if turn == 0:
                self.add_ceiling("disk", turn, {
                    "kind": "disk", "files": files, "seconds": DISK_SECONDS, "reads": DISK_SWEEPS,
                    "geometries": [[threads, size * MIB] for threads, size in GEOMETRIES]})
            # The best of the sweep read everything, as a loader must; only those are the ceiling.
            self.add_ceiling("disk", turn, {
                "kind": "disk", "files": files, "seconds": DISK_FINAL_SECONDS, "reads": reads,
                "geometries": self.finalists()}, whole=True)

    def reads_of(self, turn: int) -> int:
        """How many times a geometry reads the model in this round."""
        size = max(1, self.model.file_bytes)
        least, most = SMALL_READS
        return 1 if turn or size > SMALL_BYTES else max(least, min(most, SMALL_BYTES // size))

    def ceilings_guess(self, state: str, turn: int) -> float:
        if state != "cold":
            return WARM_CEILINGS_SECONDS if state == "warm" else 0.0
        once = self.reading_seconds()
        sweep = 0.0 if turn else DISK_SWEEPS * len(GEOMETRIES) * min(DISK_SECONDS, once)
        reads = self.finalists_count() * self.reads_of(turn)
        return sweep + reads * min(DISK_FINAL_SECONDS, once)

    def finalists(self) -> list[list[int]]:
        """The geometries that were the fastest over all sweeps."""
        rates: dict[tuple[int, int], float] = {}
        for row in self.ceilings["disk"]:
            if not row["whole"]:
                geometry = row["threads"], row["request"]
                rates[geometry] = rates.get(geometry, 0.0) + row["gb_per_s"]
        best = sorted(rates, key=lambda geometry: -rates[geometry])
        return [list(geometry) for geometry in best[:self.finalists_count()]]

    def finalists_count(self) -> int:
        return SMALL_FINALISTS if self.model.file_bytes <= SMALL_BYTES else DISK_FINALISTS

    def add_ceiling(self, name: str, turn: int, job: dict, whole: bool = False) -> None:
        answer = self.runner.run(job, self.options.timeout)
        if answer["status"] != "ok":
            self.notes.append(f"the {name} ceiling was not measured: {answer['reason']}")
            self.options.say(self.notes[-1])
            return
        for row in answer["rows"]:
            self.ceilings[name].append({**row, "round": turn + 1, "whole": whole})
        best = max((row["gb_per_s"] for row in answer["rows"]), default=0.0)
        self.options.say(f"ceiling  {name:24} {best:8.2f} GB/s")

    # --------------------------------------------------------------------- the other questions

    def run_tensor_parallel(self) -> None:
        set_state("cold", list(self.model.files))
        answer = self.runner.run(
            {"kind": "tensor-parallel", "model": self.model.path, "device": self.options.device,
             "tensors": [asdict(tensor) for tensor in self.model.tensors]},
            self.options.timeout, loader="penstock")
        self.tensor_parallel = {**answer, "file_bytes": self.model.file_bytes}
        if answer["status"] == "ok":
            self.options.say(f"half of each tensor: {answer['storage_bytes'] / 1e9:.2f} of "
                             f"{self.model.file_bytes / 1e9:.2f} GB read")
        else:
            self.options.say(f"half of each tensor: {answer['reason']}")

    def run_startup(self) -> None:
        light = ["context", "penstock"] if self.cuda else ["penstock"]
        heavy = ["torch", "penstock-torch", "penstock-pretrained", "transformers"]
        set_state("warm", list(self.model.files))
        for turn in range(STARTUP_ROUNDS):
            for kind in light:
                self.start_up(kind, turn)
        for turn in range(STARTUP_HEAVY_ROUNDS):
            # The first round finds torch and transformers out of the page cache, and is needed.
            if turn and self.options.limit and \
                    time.monotonic() > self.started + self.options.limit - STARTUP_SECONDS / 2:
                self.notes.append("there was time for one round of start-ups with torch only")
                break
            for kind in heavy:
                self.start_up(kind, turn)

    def start_up(self, kind: str, turn: int) -> None:
        runs = self.startup.setdefault(kind, [])
        if runs and runs[-1]["status"] != "ok":
            return
        answer = self.runner.startup(kind, self.model.path, self.options.device,
                                     self.options.timeout)
        runs.append(answer)
        if answer["status"] == "ok":
            ready = answer["marks"]["ready"]
            self.options.say(f"startup {turn + 1} {kind:24} {ready:8.3f} s")
        else:
            self.options.say(f"startup   {kind:24} {answer['status']}: {answer['reason']}")
