# SPDX-License-Identifier: MIT
"""penstock copy between all kinds of sides, and what each option does."""
import os
import pathlib
import re
import stat
import subprocess
import time

import pytest

from cli_program import MIB, pattern

SIZES = [0, 1, 7, 511, 512, 513, 4095, 4096, 4097, MIB - 1, MIB, 5 * MIB + 3]
FIELDS = {"source", "destination", "transfer", "device", "bytes", "storage_bytes", "seconds",
          "setup_seconds", "gb_per_s", "cpu_seconds", "pinned_bytes", "lanes", "retries",
          "requests", "request_size", "depth", "latency_us", "paths", "refused"}


def resident(path):
    """Bytes of a file in the page cache, asked of the kernel and not of penstock."""
    done = subprocess.run(["fincore", "-nbo", "RES", path], capture_output=True, text=True)
    return int(done.stdout)


def check_report(report, size):
    assert FIELDS <= set(report)
    assert report["bytes"] == size
    assert report["seconds"] > 0 and report["setup_seconds"] <= report["seconds"]
    latency = report["latency_us"]
    assert latency["p50"] <= latency["p95"] <= latency["p99"] <= latency["max"]
    for path in report["paths"]:
        assert path["path"] and path["reason"] and path["direction"] in ("read", "write")
    for path in report["refused"]:
        assert path["path"] and path["reason"]
    for direction in {path["direction"] for path in report["paths"]}:
        moved = [p["bytes"] for p in report["paths"] if p["direction"] == direction]
        assert sum(moved) == size
    assert 0 < report["pinned_bytes"] + 1 <= (128 << 20) + 1


# ------------------------------------------------------------------------------- the sides --

@pytest.mark.parametrize("size", SIZES)
def test_file_reaches_memory(penstock, tmp_path, size):
    file = tmp_path / "file"
    file.write_bytes(pattern(size))
    report = penstock.report(file, "host:", "--verify")
    check_report(report, size)
    assert report["verified"] is True and report["device"] == "host"
    assert report["source"] == str(file) and report["destination"] == "host:"


@pytest.mark.parametrize("size", SIZES)
def test_memory_reaches_file(penstock, tmp_path, size):
    file = tmp_path / "file"
    report = penstock.report("host:", file, "--size", str(size), "--verify")
    check_report(report, size)
    assert file.read_bytes() == pattern(size)


@pytest.mark.parametrize("size", SIZES)
def test_file_reaches_file(penstock, tmp_path, size):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(pattern(size))
    check_report(penstock.report(one, other, "--verify"), size)
    assert other.read_bytes() == pattern(size)


def test_copy_of_many_windows_keeps_every_byte_in_place(penstock, source, tmp_path):
    out = tmp_path / "out"
    report = penstock.report(source, out, "--memory-limit", "1M", "--verify")
    check_report(report, source.stat().st_size)
    assert out.read_bytes() == source.read_bytes()


def test_hash_is_the_same_by_every_way(penstock, tmp_path):
    file = tmp_path / "file"
    size = 2 * MIB + 5
    ways = [("host:", file, "--size", str(size)), (file, "host:"), (f"pattern:{size}", "host:"),
            (file, tmp_path / "copy"), (file, f"pattern:{size}")]
    hashes = {penstock.report(*way, "--verify")["hash"] for way in ways}
    assert len(hashes) == 1 and re.fullmatch("[0-9a-f]{32}", hashes.pop())


def test_pattern_reaches_file_and_file_is_checked_by_pattern(penstock, tmp_path):
    file = tmp_path / "file"
    penstock.report("pattern:3M", file)
    assert file.read_bytes() == pattern(3 * MIB)
    penstock.report(file, "pattern:3M")


def test_pattern_destination_refuses_other_bytes(penstock, source):
    error = penstock.fails("copy", source, "pattern:4M")
    assert error["errno"] == "EILSEQ" and error["object"].startswith("pattern:")


def test_null_gives_zeros(penstock, tmp_path):
    file = tmp_path / "file"
    penstock.report("null:", file, "--size", "70000", "--verify")
    assert file.read_bytes() == bytes(70000)
    penstock.report("null:", "host:", "--size", "70000", "--verify")


def test_null_takes_everything(penstock, source):
    assert penstock.report(source, "null:")["bytes"] == source.stat().st_size
    assert penstock.report("host:", "null:", "--size", "3M")["bytes"] == 3 * MIB
    assert penstock.report("pattern:3M", "null:")["bytes"] == 3 * MIB


