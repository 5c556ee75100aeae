# SPDX-License-Identifier: MIT
"""What goes wrong is a penstock.Error that names the file, the place and the way out."""
import copy
import errno
import os
import pickle
import shutil
import struct
import time

import pytest
import safetensors
import torch
from safetensors.torch import save_file

import penstock
from support import REFUSED, held_below, outcome, python, write_holes, write_raw

CALLS = {
    "load_file": lambda path: penstock.load_file(path),
    "load_model": lambda path: penstock.load_model(path),
    "stream": lambda path: list(penstock.stream(path)),
    "safe_open": lambda path: penstock.safe_open(path, "pt"),
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def check(error: penstock.Error, path) -> None:
    """All that an error about a file must carry."""
    assert isinstance(error, OSError)
    assert isinstance(error.errno, int) and error.errno > 0
    assert error.code == -error.errno
    assert error.domain in ("errno", "cuda", "cufile", "format")
    assert isinstance(error.raw, int)
    assert error.operation and isinstance(error.operation, str)
    assert os.path.basename(path) in error.object
    assert error.offset is None or error.offset >= 0
    assert error.message and error.message in str(error)
    assert isinstance(error.hint, str)
    assert os.path.basename(path) in str(error)
    assert os.fspath(error.filename).endswith(os.path.basename(path))
    assert error.strerror


# --------------------------------------------------------------------------- files that are not --

def test_a_missing_file(tmp_path, call):
    path = tmp_path / "missing.safetensors"
    with pytest.raises(penstock.Error) as caught:
        call(path)
    check(caught.value, path)
    assert caught.value.errno == 2
    assert caught.value.domain == "errno"
    assert caught.value.raw in (2, -2)
    assert caught.value.filename == str(path)


def test_a_missing_file_is_caught_as_code_for_safetensors_catches_it(tmp_path, call):
    with pytest.raises(FileNotFoundError):
        call(tmp_path / "missing.safetensors")


def test_a_folder_without_model(tmp_path, call):
    (tmp_path / "folder").mkdir()
    with pytest.raises(penstock.Error) as caught:
        call(tmp_path / "folder")
    check(caught.value, tmp_path / "folder")


def test_a_path_through_a_file(few, call):
    path, _ = few
    with pytest.raises(penstock.Error) as caught:
        call(path / "below.safetensors")
    assert caught.value.errno == 20
    assert "few.safetensors" in str(caught.value)


def test_no_permission(tmp_path):
    path = tmp_path / "closed.safetensors"
    save_file({"a": torch.ones(1)}, path)
    path.chmod(0)
    said = python("""
        import os, sys, penstock
        try:
            penstock.load_file(sys.argv[1] + ".none", framework="dlpack")
        except FileNotFoundError:
            pass  # all that is imported late is there now
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            penstock.load_file(sys.argv[1], framework="dlpack")
        except PermissionError as error:
            print("PermissionError", end=" ")
            print(isinstance(error, penstock.Error), error.errno, error)
        except penstock.Error as error:
            print("Error", error.errno, error)
        """, path).stdout
    assert said.startswith("PermissionError True 13 ") and "closed.safetensors" in said


@pytest.mark.parametrize("kind", ["fifo", "/dev/null", "socket"])
def test_things_that_are_no_files_are_refused_at_once(tmp_path, kind):
    path = tmp_path / "thing"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        import socket

        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path = kind
    said = python("""
        import sys, penstock
        try:
            penstock.load_file(sys.argv[1], framework="dlpack")
        except penstock.Error as error:
            print(error)
        """, path, timeout=10).stdout
    assert str(path) in said


def test_a_name_with_a_nul_is_refused(call):
    with pytest.raises((ValueError, penstock.Error)):
        call("a\0b")


@pytest.mark.parametrize("path", [None, 7, 1.5, [], object], ids=str)
def test_what_is_no_path_is_a_type_error(call, path):
    with pytest.raises((TypeError, ValueError)):
        call(path)


def test_an_empty_path_is_an_error(call):
    with pytest.raises((penstock.Error, ValueError)):
        call("")


# --------------------------------------------------------------------------------- broken files --

GOOD = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
BROKEN = {
    "nothing": b"",
    "one byte": b"x",
    "seven bytes": b"\0" * 7,
    "length only": struct.pack("<Q", 8),
    "garbage": b"garbage " * 100,
    "header too long": struct.pack("<Q", 200_000_000) + b"{}",
    "header of 2^64": b"\xff" * 8 + b"{}",
    "header of nothing": struct.pack("<Q", 0),
    "no json": struct.pack("<Q", 8) + b"not json",
    "a list": struct.pack("<Q", 2) + b"[]",
    "bad utf-8": struct.pack("<Q", 10) + b'{"\xff":null}',
    "cut header": struct.pack("<Q", len(GOOD)) + GOOD[:-5],
    "cut data": struct.pack("<Q", len(GOOD)) + GOOD + b"1234567",
    "trailing byte": struct.pack("<Q", len(GOOD)) + GOOD + b"123456789",
}
ENTRIES = {
    "dtype": b'{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}',
    "size": b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
    "order": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}',
    "beyond": b'{"a":{"dtype":"F32","shape":[20],"data_offsets":[0,80]}}',
    "hole": b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
    "overlap": b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},'
               b'"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
    "overflow": b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}',
    "negative": b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
    "fraction": b'{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}',
    "no shape": b'{"a":{"dtype":"F32","data_offsets":[0,8]}}',
    "twice": b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
             b'"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
    "metadata": b'{"__metadata__":{"k":1},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
}
BROKEN.update({name: struct.pack("<Q", len(text)) + text + b"12345678"
               for name, text in ENTRIES.items()})


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_as_safetensors_refuses_it(tmp_path, call, what):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(BROKEN[what])
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, "pt")
    with pytest.raises(penstock.Error) as caught:
        call(path)
    check(caught.value, path)
    assert caught.value.domain == "format"


