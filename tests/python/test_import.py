# SPDX-License-Identifier: MIT
"""The package from the outside: quick to import, documented and typed, honest in its reports."""
import enum
import inspect
import os
import subprocess
import sys
import threading
import typing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import penstock
from support import environment, python

EXPECTED = ["Error", "load_file", "load_model", "stream", "safe_open", "save_file",
            "from_pretrained", "prefetch", "Prefetch", "File", "fromfile", "tofile", "last_report",
            "Report", "Array"]
PUBLIC = sorted(name for name in getattr(penstock, "__all__", []) if not name.startswith("__"))


# ------------------------------------------------------------------------------------ importing --

@pytest.mark.alone
def test_import_takes_less_than_50_ms(tmp_path):
    """Inside the interpreter and by the clock of the caller. Noise only adds: the best counts.

    Compiled beforehand, as an installed package is.
    """
    env = environment(PYTHONPYCACHEPREFIX=str(tmp_path))
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    timed = "import time; t = time.perf_counter(); import penstock; print(time.perf_counter() - t)"
    python(timed, env=env)
    inside, bare, whole = [], [], []
    for _ in range(20):
        inside.append(float(python(timed, env=env).stdout))
        bare.append(_run("pass", env))
        whole.append(_run("import penstock", env))
        if len(bare) > 4 and min(inside) < 0.050 and min(whole) - min(bare) < 0.050:
            return
    raise AssertionError(f"{min(inside):.3f} s inside, {min(whole) - min(bare):.3f} s outside")


def _run(code: str, env: dict) -> float:
    from time import perf_counter

    start = perf_counter()
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    return perf_counter() - start


def test_import_starts_no_thread_and_prints_nothing():
    done = python("import penstock, os; print(len(os.listdir('/proc/self/task')))")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_import_is_quiet_under_strict_warnings():
    env = environment(PYTHONWARNINGS="error", PYTHONDEVMODE="1")
    assert python("import penstock", env=env).stderr == ""


# ------------------------------------------------------------------------------ words and types --

def test_all_that_was_promised_is_there():
    missing = [name for name in EXPECTED if not hasattr(penstock, name)]
    assert not missing
    assert not [name for name in EXPECTED if name not in penstock.__all__]


def test_all_names_what_there_is():
    assert not [name for name in penstock.__all__ if not hasattr(penstock, name)]


def test_the_version_is_told():
    assert penstock.__version__.count(".") >= 2


def test_the_package_has_a_doc_string_that_shows_its_use():
    assert penstock.__doc__ and "load" in penstock.__doc__


