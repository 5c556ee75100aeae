# SPDX-License-Identifier: MIT
"""Bad input and faults: one clear message, a failure, and a destination that is as it was."""
import os
import shutil
import stat
import subprocess
import time

import pytest

from cli_program import MIB, PROGRAM, Result

OLD = b"what was there before" * 50


@pytest.fixture
def target(tmp_path):
    """A directory with one old file in it, and nothing else before and after."""
    (tmp_path / "target").mkdir()
    file = tmp_path / "target" / "file"
    file.write_bytes(OLD)
    yield file
    assert file.read_bytes() == OLD
    assert os.listdir(file.parent) == ["file"]


def test_missing_source(penstock, target):
    error = penstock.fails("copy", "/no/such/file", target)
    assert error["errno"] == "ENOENT" and error["object"] == "/no/such/file"


def test_missing_source_into_memory(penstock):
    assert penstock.fails("copy", "/no/such/file", "host:")["errno"] == "ENOENT"


@pytest.mark.parametrize("side", ["host:", "null:"])
def test_directory_as_source(penstock, tmp_path, side):
    error = penstock.fails("copy", tmp_path, side)
    assert error["errno"] == "EISDIR" and error["object"] == str(tmp_path)


def test_directory_as_destination_of_what_has_no_name(penstock, tmp_path):
    before = os.listdir(tmp_path)
    assert penstock.fails("copy", "pattern:1M", tmp_path)["errno"] == "EISDIR"
    assert os.listdir(tmp_path) == before


def test_missing_parent_directory(penstock, source, tmp_path):
    error = penstock.fails("copy", source, tmp_path / "no" / "such" / "file")
    assert error["errno"] == "ENOENT" and "/no/such" in error["object"]


def test_destination_with_a_slash_is_a_directory(penstock, source, tmp_path):
    for side in (source, "pattern:1M"):
        error = penstock.fails("copy", side, f"{tmp_path}/new/")
        assert error["message"] == "there is no such directory" and "slash" in error["hint"]
    error = penstock.fails("copy", source, f"{source}/")
    assert error["errno"] == "ENOTDIR" and error["hint"]
    error = penstock.fails("make-model", "layers=1", source / "out")
    assert error["errno"] == "ENOTDIR" and "A part of the path" in error["hint"]
    assert os.listdir(tmp_path) == [source.name]


@pytest.mark.parametrize("args, status", [
    (["pattern:1M", "null:", "--verify"], 2), (["pattern:1M", "host:", "--in-place"], 2),
    (["host:", "null:", "--size", "1", "--offset", "1"], 2), (["SOURCE", "SOURCE"], 1),
    (["SOURCE", "host:", "--offset", "1T"], 1), (["host:", "host:"], 2), (["null:", "host:"], 2),
])
def test_what_cannot_be_done_says_what_can(penstock, source, args, status):
    args = [source if arg == "SOURCE" else arg for arg in args]
    assert penstock.fails("copy", *args, status=status)["hint"]


def test_parent_that_is_a_file(penstock, source, target):
    assert penstock.fails("copy", source, target / "file")["errno"] == "ENOTDIR"


def test_file_name_that_is_too_long(penstock, source, tmp_path):
    assert penstock.fails("copy", source, tmp_path / ("x" * 300))["errno"] == "ENAMETOOLONG"


def test_empty_name(penstock, target):
    for args in (["copy", "", target], ["copy", target, ""], ["explain", ""], ["inspect", ""],
                 ["load", ""], ["make-model", "", target], ["make-model", "7b", ""]):
        error = penstock.fails(*args, status=2)
        assert "empty" in error["message"] and error["hint"]


@pytest.mark.parametrize("side", ["pattern:", "pattern:lots", "pattern:1M,speed=3", "pattern:-1",
                                  "pattern:1M,latency=soon"])
def test_pattern_that_makes_no_sense(penstock, target, side):
    for args in (["copy", side, target], ["copy", target, side], ["explain", side]):
        error = penstock.fails(*args, status=2)
        assert error["errno"] == "EINVAL" and error["object"] == side


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "cuda:-1", "cuda:256", "cuda:0x1"])
def test_gpu_that_cannot_be_meant(penstock, target, device):
    for sides in ([target, device], [device, target]):
        error = penstock.fails("copy", *sides, status=2)
        assert error["object"] == device and error["hint"]


@pytest.mark.parametrize("device", ["cuda:0", "cuda:99"])
def test_gpu_that_is_not_there(penstock, source, device):
    if device == "cuda:0" and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU here")
    error = penstock.fails("copy", source, device)
    assert device in error["object"] or "libcuda" in error["message"]
    assert error["hint"]


@pytest.fixture
def tight_files():
    """A soft limit of open files that is soon reached, for what is started here."""
    import resource
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return lambda least: resource.setrlimit(resource.RLIMIT_NOFILE, (16, min(least, hard)))


