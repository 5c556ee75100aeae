# SPDX-License-Identifier: MIT
"""python -m penstock.compare: complete where all goes well, and plain about whoever fails.

Fake peers are planted in folders named by --path: one that raises, one that delivers wrong bytes,
one that hangs, one that crashes. They must be named with their reason, and the others measured.
"""
from __future__ import annotations

import importlib.util
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import penstock
import pytest
from penstock.compare import cache, ceilings, measure, report, schedule
from penstock.compare.__main__ import main, names, rounds
from penstock.compare.loaders import BY_NAME
from penstock.compare.model import ModelError, model_open

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = Path(penstock.__file__).resolve().parents[1]

RAISES = """
def fastsafe_open(*arguments, **options):
    raise RuntimeError("the disk is made of cheese")
"""
WRONG = """
import torch
from safetensors.torch import load_file

class SafetensorsStreamer:
    def __enter__(self):
        return self

    def stream_files(self, files, device):
        self.files = files

    def get_tensors(self):
        for file in self.files:
            for name, tensor in load_file(file).items():
                tensor = tensor.clone()
                # One byte in the middle of one tensor.
                if name == "layer.1.weight":
                    tensor.view(-1).view(torch.uint8)[tensor.nbytes // 3] ^= 1
                yield name, tensor
"""
HANGS = """
import os, time
from pathlib import Path

def fastsafe_open(*arguments, **options):
    Path(os.environ["FAKE_PID"]).write_text(str(os.getpid()))
    time.sleep(600)
"""
CRASHES = """
import os, signal

def fastsafe_open(*arguments, **options):
    os.kill(os.getpid(), signal.SIGSEGV)
"""


TORCH_THERE = """
import sys
THERE = "torch" in sys.modules

def fastsafe_open(*arguments, **options):
    raise RuntimeError(f"torch imported before: {THERE}")
"""


def plant(folder: Path, module: str, text: str) -> str:
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(text)
    return str(folder)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PACKAGES), **more}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "penstock.compare", *words]


def compare(*words: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(*words), env=environment(**env), text=True, timeout=300,
                          capture_output=True, check=False)


