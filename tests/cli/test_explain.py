# SPDX-License-Identifier: MIT
"""penstock explain: the facts of a file or a model, its ranges, and why not better."""
import json
import os
import re

import pytest

from cli_program import MIB
from test_options import documented_members, members

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


def test_missing_file_is_an_error(penstock):
    assert penstock.fails("explain", "/no/such/file")["errno"] == "ENOENT"


# ------------------------------------------------------------------------------------- models --

@pytest.fixture
def model(tmp_path, penstock):
    """Three files, an index and a file that is no part of it."""
    spec = {"files": [{"name": f"part-{number}.safetensors",
                       "tensors": [{"name": f"t{number}", "dtype": "U8",
                                    "shape": [number * 8 * MIB]}]}
                      for number in (1, 2, 3)]}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    penstock.ok("make-model", tmp_path / "spec.json", tmp_path / "model", "--quiet")
    (tmp_path / "model" / "notes.txt").write_text("not a part of it")
    return tmp_path / "model"


def test_model_is_the_sum_of_its_files(penstock, model):
    plan = explain(penstock, model)
    paths = sorted(model.glob("*.safetensors"))
    assert [part["file"] for part in plan["files"]] == [str(path) for path in paths]
    alone = [explain(penstock, path) for path in paths]
    assert plan["model"] == str(model) and "file" not in plan
    for name in ("bytes", "resident"):
        assert plan[name] == sum(part[name] for part in alone) == \
            sum(part[name] for part in plan["files"])
    assert sum(path["bytes"] for path in plan["paths"]) == plan["bytes"]
    assert [part["ranges"] for part in plan["files"]] == [part["ranges"] for part in alone]
    names = [path["path"] for path in plan["paths"]]
    assert len(names) == len(set(zip(names, (path["reason"] for path in plan["paths"]))))


def test_folder_and_index_are_the_same_model(penstock, model):
    [index] = model.glob("*.index.json")
    by_folder, by_index = explain(penstock, model), explain(penstock, index)
    assert by_index.pop("model") == str(index) and by_folder.pop("model") == str(model)
    assert by_index == by_folder


def test_model_for_people_is_one_table(penstock, model):
    out = penstock.ok("explain", "-d", "host", model).out
    assert re.search(r"^  files        3$", out, re.M)
    for number in (1, 2, 3):
        row = rf"^  part-{number}\.safetensors +{number * 8}(\.\d+)? MiB +\d+ %  [a-z-]+ \d+ %"
        assert re.search(row, out, re.M), out
    assert out.count("in page cache") == 1 and out.count("file system") == 1
    assert out.count("Paths taken") == 1 and "notes.txt" not in out


def test_json_members_of_a_model_are_in_the_man_page(penstock, model):
    assert members(explain(penstock, model)) <= documented_members("explain")


def test_many_files_are_counted(penstock, tmp_path):
    for number in range(30):
        text = json.dumps({f"t{number}": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})
        (tmp_path / f"{number:02}.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text.encode() + b"x")
    out = penstock.ok("explain", tmp_path).out
    assert len(re.findall(r"^  \d\d\.safetensors", out, re.M)) == 19
    assert re.search(r"^  and 11 more files, ", out, re.M)
    assert len(explain(penstock, tmp_path)["files"]) == 30


def test_model_tells_the_paths_that_the_load_takes(penstock, model):
    plan = explain(penstock, model)
    report = penstock.ok("load", "-d", "host", "--no-ceiling", model, "--json").json
    assert {path["path"] for path in report["paths"]} <= {path["path"] for path in plan["paths"]}


def test_folder_without_a_model_and_a_broken_model_are_errors(penstock, model, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no *.safetensors file" in penstock.fails("explain", tmp_path / "empty")["message"]
    (model / "part-2.safetensors").write_bytes(b"nonsense" * 4)
    assert penstock.fails("explain", model)["domain"] == "format"
