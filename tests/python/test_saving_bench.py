# SPDX-License-Identifier: MIT
"""bench/saving.py: every figure in one run, taken in turns, judged right, and no file left over."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import penstock
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = Path(penstock.__file__).resolve().parents[1]
KVIKIO = """
import os
from concurrent.futures import Future

class CuFile:
    def __init__(self, path, flags):
        self.file = open(path, flags + "b")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def pwrite(self, data, file_offset=0):
        future = Future()
        future.get = lambda: os.pwrite(self.file.fileno(), data, file_offset)
        return future
"""


@pytest.fixture(scope="module")
def saving(bench_module):
    return bench_module("saving")


@pytest.fixture(scope="module")
def turns(bench_module):
    return bench_module("rounds")


def run(tmp_path: Path, *options: str) -> subprocess.CompletedProcess:
    import torch
    from safetensors.torch import save_file

    for number in range(2):
        save_file({f"{number}.{name}": torch.randn(100, 512) for name in "abc"},
                  tmp_path / f"model-{number + 1:05}-of-00002.safetensors")
    return subprocess.run(
        [sys.executable, str(ROOT / "bench/saving.py"), str(tmp_path), str(tmp_path / "out"),
         "--device", "cpu", "--json", str(tmp_path / "out.json"), *options],
        env={**os.environ, "PYTHONPATH": str(PACKAGES)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.alone
def test_one_run_has_every_figure_and_leaves_no_file(tmp_path):
    peer = tmp_path / "peer/kvikio"
    peer.mkdir(parents=True)
    (peer / "__init__.py").write_text(KVIKIO)
    (peer / "defaults.py").write_text("def set(options):\n    pass\n")
    done = run(tmp_path, "--rounds", "1", "--path", f"kvikio={peer.parent}")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["trouble"], found["left_out"]) == ({}, {})
    table = done.stdout.rpartition("\n\n")[2].splitlines()
    assert {line[9:23].strip() for line in table} == set(found["rounds"])
    assert "not measured" not in done.stdout
    saved, = found["rounds"]["save-7b"]
    assert list(saved) == ["raw", "penstock", "penstock-safetensors", "kvikio", "kvikio+fsync",
                           "safetensors", "safetensors+fsync", "torch", "torch+fsync"]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_a_run_without_time_names_what_it_leaves_out(tmp_path):
    done = run(tmp_path, "--limit", "0", "--only", "save-7b,gil", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert ("no time was left for save-7b:raw in round 1, 2; save-7b:penstock in round 1, 2;"
            in done.stdout)
    table = done.stdout.rpartition("\n\n")[2].splitlines()
    assert table and all(line.endswith("not measured") for line in table)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_next_round_goes_the_other_way_and_who_failed_does_not_come_again(turns):
    ran = []

    def contender(word: str, rounds: int = 99, trouble: str = "") -> object:
        def figures(_: object) -> dict[str, float]:
            ran.append(word)
            if trouble:
                raise turns.NotMeasured(trouble)
            return {word: 1.0}
        return turns.Contender(word, figures, 1.0, rounds)

    cases = [turns.Case("first", "s", (contender("a"), contender("broken", trouble="cheese"),
                                        contender("slow", 1), contender("b")), ()),
             turns.Case("second", "s", (contender("c"),), ())]
    play = turns.Play(SimpleNamespace(bytes=0), cases, time.monotonic() + 600)
    play.play(3)
    assert "".join(f"{word} " for word in ran) == "a broken slow b c b a c a b c "
    assert play.trouble == {"first:broken": "cheese"}
    assert play.rounds["first"] == [{"a": 1.0, "slow": 1.0, "b": 1.0}, {"b": 1.0, "a": 1.0},
                                    {"a": 1.0, "b": 1.0}]


@pytest.mark.parametrize("least, wanted, verdict", [
    (True, 0.5, "met"), (True, 0.6, "NOT MET"), (False, 0.5, "met"), (False, 0.4, "NOT MET"),
    (False, None, "")])
def test_the_median_of_the_ratios_is_judged(turns, least, wanted, verdict):
    rounds = [{"ours": 1.0, "theirs": 2.0}, {"ours": 9.0}, {"ours": 1.0, "theirs": 10.0},
              {"ours": 9.0, "theirs": 10.0}]
    case = turns.Case("case", "s", (), ())
    line = turns.verdict_line(case, turns.Line("title", "ours", "theirs", wanted, least), rounds)
    assert line[:8].strip() == verdict
    assert " 0.500 (0.100-0.900) in 3" in line
    assert turns.verdict_line(case, turns.Line("title", "ours", "nobody", wanted, least),
                               rounds).endswith("not measured")


def test_the_raw_writes_leave_no_hole(turns, tmp_path):
    assert turns.write_raw(tmp_path / "raw", (9 << 20) + 1, 3, 2 << 20) > 0
    data = (tmp_path / "raw").read_bytes()
    assert len(data) == (9 << 20) + 4096
    assert all(any(data[at:at + 4096]) for at in range(0, len(data), 4096))


def test_a_counting_thread_counts_while_others_wait_and_ends(saving):
    with saving.Counting() as counting:
        def wait() -> None:
            enough = counting.count + 1000
            while counting.count < enough:
                time.sleep(0.001)

        assert counting.rate(wait) > 0
    assert not counting.thread.is_alive()