@pytest.mark.parametrize("what", ["dtype", "size", "hole", "overlap", "overflow", "beyond"])
def test_the_tensor_at_fault_is_named(tmp_path, what):
    path = tmp_path / "broken.safetensors"
    text = ENTRIES[what].replace(b'"a"', b'"the.tensor"').replace(b'"b"', b'"the.tensor.2"')
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"12345678")
    with pytest.raises(penstock.Error, match="the.tensor"):
        penstock.load_file(path)


def test_a_truncated_download_is_called_that(big, tmp_path):
    """The most common damage: the words tell how much is missing or what to do."""
    path, _ = big
    with open(path, "rb") as source:
        (tmp_path / "cut.safetensors").write_bytes(source.read(1 << 20))
    with pytest.raises(penstock.Error) as caught:
        penstock.load_file(tmp_path / "cut.safetensors")
    check(caught.value, tmp_path / "cut.safetensors")
    assert caught.value.hint


def test_a_good_load_after_a_bad_one(few, tmp_path):
    path, tensors = few
    for _ in range(50):
        with pytest.raises(penstock.Error):
            penstock.load_file(tmp_path / "missing")
    assert len(penstock.load_file(path)) == len(tensors)


def test_errors_leave_no_file_open(tmp_path):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(BROKEN["cut data"])
    for call in CALLS.values():
        for _ in range(10):
            with pytest.raises(penstock.Error):
                call(path)
    assert not held_below(tmp_path)


# -------------------------------------------------------------- files that change during a load --

CHANGE = """
    import os, sys, penstock
    path, how, device = sys.argv[1:]
    stream = penstock.stream(path, device, framework="dlpack", window=32 << 20, copy=True)
    next(stream)
    size = os.path.getsize(path)
    if how == "truncated":
        os.truncate(path, size // 2)
    elif how == "emptied":
        os.truncate(path, 0)
    elif how == "replaced":
        os.replace(path + ".new", path)
    elif how == "written over":
        with open(path + ".new", "rb") as new, open(path, "r+b") as old:
            old.write(new.read(1 << 20))
    try:
        count = 1
        for name, tensor in stream:
            count += 1
        print("all", count, "came")
    except penstock.Error as error:
        print("Error", error.errno, error.object, error)
    penstock.load_file(sys.argv[1] + ".good", framework="dlpack")
    print("usable")
    """