def row_of(found: dict, name: str) -> dict:
    return next(row for row in found["loaders"] if row["name"] == name)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Four shards of 8 MiB, with an empty tensor, a scalar and odd sizes among the large ones."""
    import torch
    from safetensors.torch import save_file
    folder = tmp_path_factory.mktemp("model")
    generator = torch.Generator().manual_seed(7)
    for shard in range(4):
        tensors = {f"layer.{shard}.weight": torch.randn(1024, 4096, generator=generator)
                   .to(torch.bfloat16),
                   f"layer.{shard}.bias": torch.randn(1001, generator=generator)}
        if shard == 0:
            tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(3.5),
                        "odd": torch.arange(13, dtype=torch.uint8)}
        save_file(tensors, folder / f"model-{shard + 1:05}-of-00004.safetensors")
    return folder


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> dict:
    """One run of everything, which several tests look at."""
    folder = tmp_path_factory.mktemp("whole")
    done = compare(str(model), "--device", "cpu", "--rounds", "2,torch=1", "--mixed", "--fork",
                   "--tp", "2", "--torch-files", str(folder / "torch"),
                   "--coded-files", str(folder / "coded"), "--json",
                   str(folder / "out.json"), "--plot", str(folder / "out.png"),
                   "--path", "fastsafetensors=" + plant(folder / "a", "fastsafetensors", RAISES),
                   "--path", "runai=" + plant(folder / "b", "runai_model_streamer", WRONG))
    assert done.returncode == 0, done.stderr
    return {"text": done.stdout, "said": done.stderr, "plot": folder / "out.png",
            "json": json.loads((folder / "out.json").read_text())}


def test_every_loader_is_in_the_result(whole):
    assert [row["name"] for row in whole["json"]["loaders"]] == list(BY_NAME)
    for row in whole["json"]["loaders"]:
        assert row["status"] == "ok" or row["reason"], row["name"]


@pytest.mark.parametrize("name", ["penstock", "penstock-coded", "safetensors", "safetensors-cpu",
                                  "torch-mmap"])
def test_loaders_that_work_have_every_figure(whole, name):
    row = row_of(whole["json"], name)
    assert row["status"] == "ok", row["reason"]
    assert row["version"]
    for state in ("warm", "cold", "mixed"):
        seconds = row["states"][state]["seconds"]
        assert seconds["runs"] == 2
        assert 0 < seconds["min"] <= seconds["median"] <= seconds["max"]
        assert row["states"][state]["cpu_seconds"]["max"] > 0
    assert row["memory"]["host_bytes"] >= 0


def test_coded_and_plain_are_shown_side_by_side(whole):
    lines = [line for line in whole["text"].splitlines() if "Penstock" in line]
    assert any("coded model" in line for line in lines), whole["text"]
    report = row_of(whole["json"], "penstock-coded")
    assert report["status"] == "ok" and report["states"]["cold"]["gb_per_s"] > 0


def test_a_coded_model_is_not_made_over_the_model_itself(model):
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    done = compare(str(model), "--device", "cpu", "--rounds", "1", "--warm", "--no-ceilings",
                   "--loaders", "penstock-coded", "--coded-files", str(model))
    assert "would replace" in done.stdout
    assert before == {path.name: path.read_bytes() for path in model.iterdir()}


def test_rounds_of_one_loader(whole):
    assert row_of(whole["json"], "torch")["states"]["cold"]["seconds"]["runs"] == 1


def test_the_tensors_of_torch_load_are_memory(whole):
    """A sampler that looks at nothing would find nothing: these tensors are anonymous memory."""
    held = row_of(whole["json"], "torch")["memory"]["host_bytes"]
    assert held >= 0.9 * whole["json"]["model"]["tensor_bytes"]


def test_a_loader_that_raises_is_named(whole):
    row = row_of(whole["json"], "fastsafetensors")
    assert row["status"] == "failed"
    assert row["reason"] == "RuntimeError: the disk is made of cheese"
    assert "fastsafetensors, nogds: failed - RuntimeError: the disk is made of cheese" \
        in whole["text"]


def test_a_loader_with_wrong_bytes_is_named_and_not_ranked(whole):
    row = row_of(whole["json"], "runai")
    assert row["status"] == "wrong"
    assert row["reason"] == "1 tensors hold other bytes than the file, layer.1.weight first"
    assert not any("Run:ai" in line for line in whole["json"]["conclusion"])


def test_loaders_that_cannot_run_here_are_named(whole):
    for name in ("instanttensor", "instanttensor-buffered", "instanttensor-mmap", "kvikio",
                 "safetensors-prefetch"):
        row = row_of(whole["json"], name)
        assert (row["status"], row["reason"]) == ("unavailable", "it loads to CUDA devices only")
    row = row_of(whole["json"], "transformers")
    assert row["status"] == "unavailable"
    assert "config.json" in row["reason"]


def test_the_result_has_its_parts(whole):
    found = whole["json"]
    assert found["format"] == 1
    assert found["model"]["tensors"] == 11
    assert found["model"]["files"] == 4
    assert found["model"]["tensor_bytes"] == 4 * (1024 * 4096 * 2 + 1001 * 4) + 4 + 13
    assert found["states"] == ["warm", "mixed", "cold"]
    for key in ("disk_gb_per_s", "cache_gb_per_s"):
        assert found["ceilings"][key]["median"] > 0
    assert found["ceilings"]["copy_gb_per_s"] is None
    assert found["shares"]["warm"] > 0
    assert found["shares"]["cold"] > 0
    assert found["machine"]["cores"] > 0
    assert found["startup"] is None
    assert len(found["conclusion"]) == 4


def test_half_of_each_tensor(whole):
    tp = whole["json"]["tensor_parallel"]
    assert tp["status"] == "ok", tp["reason"]
    assert tp["bytes"] < 0.51 * whole["json"]["model"]["tensor_bytes"]
    assert tp["storage_bytes"] <= 0.55 * tp["file_bytes"]


def test_the_table_has_a_line_for_each(whole):
    lines = whole["text"].splitlines()
    for label in ("Penstock", "safetensors", "torch.load"):
        assert any(line.startswith(label) for line in lines), label
    assert any(line.startswith("loader") and "cold s" in line and "mixed s" in line
               for line in lines)
    assert any(line.startswith("warm: ") and "is fastest" in line for line in lines)
    assert lines[-1].startswith("took ") and ", ceilings " in lines[-1] and ", cold " in lines[-1]


def test_the_plot_is_a_picture(whole):
    data = whole["plot"].read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 5000


# A fresh process imports torch within its time, a forked one has it already.
@pytest.mark.parametrize("mode, seconds", [("--fork", "5"), ("--quiet", "20")],
                         ids=["forked", "fresh"])
def test_a_loader_that_hangs_is_stopped(model, tmp_path, mode, seconds):
    folder = plant(tmp_path / "fake", "fastsafetensors", HANGS)
    mark = tmp_path / "pid"
    done = compare(str(model), "--device", "cpu", "--loaders", "fastsafetensors,safetensors",
                   "--rounds", "1", "--warm", "--timeout", seconds, "--no-ceilings", "--no-memory",
                   "--json", mode, "--path", f"fastsafetensors={folder}", FAKE_PID=str(mark))
    found = json.loads(done.stdout)
    row = row_of(found, "fastsafetensors")
    assert row["status"] == "timeout"
    assert f"after {seconds} s" in row["reason"]
    assert row_of(found, "safetensors")["status"] == "ok"
    assert not running(int(mark.read_text()))


@pytest.mark.parametrize("mode", ["--fork", "--quiet"], ids=["forked", "fresh"])
def test_a_loader_that_crashes_is_named(model, tmp_path, mode):
    folder = plant(tmp_path / "fake", "fastsafetensors", CRASHES)
    done = compare(str(model), "--device", "cpu", "--loaders", "fastsafetensors,safetensors",
                   "--rounds", "1", "--warm", "--no-ceilings", "--no-memory", "--json", mode,
                   "--path", folder)
    found = json.loads(done.stdout)
    assert row_of(found, "fastsafetensors")["status"] == "died"
    assert "SIGSEGV" in row_of(found, "fastsafetensors")["reason"]
    assert row_of(found, "safetensors")["status"] == "ok"


@pytest.mark.parametrize("mode", ["--fork", "--quiet"], ids=["forked", "fresh"])
def test_an_interrupt_leaves_no_worker(model, tmp_path, mode):
    folder = plant(tmp_path / "fake", "fastsafetensors", HANGS)
    mark = tmp_path / "pid"
    process = subprocess.Popen(
        command(str(model), "--device", "cpu", "--loaders", "fastsafetensors", "--warm",
                "--no-ceilings", mode, "--path", folder),
        env=environment(FAKE_PID=str(mark)), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not mark.exists() or not mark.read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "stopped" in said
    assert not running(int(mark.read_text()))


def test_torch_is_imported_before_the_clock(model, tmp_path):
    folder = plant(tmp_path / "fake", "fastsafetensors", TORCH_THERE)
    done = compare(str(model), "--device", "cpu", "--loaders", "fastsafetensors", "--rounds", "1",
                   "--warm", "--no-ceilings", "--no-memory", "--json", "--path", folder)
    row = row_of(json.loads(done.stdout), "fastsafetensors")
    assert row["reason"] == "RuntimeError: torch imported before: True"


def test_a_device_that_does_not_work_ends_it_at_once(model):
    done = compare(str(model), "--device", "cuda:99")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("penstock.compare: cuda:99 cannot be used: ")


def running(process: int) -> bool:
    """Is it there, other than as a zombie whose end nobody has asked for?"""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_what_does_not_fit_the_time_is_said(model):
    done = compare(str(model), "--device", "cpu", "--loaders", "safetensors", "--warm", "--rounds",
                   "5", "--no-memory", "--fork", "--limit", "0.01")
    assert "left out for lack of time: safetensors, load_file warm 5 times" in done.stdout


def test_without_matplotlib_there_is_a_reason(model, tmp_path):
    plant(tmp_path, "matplotlib", "raise ImportError('no matplotlib here')")
    done = compare(str(model), "--plot", str(tmp_path / "x.png"),
                   PYTHONPATH=f"{tmp_path}:{PACKAGES}")
    assert done.returncode == 2
    assert "--plot needs matplotlib (no matplotlib here)" in done.stderr


@pytest.mark.parametrize("words, said", [
    (["/nowhere"], "there is no file or folder /nowhere"),
    (["/", "--loaders", "warp-drive"], "no loader is called warp-drive"),
    (["/", "--rounds", "many"], "'many' is no number of rounds"),
    (["/", "--rounds", "hot:torch=1"], "'hot' is no state"),
    (["/", "--device", "tpu"], "tpu is no device"),
    (["/", "--path", "torch=/nowhere"], "there is no folder /nowhere"),
    ([], "name a model"),
])
def test_bad_words_are_refused(words, said, capsys):
    try:
        status = main(words)
    except SystemExit as error:
        status = error.code
    assert status in (1, 2)
    assert said in capsys.readouterr().err


def test_files_that_are_no_models_are_refused(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="not a safetensors file"):
        model_open(tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(ModelError, match="which is not there"):
        model_open(tmp_path)


def test_list_names_the_loaders(capsys):
    assert main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(BY_NAME)


def test_words_for_loaders_and_rounds():
    assert names("torch*,penstock") == ["penstock", "torch-mmap", "torch"]
    assert rounds("4") == (4, {})
    assert rounds("2,torch*=1,cold:torch=0") == \
        (2, {"torch": 1, "torch-mmap": 1, "cold:torch": 0})


# --------------------------------------------------------------------------------- the page cache

def held(path: Path, offset: int) -> bool:
    """Asked in another way than the module does: a read that may not wait for the disk."""
    with open(path, "rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
        except OSError as error:
            pytest.skip(f"no RWF_NOWAIT on this file system: {error}")


def test_states_of_the_page_cache(model):
    files = [str(file) for file in sorted(model.glob("*.safetensors"))]
    places = [0, 4 << 20, 8 << 20]
    for state, expected in (("cold", [False] * 4), ("warm", [True] * 4),
                            ("mixed", [True, False, True, False])):
        cache.set_state(state, files)
        assert [[held(Path(file), place) for place in places] for file in files] == \
            [[each] * len(places) for each in expected], state


def test_half_of_a_single_file(tmp_path):
    file = tmp_path / "one"
    file.write_bytes(os.urandom(16 << 20))
    cache.set_state("mixed", [str(file)])
    assert held(file, 0) and held(file, (8 << 20) - 4096)
    assert not held(file, 12 << 20) and not held(file, (16 << 20) - 4096)
    assert cache.residency([(str(file), 0, 8 << 20)]) == 1.0


def test_residency_by_mincore_agrees(tmp_path, monkeypatch):
    file = tmp_path / "one"
    file.write_bytes(os.urandom(16 << 20))
    cache.set_state("mixed", [str(file)])
    monkeypatch.setattr(cache.platform, "machine", lambda: "alpha")
    assert cache.residency([(str(file), 0, 8 << 20)]) == 1.0
    assert cache.residency([(str(file), 12 << 20, 4 << 20)]) == 0.0


# ----------------------------------------------------------------------------------- measuring

def test_the_watch_sees_memory_that_is_gone_again():
    watch = measure.Watch("cpu")
    watch.start()
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    time.sleep(0.1)
    del block
    peak = watch.finish()
    assert 60 << 20 < peak["RssAnon"] < 100 << 20
    assert peak["held"] >= 60 << 20


def test_the_watch_sees_memory_shared_with_a_driver():
    """cudaHostAlloc's memory is a shared mapping of a device; /dev/zero makes the same kind."""
    before = measure.process_memory()
    size = 32 << 20
    with open("/dev/zero", "r+b", buffering=0) as zero, mmap.mmap(zero.fileno(), size):
        assert measure.process_memory()["driver"] - before["driver"] == size