def test_soft_limit_of_open_files_is_no_limit(penstock, tmp_path, tight_files):
    """What users have is often 1024; the program raises it as far as it may."""
    penstock.ok("make-model", "layers=3,shards=30", tmp_path / "model", "-q")
    for command in (["load", "-d", "host"], ["inspect"]):
        penstock.ok(*command, tmp_path / "model", preexec_fn=lambda: tight_files(1024))
    error = penstock.fails("inspect", tmp_path / "model", preexec_fn=lambda: tight_files(16))
    assert error["errno"] == "EMFILE" and "which is 16 (ulimit -n)" in error["hint"]


def test_limit_of_memory_is_named_where_there_is_memory(penstock):
    import resource
    limit = 1 << 30

    error = penstock.fails("copy", "pattern:2G", "host:", preexec_fn=lambda: resource.setrlimit(
        resource.RLIMIT_AS, (limit, limit)))
    assert error["errno"] == "ENOMEM" and "ulimit -v" in error["hint"]


def as_nobody(*args):
    """Run as a user with no rights: root may do everything."""
    if os.geteuid():
        command = [PROGRAM, *args]
    elif shutil.which("setpriv"):
        drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        if subprocess.run([*drop, "test", "-x", PROGRAM]).returncode:
            pytest.skip("others may not enter the folder of this checkout")
        command = [*drop, PROGRAM, *args]
    else:
        pytest.skip("root needs setpriv to try this")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "failed to execute" in done.stderr:
        pytest.skip("the program lies where other users cannot reach it")
    return Result(done.returncode, done.stdout, done.stderr, "--json" in args)


def test_source_without_permission(penstock, open_dir):
    secret = open_dir / "secret"
    secret.write_bytes(b"x")
    secret.chmod(0)
    result = as_nobody("copy", secret, "host:", "--json")
    assert result.status == 1 and result.error["errno"] == "EACCES"
    assert str(secret) in result.err


def test_directory_without_permission(penstock, open_dir):
    open_dir.chmod(0o555)
    result = as_nobody("copy", "pattern:1M", open_dir / "out", "--json")
    assert result.status == 1 and result.error["errno"] == "EACCES"
    result = as_nobody("make-model", "layers=1,hidden=64", open_dir / "model", "--json")
    assert result.status == 1 and result.error["errno"] == "EACCES"
    assert "permissions" in result.error["hint"]
    assert os.listdir(open_dir) == []


def test_read_only_file_system(penstock, small_fs):
    (small_fs / "file").write_bytes(OLD)
    subprocess.run(["mount", "-o", "remount,ro", small_fs], check=True)
    for options in ([], ["--in-place"]):
        error = penstock.fails("copy", "pattern:1M", small_fs / "file", *options)
        assert error["errno"] == "EROFS"
    assert (small_fs / "file").read_bytes() == OLD


@pytest.mark.parametrize("side", ["pattern:8M", "host:"])
def test_full_file_system_keeps_the_old_file_and_has_no_litter(penstock, small_fs, side):
    (small_fs / "file").write_bytes(OLD)
    free = os.statvfs(small_fs).f_bfree
    error = penstock.fails("copy", side, small_fs / "file", "--size", "8M")
    assert error["errno"] == "ENOSPC" and error["object"].endswith("small/file")
    assert (small_fs / "file").read_bytes() == OLD
    assert os.listdir(small_fs) == ["file"] and os.statvfs(small_fs).f_bfree == free


@pytest.fixture
def node(tmp_path):
    """A device node of our own: an engine that replaced it would otherwise harm the machine."""
    def make(minor):
        path = tmp_path / "node"
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
            open(path, "rb").close()
        except PermissionError:
            pytest.skip("making a device node needs root")
        return path
    return make


def test_device_node_is_never_replaced_by_a_file(penstock, node):
    path = node(3)
    penstock("copy", "pattern:1M", path)
    assert stat.S_ISCHR(path.stat().st_mode)


def test_dev_full_fails_in_place(penstock, node):
    path = node(7)
    result = penstock("copy", "pattern:1M", path, "--in-place")
    assert result.status == 1 and str(path) in result.err
    assert stat.S_ISCHR(path.stat().st_mode)