@pytest.mark.parametrize("how", ["truncated", "emptied", "replaced", "written over"])
def test_a_file_that_changes_under_a_stream_is_an_error_that_names_it(tmp_path, few, device, how):
    path = tmp_path / "changing.safetensors"
    sizes = {f"t{i}": 32 << 20 for i in range(24)}
    write_holes(path, sizes)
    write_holes(str(path) + ".new", sizes)
    with open(str(path) + ".new", "r+b") as file:
        file.seek(700 << 20)
        file.write(b"other")
    shutil.copy(few[0], str(path) + ".good")
    lines = python(CHANGE, path, how, device).stdout.splitlines()
    assert lines[0].startswith("Error ") and "changing.safetensors" in lines[0]
    assert lines[1] == "usable"


def test_a_file_that_is_truncated_under_a_load_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "changing.safetensors"
    write_holes(path, {"a": 1 << 30})
    lines = python("""
        import os, sys, threading, time, penstock

        def anonymous():
            for line in open("/proc/self/status"):
                if line.startswith("RssAnon"):
                    return int(line.split()[1]) << 10

        def truncate():
            before = anonymous()
            while anonymous() < before + (100 << 20):
                time.sleep(0.001)
            os.truncate(sys.argv[1], 10 << 20)

        thread = threading.Thread(target=truncate, daemon=True)
        thread.start()
        try:
            penstock.load_file(sys.argv[1], framework="dlpack", copy=True)
            print("loaded")
        except penstock.Error as error:
            print("Error", error)
        print(anonymous() >> 20)
        """, path).stdout.splitlines()
    assert lines[0].startswith("Error ") and "changing.safetensors" in lines[0]
    assert int(lines[1]) < 128, "the memory of the failed load was kept"


# ------------------------------------------------------------------------------ wrong arguments --

@pytest.mark.parametrize("device", ["abacus", "cuda:", "cuda:x", "cuda:-1", "cuda0", "", -1, 1.5,
                                    object], ids=str)
def test_an_unknown_device_is_refused(few, device):
    path, _ = few
    with pytest.raises(REFUSED) as caught:
        penstock.load_file(path, device)
    if isinstance(device, str) and device:
        assert device in str(caught.value)


def test_a_gpu_that_is_not_there_says_what_to_do(few):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    path, _ = few
    for device in ("cuda:0", "cuda", 0, torch.device("cuda:0")):
        with pytest.raises(penstock.Error) as caught:
            penstock.load_file(path, device)
        assert caught.value.hint
        assert "cuda" in str(caught.value).lower() or "nvidia" in str(caught.value).lower()


def test_a_gpu_number_that_is_not_there_is_named(few):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    path, _ = few
    with pytest.raises(penstock.Error, match="63"):
        penstock.load_file(path, "cuda:63")


@pytest.mark.parametrize("transfer", ["warp", "", 99, -2, 1.5, object], ids=str)
def test_an_unknown_transfer_type_is_refused(few, transfer):
    path, _ = few
    with pytest.raises(REFUSED) as caught:
        penstock.load_file(path, transfer=transfer)
    if transfer == "warp":
        assert "warp" in str(caught.value) and "auto" in str(caught.value).lower()


def test_a_transfer_type_that_the_host_cannot_do_is_refused_not_replaced(few):
    path, _ = few
    with pytest.raises(penstock.Error) as caught:
        penstock.load_file(path, "cpu", transfer="gpu_direct")
    assert caught.value.message


@pytest.mark.parametrize("limit", [-1, 1, 1000, "lots", 1.5, 1 << 70, object], ids=str)
def test_a_wrong_memory_limit_is_refused(few, limit):
    path, _ = few
    with pytest.raises((*REFUSED, OverflowError)):
        penstock.load_file(path, memory_limit=limit)


def test_an_unknown_framework_is_refused_and_the_known_ones_are_listed(few):
    path, _ = few
    with pytest.raises(REFUSED, match="(?s)cobol.*(pt|torch)"):
        penstock.load_file(path, framework="cobol")


def test_unknown_arguments_are_type_errors(few):
    path, _ = few
    for function in (penstock.load_file, penstock.load_model, penstock.stream):
        with pytest.raises(TypeError):
            function(path, colour="green")


# ----------------------------------------------------------------------------- the class itself --

