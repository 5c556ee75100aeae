#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How fast is a checkpoint on the disk, durable, and back again?

    PYTHONPATH=build/python bench/saving.py MODEL FOLDER [--rounds N] [--limit SECONDS]
        [--only WORD,...] [--device cuda:0] [--path kvikio=FOLDER] [--json FILE]

The tensors of MODEL lie on the device in one process that serves all savers: what is measured is
the saving, and no run has to load them again. Only KvikIO has a process of its own, with random
bytes of the same sizes on the device. Each file is written to FOLDER and deleted after its run; one
torch zip stays for the loads until the end, so that twice the size of MODEL must be free.

How rounds go is told in bench/rounds.py.

Loads are those of a process that has its CUDA context, its allocator emptied before each, with
cache="off" so that nothing goes on behind the next one; what they are held against are the files of
MODEL itself, which therefore should lie on the same disk.
"""
from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from functools import cached_property
from pathlib import Path
from typing import Any, Callable

import penstock
import torch
from penstock.compare.__main__ import folder
from penstock.compare.cache import set_state
from penstock.compare.measure import Watch, clocked, device_ready, device_sync, differences, \
    fingerprints
from penstock.compare.model import Model, model_open
from penstock.compare.runner import Runner
from rounds import BLOCK, MIB, Case, Contender, Figures, Line, NotMeasured, Play, Raw, chosen, \
    sync_path, tell

MANY = 10_000
# What files have beside their tensors, and a little more.
ROOM = 256 * MIB
# A few seconds of saving are enough to see who else can run meanwhile.
GIL_BYTES = 4 << 30
IDLE_SECONDS = 1.0
# A process that takes longer hangs.
KVIKIO_SECONDS = 90.0
# What docs/checkpoint.md promises, and what a process may grow by beside it.
PINNED_MIB, BESIDE_MIB = 128, 64
# Writes random bytes of given sizes to each file that it is told of, at aligned offsets, which
# suits KvikIO best; answers with the seconds until the call was done, and until an fsync was.
KVIKIO = """
import json, os, sys, time
import torch
import kvikio, kvikio.defaults
kvikio.defaults.set({"num_threads": 16, "task_size": 16 << 20})
device, sizes = sys.argv[1], json.loads(sys.argv[2])
tensors = [torch.empty(size, dtype=torch.uint8, device=device).random_() for size in sizes]
if device == "cpu":
    tensors = [tensor.numpy() for tensor in tensors]
else:
    torch.cuda.synchronize()
# The driver is opened by the first file; nobody else's start is timed either.
with kvikio.CuFile(sys.argv[3], "w") as file:
    file.pwrite(tensors[0]).get()