def test_what_is_only_mapped_is_read_inside_the_clock(tmp_path):
    import torch
    file = tmp_path / "one"
    size = (16 << 20) + 1
    file.write_bytes(b"\1" * size)
    cache.set_state("cold", [str(file)])
    mapped = torch.from_file(str(file), size=size, dtype=torch.uint8)
    assert cache.residency([(str(file), 0, size)]) < 0.1
    tensors, seconds, _ = measure.clocked(lambda: {"a": mapped[4095:]}, "cpu")
    assert list(tensors) == ["a"] and seconds > 0
    assert cache.residency([(str(file), 0, size)]) == 1.0


def test_one_byte_of_every_page_is_looked_at():
    import torch
    assert measure.touch({"a": torch.ones(3 * 4096, dtype=torch.uint8)}) == 3 + 1
    assert measure.touch({"a": torch.ones(2, 4097, dtype=torch.int16)[:, ::2],
                          "empty": torch.zeros(0, 4), "scalar": torch.tensor(0.0)}) == 3
    assert measure.touch({"a": torch.ones((), dtype=torch.uint8)}) == 2


def test_fingerprints_tell_every_byte():
    import torch
    tensor = torch.arange(100_003, dtype=torch.uint8)
    first = measure.fingerprints({"a": tensor})
    for place in (0, 1, 20_000, 50_000, 77_777, 100_002):
        other = tensor.clone()
        other[place] ^= 128
        assert measure.differences(first, measure.fingerprints({"a": other})), place
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), tensor])[3:]
    assert not measure.differences(first, measure.fingerprints({"a": shifted}))
    assert "missing" in measure.differences(first, {})
    assert "bytes instead of" in measure.differences(
        first, measure.fingerprints({"a": tensor[:-1]}))


