# SPDX-License-Identifier: MIT
"""penstock load: every tensor lands as it lies in the file, on the host and on the fake GPU."""
import json
import os
import re
import signal
import struct
import time

import pytest

from cli_program import FAKES, MIB
from test_bad_input import as_nobody
from test_gpu_fake import check_books
from test_options import documented_members, members
from test_terminal import drawings, on_terminal, start_and_signal

SMALL = "layers=3,hidden=64,intermediate=96,heads=4,kv=2,vocab=300"
TYPES = ["auto", "CPU_GPU", "CPU_ASYNC_GPU", "CPU_CACHED_GPU", "MAPPED"]
FIELDS = {"model", "transfer", "device", "files", "tensors", "bytes", "storage_bytes", "seconds",
          "setup_seconds", "gb_per_s", "cpu_seconds", "pinned_bytes", "lanes", "depth",
          "request_size", "requests", "retries", "latency_us", "refused", "paths", "open_seconds",
          "runs", "ceiling", "ceiling_reason", "memory_bytes", "anonymous_bytes", "warnings",
          "cache_reason", "delivered_bytes", "coded_bytes", "core_decoded_bytes",
          "decode_seconds", "device_staging_bytes"}
SLOW = ["--lanes", "1", "--depth", "1", "--request-size", "128K", "--inject", "delay:1+:20ms"]


@pytest.fixture
def model(penstock, tmp_path):
    """A small model of three shards."""
    folder = tmp_path / "model"
    penstock.ok("make-model", SMALL + ",shards=3", folder, "-q")
    return folder


@pytest.fixture
def large(penstock, tmp_path):
    """A model of 24 MiB: what is slowed down takes some seconds."""
    folder = tmp_path / "large"
    penstock.ok("make-model", "layers=1,hidden=1024,intermediate=1024,vocab=2048,shards=2", folder,
                "-q")
    return folder


def load(penstock, *args):
    return penstock.ok("load", *map(str, args), "--json").json


def on_host(penstock, *args):
    return load(penstock, "--device", "host", *args)


def bytes_of(folder):
    """The bytes of each tensor as they lie in its file; the safetensors package has agreed."""
    from safetensors import safe_open
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        start = 8 + struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8:start])
        with safe_open(path, "pt") as file:
            for name in file.keys():
                begin, end = header[name]["data_offsets"]
                found[name] = raw[start + begin:start + end]
                if file.get_slice(name).get_dtype() == "BF16":
                    import torch
                    tensor = file.get_tensor(name).view(torch.int16).numpy()
                    assert tensor.tobytes() == found[name]
    return found


def hashes(report):
    return {entry["name"]: entry["hash"] for entry in report["hashes"]}


@pytest.fixture
def expected(tmp_path):
    """The right hashes of a folder: each tensor's bytes copied alone and hashed by `copy`."""
    from cli_program import Penstock

    def compute(folder):
        found = {}
        for name, data in bytes_of(folder).items():
            alone = tmp_path / "alone.bin"
            alone.write_bytes(data)
            found[name] = Penstock().report(alone, "host:", "--verify")["hash"]
        return found
    return compute


# --------------------------------------------------------------------------- what has landed --

def test_every_tensor_lands_as_it_lies_in_the_file(penstock, model, expected):
    assert hashes(on_host(penstock, model, "--hash")) == expected(model)


@pytest.mark.parametrize("transfer", TYPES)
def test_every_tensor_reaches_the_gpu(gpu, model, expected, transfer):
    fake = gpu()
    report = load(fake, model, "--hash", "--transfer", transfer)
    assert hashes(report) == expected(model)
    assert report["device"] == "cuda:0" and report["pinned_bytes"] <= 128 * MIB
    check_books(fake.books())
    assert fake.books()["live_allocations"] == 0


@pytest.mark.parametrize("transfer", ["0", "5", "6", "7"])
def test_every_tensor_reaches_the_gpu_by_cufile(gpu, model, expected, transfer):
    if not (FAKES / "libcufile.so.0").exists():
        pytest.skip(f"there is no fake libcufile.so.0 in {FAKES}")
    report = load(gpu(), model, "--hash", "--transfer", transfer)
    assert hashes(report) == expected(model)
    assert [path["path"] for path in report["paths"]] == ["cufile-compat"]


