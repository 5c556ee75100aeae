# SPDX-License-Identifier: MIT
"""Each example is compiled by the line in its own comment, against an installed copy, and run.

So they are what a newcomer meets: one header, one library, pkg-config. The GPU is the fake one.
"""
import array
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
FAKES = BUILD / "tests" / "fakes"
EXAMPLES = sorted((ROOT / "examples").glob("*.c"))
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
MIB = 1 << 20


def pattern(size):
    return array.array("Q", range(0, size + 7, 8)).tobytes()[:size]


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The environment of somebody who installed Penstock somewhere."""
    place = tmp_path_factory.mktemp("installed")
    subprocess.run(["meson", "install", "-C", BUILD, "--no-rebuild", "--quiet", "--destdir", place],
                   check=True, capture_output=True)
    config = next(place.rglob("penstock.pc"))
    return {**os.environ, "PKG_CONFIG_PATH": str(config.parent),
            "PKG_CONFIG_SYSROOT_DIR": str(place),
            "LD_LIBRARY_PATH": str(next(place.rglob("libpenstock.so")).parent)}


@pytest.fixture(scope="session")
def programs(installed, tmp_path_factory):
    """All examples, compiled by their own lines."""
    folder = tmp_path_factory.mktemp("examples")
    for source in EXAMPLES:
        line = re.search(r"^ \*\t(cc .*)$", source.read_text(), re.MULTILINE)
        assert line, f"{source.name} does not say how it is compiled"
        shutil.copy(source, folder)
        done = subprocess.run(["sh", "-c", line[1]], cwd=folder, env=installed, text=True,
                              capture_output=True)
        assert done.returncode == 0 and done.stderr == "", done.stderr
    return folder


@pytest.fixture
def run(programs, installed):
    def start(name, *args, gpu=False, **options):
        env = dict(installed, CUDA_VISIBLE_DEVICES="")
        if gpu:
            env["LD_LIBRARY_PATH"] += f":{FAKES}"
            env["FAKE_CUDA_STRICT"] = "1"
        command = [programs / name, *map(str, args)]
        if options.pop("wait", True):
            # Not the input of the tests' own process, on which it is told what to do.
            return subprocess.run(command, env=env, text=True, capture_output=True, timeout=120,
                                  stdin=subprocess.DEVNULL)
        return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, **options)
    return start


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.bin"
    path.write_bytes(pattern(3 * MIB + 16))
    return path


def test_there_are_eight_short_examples_and_one_in_python():
    assert (len(EXAMPLES), len(SCRIPTS)) == (8, 1)
    for source in EXAMPLES + SCRIPTS:
        lines = source.read_text().splitlines()
        assert 40 <= len(lines) <= 90, source.name
        assert max(len(line.expandtabs(8)) for line in lines) <= 100, source.name


def test_load_reaches_the_gpu(run, source):
    done = run("load", source, gpu=True)
    assert done.returncode == 0, done.stderr
    assert f"{source.stat().st_size} bytes into cuda:0" in done.stdout
    assert "it begins with 00 00 00 00 00 00 00 00" in done.stdout


def test_load_falls_back_to_host_memory(run, source):
    done = run("load", source)
    assert done.returncode == 0, done.stderr
    assert "no GPU" in done.stdout and "bytes into host" in done.stdout


def test_load_says_what_is_wrong(run, tmp_path):
    done = run("load", tmp_path / "absent")
    assert done.returncode == 1 and "absent: No such file" in done.stderr


def write_model(path, sizes):
    """A safetensors file of float32 vectors, made by hand."""
    header, end = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "F32", "shape": [size], "data_offsets": [end, end + 4 * size]}
        end += 4 * size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


@pytest.mark.parametrize("device", ["host", "cuda:0"])
def test_load_model_says_what_lands(run, tmp_path, device):
    sizes = {"none": 0, **{f"layer.{i}": 1000 * i + 1 for i in range(200)}}
    write_model(tmp_path / "a.safetensors", dict(list(sizes.items())[:50]))
    write_model(tmp_path / "b.safetensors", dict(list(sizes.items())[50:]))
    done = run("load_model", tmp_path, device, gpu=True)
    assert done.returncode == 0, done.stderr
    *landed, last = done.stdout.splitlines()
    assert sorted(landed) == sorted(f"F32      [{size}] {name}" for name, size in sizes.items())
    assert last.startswith(f"201 tensors, {4 * sum(sizes.values())} bytes into {device} in ")


def test_load_model_takes_an_empty_model_and_refuses_a_broken_one(run, tmp_path):
    write_model(tmp_path / "empty.safetensors", {})
    done = run("load_model", tmp_path / "empty.safetensors")
    assert done.returncode == 0 and done.stdout.startswith("0 tensors, 0 bytes"), done.stderr
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense" * 4)
    done = run("load_model", tmp_path / "bad.safetensors")
    assert done.returncode == 1 and "bad.safetensors" in done.stderr and not done.stdout


@pytest.mark.parametrize("device", ["host", "cuda:0"])
def test_slices_brings_the_right_bytes(run, source, device):
    row, workers, worker = 4096, 8, 3
    data = source.read_bytes()
    rows, part = len(data) // row, row // workers
    wanted = [data[r * row + worker * part:][:part] for r in range(rows)]
    wanted += [data[:row], data[(rows - 1) * row:rows * row]]
    done = run("slices", source, row, worker, workers, device, gpu=True)
    assert done.returncode == 0, done.stderr
    assert f"{sum(map(len, wanted))} bytes wanted" in done.stdout
    assert done.stdout.endswith(f"sum {sum(sum(piece) for piece in wanted)}\n")


@pytest.mark.parametrize("device", ["host", "cuda:0"])
def test_save_replaces_a_file(run, tmp_path, device):
    path = tmp_path / "state.bin"
    path.write_text("old")
    done = run("save", path, MIB + 5, device, gpu=True)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == b"p" * (MIB + 5)
    assert os.listdir(tmp_path) == ["state.bin"]


def test_save_that_fails_leaves_the_old_file(run, tmp_path):
    path = tmp_path / "state.bin"
    path.write_text("old")
    done = run("save", path, 1 << 30, "cuda:7", gpu=True)
    assert done.returncode == 1 and "cuda:7" in done.stderr
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["state.bin"]


@pytest.mark.parametrize("device", ["host", "cuda:0"])
def test_progress_ends_at_all_bytes(run, device):
    done = run("progress", "pattern:16M", device, gpu=True)
    assert done.returncode == 0, done.stderr
    assert "100.0 %" in done.stdout and f"all {16 * MIB} bytes are there" in done.stdout


@pytest.mark.parametrize("device", ["host", "cuda:0"])
def test_progress_stops_at_ctrl_c(run, device):
    process = run("progress", "pattern:64M,rate=4M", device, gpu=True, wait=False)
    # The first line of progress tells that the handler is there.
    assert process.stdout.read(1)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "cancelled" in err
    assert time.monotonic() - started < 5


def parts(numbers):
    return sorted(f"part {number} has landed" for number in numbers)


@pytest.mark.parametrize("device", ["host", "cuda:0"])
def test_event_loop_hears_of_every_part(run, device):
    done = run("event_loop", "pattern:16M,rate=100M", device, gpu=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == parts(range(16))


def test_event_loop_listens_to_the_keyboard_meanwhile(run):
    process = run("event_loop", "pattern:64M,rate=4M", wait=False, stdin=subprocess.PIPE)
    out, err = process.communicate("xq", timeout=60)
    assert process.returncode == 1 and "cancelled" in err
    assert len(out.splitlines()) < 16


def test_diagnose_tells_the_path_and_why(run, source):
    done = run("diagnose", source)
    assert done.returncode == 0, done.stderr
    assert f"{source.stat().st_size} bytes on" in done.stdout
    assert "would take" in done.stdout and "\n  took " in done.stdout


def test_diagnose_tells_errors_apart(run, source, tmp_path):
    done = run("diagnose", tmp_path / "absent")
    assert done.returncode == 3 and "No such file" in done.stderr
    done = run("diagnose", source, "cuda:7", gpu=True)
    assert done.returncode == 4 and "cuda:7" in done.stderr


def test_repack_torch_gives_the_same_tensors_aligned_and_with_digests(run, tmp_path):
    torch = pytest.importorskip("torch")
    state = {"w": torch.randn(300, 301), "list": [torch.arange(9), 7]}
    state["view"] = state["w"].t()[3:5]
    torch.save(state, tmp_path / "old.pt")
    done = run("repack_torch", tmp_path / "old.pt", tmp_path / "new.pt")
    assert done.returncode == 0, done.stderr
    assert "2 storages, 361272 bytes verified" in done.stdout
    again = torch.load(tmp_path / "new.pt", weights_only=True)
    assert torch.equal(again["view"], state["view"]) and torch.equal(again["w"], state["w"])
    assert torch.equal(again["list"][0], state["list"][0]) and again["list"][1] == 7
    assert again["view"].untyped_storage().data_ptr() == again["w"].untyped_storage().data_ptr()


def train(folder, *options, **more):
    """The example in Python, as one would start it beside the build."""
    if not list((BUILD / "python/penstock").glob("_penstock*.so")):
        pytest.skip("the Python package is not built")
    env = {**os.environ, "PYTHONPATH": str(BUILD / "python"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, SCRIPTS[0], folder, *map(str, options)], env=env,
                            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **more)


def losses(lines):
    return [line.partition(",")[0] for line in lines if "loss" in line]


def test_train_goes_on_where_it_was_killed_with_the_same_numbers(tmp_path):
    pytest.importorskip("torch")
    with train(tmp_path / "whole", 80) as whole:
        expected = losses(whole.stdout)
    assert whole.returncode == 0 and len(expected) == 8
    with train(tmp_path / "killed", 80) as killed:
        for line in killed.stdout:
            if line.startswith("step 50"):
                killed.kill()
                break
    with train(tmp_path / "killed", 80) as again:
        first, *rest = again.stdout
    assert again.returncode == 0
    step = int(re.fullmatch("goes on after step ([0-9]+)\n", first)[1])
    assert step >= 40 and losses(rest) == expected[step // 10:]
    assert len(list((tmp_path / "killed").glob("step-*"))) == 3


def test_train_goes_on_from_the_step_before_a_damaged_one_and_replaces_that(tmp_path):
    pytest.importorskip("torch")
    with train(tmp_path, 30) as whole:
        expected = losses(whole.stdout)
    file = tmp_path / "step-00000030/rank-00000.pt"
    data = bytearray(file.read_bytes())
    data[20000] ^= 1
    file.write_bytes(data)
    for first in "goes on after step 20\n", "goes on after step 30\n":
        with train(tmp_path, 30, stderr=subprocess.DEVNULL) as again:
            told, *rest = again.stdout
        assert again.returncode == 0 and told == first
        assert losses(rest) == (expected[2:] if "20" in first else [])