@pytest.mark.parametrize("threads, request_size", [(1, 1 << 20), (4, 1 << 20), (3, 4 << 20)])
def test_the_disk_ceiling_reads_every_byte(model, threads, request_size):
    files = [str(file) for file in sorted(model.glob("*.safetensors"))]
    try:
        row = ceilings.read_files(files, threads, request_size, True, 60.0)
    except OSError as error:
        pytest.skip(f"no O_DIRECT on this file system: {error}")
    assert row["bytes"] == sum(os.path.getsize(file) for file in files)
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
    again = ceilings.read_files(files, threads, request_size, True, 60.0, times=3)
    assert again["bytes"] == 3 * row["bytes"]


# ------------------------------------------------------------------------------- what is concluded

def made_up(**medians: dict[str, float]) -> dict:
    """A result as report.result() makes it, on a GPU, with these seconds."""
    def states(times: dict[str, float]) -> dict:
        return {state: {"seconds": {"median": time, "min": time, "max": time, "runs": 3},
                        "cpu_seconds": {"median": 1.0}, "speed_up": None, "gb_per_s": 1.0}
                for state, time in times.items()}

    loaders = [{"name": name.replace("_", "-"), "label": name, "setting": "none", "version": "1",
                "status": "ok", "reason": "", "states": states(times), "left_out": [],
                "memory": {"host_bytes": 150 << 20, "pinned_bytes": 128 << 20,
                           "gpu_extra_bytes": 100 << 20}, "runs": []}
               for name, times in medians.items()]
    entry = {"median": 50.0, "min": 50.0, "max": 50.0, "runs": 3}
    found = {"device": "cuda:0", "loaders": loaders, "states": ["warm", "cold", "mixed"],
             "model": {"tensor_bytes": 15 * 10**9, "path": "7b", "tensors": 339, "files": 4},
             "ceilings": {"copy_gb_per_s": entry, "disk_gb_per_s": entry | {"median": 4.0},
                          "cache_gb_per_s": entry},
             "startup": None, "tensor_parallel": {"status": "ok", "bytes": 75 * 10**8,
                                                  "storage_bytes": 76 * 10**8,
                                                  "file_bytes": 15 * 10**9}, "notes": []}
    found["shares"] = report.shares(found)
    found["conclusion"] = report.conclusion(found)
    return found