os.unlink(sys.argv[3])
for line in sys.stdin:
    start, offset, waiting = time.monotonic(), 0, []
    with kvikio.CuFile(line.rstrip("\\n"), "w") as file:
        for tensor in tensors:
            waiting.append(file.pwrite(tensor, file_offset=offset))
            offset += -(-tensor.nbytes // 4096) * 4096
        written = sum(future.get() for future in waiting)
    done = time.monotonic() - start
    if written != sum(sizes):
        sys.exit(f"KvikIO wrote {written} of {sum(sizes)} bytes")
    handle = os.open(line.rstrip("\\n"), os.O_RDONLY)
    os.fsync(handle)
    print("saved", done, time.monotonic() - start, flush=True)
    os.close(handle)
"""

class Counting:
    """A Python thread that counts as fast as it may."""

    def __enter__(self) -> Counting:
        self.count, self.over = 0, False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.thread.join()

    def run(self) -> None:
        while not self.over:
            self.count += 1

    def rate(self, work: Callable[[], Any]) -> float:
        """Millions that it counts in a second of the work."""
        count, start = self.count, time.monotonic()
        work()
        return (self.count - count) / (time.monotonic() - start) / 1e6


class Bench:
    """The state in all its shapes, and the runs that cases are made of."""

    def __init__(self, model: Model, place: Path, device: str, runner: Runner) -> None:
        self.model, self.place, self.device, self.runner = model, place, device, runner
        device_ready(device)
        loaded = penstock.load_model(model.path, device=device, copy=True, cache="off")
        # Each in a storage of its own, as the parameters of a module are.
        self.tensors = {name: tensor.clone() for name, tensor in loaded.items()}
        del loaded
        self.bytes = model.tensor_bytes
        self.raw = Raw(place, self.bytes)
        self.kvikio_process: subprocess.Popen | None = None
        self.numbers = itertools.count()

    def close(self) -> None:
        if self.kvikio_process is not None:
            self.kvikio_process.kill()
            self.kvikio_process.communicate()
        if "zip" in self.__dict__:
            self.zip.unlink(missing_ok=True)

    @cached_property
    def many(self) -> dict[str, Any]:
        """The same bytes as ten thousand tensors."""
        count = max(1, min(MANY, self.bytes // BLOCK))
        size = self.bytes // count // 2
        noise = torch.empty(2 * size, dtype=torch.uint8, device=self.device).random_()
        return {f"tensor.{number}": noise.clone().view(torch.bfloat16) for number in range(count)}

    @cached_property
    def optimizer(self) -> dict[str, Any]:
        """The same bytes as Adam keeps them, its steps on the host, and what trainers add."""
        state = {}
        for number, tensor in enumerate(self.tensors.values()):
            halves = tensor.flatten().tensor_split(2)
            state[number] = {"step": torch.tensor(1000.0 + number),
                             "exp_avg": halves[0].clone(), "exp_avg_sq": halves[1].clone()}
        group = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1,
                 "amsgrad": False, "foreach": None, "params": list(state)}
        return {"optimizer": {"state": state, "param_groups": [group]}, "epoch": 3,
                "arguments": {"name": "bench", "milestones": [100, 200], "resumed": None},
                "rng": torch.get_rng_state()}

    @cached_property
    def part(self) -> dict[str, Any]:
        """As much of the state as a question needs that is not about its size."""
        sizes = itertools.accumulate(tensor.nbytes for tensor in self.tensors.values())
        return {name: tensor for (name, tensor), end in zip(self.tensors.items(), sizes)
                if end <= GIL_BYTES} or self.tensors

    @cached_property
    def zip(self) -> Path:
        path = self.place / "saving-kept.pt"
        penstock.save(self.tensors, path)
        return path

    @cached_property
    def expected(self) -> dict[str, list[int]]:
        return fingerprints(self.tensors)

    # ---------------------------------------------------------------------------------- savers --

    def timed(self, name: str, save: Callable[[Path], Any]) -> Figures:
        """The seconds of a save as it is and, where that is more, until it is durable."""
        path = self.place / f"saving-{next(self.numbers)}"
        try:
            device_sync(self.device)
            start = time.monotonic()
            save(path)
            figures = {name: time.monotonic() - start}
            if not name.startswith("penstock"):
                sync_path(path)
                figures[f"{name}+fsync"] = time.monotonic() - start
            return figures
        finally:
            self.delete(path)

    def delete(self, path: Path) -> None:
        """The disk has done with it when this returns; the next one shall not pay for it."""
        path.unlink(missing_ok=True)
        sync_path(self.place)

    def save_penstock(self, state: dict) -> Figures:
        return self.timed("penstock", lambda path: penstock.save(state, path))

    def save_torch(self, state: dict) -> Figures:
        return self.timed("torch", lambda path: torch.save(state, path))

    def save_penstock_safetensors(self) -> Figures:
        return self.timed("penstock-safetensors",
                          lambda path: penstock.save_file(self.tensors, path))

    def save_safetensors(self) -> Figures:
        from safetensors.torch import save_file

        return self.timed("safetensors", lambda path: save_file(self.tensors, path))

    def save_kvikio(self) -> Figures:
        path = self.place / f"saving-{next(self.numbers)}"
        process = self.kvikio()
        assert process.stdin and process.stdout
        watchdog = threading.Timer(KVIKIO_SECONDS, process.kill)
        watchdog.start()
        try:
            print(path, file=process.stdin, flush=True)
            for line in process.stdout:
                if line.startswith("saved "):
                    done, durable = map(float, line.split()[1:])
                    return {"kvikio": done, "kvikio+fsync": durable}
        except BrokenPipeError:
            pass
        finally:
            watchdog.cancel()
            self.delete(path)
        self.runner.log.seek(0)
        lines = [line for line in self.runner.log.read().splitlines() if line.strip()]
        raise NotMeasured(lines[-1] if lines else "its process was stopped or ended")

    def kvikio(self) -> subprocess.Popen:
        if self.kvikio_process is None:
            environment = self.runner.environment()
            environment["PYTHONPATH"] = ":".join(
                self.runner.path_of("kvikio") + [environment.get("PYTHONPATH", "")])
            sizes = [tensor.nbytes for tensor in self.tensors.values() if tensor.nbytes]
            # cuFile leaves its log where it is started.
            self.kvikio_process = subprocess.Popen(
                [sys.executable, "-P", "-c", KVIKIO, self.device, json.dumps(sizes),
                 str(self.place / "saving-first")], text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=self.runner.log, env=environment,
                cwd=self.runner.folder.name)
        return self.kvikio_process

    # ----------------------------------------------------------------------------------- loads --

    def load(self, state: str, name: str, load: Callable[[], dict]) -> Figures:
        files = list(self.model.files)
        if name != "safetensors":
            files = [str(self.zip)]
        elif state == "cold" and Path(files[0]).stat().st_dev != self.place.stat().st_dev:
            raise NotMeasured("the model is on another disk than the folder")
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
        set_state(state, files)
        tensors, seconds, _ = clocked(load, self.device)
        trouble = differences(self.expected, fingerprints(tensors))
        if trouble:
            raise NotMeasured(trouble)
        return {f"{state}-{name}": seconds}

    def load_zip(self, state: str) -> Figures:
        return self.load(state, "zip",
                         lambda: penstock.load(self.zip, device=self.device, cache="off"))

    def load_safetensors(self, state: str) -> Figures:
        return self.load(state, "safetensors", lambda: penstock.load_model(
            self.model.path, device=self.device, copy=True, cache="off"))

    def load_torch(self, state: str) -> Figures:
        return self.load(state, "torch", lambda: torch.load(
            self.zip, map_location=self.device, weights_only=True))

    # ------------------------------------------------------------------------------ and others --

    def count_idle(self) -> Figures:
        with Counting() as counting:
            return {"idle": counting.rate(lambda: time.sleep(IDLE_SECONDS))}

    def count_beside(self, name: str, save: Callable[[Any, Path], Any]) -> Figures:
        path = self.place / f"saving-{next(self.numbers)}"
        try:
            device_sync(self.device)
            with Counting() as counting:
                return {name: counting.rate(lambda: save(self.part, path))}
        finally:
            self.delete(path)

    def memory(self) -> Figures:
        """Watched, and therefore not timed. It is the first save of the process, whose heap has
        no room yet that a save could hide in."""
        path = self.place / f"saving-{next(self.numbers)}"
        try:
            penstock.trim()
            watch = Watch(self.device)
            watch.start()
            try:
                penstock.save(self.tensors, path)
            finally:
                peak = watch.finish()
        finally:
            self.delete(path)
        report = penstock.last_report()
        assert report
        pinned = report.pinned_bytes / MIB
        return {"pinned": pinned, "beside": max(0.0, peak["held"] / MIB - pinned),
                "promised": PINNED_MIB, "allowed": BESIDE_MIB}


def saved(word: str, state: Callable[[Bench], dict], share: float, rounds: int,
          others: tuple[Contender, ...] = (), lines: tuple[Line, ...] = ()) -> Case:
    """A case of the raw disk, Penstock, torch, and others."""
    return Case(word, "s", (
        Contender("raw", lambda bench: bench.raw.run(), 1.0),
        Contender("penstock", lambda bench: bench.save_penstock(state(bench)), 1.5),
        *others,
        Contender("torch", lambda bench: bench.save_torch(state(bench)), 0.5, rounds),
    ), (
        Line("save: its rate / raw O_DIRECT writes", "raw", "penstock", share, True),
        *lines,
        Line("save: its time / torch.save + fsync", "penstock", "torch+fsync"),
    ))


def loaded(state: str) -> tuple[tuple[Contender, ...], tuple[Line, ...]]:
    return (
        Contender(f"{state}-zip", lambda bench: bench.load_zip(state), 1.0),
        Contender(f"{state}-safetensors", lambda bench: bench.load_safetensors(state), 1.0),
        Contender(f"{state}-torch", lambda bench: bench.load_torch(state), 0.5, 1),
    ), (
        Line(f"load, {state}: zip / safetensors", f"{state}-zip", f"{state}-safetensors", 1.05),
        Line(f"load, {state}: torch.load / ours", f"{state}-torch", f"{state}-zip", 5.0, True),
    )


BESIDE_TORCH = (Line("save: its time / torch.save", "penstock", "torch"),)
COLD, WARM = loaded("cold"), loaded("warm")
# What matters most comes first; but the memory of the first save can be seen only once.
CASES = (
    Case("memory", "MiB", (Contender("memory", Bench.memory, 1.0, 1),), (
        Line("save: pinned / promised", "pinned", "promised", 1.0),
        Line("save: host memory beside that / allowed", "beside", "allowed", 1.0),
    )),
    saved("save-7b", lambda bench: bench.tensors, 0.90, 2, (
        Contender("penstock-safetensors", Bench.save_penstock_safetensors, 1.0),
        Contender("kvikio", Bench.save_kvikio, 0.8, 2),
        Contender("safetensors", Bench.save_safetensors, 0.6, 2),
    ), (
        Line("save: its time / torch.save", "penstock", "torch", 1 / 3),
        Line("save: its time / save_file", "penstock", "safetensors"),
        Line("save: its time / save_file + fsync", "penstock", "safetensors+fsync"),
        Line("save: its time / KvikIO", "penstock", "kvikio"),
        Line("save: its time / KvikIO + fsync", "penstock", "kvikio+fsync"),
        Line("save_file: its rate / raw O_DIRECT writes", "raw", "penstock-safetensors"),
    )),
    saved("save-10k", lambda bench: bench.many, 0.85, 1, lines=BESIDE_TORCH),
    saved("save-optimizer", lambda bench: bench.optimizer, 0.85, 1, lines=BESIDE_TORCH),
    Case("load-zip", "s", COLD[0] + WARM[0], COLD[1] + WARM[1]),
    Case("gil", "M/s", (
        Contender("idle", Bench.count_idle, 99.0),
        Contender("penstock", lambda bench: bench.count_beside("penstock", penstock.save), 4.0),
        Contender("torch", lambda bench: bench.count_beside("torch", torch.save), 2.0, 1),
    ), (
        Line("a thread counts beside save / idle", "penstock", "idle", 0.8, True),
        Line("a thread counts beside torch.save / idle", "torch", "idle"),
    )),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=420.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--path", type=folder, action="append", default=[])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    end = time.monotonic() + asked.limit
    cases = chosen(parser, CASES, asked.only)
    paths: dict[str, list[str]] = {}
    for name, path in asked.path:
        paths.setdefault(name, []).append(path)
    asked.folder.mkdir(parents=True, exist_ok=True)
    model = model_open(asked.model)
    needed = model.tensor_bytes * (2 if "load-zip" in [case.word for case in cases] else 1) + ROOM
    if shutil.disk_usage(asked.folder).free < needed:
        parser.error(f"{asked.folder} has no room for {needed / 1e9:.1f} GB")
    with Runner(paths, False, None) as runner:
        bench = Bench(model, asked.folder, asked.device, runner)
        play = Play(bench, cases, end)
        try:
            play.play(asked.rounds)
        finally:
            bench.close()
    tell(play, (f"{bench.bytes / 1e9:.3f} GB on {bench.device}, {len(bench.tensors)} tensors; "
                "medians and ranges", bench.raw.words()))
    if asked.json:
        asked.json.write_text(json.dumps(
            {"bytes": bench.bytes, "device": bench.device, "raw": bench.raw.geometries,
             "rounds": play.rounds, "trouble": play.trouble, "left_out": play.left_out},
            indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
