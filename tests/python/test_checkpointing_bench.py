# SPDX-License-Identifier: MIT
"""bench/checkpointing.py: every figure in one run, of saves that hold the old values, and no file
left over."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import penstock
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = Path(penstock.__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def checkpointing(bench_module):
    return bench_module("checkpointing")


@pytest.mark.slow
@pytest.mark.alone
def test_one_run_of_checkpoints_has_every_figure_and_leaves_no_file(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/checkpointing.py"), str(tmp_path / "out"),
         "--device", "cpu", "--gb", "0.004", "--tensors", "5", "--many", "50", "--width", "16",
         "--layers", "1", "--steps", "2", "--every", "1", "--rounds", "1",
         "--json", str(tmp_path / "out.json"), "--svg", str(tmp_path / "out.svg")],
        env={**os.environ, "PYTHONPATH": str(PACKAGES)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert {name.partition(":")[2] for name in found["trouble"]} == {"device", "penstock-device"}
    assert found["left_out"] == {}
    table = done.stdout.rpartition("\n\n")[2].splitlines()
    assert {line[9:23].strip() for line in table} == set(found["rounds"])
    assert all("device" in line for line in table if "not measured" in line)
    assert ElementTree.parse(tmp_path / "out.svg").getroot().tag.endswith("svg")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_save_that_has_new_values_is_noticed(checkpointing):
    state = checkpointing.State("cpu", 3000, 3)
    old = {name: tensor.clone() for name, tensor in state.tensors.items()}
    state.change()
    state.check(old)
    with pytest.raises(checkpointing.NotMeasured, match="layer.0.weight changed"):
        state.check(state.tensors)


def test_the_chart_has_a_bar_for_each_that_ran(checkpointing):
    chart = checkpointing.chart([{"none-rate": 4.0}, {"none-rate": 2.0, "penstock-rate": 1.5},
                                 {"penstock-device-rate": 0.75}], "steps")
    bars = [rect for rect in ElementTree.fromstring(chart).iter() if rect.get("height") == "24"]
    assert [float(bar.get("width")) for bar in bars] == [360.0, 180.0, 90.0]


def test_a_chart_of_what_was_compared_has_the_fastest_first(bench_module):
    found = {"loaders": [
        {"name": "other", "label": "Other", "setting": "a < b",
         "states": {"warm": {"seconds": {"median": 2.0, "min": 1.0, "max": 4.0}}}},
        {"name": "penstock", "label": "Penstock", "setting": "none",
         "states": {"warm": {"seconds": {"median": 1.0, "min": 1.0, "max": 1.0}}}},
        {"name": "absent", "label": "Absent", "setting": "none", "states": {"warm": {}}}]}
    chart = bench_module("chart")
    picture = ElementTree.fromstring(chart.bars("x & y", chart.compared(found, "warm")))
    assert [float(rect.get("width")) for rect in picture.iter() if rect.get("height") == "24"] \
        == [90.0, 180.0]
    assert [text.text for text in picture.iter() if text.tag.endswith("text")] \
        == ["x & y", "Penstock", "1", "Other, a < b", "2"]
    assert [path.get("d") for path in picture.iter() if path.tag.endswith("path")] \
        == ["M340.0 86H610.0"]


def test_a_chart_of_rounds_has_the_bars_that_were_asked_for(bench_module):
    chart = bench_module("chart")
    found = {"rounds": {"save": [{"penstock": 1.0, "raw": 2.0}, {"penstock": 3.0}, {}]}}
    assert chart.played(found, "save", {"raw": "plain", "absent": "x", "penstock": "ours"}) == [
        chart.Bar("plain", 2.0, False, 2.0, 2.0), chart.Bar("ours", 2.0, True, 1.0, 3.0)]
    assert chart.played(found, "load", {"raw": "plain"}) == []
