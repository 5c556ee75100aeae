#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How long does a training stand still for a checkpoint, when is that durable, and how soon is it
back?

    PYTHONPATH=build/python bench/checkpointing.py FOLDER [--rounds N] [--limit SECONDS]
        [--only WORD,...] [--device cuda:0] [--gb 15.2] [--tensors 339] [--many 10000]
        [--memory-limit BYTES] [--width 1024] [--layers 10] [--steps 300] [--every 100]
        [--json FILE] [--svg FILE]

A state of noise lies on the device, in some tensors and in many. The stall is from the call to the
moment when the next kernel on the current stream may run, pickling included; that kernel changes
all tensors, and in the first round what was saved is loaded again, to see that it has the old
values. The first save makes the memory that the second one finds; host memory is looked at during
the first, by a thread of this process, so that its stall has a little of that too. What is written
is not read back to verify it (verify=False), as the others do not; in the training loop it is.

Nothing written stays, and there must be room for the state twice.
How rounds go is told in bench/rounds.py.
"""
from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import penstock
import torch
import torch.distributed.checkpoint as dcp
from chart import Bar, bars
from penstock._torch_save import collect
from penstock.compare.cache import set_state
from penstock.compare.measure import Watch, clocked, device_ready, device_sync
from penstock.dcp import Writer
from rounds import MIB, Case, Contender, Figures, Line, NotMeasured, Play, Raw, chosen, sync_path, \
    tell
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

# What is asked of a stall from the second save on: the bytes at this rate, and so many seconds.
HOST, DEVICE = (45e9, 0.050), (1e12, 0.020)
# So much longer may it be with many tensors.
MANY_SECONDS = 0.3
NO_DEVICE = "there is no device to copy the state on"
# Files have more than their tensors.
ROOM = 256 * MIB
BATCH, LENGTH, TOKENS, HEADS = 8, 512, 16_000, 16
# Who takes part in the training loop, as the chart calls them.
LOOPS = {"none": "no checkpoints", "torch": "torch's async_save", "penstock": "Checkpointer",
         "penstock-device": 'Checkpointer, snapshot="device"'}


class State:
    """Tensors on the device that a training would hold, and the kernel that changes them."""

    def __init__(self, device: str, size: int, count: int) -> None:
        each = max(1, size // count // 2)
        noise = torch.empty(2 * each, dtype=torch.uint8, device=device).random_()
        self.numbers = [noise.clone().view(torch.int16) for _ in range(count)]
        self.tensors = {f"layer.{number}.weight": tensor.view(torch.bfloat16)
                        for number, tensor in enumerate(self.numbers)}
        self.bytes = 2 * each * count

    def change(self) -> None:
        torch._foreach_add_(self.numbers, 1)

    def check(self, found: dict[str, Any]) -> None:
        """Is that what it was before the last change?"""
        for mine, name in zip(self.numbers, self.tensors, strict=True):
            if not torch.equal(found[name].view(torch.int16) + 1, mine):
                raise NotMeasured(f"{name} changed while it was saved")


def settle(device: str) -> None:
    """What was queued on the current stream is done; other streams may go on."""
    if device != "cpu":
        torch.cuda.current_stream().synchronize()


def copy_rate(device: str) -> float:
    """Bytes a second from the device to pinned memory, in one large copy; 0: there is no GPU."""
    if device == "cpu":
        return 0.0
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    target = torch.zeros(1 << 30, dtype=torch.uint8, pin_memory=True)
    seconds = [clocked(lambda: target.copy_(source, non_blocking=True), device)[1]
               for _ in range(5)]
    return source.nbytes / statistics.median(seconds)


class Bench:
    """The states, and the runs that cases are made of."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.place, self.device = asked, asked.folder, asked.device
        self.bytes = int(asked.gb * 1e9)
        device_ready(self.device)
        self.copy_rate = copy_rate(self.device)
        self.raw = Raw(self.place, self.bytes)
        self.names = itertools.count()
        self.checked: set[str] = set()
        # What the second stall of a kind depended on.
        self.reasons: dict[str, str] = {}

    @cached_property
    def few(self) -> State:
        return State(self.device, self.bytes, self.asked.tensors)

    @cached_property
    def many(self) -> State:
        return State(self.device, self.bytes, self.asked.many)

    def remove(self, path: Path) -> None:
        """The disk has done with it when this returns; the next one shall not pay for it."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        sync_path(self.place)

    def fresh(self, trim: bool = True) -> Path:
        """A name for what is saved; and nobody finds memory that another one left, unless that was
        for him."""
        gc.collect()
        if trim:
            penstock.trim()
        if self.device != "cpu":
            torch.cuda.empty_cache()
        return self.place / f"checkpoint-{next(self.names)}"

    # ------------------------------------------------------------------------------ the stall --

    def stalled(self, state: State, save: Callable[[], Any]) -> tuple[Any, float, float]:
        """What it returns, when it began, and the seconds until the state may change."""
        device_sync(self.device)
        start = time.perf_counter()
        result = save()
        settle(self.device)
        stall = time.perf_counter() - start
        state.change()
        return result, start, stall

    def checkpointer(self, name: str, state: State, allowed: float, **options: Any) -> Figures:
        """A first save and a second one."""
        path = self.fresh()
        try:
            with penstock.Checkpointer(path, keep=1, verify=False, **options) as ckpt:
                watch = Watch("cpu")
                watch.start()
                try:
                    report, _, stall = self.stalled(state, lambda: ckpt.save(1, state.tensors))
                    ckpt.wait()
                finally:
                    peak = watch.finish()
                figures = {f"{name}-first-stall": stall,
                           f"{name}-first-durable": report.durable_seconds}
                report, _, stall = self.stalled(state, lambda: ckpt.save(2, state.tensors))
                ckpt.wait()
                pinned = report.transfer.pinned_bytes
                self.reasons[f"{name}, {len(state.tensors)} tensors"] = report.stall_reason
                figures |= {f"{name}-stall": stall, f"{name}-durable": report.durable_seconds,
                            f"{name}-memory": max(peak["held"], pinned) / MIB}
                self.check_once(name, state, lambda: ckpt.restore(map_location=self.device))
        finally:
            self.remove(path)
        return figures | ({f"{name}-allowed": allowed} if allowed else {})

    def check_once(self, name: str, state: State, load: Callable[[], dict]) -> None:
        if name not in self.checked:
            state.check(load())
            self.checked.add(name)

    def pickle(self, state: State) -> Figures:
        """What of a stall is Python's."""
        start = time.perf_counter()
        collect(torch, state.tensors)
        return {"pickle": time.perf_counter() - start}

    def host(self, state: State, more: float = 0.0) -> Figures:
        return self.checkpointer("host", state, state.bytes / HOST[0] + HOST[1] + more)

    def device_copy(self, state: State, more: float = 0.0) -> Figures:
        if self.device == "cpu":
            raise NotMeasured(NO_DEVICE)
        return self.checkpointer("device", state, state.bytes / DEVICE[0] + DEVICE[1] + more,
                                 snapshot="device")

    def limited(self, state: State) -> Figures:
        return self.checkpointer("limited", state, 0.0, memory_limit=self.asked.memory_limit)

    def other(self, name: str, state: State, save: Callable[[Path], Any],
              finish: Callable[[Path, Any], None], first: bool = True) -> Figures:
        """Someone's save: until the state may change, and until `finish` has made sure that it is
        durable."""
        path = self.fresh(first)
        watch = Watch("cpu")
        watch.start()
        try:
            result, start, stall = self.stalled(state, lambda: save(path))
            finish(path, result)
            durable = time.perf_counter() - start
        except CheckpointException as error:
            raise NotMeasured(str(error)) from error
        finally:
            peak = watch.finish()
            self.remove(path)
        return {f"{name}-stall": stall, f"{name}-durable": durable,
                f"{name}-memory": peak["held"] / MIB}

    def torch_save(self, state: State) -> Figures:
        return self.other("torch.save", state, lambda path: torch.save(state.tensors, path),
                          lambda path, _: sync_path(path))

    def dcp_save(self, name: str, state: State, writer: Callable[[Path], Any]) -> Figures:
        return self.other(name, state, lambda path: dcp.save(
            state.tensors, storage_writer=writer(path), no_dist=True), lambda *_: None)

    def dcp_async(self, name: str, state: State, writer: Callable[[Path], Any],
                  first: bool = True) -> Figures:
        return self.other(name, state, lambda path: dcp.async_save(
            state.tensors, storage_writer=writer(path)), lambda _, future: future.result(), first)

    def dcp_async_twice(self, name: str, state: State, writer: Callable[[Path], Any]) -> Figures:
        """Of a writer that keeps its memory for the next save."""
        first = self.dcp_async(f"{name}-first", state, writer)
        memory = first.pop(f"{name}-first-memory")
        return first | self.dcp_async(name, state, writer, False) | {f"{name}-memory": memory}

    # -------------------------------------------------------------------------------- restore --

    def restore(self) -> Figures:
        """A checkpoint and the same tensors as a model, each loaded twice, in turns."""
        state, path = self.few, self.fresh()
        step, model = path / "steps", path / "model.safetensors"
        seconds: dict[str, list[float]] = {}
        try:
            path.mkdir()
            penstock.save_file(state.tensors, model)
            with penstock.Checkpointer(step, verify=False) as ckpt:
                ckpt.save(0, state.tensors)
                ckpt.wait()
                zips = [str(each) for each in Path(ckpt.path(0)).glob("*.pt")]
                ways = [("restore", zips, lambda: ckpt.restore(into=state.tensors)),
                        ("load_model", [str(model)], lambda: penstock.load_model(
                            model, device=self.device, copy=True, cache="off"))]
                for cache in ("cold", "warm"):
                    for name, files, load in ways + ways[::-1]:
                        gc.collect()
                        if self.device != "cpu":
                            torch.cuda.empty_cache()
                        set_state(cache, files)
                        seconds.setdefault(f"{cache}-{name}", []).append(
                            clocked(load, self.device)[1])
        finally:
            self.remove(path)
        return {name: statistics.mean(both) for name, both in seconds.items()}

    # ------------------------------------------------------------------------------- training --

    @cached_property
    def training(self) -> Callable[[], None]:
        """A step of a small transformer, whose state is there after the first."""
        asked = self.asked
        torch.manual_seed(1)
        heads = min(HEADS, asked.width // 8)
        layer = torch.nn.TransformerEncoderLayer(asked.width, heads, 4 * asked.width,
                                                 dropout=0.0, batch_first=True, norm_first=True)
        words = TOKENS if self.device != "cpu" else 100
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(words, asked.width),
            torch.nn.TransformerEncoder(layer, asked.layers, enable_nested_tensor=False),
            torch.nn.Linear(asked.width, words)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        length = LENGTH if self.device != "cpu" else 8
        text = torch.randint(words, (BATCH, length + 1), device=self.device)

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device != "cpu"):
                found = self.model(text[:, :-1])
                loss = torch.nn.functional.cross_entropy(found.flatten(0, 1),
                                                         text[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        for _ in range(3):
            step()
        return step

    def loop(self, name: str, save: Callable[[int], Any], finish: Callable[[], None]) -> Figures:
        """Steps a second while it saves, and the seconds after the last step until all is
        durable."""
        step, asked = self.training, self.asked
        device_sync(self.device)
        start, stalls = time.perf_counter(), []
        for number in range(1, asked.steps + 1):
            step()
            if number % asked.every == 0:
                # Steps that are still queued are none of the stall.
                settle(self.device)
                before = time.perf_counter()
                save(number)
                settle(self.device)
                stalls.append(time.perf_counter() - before)
        settle(self.device)
        done = time.perf_counter()
        finish()
        after = time.perf_counter() - done
        return {f"{name}-rate": asked.steps / (done - start),
                f"{name}-stall": statistics.mean(stalls), f"{name}-after": after}

    def loop_alone(self) -> Figures:
        found = self.loop("none", lambda _: None, lambda: None)
        # What is saved by the others, for who reads the table.
        state = sum(tensor.nbytes for tensor in self.model.parameters()) * 3
        return {"none-rate": found["none-rate"], "state-size": state / 1e9}

    def loop_torch(self) -> Figures:
        path, waiting = self.fresh(), []

        def finish() -> None:
            """One save at a time; older ones go, as they do with keep=1."""
            if waiting:
                future, folder = waiting.pop()
                future.result()
                shutil.rmtree(folder)

        def save(number: int) -> None:
            finish()
            model, optimizer = get_state_dict(self.model, self.optimizer)
            folder = path / str(number)
            waiting.append((dcp.async_save({"model": model, "optimizer": optimizer},
                                           checkpoint_id=folder), folder))

        try:
            path.mkdir()
            return self.loop("torch", save, finish)
        finally:
            self.remove(path)

    def loop_penstock(self, name: str, **options: Any) -> Figures:
        path = self.fresh()
        try:
            with penstock.Checkpointer(path, keep=1, **options) as ckpt:
                return self.loop(name, lambda number: ckpt.save(
                    number, {"model": self.model, "optimizer": self.optimizer}), ckpt.wait)
        finally:
            self.remove(path)

    def loop_device(self) -> Figures:
        if self.device == "cpu":
            raise NotMeasured(NO_DEVICE)
        return self.loop_penstock("penstock-device", snapshot="device")


def torchs(path: Path) -> Any:
    return dcp.FileSystemWriter(path)


def stalls(word: str, state: Callable[[Bench], State], more: float,
           others: tuple[Contender, ...] = (), lines: tuple[Line, ...] = ()) -> Case:
    """Those who save a state; the slow ones in the first round only."""
    return Case(word, "s", (
        Contender("raw", lambda bench: bench.raw.run(), 1.0),
        Contender("pickle", lambda bench: bench.pickle(state(bench)), 15.0),
        Contender("host", lambda bench: bench.host(state(bench), more), 0.8),
        Contender("device", lambda bench: bench.device_copy(state(bench), more), 0.8),
        Contender("async-ours", lambda bench: bench.dcp_async_twice("async-ours", state(bench),
                                                                    Writer), 0.8, 1),
        *others,
        Contender("async-torch", lambda bench: bench.dcp_async("async-torch", state(bench),
                                                               torchs), 0.5, 1),
        Contender("torch.save", lambda bench: bench.torch_save(state(bench)), 0.5, 1),
    ), (
        Line("stall, to the host: its time / allowed", "host-stall", "host-allowed", 1.0),
        Line("stall, on the device: its time / allowed", "device-stall", "device-allowed", 1.0),
        Line("durable, by the host: its rate / raw", "raw", "host-durable", 0.9, True),
        Line("durable, by the device: its rate / raw", "raw", "device-durable", 0.9, True),
        Line("stall: first / second", "host-first-stall", "host-stall"),
        Line("stall: torch.save / Checkpointer", "torch.save-stall", "host-stall"),
        Line("stall: torch's async_save / Checkpointer", "async-torch-stall", "host-stall"),
        Line("stall: async_save, torch's writer / ours", "async-torch-stall", "async-ours-stall"),
        Line("durable: torch's async_save / Checkpointer", "async-torch-durable", "host-durable"),
        *lines,
    ), {"memory": "MiB"})


# What matters most comes first.
CASES = (
    stalls("stall-few", lambda bench: bench.few, 0.0, (
        Contender("limited", lambda bench: bench.limited(bench.few), 0.8, 1),
        Contender("dcp-ours", lambda bench: bench.dcp_save("dcp-ours", bench.few, Writer), 1.5, 1),
        Contender("dcp-torch", lambda bench: bench.dcp_save("dcp-torch", bench.few, torchs), 0.5,
                  1),
    ), (
        Line("stall: limited / enough memory", "limited-stall", "host-stall"),
        Line("durable, limited: its rate / raw", "raw", "limited-durable"),
        Line("durable: DCP save, torch's writer / ours", "dcp-torch-durable", "dcp-ours-durable"),
    )),
    stalls("stall-many", lambda bench: bench.many, MANY_SECONDS),
    Case("restore", "s", (Contender("restore", Bench.restore, 0.25, 1),), (
        Line("restore, cold / load_model", "cold-restore", "cold-load_model", 1.05),
        Line("restore, warm / load_model", "warm-restore", "warm-load_model", 1.05),
    )),
    Case("training", "s", (
        Contender("none", Bench.loop_alone, 1.0),
        Contender("torch", Bench.loop_torch, 0.5, 1),
        Contender("penstock", lambda bench: bench.loop_penstock("penstock"), 0.8),
        Contender("penstock-device", Bench.loop_device, 0.8),
    ), (
        Line("steps a second: Checkpointer / no saving", "penstock-rate", "none-rate"),
        Line("steps a second: on the device / no saving", "penstock-device-rate", "none-rate"),
        Line("steps a second: torch's async / no saving", "torch-rate", "none-rate"),
    ), {"rate": "/s", "size": "GB"}, rates=False),
)


def chart(rounds: list[Figures], title: str) -> str:
    """Bars of the steps a second, as SVG."""
    rates = {label: statistics.median(found) for name, label in LOOPS.items()
             if (found := [each[f"{name}-rate"] for each in rounds if f"{name}-rate" in each])}
    return bars(title, [Bar(label, rate, label.startswith("Checkpointer"))
                        for label, rate in rates.items()])


def main() -> int:
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=420.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--gb", type=float, default=15.2)
    parser.add_argument("--tensors", type=int, default=339)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--memory-limit", type=int, default=1 << 30)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    asked = parser.parse_args()
    end = time.monotonic() + asked.limit
    cases = chosen(parser, CASES, asked.only)
    if not 0 < asked.every <= asked.steps:
        parser.error("--every is a number from 1 to --steps")
    asked.folder.mkdir(parents=True, exist_ok=True)
    needed = 2 * int(asked.gb * 1e9) + ROOM
    if shutil.disk_usage(asked.folder).free < needed:
        parser.error(f"{asked.folder} has no room for {needed / 1e9:.1f} GB")
    # A restore that brings its files into the page cache afterwards would do so beside the next.
    os.environ["PENSTOCK_CACHE"] = "off"
    # torch says that there is one process only, and that it has not been told so.
    warnings.filterwarnings("ignore", module="torch.distributed")
    bench = Bench(asked)
    play = Play(bench, cases, end)
    play.play(asked.rounds)
    copies = f"; one copy to pinned memory: {bench.copy_rate / 1e9:.1f} GB/s" \
        if bench.copy_rate else ""
    tell(play, (f"{bench.bytes / 1e9:.3f} GB on {bench.device}, in {asked.tensors} and in "
                f"{asked.many} tensors{copies}; medians and ranges", bench.raw.words(),
                *(f"{name}: {words}" for name, words in bench.reasons.items()),
                f"training: {asked.steps} steps, a checkpoint every {asked.every}"))
    if asked.json:
        asked.json.write_text(json.dumps(
            {"bytes": bench.bytes, "device": bench.device, "copy_rate": bench.copy_rate,
             "raw": bench.raw.geometries, "rounds": play.rounds, "trouble": play.trouble,
             "left_out": play.left_out}, indent=1) + "\n", encoding="utf-8")
    if asked.svg and play.rounds.get("training"):
        asked.svg.write_text(chart(play.rounds["training"], "training steps a second, with a "
                                   f"checkpoint every {asked.every} steps"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