@pytest.mark.parametrize("options", [
    ["--memory-limit", "1M"], ["--lanes", "3"], ["--depth", "2", "--request-size", "64K"],
    ["--cache", "drop"], ["--cache", "keep"], ["--inject", "short:50%,fail:5%:EAGAIN"],
    ["--drop-cache"],
])
def test_options_of_the_engine_change_nothing_about_the_bytes(gpu, penstock, large, expected,
                                                              options):
    right = expected(large)
    for program, device in ((penstock, "host"), (gpu(), "cuda:0")):
        report = load(program, large, "--hash", "--device", device, "--no-ceiling", *options)
        assert hashes(report) == right
        if "--memory-limit" in options:
            assert report["pinned_bytes"] <= MIB
        if "--lanes" in options:
            assert report["lanes"] <= 3
        if "--inject" in options:
            assert report["retries"] > 0


def test_known_hash(penstock, tmp_path):
    """Against the figure that the reference implementation gives for these bytes."""
    path = tmp_path / "x.safetensors"
    header = b'{"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"abc")
    assert hashes(on_host(penstock, path, "--hash")) == {"x": "06b05ab6733a618578af5f94892f3950"}


def test_hash_lines_are_for_scripts(penstock, model):
    report = on_host(penstock, model, "--hash")
    out = penstock.ok("load", model, "--device", "host", "--hash", "--quiet").out
    assert out == "".join(f"{entry['hash']}  {entry['name']}\n" for entry in report["hashes"])
    both = penstock.ok("load", model, "--device", "host", "--hash").out
    assert both.startswith(out) and len(both) > len(out)


def test_corruption_shows_in_the_hash(gpu, penstock, model, expected):
    right = expected(model)
    wrong = hashes(on_host(penstock, model, "--hash", "--inject", "corrupt:1"))
    assert sum(wrong[name] != right[name] for name in right) == 1
    wrong = hashes(load(gpu(FAKE_CUDA_CORRUPT="1"), model, "--hash"))
    assert sum(wrong[name] != right[name] for name in right) == 1


@pytest.mark.parametrize("header, data", [
    ({}, b""),
    ({"e": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, b""),
    ({"s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
      "e": {"dtype": "F32", "shape": [2, 0], "data_offsets": [4, 4]}}, b"abcd"),
    ({"odd": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]},
      "next": {"dtype": "F32", "shape": [1], "data_offsets": [5, 9]}}, b"abcdefghi"),
])
@pytest.mark.parametrize("device", ["host", "cuda:0"])
def test_odd_models_load(penstock, gpu, tmp_path, expected, header, data, device):
    path = tmp_path / "x.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    program = penstock if device == "host" else gpu()
    report = load(program, path, "--hash", "--device", device)
    assert report["bytes"] == len(data) and report["tensors"] == len(header)
    assert hashes(report) == expected(tmp_path)
    assert program.ok("load", path, "--device", device).out


def test_file_folder_and_index_load_the_same(penstock, model):
    all_of_them = hashes(on_host(penstock, model, "--hash"))
    assert hashes(on_host(penstock, model / "model.safetensors.index.json", "--hash")) == \
        all_of_them
    one = hashes(on_host(penstock, model / "model-00002-of-00003.safetensors", "--hash"))
    assert one.items() < all_of_them.items()


def test_keys_choose_what_is_loaded_and_read(penstock, model):
    everything = hashes(on_host(penstock, model, "--hash"))
    report = on_host(penstock, model, "--hash", "--keys", "*.mlp.*", "-k", "model.norm.weight")
    wanted = {name: value for name, value in everything.items()
              if ".mlp." in name or name == "model.norm.weight"}
    assert hashes(report) == wanted and report["tensors"] == len(wanted)
    sizes = {name: len(data) for name, data in bytes_of(model).items()}
    assert report["bytes"] == sum(sizes[name] for name in wanted)


def test_keys_that_match_nothing_tell_some_names(penstock, model):
    for keys in (["-k", "transformer.*"], ["-k", "x", "-k", "y"]):
        error = penstock.fails("load", model, "--device", "host", *keys)
        assert error["errno"] == "ENOENT" and "none of its 35 tensors" in error["message"]
        assert "model.embed_tokens.weight" in error["hint"]


# -------------------------------------------------------------------------------- the report --

