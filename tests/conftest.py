# SPDX-License-Identifier: MIT
"""Collects the C test programs beside the Python tests, and ends with one line that counts.

A C program answers --list with its cases and runs one by name; each becomes a pytest item, once
per build (plain, asan, tsan). The plain closing line is what people and CI read.
"""
import os
import signal
import subprocess
from pathlib import Path

import pytest

# A background shell ignores SIGINT and a CI runner has no terminal; the tests want neither.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["TERM"] = "xterm"

ROOT = Path(__file__).resolve().parent.parent
BUILDS = {"plain": ROOT / "build", "asan": ROOT / "build-asan", "tsan": ROOT / "build-tsan"}
# Under the thread sanitizer only what has threads; the rest would only cost time.
TSAN_PROGRAMS = ("conform", "queue_cufile", "job", "groups", "streams", "tuner", "pool")


def environment(build: Path) -> dict:
    env = dict(os.environ)
    env["LD_LIBRARY_PATH"] = str(build / "tests/fakes")
    env["FAKE_CUDA_STRICT"] = "1"
    env["FAKE_CUDA_ABORT_ON_LEAK"] = "1"
    env["ASAN_OPTIONS"] = "detect_leaks=1:abort_on_error=0"
    env["UBSAN_OPTIONS"] = "halt_on_error=1:print_stacktrace=1"
    env["TSAN_OPTIONS"] = "halt_on_error=1"
    return env


class CProgram(pytest.File):
    """All cases of one source file under tests/, in every build that has it."""

    def collect(self):
        relative = self.path.relative_to(ROOT / "tests").with_suffix("")
        name = str(relative).replace("/", "_")
        for label, build in BUILDS.items():
            program = build / "tests" / name
            if label == "tsan" and not any(word in name for word in TSAN_PROGRAMS):
                continue
            if not program.exists():
                continue
            listed = subprocess.run([program, "--list"], env=environment(build), text=True,
                                    capture_output=True, timeout=60, check=True)
            for case in listed.stdout.split():
                yield CCase.from_parent(self, name=f"{case}[{label}]", program=program,
                                        case=case, build=build)


class CCase(pytest.Item):
    def __init__(self, *, program, case, build, **kwargs):
        super().__init__(**kwargs)
        self.program, self.case, self.build = program, case, build

    def runtest(self):
        done = subprocess.run([self.program, self.case], env=environment(self.build), text=True,
                              capture_output=True, timeout=300, errors="replace")
        if done.returncode == 77:
            pytest.skip(done.stdout.strip())
        if done.returncode:
            raise CFailure(f"exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-8000:]}")

    def repr_failure(self, excinfo):
        if isinstance(excinfo.value, CFailure):
            return f"{self.program} {self.case}\n{excinfo.value}"
        return super().repr_failure(excinfo)

    def reportinfo(self):
        return self.path, 0, f"{self.path.stem}:{self.name}"


class CFailure(Exception):
    """What a failed C case printed."""


def pytest_collect_file(parent, file_path):
    if file_path.suffix == ".c" and file_path.name.startswith("test_") \
            and file_path.parent.name in ("unit", "conform", "fault", "fuzz", "crash", "gpu"):
        return CProgram.from_parent(parent, path=file_path)
    return None


def pytest_unconfigure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.collectonly:
        return
    count = {kind: len(reporter.stats.get(kind, [])) for kind in
             ("passed", "failed", "error", "skipped")}
    print(f"{count['passed']} passed, {count['failed'] + count['error']} failed, "
          f"{count['skipped']} skipped")
