# SPDX-License-Identifier: MIT
"""Folders of checkpoints, as the extension gives them to the package."""
import os
import subprocess
import sys
import threading

import pytest

import penstock
from penstock import _penstock

torch = pytest.importorskip("torch")


def save(folder, step, value=1.0, overwrite=False, user=None):
    path = folder.begin(step, 0, 1, overwrite)
    penstock.save({"w": torch.full((3000,), value), "step": step}, path)
    folder.commit(step, [folder.describe(step)], user or {})


@pytest.fixture
def folder(tmp_path):
    folder = _penstock.checkpoints_open(tmp_path / "run", True, 0)
    yield folder
    folder.close()


def test_a_step_is_there_when_it_is_committed_and_torch_loads_it(folder):
    assert folder.steps() == [] and folder.warning == ""
    path = folder.begin(7, 0, 1, False)
    penstock.save({"w": torch.ones(3)}, path)
    assert folder.steps() == []
    folder.commit(7, [folder.describe(7)], {"epoch": 2, "note": "Größe"})
    assert folder.steps() == [7]
    assert os.path.dirname(path) == folder.path(7)
    shown = folder.show(7)
    assert shown["user"] == {"epoch": 2, "note": "Größe"} and shown["world_size"] == 1
    assert shown["files"][0]["name"] == os.path.basename(path)
    assert shown["files"][0]["bytes"] == os.path.getsize(path) == shown["bytes"]
    assert shown["files"][0]["tensors"] == 1
    assert torch.load(path)["w"].tolist() == [1, 1, 1]


def test_an_existing_step_is_refused_or_replaced(folder):
    save(folder, 1, 1.0)
    with pytest.raises(penstock.Error, match="step 1 exists.*overwritten"):
        save(folder, 1, 2.0)
    save(folder, 1, 2.0, overwrite=True)
    assert sorted(os.listdir(folder.path(1))) == ["manifest.json", "rank-00000.1.pt"]
    assert torch.load(folder.path(1) + "/rank-00000.1.pt")["w"][0] == 2


def test_abandon_gc_and_sweep(folder):
    for step in (1, 2, 3):
        save(folder, step)
    path = folder.begin(4, 0, 1, False)
    penstock.save({"w": torch.ones(3)}, path)
    folder.abandon(4)
    assert not os.path.exists(folder.path(4))
    os.mkdir(folder.path(9))
    assert folder.gc(2) == [1] and folder.steps() == [2, 3]
    assert folder.sweep() == ["step-00000009"]


def test_verify_names_file_tensor_and_byte(folder):
    save(folder, 1)
    report = folder.verify(1)
    assert report["files"] == 1 and report["verified_bytes"] >= 12000
    assert report["unverified_bytes"] == 0
    path = folder.path(1) + "/rank-00000.pt"
    with open(path, "r+b") as file:
        file.seek(9000)
        file.write(b"x")
    with pytest.raises(penstock.Error, match="tensor w") as error:
        folder.verify(1)
    assert error.value.filename == path and "at byte" in str(error.value)


def test_a_second_process_is_refused_by_name_and_a_reader_is_not(folder, tmp_path):
    save(folder, 1)
    program = ("import sys\nfrom penstock import _penstock\n"
               "print(_penstock.checkpoints_open(sys.argv[1], False, 0).steps())\n"
               "try: _penstock.checkpoints_open(sys.argv[1], True, 0)\n"
               "except OSError as error: print(error.errno, error)\n")
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "run"], text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.stdout.startswith("[1]\n16 ") and f"process {os.getpid()} on" in done.stdout


def test_threads_look_while_one_writes_and_always_see_a_step(folder):
    save(folder, 0)
    wrong = []

    def look():
        while not done.is_set():
            if not folder.steps():
                wrong.append("no step")

    done = threading.Event()
    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(1, 30):
        save(folder, step)
        folder.gc(1)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong and folder.steps() == [29]


def test_wrong_arguments(folder, tmp_path):
    with pytest.raises(ValueError, match="opened as rank 0"):
        folder.begin(1, 1, 2, False)
    with pytest.raises(penstock.Error, match="is none of 0"):
        folder.begin(1, 0, 0, False)
    with pytest.raises((OverflowError, TypeError)):
        folder.show(-1)
    with pytest.raises(penstock.Error, match="there is no step 5"):
        folder.show(5)
    path = folder.begin(1, 0, 1, False)
    penstock.save({}, path)
    file = folder.describe(1)
    with pytest.raises(ValueError, match="begun last"):
        folder.commit(2, [file], {})
    with pytest.raises(ValueError):
        folder.commit(1, [file], {"loss": float("nan")})
    with pytest.raises(TypeError):
        folder.commit(1, [file], {"loss": torch.ones(1)})
    with pytest.raises(KeyError, match="digest"):
        folder.commit(1, [{key: file[key] for key in ("name", "bytes", "tensors")}], {})
    with pytest.raises(penstock.Error, match="not the file"):
        folder.commit(1, [{**file, "bytes": 1}], {})
    folder.commit(1, [file], {})
    folder.close()
    with pytest.raises(ValueError, match="closed"):
        folder.steps()
    folder.close()


def test_closing_abandons_what_is_under_way(tmp_path):
    folder = _penstock.checkpoints_open(tmp_path / "run", True, 0)
    penstock.save({}, folder.begin(1, 0, 1, False))
    folder.close()
    folder = _penstock.checkpoints_open(tmp_path / "run", True, 0)
    assert folder.steps() == [] and not os.path.exists(folder.path(1))
    del folder
    _penstock.checkpoints_open(tmp_path / "run", True, 0).close()