def test_memory_to_memory_is_refused(penstock):
    error = penstock.fails("copy", "host:", "cuda:0", status=2)
    assert "both are memory" in error["message"] and "One side must be" in error["hint"]


@pytest.mark.parametrize("side", ["host:", "null:", "cuda:0"])
def test_source_without_a_size_needs_one(penstock, tmp_path, side):
    error = penstock.fails("copy", side, tmp_path / "file", status=2)
    assert "no size of its own" in error["message"] and "--size" in error["hint"]


def test_file_that_is_named_like_a_device_is_reached_by_its_directory(penstock, source, tmp_path):
    for name in ("host:", "null:", "cuda:0", "pattern:1M"):
        penstock.ok("copy", "-q", source, f"./{name}", cwd=tmp_path)
        assert (tmp_path / name).read_bytes() == source.read_bytes()
        report = penstock.report(f"./{name}", "host:", "--verify", cwd=tmp_path)
        assert report["bytes"] == source.stat().st_size


def test_directory_means_the_file_of_that_name_in_it(penstock, source, tmp_path):
    (tmp_path / "dir").mkdir()
    report = penstock.report(source, tmp_path / "dir")
    assert report["destination"] == str(tmp_path / "dir" / source.name)
    assert (tmp_path / "dir" / source.name).read_bytes() == source.read_bytes()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_same_file_is_refused_by_whatever_name(penstock, source, tmp_path, link):
    before = source.read_bytes()
    link(source, tmp_path / "other")
    for one, other in ((source, source), (source, tmp_path / "other"), (tmp_path / "other", source),
                       (source, tmp_path)):
        assert "same file" in penstock.fails("copy", one, other)["message"]
    assert source.read_bytes() == before


# ------------------------------------------------------------------------ replacing a file --

def test_replaced_file_keeps_mode_and_owner(penstock, source, tmp_path):
    out = tmp_path / "out"
    out.write_bytes(b"old")
    out.chmod(0o640)
    owner = (out.stat().st_uid, out.stat().st_gid)
    if os.geteuid() == 0:
        owner = (1234, 4321)
        os.chown(out, *owner)
    penstock.report(source, out)
    assert out.read_bytes() == source.read_bytes()
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    assert (out.stat().st_uid, out.stat().st_gid) == owner


def test_new_file_obeys_the_umask(penstock, source, tmp_path):
    out = tmp_path / "out"
    penstock.report(source, out, umask=0o027)
    assert stat.S_IMODE(out.stat().st_mode) == 0o640


def test_symbolic_link_is_followed(penstock, source, tmp_path):
    (tmp_path / "dir").mkdir()
    real, link = tmp_path / "dir" / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to("dir/real")
    penstock.report(source, link)
    assert link.is_symlink() and real.read_bytes() == source.read_bytes()
    assert penstock.report(link, "host:", "--verify")["bytes"] == source.stat().st_size


def test_shorter_copy_leaves_nothing_of_a_longer_file(penstock, source, tmp_path):
    out = tmp_path / "out"
    out.write_bytes(bytes(8 * MIB))
    penstock.report(source, out, "--verify")
    assert out.read_bytes() == source.read_bytes()


def test_copy_leaves_only_the_destination(penstock, source, tmp_path):
    before = set(os.listdir(tmp_path))
    penstock.report(source, tmp_path / "out")
    assert set(os.listdir(tmp_path)) == before | {"out"}


def test_in_place_keeps_the_file_itself(penstock, source, tmp_path):
    out = tmp_path / "out"
    out.write_bytes(bytes(1000))
    os.link(out, tmp_path / "second-name")
    inode = out.stat().st_ino
    penstock.report(source, out, "--in-place", "--verify")
    assert out.stat().st_ino == inode
    assert (tmp_path / "second-name").read_bytes() == source.read_bytes()


def test_in_place_creates_what_is_not_there(penstock, source, tmp_path):
    penstock.report(source, tmp_path / "out", "--in-place", "--verify")
    assert (tmp_path / "out").read_bytes() == source.read_bytes()


def test_in_place_is_refused_for_memory(penstock, source):
    assert penstock.fails("copy", source, "host:", "--in-place", status=2)["object"] == "--in-place"


# --------------------------------------------------------------------------------- options --