def test_the_conclusion_counts_right():
    found = made_up(penstock={"warm": 0.32, "cold": 4.0}, kvikio={"warm": 0.4, "cold": 3.2})
    warm, cold, half = found["conclusion"]
    assert warm == ("warm: penstock is fastest with 0.320 s (46.9 GB/s). Penstock is ahead of the "
                    "fastest other, kvikio by 25 %, at 94% of the ceiling.")
    assert cold == ("cold: kvikio is fastest with 3.200 s (4.7 GB/s). Penstock is behind the "
                    "fastest other, kvikio by 25 %, at 94% of the ceiling.")
    assert "50.7% of the files" in half


def targets_of(folder: Path, found: dict) -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("targets", ROOT / "bench/compare_targets.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {target: {True: "met", False: "not met", None: "-"}[met]
            for target, _, met in module.large(found)}


def test_the_targets_are_judged_right(tmp_path):
    others = {"transformers": {"warm": 2.4, "cold": 10.0, "mixed": 6.0},
              "fastsafetensors": {"warm": 3.0, "cold": 3.95, "mixed": 3.5},
              "kvikio": {"warm": 4.0, "cold": 5.2, "mixed": 4.6},
              "instanttensor_mmap": {"warm": 0.36, "cold": 9.0, "mixed": 5.0}}
    good = targets_of(tmp_path, made_up(
        penstock={"warm": 0.32, "cold": 3.9, "mixed": 2.0}, **others))
    assert set(good.values()) == {"met"}, good
    bad = targets_of(tmp_path, made_up(
        penstock={"warm": 0.41, "cold": 5.6, "mixed": 6.0}, **others))
    assert [target for target, verdict in bad.items() if verdict == "met"] == [
        "7B: at most 128 MiB pinned",
        "7B: at most 64 MiB of anonymous growth besides",
        "7B: at most 1 % of device memory beyond the tensors",
        "7B, half of each tensor: at most 55 % of the file read"]


