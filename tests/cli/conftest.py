# SPDX-License-Identifier: MIT
"""What the tests of the command line share: the program, files to copy, and the fake GPU."""
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import pytest

from cli_program import FAKES, MIB, PROGRAM, Penstock, pattern


@pytest.fixture(scope="session")
def penstock():
    if not PROGRAM.exists():
        pytest.fail(f"{PROGRAM} is not built; run make, or name another one in PENSTOCK")
    return Penstock()


@pytest.fixture
def gpu(penstock, tmp_path):
    """The program with a fake GPU; books of what was done are kept in `books`."""
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip(f"there is no fake libcuda.so.1 in {FAKES}")

    def make(**env):
        paths = [str(FAKES), os.environ.get("LD_LIBRARY_PATH", "")]
        fake = Penstock(LD_LIBRARY_PATH=":".join(filter(None, paths)),
                        FAKE_CUDA_REPORT=str(tmp_path / "fake-cuda.json"), **env)
        fake.books = lambda: json.loads((tmp_path / "fake-cuda.json").read_text())
        return fake
    return make


@pytest.fixture
def source(tmp_path):
    """A file of 3 MiB and a bit, aligned to nothing, that no pattern could be taken for."""
    path = tmp_path / "source.bin"
    path.write_bytes(bytes(reversed(pattern(3 * MIB + 123))))
    return path


@pytest.fixture
def open_dir():
    """A directory that every user can reach, unlike tmp_path."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="penstock-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def small_fs(tmp_path):
    """A file system of 4 MiB: full soon, and ours to make read-only."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", path],
                                      capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", path], check=True)