def test_size_limits_and_offset_starts(penstock, source, tmp_path):
    data, out = source.read_bytes(), tmp_path / "out"
    for offset, size in ((0, 1000), (1, 1), (4096, 8192), (4097, MIB), (len(data) - 10, 10)):
        penstock.report(source, out, "--offset", str(offset), "--size", str(size), "--verify")
        assert out.read_bytes() == data[offset:offset + size]
    assert penstock.report(source, "host:", "--offset", "1M", "--verify")["bytes"] == \
        len(data) - MIB


def test_size_beyond_the_end_copies_what_there_is(penstock, source):
    assert penstock.report(source, "host:", "--size", "1T")["bytes"] == source.stat().st_size


def test_offset_at_the_end_copies_nothing_and_beyond_it_fails(penstock, source):
    size = source.stat().st_size
    assert penstock.report(source, "host:", "--offset", str(size))["bytes"] == 0
    error = penstock.fails("copy", source, "host:", "--offset", str(size + 1))
    assert error["offset"] == size + 1 and f"only {size} bytes" in error["message"]


def test_offset_is_refused_for_memory(penstock):
    error = penstock.fails("copy", "host:", "null:", "--size", "1M", "--offset", "1", status=2)
    assert error["object"] == "--offset"


@pytest.mark.parametrize("name", ["1", "CPU_ONLY", "cpu_only"])
def test_transfer_type_is_taken_by_number_and_name(penstock, source, name):
    report = penstock.report(source, "host:", "--transfer", name, "--verify")
    assert report["transfer"] == "CPU_ONLY"


@pytest.mark.parametrize("name", ["0", "2", "CPU_ASYNC_GPU", "MAPPED"])
def test_transfer_type_that_cannot_be_had_is_refused_not_replaced(penstock, source, name):
    error = penstock.fails("copy", source, "host:", "--transfer", name)
    assert error["hint"], "it must say what would work"


def test_unknown_transfer_type_lists_those_there_are(penstock, source):
    error = penstock.fails("copy", source, "host:", "--transfer", "warp", status=2)
    assert "CPU_ASYNC_GPU" in error["message"] + error["hint"]


def test_lanes_depth_and_request_size_are_obeyed(penstock, source):
    report = penstock.report(source, "host:", "--lanes", "2", "--depth", "3", "--request-size",
                             "128K", "--verify")
    assert report["lanes"] <= 2 and report["depth"] <= 3 and report["request_size"] <= 128 << 10
    assert report["requests"] >= source.stat().st_size // (128 << 10)


@pytest.mark.parametrize("limit", ["1M", "4M", "32M"])
def test_memory_limit_is_obeyed(penstock, source, tmp_path, limit):
    for side in ("host:", tmp_path / "out"):
        report = penstock.report(source, side, "--memory-limit", limit, "--verify")
        assert report["pinned_bytes"] <= int(limit[:-1]) * MIB


@pytest.mark.parametrize("args", [["--memory-limit", "64K"],
                                  ["--memory-limit", "255K"],
                                  ["--memory-limit", "1M", "--request-size", "512K"],
                                  ["--memory-limit", "1M", "--request-size", "16M"],
                                  ["--request-size", "64M"]])
def test_memory_limit_that_is_too_small_is_refused_at_the_start(penstock, source, tmp_path, args):
    error = penstock.fails("copy", source, tmp_path / "out", *args, status=2)
    assert error["object"] == "the memory limit" and error["hint"]
    assert not (tmp_path / "out").exists()


def most_memory(penstock, *args):
    """The most memory that a run had at a time, in bytes, as far as it was seen."""
    process = penstock.start(*args)
    most = 0
    while process.poll() is None:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.M)    # none once it has ended
        most = max(most, int(found.group(1)) << 10 if found else 0)
    assert process.returncode == 0, process.communicate()
    process.communicate()
    return most


def test_verify_and_filling_keep_within_the_memory_limit(penstock, tmp_path):
    out = tmp_path / "out"
    args = ["--memory-limit", "256K", "--request-size", "64K"]
    bare = most_memory(penstock, "copy", "-q", "pattern:100M", out, *args)
    assert most_memory(penstock, "copy", "-q", "pattern:100M", out, *args, "--verify") < bare + MIB
    memory = 16 * MIB + bare
    assert most_memory(penstock, "copy", "-q", out, "host:", "--size", "16M", "--verify",
                       *args) < memory + MIB
    assert most_memory(penstock, "copy", "-q", "host:", out, "--size", "16M", *args) < memory + MIB