# ------------------------------------------------------------------------------- who runs when

class FakeRunner:
    """Answers at once, and sets the clock on by what the work would have taken."""

    def __init__(self, seconds: dict[str, float], slow: dict[str, float]) -> None:
        """Seconds to load by state, and more for some loaders in every state."""
        self.seconds, self.slow, self.now, self.ran = seconds, slow, 1000.0, []
        self.jobs: list[dict] = []

    def monotonic(self) -> float:
        return self.now

    def file(self, name: str) -> str:
        return name

    def run(self, job: dict, timeout: float, loader: str = "") -> dict:
        if job["kind"] != "load":
            self.now += 1.0
            rows = [{"threads": threads, "request": request, "gb_per_s": 3.0}
                    for threads, request in job.get("geometries", [[8, 1 << 20]])]
            return {"status": "ok", "rows": rows}
        seconds = self.seconds[job["state"]] + self.slow.get(loader, 0.0)
        self.now += seconds + 0.5
        self.ran.append((job["state"], loader, job["watch"]))
        self.jobs.append(job)
        memory = dict.fromkeys(("held", "RssAnon", "RssFile", "driver", "system"), 0)
        return {"status": "ok", "seconds": seconds, "cpu_seconds": seconds, "memory": memory}


FIRST = ["penstock", "penstock-coded", "fastsafetensors", "instanttensor-buffered",
         "instanttensor-mmap", "kvikio"]
OTHERS = ["instanttensor", "transformers", "safetensors-prefetch", "safetensors-cpu", "safetensors",
          "penstock-pretrained", "runai", "torch-mmap", "torch"]


@pytest.fixture
def simulate(monkeypatch):
    """Run a schedule against a FakeRunner; the schedule and the runner."""
    def run(limit: float | None, seconds: dict[str, float], size: float = 1.2e9,
            slow: dict[str, float] | None = None,
            **options) -> tuple[schedule.Schedule, FakeRunner]:
        runner = FakeRunner(seconds, slow or {})
        monkeypatch.setattr(schedule, "time", runner)
        monkeypatch.setattr(schedule, "set_state", lambda *words, **more: None)
        model = SimpleNamespace(path="m", files=("m",), tensors=(), tensor_bytes=int(size),
                                file_bytes=int(size))
        asked = schedule.Options("cuda:0", list(seconds), 3, loaders=list(BY_NAME), limit=limit,
                                 **options)
        made = schedule.Schedule(model, asked, runner)
        made.torch_files, made.coded_files = ["m.pt"], ["m.safetensors"]
        made.run()
        return made, runner
    return run


def missing(made: schedule.Schedule) -> dict[str, int]:
    return {row.loader.name: len(row.left_out) for row in made.rows if row.left_out}


def test_the_classes_are_all_loaders():
    assert [name for name, loader in BY_NAME.items() if loader.first] == FIRST
    assert [name for name, loader in BY_NAME.items() if not loader.first] == OTHERS


def test_a_second_load_comes_after_one_whose_process_stayed(simulate):
    made, runner = simulate(None, {"second": 1.0}, memory=False, pause=7.0)
    mine = [job for job, (_, name, _) in zip(runner.jobs, runner.ran) if name == "penstock"]
    assert [job["stay"] for job in mine] == [7.0, 0.0] * 3
    assert len(made.rows[0].runs) == 3


