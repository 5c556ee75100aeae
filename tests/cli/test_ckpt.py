# SPDX-License-Identifier: MIT
"""penstock ckpt: what is told of a folder of checkpoints, and what is removed from it."""
import ctypes
import ctypes.util
import fcntl
import json
import os
import struct
import zipfile

import pytest

from test_options import documented_members, members


def xxh3(text):
    name = ctypes.util.find_library("xxhash")
    if not name:
        pytest.skip("libxxhash is not installed")
    function = ctypes.CDLL(name).XXH3_64bits
    function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_uint64
    return function(text, len(text))


def save(folder, step, user=None, ranks=1, tag="x"):
    """A step as the format says, made without the library: documents and code must agree."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    files = []
    for rank in range(ranks):
        file = path / f"rank-{rank:05d}.pt"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("rank/data.pkl", b"\x80\x02}.")
            archive.writestr("rank/data/0", (tag * (1000 + step)).encode())
        records = b""
        with zipfile.ZipFile(file) as archive, open(file, "rb") as raw:
            for info in archive.infolist():
                raw.seek(info.header_offset + 26)
                name, extra = struct.unpack("<HH", raw.read(4))
                offset = info.header_offset + 30 + name + extra
                records += struct.pack("<QQQ", offset, info.file_size, info.CRC)
        files.append({"name": file.name, "bytes": file.stat().st_size, "tensors": 1,
                      "digest": f"xxh3:{xxh3(records):016x}"})
    manifest = {"format": "penstock-checkpoint", "version": 1, "step": step,
                "time": "2026-11-17T02:30:00Z", "world_size": ranks, "files": files,
                "user": user or {}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "run"
    for step in (100, 200, 300):
        save(folder, step, user={"lr": 0.5, "tags": ["a", None]}, ranks=2)
    return folder


def test_list_has_every_step_and_its_state(penstock, folder):
    os.truncate(folder / "step-00000300" / "rank-00001.pt", 10)
    (folder / "step-00000400").mkdir()
    (folder / "notes").mkdir()
    out = penstock.ok("ckpt", "list", folder).out
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["100", "200", "300", "400"]
    assert "damaged: its file rank-00001.pt has 10 bytes" in out and "unfinished: " in out
    listed = penstock.ok("ckpt", "list", folder, "--json").json
    assert listed["latest"] == 200 and listed["folder"] == str(folder)
    assert [step["state"] for step in listed["steps"]] == ["whole", "whole", "damaged",
                                                          "unfinished"]
    assert listed["steps"][0]["world_size"] == 2 and listed["steps"][0]["problem"] is None


def test_show_has_files_and_values_of_the_last_step_or_the_one_named(penstock, folder):
    shown = penstock.ok("ckpt", "show", folder, "--json").json
    assert shown["step"] == 300 and shown["user"] == {"lr": 0.5, "tags": ["a", None]}
    assert [file["name"] for file in shown["files"]] == ["rank-00000.pt", "rank-00001.pt"]
    for name in ("100", "step-00000100"):
        out = penstock.ok("ckpt", "show", folder, name).out
        assert "step 100, saved 2026-11-17T02:30:00Z by 2 ranks: 2 tensors" in out
        assert '"lr": 0.5' in out and "rank-00001.pt" in out


def test_verify_reads_the_last_step_or_all_and_names_what_is_wrong(penstock, folder):
    assert "step 300: 2 files" in penstock.ok("ckpt", "verify", folder).out
    file = folder / "step-00000200" / "rank-00001.pt"
    broken = bytearray(file.read_bytes())
    broken[broken.index(b"xxxx") + 20] ^= 1
    file.write_bytes(broken)
    error = penstock.fails("ckpt", "verify", folder, "200")
    assert error["object"] == str(file) and "data/0" in error["message"] and error["offset"] > 0
    result = penstock("ckpt", "verify", folder, "--all", "--json")
    assert result.status == 1 and result.err.count("penstock: ") == 1
    assert [bool(step["problem"]) for step in result.json["steps"]] == [False, True, False]
    penstock.ok("ckpt", "verify", folder)


def test_a_file_of_another_save_is_found(penstock, folder):
    other = save(folder.parent / "other", 300, ranks=2, tag="y")
    (other / "rank-00001.pt").rename(folder / "step-00000300" / "rank-00001.pt")
    assert "not the file that was saved" in penstock.fails("ckpt", "verify", folder)["message"]


def test_gc_removes_what_it_says_and_keeps_the_rest(penstock, folder):
    (folder / "step-00000050").mkdir()
    (folder / "step-00000100" / "notes.txt").write_text("mine")
    before = sorted(folder.rglob("*"))
    told = penstock.ok("ckpt", "gc", "--keep", "1", "--dry-run", folder, "--json").json
    assert [path for path in sorted(folder.rglob("*")) if path.name != ".penstock.lock"] == before
    done = penstock.ok("ckpt", "gc", "--keep", "1", folder, "--json").json
    assert told.pop("dry_run") is True and done.pop("dry_run") is False and told == done
    assert done["steps"] == [100, 200]
    assert done["removed"] == ["step-00000050", "step-00000200"]
    assert done["left"] == ["step-00000100/notes.txt"]
    assert sorted(path.name for path in folder.iterdir()) == [".penstock.lock", "step-00000100",
                                                              "step-00000300"]
    assert "step 300" in penstock.ok("ckpt", "verify", folder).out


def test_gc_without_keep_removes_leftovers_only(penstock, folder):
    (folder / "step-00000400").mkdir()
    (folder / "step-00000300" / "rank-00000.1.pt").write_text("of a save that was killed")
    out = penstock.ok("ckpt", "gc", folder).out
    assert "removed      step-00000400" in out and "step-00000300/rank-00000.1.pt" in out
    assert penstock.ok("ckpt", "list", folder).out.count("whole") == 3
    assert penstock.ok("ckpt", "gc", folder, "-q").out == ""


def test_gc_creates_no_folder(penstock, tmp_path):
    assert penstock.fails("ckpt", "gc", tmp_path / "none")["errno"] == "ENOENT"
    assert not (tmp_path / "none").exists()


def test_gc_is_refused_while_somebody_saves(penstock, folder):
    with open(folder / ".penstock.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711 elsewhere\n")
        lock.flush()
        error = penstock.fails("ckpt", "gc", "--keep", "1", folder)
        assert error["errno"] == "EBUSY" and "process 4711 on elsewhere" in error["message"]
        assert penstock.ok("ckpt", "list", folder).out.count("whole") == 3


def test_manifests_of_strangers_are_refused_in_words(penstock, folder):
    manifest = folder / "step-00000300" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("rank-00001.pt", "../../rank-00001.pt"))
    assert "name of that rank" in penstock.fails("ckpt", "show", folder, "300")["message"]
    assert penstock.ok("ckpt", "list", folder, "--json").json["latest"] == 200


def test_an_empty_folder_and_none(penstock, tmp_path):
    assert "no checkpoints" in penstock.ok("ckpt", "list", tmp_path).out
    assert penstock.ok("ckpt", "list", tmp_path, "--json").json["latest"] is None
    assert penstock.fails("ckpt", "show", tmp_path)["message"] == "there is none"
    assert penstock.fails("ckpt", "list", tmp_path / "none")["errno"] == "ENOENT"


@pytest.mark.parametrize("args, message", [
    (["lst", "DIR"], "there is no such action"),
    (["list", "DIR", "100"], "list takes no STEP"),
    (["gc", "DIR", "100"], "gc takes no STEP"),
    (["verify", "DIR", "100", "--all"], "verify --all takes no STEP"),
    (["show", "DIR", "x"], "it is no step"),
    (["show", "DIR", "-1"], "there is no such option"),
    (["list", "DIR", "--keep", "1"], "ckpt list has no such option"),
    (["gc", "DIR", "--keep", "0"], "'0' is not a whole number"),
    (["verify", "DIR", "--dry-run"], "ckpt verify has no such option"),
    (["list"], "it takes ACTION DIR [STEP], and only 1 argument was given"),
    (["show", "DIR", "1", "2"], "and 4 arguments were given"),
])
def test_wrong_calls(penstock, args, message):
    assert message in penstock.fails("ckpt", *args, status=2)["message"]


@pytest.mark.parametrize("args", [["list"], ["show"], ["verify"], ["gc", "--keep", "1"]])
def test_members_of_the_report_are_in_the_man_page(penstock, folder, args):
    report = penstock.ok("ckpt", *args, folder, "--json").json
    report.pop("user", None)
    assert members(report) <= documented_members("ckpt")
