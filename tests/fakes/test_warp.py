# SPDX-License-Identifier: MIT
"""The kernels that decode, their very source run by a core in the place of a warp, beside their
twin. So a fault in them is found where there is no GPU."""
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_decoding_kernels_do_what_their_twin_does(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("there is no compiler of C++")
    program = tmp_path / "warp_decode"
    subprocess.run([compiler, "-std=c++17", "-O1", "-fsanitize=undefined",
                    "-fno-sanitize-recover=undefined", "-Wno-unknown-pragmas", f"-I{ROOT}/src",
                    f"-I{ROOT}/include", "-x", "c++", ROOT / "tests/fakes/warp_decode.cc",
                    "-x", "none", ROOT / "build/libpenstock-base.a", "-o", program],
                   check=True, stdin=subprocess.DEVNULL)
    done = subprocess.run([program], text=True, capture_output=True, stdin=subprocess.DEVNULL,
                          timeout=300)
    assert done.returncode == 0 and done.stdout == "1265 cells\n", done.stdout + done.stderr