def test_the_host_and_a_busy_driver_are_compared_beside_a_gpu(simulate):
    made, runner = simulate(None, {"warm": 1.0, "busy": 1.1, "cpu": 0.1}, memory=False)
    assert {job["device"] for job in runner.jobs if job["state"] == "cpu"} == {"cpu"}
    assert {job["device"] for job in runner.jobs if job["state"] != "cpu"} == {"cuda:0"}
    assert {job["state"] for job in runner.jobs if job["busy"]} == {"busy"}
    # One that knows no host is left out there, and only there.
    ran = [state for state, name, _ in runner.ran if name == "kvikio"]
    assert ran == ["warm"] * 3 + ["busy"] * 3
    assert not missing(made)


def test_states_that_mean_nothing_on_the_host_are_named(model):
    done = compare(str(model), "--device", "cpu", "--rounds", "1", "--loaders",
                   "penstock,safetensors", "--no-memory", "--no-ceilings", "--warm", "--busy",
                   "--cpu", "--second", "--pause", "0.1")
    assert done.returncode == 0, done.stderr
    assert "busy: not measured, there is no driver to ask" in done.stdout
    assert "cpu: not measured, everything goes to the host here" in done.stdout
    assert "second s" in done.stdout and "warm s" in done.stdout and "busy s" not in done.stdout


def test_without_a_limit_all_take_turns(simulate):
    made, runner = simulate(None, {"warm": 1.0, "cold": 2.0}, memory=False)
    assert [(state, name) for state, name, _ in runner.ran] == \
        [("warm", name) for name in BY_NAME] * 3 + [("cold", name) for name in BY_NAME] * 3
    assert not missing(made)


def test_with_a_limit_the_first_class_comes_first(simulate):
    made, runner = simulate(1000.0, {"warm": 1.0, "cold": 2.0}, memory=False)
    assert [(state, name) for state, name, _ in runner.ran] == (
        [("warm", name) for name in FIRST] * 3 + [("cold", name) for name in FIRST] * 3
        + [("warm", name) for name in OTHERS] + [("cold", name) for name in OTHERS]
        + [("warm", name) for name in OTHERS] * 2 + [("cold", name) for name in OTHERS] * 2)
    assert not missing(made)
    assert sum(made.phases.values()) == pytest.approx(runner.now - 1000.0)
    assert made.phases["warm"] == pytest.approx(18 * 1.5)
    assert made.phases["others cold"] == pytest.approx(27 * 2.5)


def test_with_little_time_the_first_class_has_its_rounds(simulate):
    """As on a real server: 15 loaders, 105 s, and the slow ones take 10 s each."""
    slow = {"transformers": 10.0, "penstock-pretrained": 10.0, "instanttensor": 3.0}
    made, runner = simulate(105.0, {"warm": 0.2, "cold": 0.8}, slow=slow,
                            rounds_of={"penstock": 7})
    assert not set(missing(made)) & set(FIRST)
    assert all(row.memory for row in made.rows if row.loader.first)
    assert len(made.rows[0].runs) == 14
    assert missing(made)
    assert runner.now <= 1000.0 + 105.0


def test_what_was_left_out_is_made_up_for(simulate):
    """The first class needs more than the share of warm files and less than that of cold ones;
    what it lacks comes before the others begin."""
    made, runner = simulate(100.0, {"warm": 3.0, "cold": 0.1}, memory=False, ceilings=False)
    names_ran = [name for _, name, _ in runner.ran]
    first = names_ran[:names_ran.index(OTHERS[0])]
    assert sorted(first) == sorted(FIRST * 6)
    # Four ninths of the 98 s left are 12 runs of 3.5 s.
    assert [state for state, _, _ in runner.ran[:len(first)]] == \
        ["warm"] * 12 + ["cold"] * 18 + ["warm"] * 6
    assert not set(missing(made)) & set(FIRST)


def test_nothing_starts_that_cannot_end(simulate):
    """15 GB are taken to need 10 s; 8 s are no time to begin with that."""
    made, runner = simulate(8.0, {"warm": 20.0}, size=15e9)
    assert not runner.ran
    assert set(missing(made)) == set(BY_NAME)
    made, runner = simulate(40.0, {"warm": 0.5}, size=15e9, memory=False, ceilings=False)
    # Once their times are known, the rounds of the first class go on until there are too few left.
    assert len(runner.ran) > 15
    assert runner.now <= 1000.0 + 40.0