def test_report_adds_up(penstock, model):
    report = on_host(penstock, model)
    sizes = [len(data) for data in bytes_of(model).values()]
    assert set(report) == FIELDS
    assert report["bytes"] == sum(sizes) == sum(path["bytes"] for path in report["paths"])
    assert report["files"] == 3 and report["tensors"] == len(sizes) == 35
    padded = sum(-(-size // 256) * 256 for size in sizes)
    assert sum(sizes) <= report["memory_bytes"] <= padded
    assert report["device"] == "host" and report["transfer"] == "AUTO"
    assert len(report["runs"]) == 1 and report["runs"][0]["seconds"] == report["seconds"] > 0
    assert all(path["reason"] for path in report["paths"] + report["refused"])
    assert report["anonymous_bytes"] < 64 * MIB and report["warnings"] == []


def test_the_page_cache_is_filled_after_the_last_load(penstock, model):
    options = ["--drop-cache", "--repeat", "2", "--no-ceiling", "--cache"]
    first = on_host(penstock, model, *options, "off")
    if first["not_evicted_bytes"] or not first["paths"][0]["path"].startswith("direct"):
        pytest.skip("this file system does not drop its page cache, or has no direct I/O")
    report = on_host(penstock, model, *options, "after")
    assert report["warmed_bytes"] > 0 and not report["not_warmed_reason"]
    assert [path["path"] for path in report["paths"]] == [first["paths"][0]["path"]]
    again = on_host(penstock, model, "--no-ceiling", "--cache", "after")
    assert [path["path"] for path in again["paths"]] == ["cached"]
    assert again["cache_reason"] == ""


@pytest.mark.alone
def test_report_for_people(penstock, model):
    out = penstock.ok("load", model, "--device", "host").out
    assert re.match(r"35 tensors of 3 files: [\d.]+ kB in [\d.]+ m?s: [\d.]+ [GM]B/s \([\d.]+ "
                    r"[mu]?s of it setup\), [\d.]+ CPU-seconds, \S+ \S+ pinned", out), out
    assert re.search(r"^  read   \S+ +100\.0 %  \S", out, re.M)
    assert re.search(r"^  ceiling: not known: too small to measure$", out, re.M)
    assert re.search(r"^  memory: [\d.]+ KiB of host, .* of it padding; anonymous memory of the "
                     r"process grew by .* besides$", out, re.M)
    assert "runs:" not in out and "not cold" not in out
    assert penstock.ok("load", model, "--device", "host", "-q").out == ""


def test_repeat_gives_the_median_and_each_run(penstock, gpu, model):
    for count in (3, 4):
        report = on_host(penstock, model, "--repeat", count)
        times = sorted(run["seconds"] for run in report["runs"])
        assert len(times) == count and report["seconds"] == times[count // 2]
    out = penstock.ok("load", model, "--device", "host", "--repeat", "3").out
    assert re.search(r"^  runs: the median of 3 is above; seconds of each:( [\d.]+){3}$", out, re.M)
    fake = gpu(FAKE_CUDA_MEMORY="1M")    # the memory of a run is free before the next
    assert len(load(fake, model, "--repeat", "20", "--no-ceiling")["runs"]) == 20


@pytest.mark.alone
def test_start_up_of_the_driver_is_told_apart_and_not_counted_against_the_ceiling(gpu, large):
    report = load(gpu(FAKE_CUDA_INIT_MS="300"), large, "--repeat", "2")
    first, second = report["runs"]
    assert report["open_seconds"] + first["setup_seconds"] >= 0.25 > second["setup_seconds"]
    spent = report["seconds"] - report["setup_seconds"]
    ceiling = report["ceiling"]
    assert ceiling["share"] == pytest.approx(ceiling["seconds"] / spent, rel=.01)


@pytest.mark.alone
def test_setup_is_in_the_report_for_people(gpu, large):
    out = gpu(FAKE_CUDA_INIT_MS="300").ok("load", large).out
    assert re.search(r"\(\d\.\d\d s of it setup\)", out) and ", after the setup; it is" in out


def test_memory_of_the_gpu_is_that_of_the_tensors(gpu, large):
    size = load(gpu(), large)["memory_bytes"]
    fake = gpu(FAKE_CUDA_MEMORY=str(size + MIB))
    report = load(fake, large, "--no-ceiling", "--hash")
    assert report["memory_bytes"] <= report["bytes"] * 1.01
    report = load(fake, large)    # there is no room to measure, which does no harm
    assert report["ceiling"] is None and "no memory left" in report["ceiling_reason"]
    assert "ceiling: not known: the GPU has no memory left" in fake.ok("load", large).out
    error = gpu(FAKE_CUDA_MEMORY="1M").fails("load", large)
    assert error["domain"] == "cuda" and error["errno"] == "ENOMEM" and error["object"] == "cuda:0"


def test_warnings_of_the_model_are_told(penstock, model):
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    assert "model.norm.weight" in on_host(penstock, model)["warnings"][0]
    assert re.search(r"^  warning: .*model\.norm\.weight",
                     penstock.ok("load", model, "--device", "host").out, re.M)


def test_json_members_are_in_the_man_page(penstock, model):
    report = on_host(penstock, model, "--hash", "--drop-cache", "--repeat", "2")
    assert members(report) <= documented_members("load")


# ------------------------------------------------------------------ the ceiling and the cache --

def check_ceiling(report, slowest):
    """It is the slowest part, or the load itself where that was faster."""
    ceiling, spent = report["ceiling"], report["seconds"] - report["setup_seconds"]
    assert ceiling["seconds"] == pytest.approx(min(slowest, spent), rel=.01)
    assert ceiling["share"] == pytest.approx(ceiling["seconds"] / spent, rel=.01)
    assert 0 < ceiling["share"] <= 1


def evicted(penstock, folder):
    """Whether this file system lets go of its page cache."""
    return on_host(penstock, folder, "--drop-cache", "--no-ceiling")["not_evicted_bytes"] == 0


@pytest.mark.alone
def test_ceiling_of_cached_files_on_the_host_is_the_page_cache(penstock, large):
    bytes_of(large)
    report = on_host(penstock, large)
    assert [path["path"] for path in report["paths"]] == ["cached"]
    ceiling = report["ceiling"]
    assert ceiling["cache_gb_per_s"] > 0
    assert ceiling["store_gb_per_s"] is None and ceiling["copy_gb_per_s"] is None
    check_ceiling(report, report["bytes"] / ceiling["cache_gb_per_s"] / 1e9)


@pytest.mark.alone
def test_ceiling_for_people(penstock, large):
    out = penstock.ok("load", large, "--device", "host").out
    assert re.search(r"^  ceiling: \d+ % of it; it is [\d.]+ m?s \(.*GB/s\)$", out, re.M), out


@pytest.mark.alone
def test_ceiling_does_not_fail_for_a_page_that_is_cached(penstock, large):
    """The ends of a file that was just written, and its header, are; all else is cold."""
    if not evicted(penstock, large):
        pytest.skip("this file system does not drop its page cache")
    for file in large.glob("*.safetensors"):
        with open(file, "rb") as start:
            os.posix_fadvise(start.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            start.read(4096)
            os.pread(start.fileno(), 8192, file.stat().st_size // 4096 * 4096)
    report = on_host(penstock, large)
    assert report["ceiling"] and report["ceiling"]["store_gb_per_s"] > 0


@pytest.mark.alone
def test_ceiling_of_what_is_too_small_is_left_out(penstock, model, large):
    report = on_host(penstock, model)
    assert report["ceiling"] is None and report["ceiling_reason"] == "too small to measure"
    report = on_host(penstock, large)
    assert report["ceiling"] and "ceiling_reason" not in report


def cached_pages(path):
    """Pages of a file in the page cache, asked by its owner: None where the kernel cannot say."""
    import ctypes
    fd = os.open(path, os.O_RDONLY)
    whole, counts = (ctypes.c_uint64 * 2)(0, os.fstat(fd).st_size), (ctypes.c_uint64 * 5)()
    failed = ctypes.CDLL(None).syscall(451, fd, whole, counts, 0)
    os.close(fd)
    return None if failed else counts[0]


@pytest.mark.alone
def test_other_users_look_at_the_cache_without_changing_it(penstock, open_dir):
    """They may not ask what is cached, and reads that look would bring in what they look at."""
    if os.geteuid():
        pytest.skip("only root can be somebody else")
    model = open_dir / "model"
    penstock.ok("make-model", "layers=1,hidden=1024,intermediate=1024,vocab=16384", model, "-q")
    file = model / "model.safetensors"
    if not evicted(penstock, model) or cached_pages(file) != 0:
        pytest.skip("the page cache cannot be dropped here, or not be counted")
    for _ in range(5):
        plan = as_nobody("explain", file, "--device", "host", "--json").json
        assert plan["residency_by"] == "samples"
        assert plan["resident"] <= 0.1 * plan["bytes"], plan["resident"]
        assert all(part["path"] != "cached" for part in plan["ranges"])
    # A page or two may stay, where the kernel was busy with it.
    assert cached_pages(file) <= 20
    report = as_nobody("load", model, "--device", "host", "--drop-cache", "--json").json
    assert all(path["path"].startswith("direct") for path in report["paths"])
    assert report["ceiling"] and report["ceiling"]["store_gb_per_s"] > 0
    assert report["not_evicted_bytes"] <= 0.1 * report["bytes"]


@pytest.mark.alone
def test_ceiling_of_cold_files_is_the_store(penstock, gpu, large):
    if not evicted(penstock, large):
        pytest.skip("this file system does not drop its page cache")
    for program, device in ((penstock, "host"), (gpu(), "cuda:0")):
        report = load(program, large, "--drop-cache", "--device", device)
        assert report["not_evicted_bytes"] == 0
        assert all(path["path"].startswith("direct") for path in report["paths"])
        ceiling = report["ceiling"]
        assert ceiling["store_gb_per_s"] > 0 and ceiling["cache_gb_per_s"] is None
        rates = [ceiling["store_gb_per_s"]]
        if device == "cuda:0":
            rates.append(ceiling["copy_gb_per_s"])
        check_ceiling(report, report["bytes"] / min(rates) / 1e9)


def test_ceiling_of_half_cached_files_on_the_host_has_both_parts(penstock, large):
    if not evicted(penstock, large):
        pytest.skip("this file system does not drop its page cache")
    on_host(penstock, large, "--drop-cache", "--no-ceiling")
    (large / "model-00001-of-00002.safetensors").read_bytes()
    report = on_host(penstock, large)
    parts = {path["path"]: path["bytes"] for path in report["paths"]}
    cached = parts.pop("cached")
    direct = sum(parts.values())
    ceiling = report["ceiling"]
    assert cached and direct and cached + direct == report["bytes"]
    times = cached / ceiling["cache_gb_per_s"], direct / ceiling["store_gb_per_s"]
    check_ceiling(report, max(times) / 1e9)


@pytest.mark.alone
def test_ceiling_of_cached_files_on_the_gpu_is_the_copies(gpu, large):
    bytes_of(large)
    report = load(gpu(), large)
    ceiling = report["ceiling"]
    assert ceiling["copy_gb_per_s"] > 0 and ceiling["store_gb_per_s"] is None
    assert ceiling["cache_gb_per_s"] is None
    check_ceiling(report, report["bytes"] / ceiling["copy_gb_per_s"] / 1e9)


@pytest.mark.alone
def test_ceiling_takes_little_time_and_can_be_left_out(penstock, large):
    report = on_host(penstock, large, "--no-ceiling")
    assert report["ceiling"] is None and "ceiling_reason" not in report
    assert "ceiling" not in penstock.ok("load", large, "--device", "host", "--no-ceiling").out
    start = time.monotonic()
    on_host(penstock, large)
    assert time.monotonic() - start < 3


@pytest.mark.alone
def test_ceiling_leaves_the_tensors_alone(gpu, penstock, large, expected):
    """Hashing comes first; a second load in the same process would show a changed page cache."""
    right = expected(large)
    assert hashes(load(gpu(), large, "--hash", "--repeat", "2")) == right
    assert expected(large) == right


def test_cache_that_cannot_be_dropped_is_told(penstock, small_fs):
    penstock.ok("make-model", SMALL, small_fs / "model", "-q")
    report = on_host(penstock, small_fs / "model", "--drop-cache")
    assert report["not_evicted_bytes"] > 0.9 * report["bytes"]
    out = penstock.ok("load", small_fs / "model", "--device", "host", "--drop-cache").out
    assert re.search(r"^  not cold: .* stayed in the page cache", out, re.M)


def test_dropped_before_every_run(penstock, large):
    if not evicted(penstock, large):
        pytest.skip("this file system does not drop its page cache")
    report = on_host(penstock, large, "--drop-cache", "--cache", "keep", "--repeat", "3")
    assert report["not_evicted_bytes"] == 0


# ------------------------------------------------------------------------------------ misuse --

def test_no_gpu_is_told_where_the_host_is_taken(penstock, model, expected):
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU here")
    report = load(penstock, model, "--hash")
    assert hashes(report) == expected(model)
    assert report["device"] == "host" and report["device_reason"]
    [line] = re.findall(r"^  device: (.*)$", penstock.ok("load", model).out, re.M)
    assert line == f"host (cuda:0 cannot be used: {report['device_reason']})"
    error = penstock.fails("load", model, "--inject", "fail:1+:ENODEV")
    assert error["hint"].endswith(f"cuda:0 cannot be used: {report['device_reason']}")


def test_gpu_that_was_asked_for_is_not_replaced(penstock, model):
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU here")
    error = penstock.fails("load", model, "--device", "cuda:0")
    assert "--device host" in error["hint"]


@pytest.mark.parametrize("env", [{"FAKE_CUDA_DEVICES": "0"}, {"FAKE_CUDA_FAIL": "cuInit:*=999"},
                                 {"FAKE_CUDA_FAIL": "cuDevicePrimaryCtxRetain:*=2"}])
def test_gpu_that_does_not_start_is_not_taken_unless_asked_for(gpu, model, expected, env):
    error = gpu(**env).fails("load", model, "-d", "cuda:0")
    assert error["object"] == "cuda:0" and "--device host" in error["hint"]
    report = load(gpu(**env), model, "--hash", "--repeat", "3")
    assert report["device"] == "host" and report["device_reason"]
    assert hashes(report) == expected(model) and len(report["runs"]) == 3


def test_gpu_that_works_needs_no_reason(gpu, model):
    assert "device_reason" not in load(gpu(), model)
    assert "  device:" not in gpu().ok("load", model).out


def test_second_gpu_is_the_second(gpu, model):
    assert load(gpu(FAKE_CUDA_DEVICES="2"), model, "-d", "cuda:1")["device"] == "cuda:1"
    assert gpu(FAKE_CUDA_DEVICES="2").fails("load", model, "-d", "cuda:2")["object"] == "cuda:2"


@pytest.mark.parametrize("device", ["", "gpu", "cuda:x", "cuda:-1", "cuda:256", "hosts", "foo"])
def test_device_that_is_none(penstock, model, device):
    for command in ("load", "explain"):
        error = penstock.fails(command, model, "--device", device, status=2)
        assert error["object"] == "--device" and f"'{device}'" in error["message"]
        assert "host (or cpu)" in error["hint"]


@pytest.mark.parametrize("name", ["host:", "cpu"])
def test_other_names_of_the_host(penstock, model, name):
    assert load(penstock, model, "--device", name)["device"] == "host"
    file = model / "model-00001-of-00003.safetensors"
    assert penstock.ok("explain", file, "--device", name, "--json").json["device"] == "host"


def test_path_that_is_missing_is_told_before_the_gpu(penstock, gpu, tmp_path):
    for program in (penstock, gpu(FAKE_CUDA_DEVICES="0")):
        error = program.fails("load", tmp_path / "nope")
        assert error["errno"] == "ENOENT" and error["object"] == str(tmp_path / "nope")
        assert "--device" not in error["hint"]


def test_paths_that_are_no_model(penstock, tmp_path):
    host = ["--device", "host"]
    assert penstock.fails("load", tmp_path / "no", *host)["errno"] == "ENOENT"
    (tmp_path / "folder").mkdir()
    error = penstock.fails("load", tmp_path / "folder", *host)
    assert error["object"] == str(tmp_path / "folder") and error["hint"]
    (tmp_path / "x.bin").write_bytes(b"x" * 100)
    penstock.fails("load", tmp_path / "x.bin", *host)


def test_truncated_file(penstock, model):
    shard = model / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    error = penstock.fails("load", model, "--device", "host")
    assert error["object"] == str(shard) and error["domain"] == "format"


def test_file_without_permission(penstock, open_dir):
    penstock.ok("make-model", SMALL, open_dir / "model", "-q")
    (open_dir / "model" / "model.safetensors").chmod(0)
    result = as_nobody("load", open_dir / "model", "--device", "host", "--json")
    assert result.status == 1 and result.error["errno"] == "EACCES"


@pytest.mark.parametrize("args, words", [
    ([], "MODEL is missing"),
    (["a", "--inject", "x"], "rule 1 cannot be understood"),
    (["a", "--repeat", "0"], "from 1 to 1000"), (["a", "--repeat", "1001"], "from 1 to 1000"),
    (["a", "--transfer", "warp"], "warp"), (["a", "--memory-limit", "1"], "is not a size from"),
    (["a", "--cache", "maybe"], "auto|keep|after|drop|off"), (["a", "--keys"], None),
])
def test_called_wrongly(penstock, args, words):
    if words is None:    # --json would be taken for the value
        result = penstock("load", *args)
        assert result.status == 2 and "its value is missing" in result.err
        return
    assert words in penstock.fails("load", *args, status=2)["message"]


def test_transfer_that_cannot_be_had_is_refused(penstock, model):
    error = penstock.fails("load", model, "--device", "host", "--transfer", "GPU_DIRECT")
    assert error["object"] == "GPU_DIRECT"


def test_lasting_failure_names_the_file_and_the_place(penstock, large):
    error = penstock.fails("load", large, "--device", "host", "--inject", "fail:1+")
    assert error["errno"] == "EIO" and error["offset"] is not None
    assert error["object"].startswith(str(large / "model-0000"))


def test_cuda_error_in_mid_flight_is_told(gpu, large):
    fake = gpu(FAKE_CUDA_FAIL_LATE="2+=719")
    error = fake.fails("load", large, "--request-size", "256K")
    assert error["domain"] == "cuda" and error["raw"] == 719


@pytest.mark.parametrize("change", [
    lambda path: os.truncate(path, 4096),
    lambda path: os.truncate(path, path.stat().st_size + 4096),
    lambda path: os.utime(path),
])
def test_file_that_changes_during_the_load_is_an_error_that_names_it(penstock, large, change):
    path = large / "model-00002-of-00002.safetensors"
    args = ["load", large, "--device", "host", *SLOW, "--json"]
    process = penstock.start(*args)
    time.sleep(0.4)
    change(path)
    result = penstock.finish(process, args)
    assert result.status == 1 and result.error["object"] == str(path)


# --------------------------------------------------------------------- signals and the terminal --

@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_a_load_at_once(penstock, large, number, status):
    args = ["load", large, "--device", "host", *SLOW]
    result, took = start_and_signal(penstock, args, number)
    assert result.status == status and took < 2 and result.err == "penstock: interrupted\n"
    assert result.out == ""


def test_signal_on_the_gpu_leaves_nothing_behind(gpu, large):
    fake = gpu()
    args = ["load", large, *SLOW, "--json"]
    result, took = start_and_signal(fake, args, signal.SIGINT)
    assert result.status == 130 and result.error["errno"] == "ECANCELED" and took < 2
    assert result.error["operation"] == "load" and result.error["hint"]
    check_books(fake.books())
    assert fake.books()["live_allocations"] == 0


def test_signal_between_runs_ends_all_of_them(penstock, model):
    args = ["load", model, "--device", "host", "--repeat", "1000", "--inject", "delay:1:50ms"]
    result, took = start_and_signal(penstock, args, signal.SIGINT)
    assert result.status == 130 and took < 2


@pytest.mark.slow
def test_bar_shows_the_load(penstock, large):
    status, out, shown = on_terminal(penstock, "load", large, "--device", "host", "--no-ceiling",
                                     *SLOW)
    lines = drawings(shown)
    assert status == 0 and len(lines) >= 3 and shown.endswith("\r\x1b[K")
    assert all(re.match(r"loading +\d+ %  ", line) for line in lines)
    quiet = on_terminal(penstock, "load", large, "--device", "host", "--quiet", *SLOW)
    assert quiet[2] == "" and quiet[1] == ""


def test_several_files_are_loaded_as_one_model(penstock, model):
    files = sorted(model.glob("*.safetensors"))
    whole, listed = (on_host(penstock, *paths, "--hash", "--no-ceiling")
                     for paths in ([model], files))
    hashes = lambda found: {entry["name"]: entry["hash"] for entry in found["hashes"]}
    assert len(files) == listed["files"] == 3 and hashes(listed) == hashes(whole)
    some = on_host(penstock, files[2], "--keys", "*norm*", files[0], "--no-ceiling")
    assert some["files"] == 2 and some["tensors"] < listed["tensors"]
