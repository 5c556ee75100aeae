# SPDX-License-Identifier: MIT
"""prefetch(): who waits, who joins, who cancels, in every order; and children of fork()."""
import errno
import os
import threading
import time

import pytest
import safetensors.torch
import torch
from support import assert_same, held_below, python

import penstock
from penstock import _mapped, _prefetch
from penstock._error import refuse


@pytest.fixture(params=["mapped", "moved"], autouse=True)
def way(request, monkeypatch):
    """On the host a prefetch maps the file; where it cannot, and on a GPU, the engine moves it."""
    if request.param == "moved":
        monkeypatch.setattr(_prefetch, "open_mapped", lambda path: _mapped.Opened(
            _prefetch.open_model(path), None, "for a test"))
    return request.param


def test_a_load_joins_and_waiting_afterwards_is_harmless(few):
    path, tensors = few
    begun = penstock.prefetch(path, "cpu")
    assert penstock.prefetch(path, "cpu") is begun
    assert_same(penstock.load_file(path), tensors)
    begun.wait()
    begun.cancel()
    assert begun.key not in _prefetch._begun


def test_a_load_joins_what_was_waited_for(few):
    path, tensors = few
    begun = penstock.prefetch(path, "cpu")
    begun.wait()
    begun.wait()
    assert_same(penstock.load_file(path), tensors)
    assert penstock.last_report().bytes == sum(t.nbytes for t in tensors.values())


def test_cancelling_what_another_load_has_joined_does_not_hurt_it(holes):
    begun = penstock.prefetch(holes, "cpu")
    found = []
    thread = threading.Thread(target=lambda: found.append(penstock.load_file(holes)))
    thread.start()
    while begun.key in _prefetch._begun:
        time.sleep(0.001)
    begun.cancel()
    thread.join()
    assert len(found[0]) == 16


def test_waiting_and_loading_at_the_same_time(holes):
    begun = penstock.prefetch(holes, "cpu")
    failed = []

    def wait():
        try:
            begun.wait()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert len(penstock.load_file(holes)) == 16
    for thread in threads:
        thread.join()
    assert not failed


def test_an_interrupted_wait_leaves_nothing_that_a_load_could_stumble_over(holes):
    assert python("""
        import os, signal, sys, threading, penstock
        begun = penstock.prefetch(sys.argv[1], "cpu")
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            begun.wait()
            begun.wait()
            signal.pause()
        except KeyboardInterrupt:
            pass
        print(len(penstock.load_file(sys.argv[1], framework="dlpack")))
        """, holes).stdout.split() == ["16"]


def test_a_wait_tells_what_went_wrong(tmp_path):
    with pytest.raises(FileNotFoundError):
        penstock.prefetch(tmp_path / "absent", "cpu").wait()


def test_a_load_with_wishes_of_its_own_does_not_join(few):
    path, tensors = few
    penstock.prefetch(path, "cpu")
    with pytest.raises(penstock.Error):
        penstock.load_file(path, transfer="GPU_DIRECT")
    begun = penstock.prefetch(path, "cpu")
    penstock.load_file(path, memory_limit=1 << 20)
    assert penstock.last_report().pinned_bytes <= 1 << 20
    assert begun.key not in _prefetch._begun


def test_a_child_forked_while_another_thread_begins_can_begin_too(few):
    path, tensors = few
    with _prefetch._lock:
        child = os.fork()
        if not child:
            import signal
            signal.alarm(20)
            penstock.prefetch(path, "cpu").wait()
            os._exit(0 if len(penstock.load_file(path, framework="dlpack")) == len(tensors) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_goes_on_where_its_parent_was_reading_ahead(tmp_path):
    tensors = {f"t{i:03}": torch.full((1000,), i, dtype=torch.int32) for i in range(40)}
    penstock.save_file(tensors, tmp_path / "x.safetensors")
    assert python("""
        import os, sys, penstock
        with penstock.safe_open(sys.argv[1], "np") as file:
            for name in file.keys()[:10]:
                file.get_tensor(name)
            child = os.fork()
            for name in file.keys()[10:]:
                assert file.get_tensor(name)[0] == int(name[1:])
            if not child:
                os._exit(0)
        print(os.waitpid(child, 0)[1])
        """, tmp_path / "x.safetensors").stdout.split() == ["0"]


def test_a_load_that_fails_before_it_joins_gives_the_memory_back(few):
    path, tensors = few
    begun = penstock.prefetch(path, "cpu")
    begun.wait()
    with pytest.raises(KeyError):
        penstock.load_file(path, keys="nothing")
    assert begun._done is None and begun._job is None
    assert_same(penstock.load_file(path), tensors)


def write_in_secret(path, tensors, also=lambda path: None) -> dict:
    """Other bytes with the old time of modification; the tensors that are there now."""
    before = os.stat(path)
    changed = {name: tensor.logical_not() if tensor.dtype == torch.bool else tensor + 1
               for name, tensor in tensors.items()}
    content = safetensors.torch.save(changed, metadata={"format": "pt"})
    assert len(content) == before.st_size
    # A clock of the kernel that ticks every few milliseconds stamps files.
    deadline = time.monotonic() + 5
    while os.stat(path).st_ctime_ns == before.st_ctime_ns and time.monotonic() < deadline:
        with open(path, "r+b") as file:
            file.write(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    also(path)
    after = os.stat(path)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    return changed


@pytest.mark.parametrize("also", [lambda path: None, lambda path: os.chmod(path, 0o600)],
                         ids=["alone", "and chmod"])
@pytest.mark.parametrize("waits", [True, False])
def test_what_was_written_in_secret_since_is_loaded_anew(few, waits, also):
    path, tensors = few
    begun = penstock.prefetch(path, "cpu")
    if waits:
        begun.wait()
    changed = write_in_secret(path, tensors, also)
    assert_same(penstock.load_file(path), changed)


@pytest.mark.parametrize("code, raises", [(errno.ESTALE, False), (errno.EIO, True)])
@pytest.mark.parametrize("way", ["moved"], indirect=True)
def test_of_what_goes_wrong_on_the_way_only_a_change_begins_anew(few, monkeypatch, code, raises):
    path, tensors = few
    begun = penstock.prefetch(path, "cpu")

    def fail(job, label, progress):
        job.wait()
        raise refuse("read", str(path), "", code=code)

    monkeypatch.setattr(_prefetch, "wait", fail)
    if raises:
        with pytest.raises(penstock.Error) as caught:
            penstock.load_file(path)
        assert caught.value.errno == code
    assert_same(penstock.load_file(path), tensors)
    assert begun.key not in _prefetch._begun


@pytest.mark.parametrize("way", ["moved"], indirect=True)
@pytest.mark.parametrize("end", ["wait", "cancel", "load", "fail"])
def test_a_prefetch_that_is_kept_keeps_no_file_open(few, end):
    path, tensors = few
    begun = penstock.prefetch(path, "cuda:99" if end == "fail" else "cpu")
    if end == "load":
        penstock.load_file(path)
    elif end == "fail":
        with pytest.raises(penstock.Error):
            begun.wait()
    else:
        getattr(begun, end)()
    assert held_below(path.parent) == []


def test_the_text_for_people_cannot_command_the_terminal(tmp_path):
    begun = penstock.prefetch(tmp_path / "\x1b[31m\udcff", "cpu")
    assert repr(begun) == f"<penstock.Prefetch {tmp_path}/\\x1b[31m\\xff to host>"
    begun.cancel()
