# SPDX-License-Identifier: MIT
"""The program under test: how it is started, and how a run ended.

PENSTOCK names the program (build/penstock otherwise), FAKE_DRIVERS the directory with the fake
libcuda.so.1 (build/tests/fakes otherwise). A run with --json must leave exactly one valid JSON
object on standard output, whatever else it does: that is checked here, in every test.
"""
import array
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(os.environ.get("PENSTOCK", ROOT / "build" / "penstock")).resolve()
FAKES = pathlib.Path(os.environ.get("FAKE_DRIVERS", ROOT / "build" / "tests" / "fakes")).resolve()
MIB = 1 << 20


def pattern(size, offset=0):
    """The bytes of pattern: from `offset` on, which is a multiple of 8."""
    words = array.array("Q", range(offset, offset + size + 7, 8))
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()[:size]


class Result:
    """How a run ended; `json` is what it printed where that was asked for."""

    def __init__(self, status, out, err, is_json):
        self.status, self.out, self.err = status, out, err
        self.json = json.loads(out) if is_json else None

    @property
    def error(self):
        return self.json["error"]


class Penstock:
    """The program under test, with an environment of its own."""

    def __init__(self, **env):
        self.env = {**os.environ, **env}

    def start(self, *args, **options):
        command = [PROGRAM, *args]
        return subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL,
                                **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})

    def finish(self, process, args, timeout=60):
        out, err = process.communicate(timeout=timeout)
        out, err = ((text or b"").decode(errors="replace") for text in (out, err))
        return Result(process.returncode, out, err, "--json" in args)

    def __call__(self, *args, timeout=60, **options):
        return self.finish(self.start(*args, **options), args, timeout)

    def ok(self, *args, **options):
        """A run that must succeed and say nothing on standard error."""
        result = self(*args, **options)
        assert result.status == 0 and result.err == "", result.err
        return result

    def report(self, *args, **options):
        """A copy that must succeed: its JSON report."""
        return self.ok("copy", "--json", *args, **options).json

    def fails(self, *args, status=1, **options):
        """A run that must fail, with words and the same error as JSON: that error."""
        result = self(*args, "--json", **options)
        assert result.status == status, (result.status, result.err)
        assert result.err.startswith("penstock: ")
        error = result.error
        assert error["message"] in result.err and error["hint"] in result.err
        assert error["code"] < 0 and error["errno"]
        return error