def test_types_are_shipped():
    assert (Path(penstock.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_doc_string(name):
    thing = getattr(penstock, name)
    if not callable(thing):
        return
    assert inspect.getdoc(thing) and len(inspect.getdoc(thing)) > 20
    if inspect.isclass(thing):
        assert thing.__doc__ and thing.__doc__ != (thing.__mro__[1].__doc__ or "")
        for method, member in _members(thing):
            assert inspect.getdoc(member), f"{name}.{method}"


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_call_has_type_hints(name):
    thing = getattr(penstock, name)
    calls = {}
    if inspect.isclass(thing):
        calls = {f"{name}.{method}": member for method, member in _members(thing)
                 if callable(member)}
        if "__init__" in vars(thing):
            calls[f"{name}.__init__"] = thing.__init__
        for attribute, member in vars(thing).items():
            if isinstance(member, property) and not attribute.startswith("_"):
                calls[f"{name}.{attribute}"] = member.fget
    elif callable(thing):
        calls = {name: thing}
    for label, call in calls.items():
        signature = inspect.signature(call)
        for parameter in signature.parameters.values():
            if parameter.name not in ("self", "cls"):
                assert parameter.annotation is not inspect.Parameter.empty, f"{label}({parameter})"
        if not label.endswith("__init__"):
            assert signature.return_annotation is not inspect.Signature.empty, label


def _members(thing):
    """Public methods that a class defines itself."""
    if issubclass(thing, (enum.Enum, tuple)):
        return []
    return [(name, member) for name, member in vars(thing).items()
            if not name.startswith("_") and (inspect.isfunction(member)
                                             or isinstance(member, property))]


def test_hints_can_be_resolved():
    """What an IDE or a type checker at run time asks for."""
    for name in ("load_file", "load_model", "stream", "save_file", "prefetch", "last_report"):
        hints = typing.get_type_hints(getattr(penstock, name))
        assert "return" in hints, name


@pytest.mark.parametrize("name, leading, keywords", [
    ("load_file", ["filename", "device"],
     {"framework", "keys", "slices", "rename", "dtype", "into", "strict", "arena", "transfer",
      "memory_limit", "progress"}),
    ("load_model", ["path", "device"],
     {"framework", "keys", "slices", "rename", "dtype", "into", "strict", "arena", "transfer",
      "memory_limit", "progress"}),
    ("stream", ["path", "device"],
     {"framework", "keys", "slices", "rename", "dtype", "into", "strict", "window", "transfer",
      "memory_limit", "progress"}),
    ("safe_open", ["filename", "framework", "device"], {"transfer", "memory_limit"}),
    ("save_file", ["tensors", "filename", "metadata"], {"transfer", "memory_limit", "progress"}),
    ("from_pretrained", ["path", "device"],
     {"dtype", "auto_class", "transfer", "memory_limit", "progress"}),
    ("prefetch", ["path", "device"], set()),
])
def test_signatures_are_those_of_the_documents(name, leading, keywords):
    parameters = inspect.signature(getattr(penstock, name)).parameters
    assert [word for word in parameters][:len(leading)] == leading
    assert keywords <= set(parameters)
    for word in keywords:
        assert parameters[word].kind is inspect.Parameter.KEYWORD_ONLY, word


# -------------------------------------------------------------------------------------- reports --

FIELDS = ["bytes", "storage_bytes", "seconds", "setup_seconds", "gb_per_s", "cpu_seconds",
          "pinned_bytes", "device", "lanes", "requests", "retries", "request_size", "depth",
          "latency_us_p50", "latency_us_p95", "latency_us_p99", "latency_us_max", "paths",
          "refused"]


@pytest.mark.alone
def test_a_report_adds_up(big, device):
    from time import perf_counter

    path, tensors = big
    start = perf_counter()
    loaded = penstock.load_file(path, device, copy=True)
    elapsed = perf_counter() - start
    report = penstock.last_report()
    assert isinstance(report, penstock.Report)
    assert report.bytes == sum(tensor.nbytes for tensor in loaded.values())
    assert report.bytes <= report.storage_bytes < 1.02 * report.bytes + (1 << 20)
    assert sum(path.bytes for path in report.paths) == report.bytes
    assert report.paths and all(path.path and path.reason for path in report.paths)
    assert all(path.path and path.reason for path in report.refused)
    assert 0 < report.seconds <= elapsed * 1.01
    assert report.seconds > 0.3 * elapsed
    assert 0 <= report.setup_seconds <= report.seconds
    assert report.gb_per_s == pytest.approx(report.bytes / report.seconds / 1e9, rel=0.02)
    assert 0 <= report.cpu_seconds < elapsed * os.cpu_count() + 0.1
    assert report.pinned_bytes <= 128 << 20
    assert report.device in ({"cpu": ("host", "cpu")}.get(device, (device,)))
    assert 1 <= report.lanes <= 64 and report.requests >= 1 and report.retries == 0
    assert report.latency_us_p50 <= report.latency_us_p95 <= report.latency_us_p99 \
        <= report.latency_us_max


def test_a_report_is_for_people_and_for_programs(few):
    import json

    path, _ = few
    penstock.load_file(path, copy=True)
    report = penstock.last_report()
    assert not [field for field in FIELDS if not hasattr(report, field)]
    text = str(report)
    assert text and "object at 0x" not in text and "GB/s" in text
    content = report.as_dict()
    assert set(FIELDS) <= set(content)
    assert json.loads(json.dumps(content)) == content
    assert content["bytes"] == report.bytes
    assert content["paths"][0]["path"] == report.paths[0].path


def test_every_call_leaves_its_report(few, tmp_path):
    path, tensors = few
    total = sum(tensor.nbytes for tensor in tensors.values())
    penstock.load_model(path)
    assert penstock.last_report().bytes == total
    penstock.load_file(path, keys=["step"])
    assert penstock.last_report().bytes == 8
    list(penstock.stream(path))
    assert penstock.last_report().bytes == total
    penstock.save_file(tensors, tmp_path / "x.safetensors")
    assert penstock.last_report().bytes >= total
    with penstock.safe_open(path, "pt") as file:
        file.get_tensor("mask")
        assert penstock.last_report().bytes == 3


def test_reports_belong_to_their_thread(few, tmp_path):
    path, tensors = few
    save_file({"a": torch.ones(1000)}, tmp_path / "x.safetensors")
    penstock.load_file(path, keys=["step"])
    seen = []

    def work():
        penstock.load_file(tmp_path / "x.safetensors")
        seen.append(penstock.last_report().bytes)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [4000]
    assert penstock.last_report().bytes == 8


def test_a_report_is_kept_when_the_next_one_comes(few):
    path, _ = few
    penstock.load_file(path, keys=["step"])
    first = penstock.last_report()
    penstock.load_file(path, keys=["mask"])
    assert first.bytes == 8 and penstock.last_report().bytes == 3


def test_before_the_first_load_there_is_no_report():
    done = python("import penstock; print(penstock.last_report())")
    assert done.stdout == "None\n"


# ------------------------------------------------------------------------------------- progress --

@pytest.mark.parametrize("call", [
    "penstock.load_file(path, framework='dlpack', progress=True, copy=True)",
    "penstock.load_model(path, framework='dlpack', progress=True, copy=True)",
    "list(penstock.stream(path, framework='dlpack', progress=True, copy=True))",
])
def test_a_progress_bar_goes_to_stderr_alone(big, call):
    done = python(f"import sys, penstock\npath = sys.argv[1]\n{call}\nprint('done')", big[0])
    assert done.stdout == "done\n"
    assert "100" in done.stderr and "%" in done.stderr and "B/s" in done.stderr
    assert done.stderr.endswith("\n")


def test_a_save_shows_progress_too(tmp_path):
    done = python("""
        import sys, numpy, penstock
        penstock.save_file({"a": numpy.zeros(50 << 20, numpy.uint8)}, sys.argv[1], progress=True)
        print("done")
        """, tmp_path / "x.safetensors")
    assert done.stdout == "done\n" and "%" in done.stderr


def test_without_progress_nothing_is_printed(big):
    done = python("import sys, penstock\npenstock.load_file(sys.argv[1], framework='dlpack')",
                  big[0])
    assert (done.stdout, done.stderr) == ("", "")


def test_progress_survives_a_closed_stderr(few):
    done = python("""
        import sys, penstock
        sys.stderr.close()
        sys.stderr = None
        print(len(penstock.load_file(sys.argv[1], framework="dlpack", progress=True)))
        """, few[0], check=False)
    assert done.stdout == "6\n"