def test_an_error_is_an_os_error_with_fields(tmp_path):
    assert issubclass(penstock.Error, OSError)
    path = tmp_path / "broken.safetensors"
    path.write_bytes(BROKEN["cut data"])
    with pytest.raises(OSError) as caught:
        penstock.load_file(path)
    check(caught.value, path)


@pytest.mark.parametrize("through", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy,
                                     copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_an_error_survives_the_way_to_another_process(tmp_path, through):
    path = tmp_path / "broken.safetensors"
    write_raw(path, {"a": ("F32", (2,), b"12345678")})
    path.write_bytes(path.read_bytes()[:-1])
    for name in (path, tmp_path / "missing"):
        with pytest.raises(penstock.Error) as caught:
            penstock.load_file(name)
        error, other = caught.value, through(caught.value)
        assert type(other) is type(error)
        assert str(other) == str(error)
        for field in ("errno", "strerror", "filename", "code", "domain", "raw", "operation",
                      "object", "offset", "message", "hint"):
            assert getattr(other, field) == getattr(error, field), field


NASTY = "\x1b[2J\r\n\x7f\x9b\u202e\u200b"
SHOWN = r"\x1b[2J\x0d\n\x7f\u009b\u202e\u200b"


def test_names_cannot_command_the_terminal(call, tmp_path):
    """What a traceback prints is harmless; the fields have the name itself."""
    path = os.path.join(os.fsencode(tmp_path), NASTY.encode() + b"\xff\x9b.safetensors")
    with pytest.raises(penstock.Error) as caught:
        call(os.fsdecode(path))
    assert os.fsencode(caught.value.object) == path == os.fsencode(caught.value.filename)
    assert SHOWN + r"\xff\x9b.safetensors" in str(caught.value)
    write_raw(tmp_path / "x.safetensors", {NASTY: ("F7", [1], b"x")})
    with pytest.raises(penstock.Error) as caught:
        call(tmp_path / "x.safetensors")
    assert NASTY in caught.value.message and SHOWN in str(caught.value)
    assert str(caught.value).isprintable()


def test_warnings_cannot_command_the_terminal(tmp_path):
    save_file({"a": torch.zeros(1), NASTY: torch.zeros(1)}, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    with pytest.warns(UserWarning) as caught:
        penstock.load_model(tmp_path)
    assert SHOWN in str(caught[0].message) and str(caught[0].message).isprintable()


def test_errors_of_any_text_can_be_printed():
    from penstock._error import refuse, shown
    assert str(refuse("use", "\ud800", "no")) == r"cannot use \\ud800: no"
    assert shown("a\0b\udc9b\u00e4") == "a\\x00b\\x9b\u00e4"


# ------------------------------------------------------------------------ files that are changed --

def written_in_secret(path):
    """Other bytes, and the old time of modification; returns when the time of change is another."""
    before = os.stat(path)
    deadline = time.monotonic() + 5
    while os.stat(path).st_ctime_ns == before.st_ctime_ns and time.monotonic() < deadline:
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def with_an_attribute(path):
    time.sleep(0.02)    # the clock that stamps files ticks every few milliseconds
    try:
        os.setxattr(path, "user.penstock", b"x")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")


@pytest.mark.parametrize("changes, noticed", [
    ([written_in_secret], True), ([with_an_attribute], True),
    ([lambda path: os.chmod(path, 0o600)], False),
    ([written_in_secret, lambda path: os.chmod(path, 0o600)], False),
    ([written_in_secret, lambda path: os.link(path, f"{path}.link")], False),
    ([written_in_secret, lambda path: os.rename(path, f"{path}.old")], False),
    ([written_in_secret, os.unlink], False),
], ids=["write", "setxattr", "chmod", "write chmod", "write link", "write rename", "write unlink"])
def test_changes_are_noticed_as_far_as_the_manual_says(few, changes, noticed):
    path, tensors = few
    path.chmod(0o644)
    coming = penstock.stream(path, window=2, copy=True)
    next(coming)
    for change in changes:
        change(path)
    _, error = outcome(lambda: list(coming))
    assert (error is not None) == noticed
    assert not noticed or error.errno == errno.ESTALE and "it was written to" in str(error)