def test_cache_keep_leaves_all_of_it_and_drop_nothing(penstock, source):
    size = source.stat().st_size
    os.sync()
    penstock.report(source, "host:", "--cache", "drop")
    if resident(source):
        pytest.skip("this file system does not drop its page cache")
    penstock.report(source, "host:", "--cache", "keep")
    assert resident(source) >= size
    penstock.report(source, "host:", "--cache", "drop", "--verify")
    assert resident(source) == 0


def test_cache_after_waits_until_all_of_it_is_there(penstock, source, monkeypatch):
    size = source.stat().st_size
    os.sync()
    dropped = penstock.report(source, "host:", "--cache", "drop")
    if resident(source) or not dropped["paths"][0]["path"].startswith("direct"):
        pytest.skip("this file system does not drop its page cache, or has no direct I/O")
    report = penstock.report(source, "host:", "--cache", "off")
    assert "around the page cache" in report["cache_reason"] and "warmed_bytes" not in report
    assert resident(source) == 0
    report = penstock.report(source, "host:", "--cache", "after")
    assert resident(source) >= size <= report["warmed_bytes"]
    assert report["warming_seconds"] > 0 == report["not_warmed_bytes"]
    assert penstock.report(source, "host:", "--cache", "after")["cache_reason"] == ""
    # The default is the environment's.
    penstock.report(source, "host:", "--cache", "drop")
    monkeypatch.setenv("PENSTOCK_CACHE", "after")
    assert "brought into the page cache" in penstock.ok("copy", source, "host:").out
    assert resident(source) >= size
    monkeypatch.setenv("PENSTOCK_CACHE", "sometimes")
    error = penstock.fails("copy", source, "host:", status=2)
    assert error["object"] == "sometimes" and "PENSTOCK_CACHE" in error["message"]
    penstock.ok("copy", source, "host:", "--cache", "auto")


def test_cache_is_kept_or_dropped_for_written_files(penstock, tmp_path):
    kept, dropped = tmp_path / "kept", tmp_path / "dropped"
    penstock.report("host:", dropped, "--size", "2M", "--cache", "drop")
    if resident(dropped):
        pytest.skip("this file system does not drop its page cache")
    penstock.report("host:", kept, "--size", "2M", "--cache", "keep")
    assert resident(kept) == 2 * MIB


def test_verify_is_refused_where_nothing_can_be_read_back(penstock, source):
    assert penstock.fails("copy", source, "null:", "--verify", status=2)["object"] == "--verify"


def test_quiet_says_nothing(penstock, source, tmp_path):
    for option in ("-q", "--quiet"):
        assert penstock.ok("copy", option, source, tmp_path / "out", "--verify").out == ""


def test_report_for_people_is_short_and_says_why(penstock, source, tmp_path):
    out = penstock.ok("copy", source, tmp_path / "out", "--verify").out
    first, *rest = out.splitlines()
    assert re.fullmatch(r"3\.15 MB in \d+\.\d\d m?s: \d+\.\d\d GB/s \(\d+\.\d\d [mu]?s of it "
                        r"setup\), 0\.\d+ CPU-seconds, \S+ \S+ pinned.*", first), first
    for direction in ("read", "write"):
        assert any(re.match(rf"  {direction} +\S+ +\d+\.\d %  \S", line) for line in rest)
    assert re.fullmatch(r"  verified: XXH3-128 [0-9a-f]{32}", rest[-1])
    assert len(rest) < 12


@pytest.mark.alone
def test_small_numbers_are_not_shown_as_nothing(penstock, tmp_path):
    """What takes microseconds, and what is so slow that it makes no hundredth of a GB/s."""
    (tmp_path / "tiny").write_bytes(b"x" * 100)
    fast = penstock.ok("copy", tmp_path / "tiny", "host:").out.splitlines()[0]
    slow = penstock.ok("copy", "pattern:64K,latency=100ms", "host:").out.splitlines()[0]
    for line in (fast, slow):
        assert not re.search(r"\b0\.0+\b", line.split(" pinned")[0].rsplit(",", 1)[0]), line
    assert re.match(r"100 B in \d+\.\d\d [mu]s: \d+\.\d\d [GMk]B/s \(", fast), fast
    assert re.match(r"65\.5 kB in 0\.\d\d s: 0\.\d\d MB/s \(", slow), slow


