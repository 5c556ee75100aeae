# SPDX-License-Identifier: MIT
"""The fake drivers are tested too: what they must refuse, delay and report."""
import os
import subprocess
from pathlib import Path

import pytest

FAKES = Path(__file__).resolve().parents[2] / "build/tests/fakes"


@pytest.mark.parametrize("program", ["test_fake_cuda", "test_fake_cufile"])
def test_fake_behaves_as_its_self_test_says(program):
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("FAKE_")}
    environment["LD_LIBRARY_PATH"] = str(FAKES)
    done = subprocess.run([FAKES / program], env=environment, text=True, timeout=120,
                          capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