def test_source_that_is_no_file_does_not_hang(penstock, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    error = penstock.fails("copy", tmp_path / "fifo", "host:", timeout=10)
    assert error["object"].endswith("fifo")


def change_during_copy(penstock, source, target, change):
    """Copy so slowly that the source can be changed meanwhile."""
    with source.open("ab") as file:
        file.truncate(6 * MIB)
    args = ["copy", source, target, "--lanes", "1", "--depth", "1", "--request-size", "64K",
            "--inject", "delay:1+:20ms", "--json"]
    process = penstock.start(*args)
    time.sleep(0.5)
    change()
    result = penstock.finish(process, args)
    assert result.status == 1
    assert result.error["object"] == str(source)
    return result.error


def test_source_that_shrinks_during_the_copy(penstock, source, target):
    change_during_copy(penstock, source, target, lambda: os.truncate(source, 4096))


def test_source_that_grows_during_the_copy(penstock, source, target):
    change_during_copy(penstock, source, target, lambda: os.truncate(source, 7 * MIB))


# -------------------------------------------------------------------------- injected faults --

def test_passing_failure_is_retried_and_counted(penstock, source, tmp_path):
    for code in ("EIO", "EAGAIN", "EINTR"):
        report = penstock.report(source, "host:", "--inject", f"fail:1:{code}", "--verify")
        assert report["retries"] >= 1, code
    report = penstock.report("host:", tmp_path / "out", "--size", "3M", "--inject", "fail:1",
                             "--verify")
    assert report["retries"] >= 1


def test_lasting_failure_ends_the_copy_with_its_place(penstock, source, target):
    for args in ((source, target), (source, "host:"), ("host:", target, "--size", "3M")):
        error = penstock.fails("copy", *args, "--inject", "fail:1+", "--request-size", "64K")
        assert error["errno"] == "EIO" and error["offset"] is not None
        assert error["object"] == str(args[0] if args[0] == source else target)


def test_failure_that_no_retry_mends_ends_the_copy(penstock, target):
    error = penstock.fails("copy", "host:", target, "--size", "3M", "--inject", "fail:2:ENOSPC",
                           "--request-size", "64K")
    assert error["errno"] == "ENOSPC"


def test_failures_of_a_share_of_requests_are_survived(penstock, source, tmp_path):
    report = penstock.report(source, tmp_path / "out", "--request-size", "16K", "--inject",
                             "fail:5%:EAGAIN,short:5%,delay:1%:1ms", "--verify")
    assert report["retries"] >= 1
    assert (tmp_path / "out").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("spec", ["short:1", "short:1+", "short:2:1000", "short:50%"])
def test_short_requests_are_completed(penstock, source, tmp_path, spec):
    for args in ((source, "host:"), ("host:", tmp_path / "out", "--size", "3M")):
        report = penstock.report(*args, "--inject", spec, "--request-size", "256K", "--verify")
        assert report["retries"] >= 1, "nothing came short"


def test_delay_is_seen_in_the_latency(penstock, source):
    report = penstock.report(source, "host:", "--inject", "delay:1:300ms", "--verify")
    assert report["latency_us"]["max"] >= 250000 and report["seconds"] >= 0.25


def test_corruption_is_caught_by_verify(penstock, source, tmp_path):
    for args in ((source, "host:"), (source, tmp_path / "a"), ("pattern:3M", "host:"),
                 ("host:", tmp_path / "b", "--size", "3M")):
        error = penstock.fails("copy", *args, "--inject", "corrupt:1", "--verify")
        assert error["operation"] == "verify" and error["errno"] == "EILSEQ"
        assert 0 <= error["offset"] < 4 * MIB and "differs" in error["message"]


def test_corruption_is_found_where_it_is(penstock, tmp_path):
    out = tmp_path / "out"
    error = penstock.fails("copy", "host:", out, "--size", "3M", "--inject", "corrupt:3",
                           "--request-size", "64K", "--verify")
    data, offset = out.read_bytes(), error["offset"]
    penstock.report("host:", out, "--size", "3M")
    right = out.read_bytes()
    assert data[:offset] == right[:offset] and data[offset] != right[offset]


@pytest.mark.parametrize("spec", ["", "fail", "fail:", "fail:0", "fail:x", "explode:1",
                                  "fail:1:EWHAT", "short:1:many", "delay:1:soon", "fail:200%",
                                  "corrupt:1:3", "fail:1,,short:2"])
def test_inject_that_makes_no_sense_is_refused_before_any_byte(penstock, target, spec):
    error = penstock.fails("copy", "pattern:1M", target, "--inject", spec, status=2)
    assert error["errno"] == "EINVAL"
    assert penstock.fails("load", target, "-d", "host", "--inject", spec, status=2) == error


# --------------------------------------------------------------------- standard descriptors --

def without(*numbers):
    """What a child does first to have these descriptors closed."""
    return lambda: [os.close(number) for number in numbers]


@pytest.mark.parametrize("closed", [(2,), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("options", [[], ["--in-place"]])
def test_messages_stay_out_of_the_destination_where_descriptors_are_closed(
        penstock, tmp_path, closed, options):
    out = tmp_path / "out"
    out.write_bytes(b"old!")
    result = penstock("copy", "-q", "--size", "4", "--inject", "fail:*:EIO", "null:", out, *options,
                      preexec_fn=without(*closed))
    assert result.status and out.read_bytes() == b"old!"
    result = penstock("copy", "--size", "4", "null:", out, *options, preexec_fn=without(*closed))
    assert result.status == (1 in closed) and out.read_bytes() == bytes(4)


def test_report_that_has_nowhere_to_go_is_a_failure_that_is_told(penstock):
    result = penstock("copy", "pattern:1M", "host:", preexec_fn=without(1))
    assert result.status == 1
    assert result.err == "penstock: cannot write the output: Bad file descriptor\n"