def test_name_that_is_no_utf8_is_still_valid_json(penstock, source, tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff\xfe\xc3"
    assert penstock.report(source, name)["bytes"] == source.stat().st_size
    assert penstock.fails("copy", name + b"gone", "host:")["errno"] == "ENOENT"


@pytest.mark.alone
def test_made_up_store_keeps_to_its_rate(penstock):
    report = penstock.report("pattern:20M,rate=40M,latency=1ms", "host:", "--verify")
    assert 0.4 < report["seconds"] < 1.5


# ------------------------------------------------------------------------- again and again --

@pytest.mark.parametrize("sides", [["{source}", "host:"], ["{source}", "{out}"],
                                   ["host:", "{out}", "--size", "3M"],
                                   ["{source}", "{out}", "--in-place"],
                                   ["pattern:3M", "null:"]])
@pytest.mark.parametrize("count", [3, 4])
def test_repeat_gives_the_median_and_each_run(penstock, source, tmp_path, sides, count):
    out = tmp_path / "out"
    args = [side.format(source=source, out=out) for side in sides]
    report = penstock.report(*args, "--repeat", str(count))
    times = sorted(run["seconds"] for run in report["runs"])
    assert len(times) == count and report["seconds"] == times[count // 2]
    # Each run is counted by itself.
    assert report["bytes"] == (3 * MIB if "host:" == args[0] or "null:" in args
                               else source.stat().st_size)
    if args[1] == str(out):
        assert out.read_bytes() == (source.read_bytes() if args[0] == str(source)
                                    else pattern(3 * MIB))
    words = penstock.ok("copy", *args, "-n", str(count)).out
    [line] = re.findall(rf"^  runs: the median of {count} is above; seconds of each: (.*)$", words,
                        re.M)
    assert len(line.split()) == count


def test_one_copy_is_one_run_and_has_no_line_of_runs(penstock, source):
    assert len(penstock.report(source, "host:")["runs"]) == 1
    assert "runs:" not in penstock.ok("copy", source, "host:").out


def test_repeated_copies_are_verified_and_keep_to_the_memory_of_one(gpu, source):
    fake = gpu(FAKE_CUDA_MEMORY="4M")
    assert fake.report(source, "cuda:0", "--repeat", "5", "--verify")["verified"]
    error = gpu().fails("copy", source, "cuda:0", "--repeat", "2", "--inject", "corrupt:1",
                        "--verify")
    assert error["operation"] == "verify"


def test_cache_is_dropped_before_every_copy(penstock, source):
    cached = ["--transfer", "CPU_ONLY", "--cache", "keep"]
    report = penstock.report(source, "host:", *cached, "--drop-cache", "--repeat", "2")
    if report["not_evicted_bytes"]:
        pytest.skip("this file system does not drop its page cache")
    assert resident(source) >= source.stat().st_size
    # All of it is in the cache: only a run that drops that has reasons to go elsewhere.
    warm = penstock.report(source, "host:")
    cold = penstock.report(source, "host:", "--drop-cache", "--repeat", "3")
    assert [path["path"] for path in warm["paths"]] == ["cached"]
    assert "cached" not in [path["path"] for path in cold["paths"]]
    assert "not_evicted_bytes" not in warm


def test_cache_that_cannot_be_dropped_is_told(penstock, small_fs):
    file = small_fs / "file"
    file.write_bytes(bytes(MIB))
    report = penstock.report(file, "host:", "--drop-cache")
    assert report["not_evicted_bytes"] == MIB
    assert re.search(r"^  not cold: 1\.00 MiB stayed",
                     penstock.ok("copy", file, "host:", "--drop-cache").out, re.M)


@pytest.mark.parametrize("args", [["pattern:1M", "host:"], ["host:", "null:", "--size", "1M"]])
def test_only_a_file_can_be_evicted(penstock, args):
    error = penstock.fails("copy", *args, "--drop-cache", status=2)
    assert error["object"] == "--drop-cache" and error["hint"]


def test_source_that_grows_between_two_copies_is_an_error(penstock, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(MIB))
    process = penstock.start("copy", file, "host:", "--repeat", "1000", "--inject",
                             "delay:*:20ms", "--json")
    time.sleep(0.5)
    with open(file, "ab") as longer:
        longer.write(bytes(8 * MIB))
    result = penstock.finish(process, ["--json"])
    # Either between two copies, or in the middle of one.
    assert result.status == 1 and result.error["errno"] in ("EBUSY", "ESTALE"), result.err
