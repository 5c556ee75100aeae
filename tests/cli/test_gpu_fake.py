# SPDX-License-Identifier: MIT
"""The GPU's side of the command line, over a fake driver that runs its copies late."""
import os

import pytest

from cli_program import FAKES, MIB, pattern

TYPES = ["auto", "CPU_GPU", "CPU_ASYNC_GPU", "CPU_CACHED_GPU"]
CUFILE = ["0", "5", "6", "7"]


@pytest.fixture
def needs_cufile():
    if not (FAKES / "libcufile.so.0").exists():
        pytest.skip(f"there is no fake libcufile.so.0 in {FAKES}")


def check_books(books):
    assert books["violations"] == 0, books["violation_texts"]
    assert books["queued_copies"] == 0 and books["live_streams"] == 0


@pytest.mark.parametrize("transfer", TYPES + ["MAPPED"])
def test_file_reaches_the_gpu(gpu, source, transfer):
    fake = gpu()
    report = fake.report(source, "cuda:0", "--transfer", transfer, "--verify")
    assert report["device"] == "cuda:0" and report["bytes"] == source.stat().st_size
    assert report["verified"] and report["pinned_bytes"] <= 128 * MIB
    check_books(fake.books())


@pytest.mark.parametrize("transfer", TYPES)
def test_gpu_reaches_a_file(gpu, tmp_path, transfer):
    fake = gpu()
    out, size = tmp_path / "out", 3 * MIB + 77
    fake.report("cuda:0", out, "--size", str(size), "--transfer", transfer, "--verify")
    assert out.read_bytes() == pattern(size)
    check_books(fake.books())


@pytest.mark.parametrize("transfer", CUFILE)
def test_cufile_moves_both_ways_and_is_called_by_its_name(gpu, needs_cufile, tmp_path, transfer):
    out = tmp_path / "out"
    ways = (["cuda:0", out, "--size", "3000000"], [out, "cuda:0"])
    for way in ways:
        report = gpu().report(*way, "--transfer", transfer, "--verify")
        assert [path["path"] for path in report["paths"]] == ["cufile-compat"]
        assert report["verified"] and report["transfer"].startswith("GPU_")


def test_cufile_that_does_not_start_is_refused_not_replaced(gpu, needs_cufile, source):
    fake = gpu(FAKE_CUFILE_DRIVER_ERROR="5027")
    error = fake.fails("copy", source, "cuda:0", "--transfer", "GPU_DIRECT")
    assert error["object"] == "GPU_DIRECT" and "CPU_ASYNC_GPU" in error["hint"]
    assert fake.report(source, "cuda:0", "--verify")["verified"]


def test_mapped_reads_only(gpu, tmp_path):
    error = gpu().fails("copy", "cuda:0", tmp_path / "out", "--size", "1M", "--transfer", "mapped")
    assert error["hint"] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [0, 1, 4097, 33 * MIB + 1])
def test_sizes_around_the_edges_reach_the_gpu_and_back(gpu, tmp_path, size):
    out = tmp_path / "out"
    gpu().report("cuda:0", out, "--size", str(size), "--verify")
    assert out.stat().st_size == size
    assert gpu().report(out, "cuda:0", "--verify")["bytes"] == size


def test_second_gpu_is_the_second(gpu, source):
    assert gpu(FAKE_CUDA_DEVICES="2").report(source, "cuda:1", "--verify")["device"] == "cuda:1"
    error = gpu(FAKE_CUDA_DEVICES="2").fails("copy", source, "cuda:2")
    assert error["object"] == "cuda:2"


def test_memory_limit_holds_for_pinned_memory(gpu, source):
    fake = gpu()
    report = fake.report(source, "cuda:0", "--memory-limit", "4M", "--transfer", "CPU_ASYNC_GPU",
                         "--verify")
    assert report["pinned_bytes"] <= 4 * MIB
    assert fake.books()["peak_registered_bytes"] <= 4 * MIB


def test_start_up_of_the_driver_is_told_apart(gpu, source):
    report = gpu(FAKE_CUDA_INIT_MS="300").report(source, "cuda:0")
    assert report["open_seconds"] + report["setup_seconds"] >= 0.25


def test_out_of_gpu_memory_says_so(gpu, source, tmp_path):
    fake = gpu(FAKE_CUDA_MEMORY="1M")
    error = fake.fails("copy", source, "cuda:0")
    assert error["domain"] == "cuda" and error["errno"] == "ENOMEM"
    assert error["object"] == "cuda:0" and error["hint"]
    fake.fails("copy", "cuda:0", tmp_path / "out", "--size", "8M")
    assert not (tmp_path / "out").exists()


def test_cuda_error_in_mid_flight_is_told_and_harms_nothing(gpu, source, tmp_path):
    fake = gpu(FAKE_CUDA_FAIL_LATE="2+=719")
    error = fake.fails("copy", source, "cuda:0", "--request-size", "256K")
    assert error["domain"] == "cuda" and error["raw"] == 719
    out = tmp_path / "out"
    out.write_bytes(b"old")
    before = os.listdir(tmp_path)
    fake = gpu(FAKE_CUDA_FAIL_LATE="2+=719")
    assert fake.fails("copy", "cuda:0", out, "--size", "3M")["raw"] == 719
    assert out.read_bytes() == b"old" and os.listdir(tmp_path) == before


def test_corruption_on_the_way_to_the_gpu_is_caught(gpu, source):
    error = gpu(FAKE_CUDA_CORRUPT="1").fails("copy", source, "cuda:0", "--verify")
    assert error["operation"] == "verify" and error["errno"] == "EILSEQ"


def test_injected_corruption_is_caught_on_the_gpu(gpu, source):
    error = gpu().fails("copy", source, "cuda:0", "--inject", "corrupt:1", "--verify")
    assert error["operation"] == "verify"


def test_broken_driver_is_an_error_with_words(gpu, source):
    error = gpu(FAKE_CUDA_FAIL="cuInit:*=999").fails("copy", source, "cuda:0")
    assert error["object"] == "cuda:0" and error["hint"]


def test_explain_takes_the_gpu_where_there_is_one(gpu, source):
    plan = gpu().ok("explain", source, "--json").json
    assert plan["device"] == "cuda:0" and "device_reason" not in plan
    assert "gds" in [path["path"] for path in plan["refused"]]


def test_explain_falls_back_to_the_host_if_the_gpu_does_not_start(gpu, source):
    plan = gpu(FAKE_CUDA_FAIL="cuDevicePrimaryCtxRetain:*=2").ok("explain", source, "--json").json
    assert plan["device"] == "host" and plan["device_reason"]
