# SPDX-License-Identifier: MIT
"""penstock explain: the facts of a file, its ranges, and why not better."""
import os

import pytest

from cli_program import MIB

FIELDS = {"file", "bytes", "resident", "residency_by", "filesystem", "store", "memory_alignment",
          "offset_alignment", "queue", "device", "lanes", "memory_limit", "ranges", "paths",
          "refused"}


def explain(penstock, *args):
    return penstock.ok("explain", "--json", "--device", "host", *args).json


def evict(path):
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_explanation_covers_every_byte_once(penstock, source):
    plan = explain(penstock, source)
    size = source.stat().st_size
    assert FIELDS <= set(plan) and plan["bytes"] == size and plan["file"] == str(source)
    at = 0
    for part in plan["ranges"]:
        assert part["offset"] == at and part["length"] > 0
        assert part["resident"] <= part["length"] and part["path"]
        at += part["length"]
    assert at == size
    assert sum(path["bytes"] for path in plan["paths"]) == size
    assert all(path["reason"] for path in plan["paths"] + plan["refused"])
    assert plan["memory_limit"] <= 128 * MIB and plan["lanes"] >= 1


def test_explanation_agrees_with_the_copy(penstock, source):
    plan = explain(penstock, source)
    report = penstock.report(source, "host:")
    assert [path["path"] for path in plan["paths"]] == [path["path"] for path in report["paths"]]


def test_residency_is_that_of_the_page_cache(penstock, source):
    evict(source)
    if explain(penstock, source)["resident"]:
        pytest.skip("this file system does not drop its page cache")
    source.read_bytes()
    assert explain(penstock, source)["resident"] == source.stat().st_size


def test_half_warm_file_has_ranges_of_both_kinds(penstock, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(64 * MIB))
    evict(file)
    if explain(penstock, file)["resident"]:
        pytest.skip("this file system does not drop its page cache")
    with open(file, "rb") as half:
        os.posix_fadvise(half.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        half.read(32 * MIB)
    plan = explain(penstock, file)
    assert len({part["path"] for part in plan["ranges"]}) == 2
    assert plan["ranges"][0]["resident"] == plan["ranges"][0]["length"]
    assert plan["ranges"][-1]["resident"] == 0


def test_words_for_people_have_it_all_and_few_lines(penstock, source):
    out = penstock.ok("explain", source).out
    for word in ("size", "file system", "direct", "page cache", "device", "lane", "from",
                 "Paths taken"):
        assert word in out, word
    assert len(out.splitlines()) <= 50


def test_missing_gpu_is_told_where_the_host_is_taken(penstock, source):
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU here")
    plan = penstock.ok("explain", source, "--json").json
    assert plan["device"] == "host" and plan["device_reason"]
    assert "cuda:0 cannot be used" in penstock.ok("explain", source).out
    error = penstock.fails("explain", source, "--device", "cuda:0")
    assert error["hint"]


def test_host_is_known_with_and_without_its_colon(penstock, source):
    assert penstock.ok("explain", source, "--json", "--device", "host:").json["device"] == "host"


def test_memory_limit_and_transfer_are_taken(penstock, source):
    plan = explain(penstock, source, "--memory-limit", "8M", "--transfer", "CPU_ONLY")
    assert plan["memory_limit"] <= 8 * MIB
    error = penstock.fails("explain", source, "--device", "host", "--transfer", "GPU_DIRECT")
    assert error["message"]


def test_synthetic_objects_and_empty_files_can_be_explained(penstock, tmp_path):
    assert explain(penstock, "pattern:1G")["bytes"] == 1 << 30
    assert "no end" in penstock.fails("explain", "null:")["message"]
    (tmp_path / "empty").touch()
    plan = explain(penstock, tmp_path / "empty")
    assert plan["bytes"] == 0 and plan["ranges"] == []
    penstock.ok("explain", tmp_path / "empty")


@pytest.mark.parametrize("name, code", [("/no/such/file", "ENOENT"), ("/", "EISDIR")])
def test_bad_file_is_an_error(penstock, name, code):
    assert penstock.fails("explain", name)["errno"] == code