def test_memory_is_watched_when_there_is_time(simulate):
    made, runner = simulate(1000.0, {"warm": 1.0})
    watched = [name for _, name, watch in runner.ran if watch]
    assert watched == FIRST + OTHERS
    # The first class before its first timed run, the others at the very end.
    assert [watch for _, _, watch in runner.ran[-len(OTHERS):]] == [True] * len(OTHERS)
    assert [len(row.runs) for row in made.rows] == [3] * len(BY_NAME)
    made, runner = simulate(70.0, {"warm": 1.0}, ceilings=False)
    assert [name for _, name, watch in runner.ran if watch][:len(FIRST)] == FIRST
    assert not any(row.memory for row in made.rows if row.loader.name == "torch")


@pytest.mark.parametrize("size, expected", [(1.2e9, 5), (3e9, 3), (15e9, 1), (3e7, 9)])
def test_small_models_are_read_several_times_for_the_ceilings(simulate, size, expected):
    made, _ = simulate(None, {"cold": 1.0}, size=size)
    assert made.reads_of(0) == expected
    assert made.reads_of(1) == 1


def test_the_ways_to_read_a_disk_are_picked_over_all_sweeps(simulate):
    made, _ = simulate(None, {"cold": 1.0})
    made.ceilings["disk"] = [
        {"threads": threads, "request": 1, "gb_per_s": rate, "whole": False} for threads, rate in
        [(4, 9.0), (8, 5.0), (16, 1.0), (32, 2.0), (4, 1.0), (8, 5.5), (16, 7.0), (32, 2.0)]]
    # What was read to the end does not vote.
    made.ceilings["disk"].append({"threads": 32, "request": 1, "gb_per_s": 99.0, "whole": True})
    assert made.finalists() == [[8, 1], [4, 1], [16, 1]][:made.finalists_count()]


def test_a_ceiling_is_the_best_median():
    rows = [{"threads": threads, "request": 1, "gb_per_s": rate} for threads, rate in
            [(4, 9.0), (8, 3.0), (4, 2.0), (8, 3.2), (4, 2.1), (8, 3.1)]]
    assert report.best_median(rows) == {"median": 3.1, "min": 3.0, "max": 3.2, "runs": 3}
    assert report.best_median([]) is None


def test_a_page_cache_that_gives_way_late_costs_only_what_needs_it(model, tmp_path, monkeypatch):
    """The files reach no state any more once the reference is read: all that is left says so."""
    from penstock.compare import schedule as module

    class Answers:
        def file(self, name: str) -> str:
            return str(tmp_path / name)

        def run(self, job: dict, timeout: float, loader: str = "") -> dict:
            return {"status": "ok"}

    asked = []

    def set_state(state: str, files: list[str]) -> None:
        asked.append(state)
        if len(asked) > 1:
            raise cache.CacheError("somebody else wants the memory")

    monkeypatch.setattr(module, "set_state", set_state)
    options = module.Options("cpu", ["warm", "cold"], 2, loaders=["safetensors"], limit=200.0,
                             memory=False, ceilings=False, startup=True, tensor_parallel=True)
    schedule = module.Schedule(model_open(model), options, Answers())
    # No time for the states, all of it for what they left out.
    schedule.share = lambda weight, others: 0.0 if weight != 1.0 else time.monotonic() + 100
    schedule.run()
    assert asked[-2:] == ["cold", "warm"]
    assert sorted((run["state"], run["round"]) for run in schedule.rows[0].left_out) == [
        ("cold", 1), ("cold", 2), ("warm", 1), ("warm", 2)]
    for what in ("warm", "cold", "half of each tensor", "start-ups"):
        assert f"{what}: not measured, somebody else wants the memory" in schedule.notes
    assert "somebody else wants the memory" in report.text(report.result(schedule))


def test_what_is_said_stays_out_of_the_result_where_standard_error_is_closed(model):
    done = subprocess.run(command(str(model), "--device", "cpu", "--rounds", "1", "--loaders",
                                  "penstock", "--no-memory", "--no-ceilings", "--json", "-"),
                          env=environment(), text=True, timeout=300, stdout=subprocess.PIPE,
                          check=True, preexec_fn=lambda: os.close(2))
    assert json.loads(done.stdout)["loaders"]
