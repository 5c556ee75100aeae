# SPDX-License-Identifier: MIT
"""Threads, processes, signals and prefetches side by side: all are served, none hangs or leaks."""
import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

import penstock
from penstock import _prefetch
from support import (MIB, Talk, assert_same, in_use, python, random_tensor, same,
                     settled)

pytestmark = pytest.mark.slow

NO_FORK = "CUDA does not survive a fork; see the tests that spawn"


# -------------------------------------------------------------------------------------- threads --

def test_eight_threads_load_at_once(tmp_path, device):
    files = []
    for number in range(8):
        tensors = {f"t{i}": random_tensor(torch.float32, (1000, 100 + i), seed=100 * number + i)
                   for i in range(5)}
        save_file(tensors, tmp_path / f"{number}.safetensors")
        files.append((tmp_path / f"{number}.safetensors", tensors))

    def work(number):
        for turn in range(4):
            path, tensors = files[(number + turn) % 8]
            assert_same(penstock.load_file(path, device, arena=bool(turn % 2)), tensors)
            assert penstock.last_report().bytes == sum(t.nbytes for t in tensors.values())
        return number

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == list(range(8))


def test_eight_threads_load_the_same_file(few, device):
    path, tensors = few

    def work(_):
        for _ in range(20):
            assert_same(penstock.load_file(path, device), tensors)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_threads_share_one_open_file_or_take_turns(few, device):
    path, tensors = few
    with penstock.safe_open(path, "pt", device) as file, ThreadPoolExecutor(8) as pool:
        for name, tensor in zip(list(tensors) * 20, pool.map(file.get_tensor, list(tensors) * 20)):
            assert same(tensor, tensors[name])


def test_threads_slice_one_open_file(few, device):
    """What transformers does when it loads a checkpoint."""
    path, tensors = few
    with penstock.safe_open(path, "pt", device) as file, ThreadPoolExecutor(8) as pool:
        names = [name for name in tensors if tensors[name].dim() == 2] * 30
        for name, tensor in zip(names, pool.map(lambda name: file.get_slice(name)[2:9], names)):
            assert same(tensor, tensors[name][2:9])


def test_streams_and_saves_in_threads(few, tmp_path, device):
    path, tensors = few

    def work(number):
        for turn in range(5):
            assert_same(dict(penstock.stream(path, device)), tensors)
            target = tmp_path / f"{number}-{turn}.safetensors"
            penstock.save_file(tensors, target, metadata={"format": "pt"})
            assert target.read_bytes() == path.read_bytes()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_a_stream_may_wander_between_threads(few):
    path, tensors = few
    stream = penstock.stream(path)
    got = {}
    while True:
        with ThreadPoolExecutor(1) as pool:
            pair = pool.submit(next, stream, None).result()
        if pair is None:
            break
        got[pair[0]] = pair[1]
    assert_same(got, tensors)


@pytest.mark.alone
@pytest.mark.parametrize("way", ["load_file", "stream", "get_tensor"])
def test_other_threads_run_meanwhile(holes, way):
    """The interpreter lock is free during a load: another thread ticks all the time."""
    names = [f"t{i:02}" for i in range(6)]
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.002)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        time.sleep(0.02)
        start = time.monotonic()
        if way == "load_file":
            penstock.load_file(holes, framework="np", keys=names, copy=True)
        elif way == "stream":
            for _ in penstock.stream(holes, framework="np", keys=names, copy=True):
                pass
        else:
            with penstock.safe_open(holes, "np", copy=True) as file:
                for name in names[:2]:
                    file.get_tensor(name)
        end = time.monotonic()
    finally:
        stop.set()
        thread.join()
    during = [start] + [moment for moment in ticks if start <= moment <= end] + [end]
    longest = max(after - before for before, after in zip(during, during[1:]))
    assert len(during) > 5, f"{len(during) - 2} ticks in {end - start:.3f} s"
    assert longest < max(0.25 * (end - start), 0.1), f"{longest:.3f} s of {end - start:.3f} s"


def test_an_error_in_one_thread_leaves_the_others(few, tmp_path):
    path, tensors = few

    def work(number):
        for _ in range(20):
            if number % 2:
                with pytest.raises(penstock.Error):
                    penstock.load_file(tmp_path / "missing")
            else:
                assert_same(penstock.load_file(path), tensors)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


# ------------------------------------------------------------------------------------ processes --

def wait_for(pid: int, seconds: float = 20) -> int:
    """The exit status of a child; one that hangs is ended and told."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hung")


def in_a_fork(work) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(code)
    return wait_for(pid)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_loads_after_its_parent_did(few):
    if torch.cuda.is_available():
        pytest.skip(NO_FORK)
    path, tensors = few
    assert_same(penstock.load_file(path), tensors)
    assert in_a_fork(lambda: assert_same(penstock.load_file(path), tensors)) == 0
    assert_same(penstock.load_file(path), tensors)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_loads_much(holes, tmp_path):
    if torch.cuda.is_available():
        pytest.skip(NO_FORK)
    penstock.load_file(holes, framework="np", keys=["t00"])

    def work():
        # Not with torch: its own threads do not survive a fork.
        loaded = penstock.load_file(holes, framework="np", keys=["t01", "t02"])
        assert loaded["t01"][0] == 2 and loaded["t02"][0] == 3 and not loaded["t02"][1:].any()
        penstock.save_file({"a": loaded["t01"]}, tmp_path / "child.safetensors")

    assert in_a_fork(work) == 0
    assert load_file(tmp_path / "child.safetensors")["a"][0] == 2


def test_a_child_forked_in_the_middle_of_a_load_loads_and_sees_the_parents_tensors(few, holes):
    """By a process of its own: no torch, no threads of pytest."""
    done = python("""
        import os, sys, threading, time, penstock
        small, large = sys.argv[1:]
        kept = penstock.load_file(small, framework="np", keys=["step"])
        penstock.prefetch(large, device="cpu")
        thread = threading.Thread(target=lambda: penstock.load_file(large, framework="np"))
        thread.start()
        for _ in range(5):
            time.sleep(0.05)
            pid = os.fork()
            if pid == 0:
                assert kept["step"] == 7
                assert penstock.load_file(small, framework="np", keys=["step"])["step"] == 7
                assert dict(penstock.stream(small, framework="np", keys=["step"]))["step"] == 7
                os._exit(0)
            deadline = time.monotonic() + 20
            while not (done := os.waitpid(pid, os.WNOHANG))[0]:
                if time.monotonic() > deadline:
                    os.kill(pid, 9)
                    print("the child hung")
                    os._exit(3)
                time.sleep(0.01)
            assert done[1] == 0, done
        thread.join()
        print("fine")
        """, few[0], holes)
    assert done.stdout == "fine\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_multiprocessing_loads(few, method):
    path, tensors = few
    said = python("""
        import multiprocessing, sys, penstock
        path, method = sys.argv[1:]
        more = {"framework": "np", "keys": ["model.embed.weight"]}
        penstock.load_file(path, **more)
        with multiprocessing.get_context(method).Pool(2) as pool:
            calls = [pool.apply_async(penstock.load_file, (path,), more) for _ in range(6)]
            for call in calls:
                print(call.get(30)["model.embed.weight"].tobytes().hex())
        """, path, method).stdout.split()
    assert said == [tensors["model.embed.weight"].numpy().tobytes().hex()] * 6


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_error_of_a_child_reaches_its_parent(tmp_path, method):
    said = python("""
        import multiprocessing, sys, penstock
        path, method = sys.argv[1:]
        with multiprocessing.get_context(method).Pool(1) as pool:
            try:
                pool.apply(penstock.load_file, (path,), {"framework": "np"})
            except penstock.Error as error:
                print(error.errno, error.hint != "", error)
        """, tmp_path / "missing.safetensors", method).stdout
    assert said.startswith("2 True ") and "missing.safetensors" in said


def test_loaded_tensors_go_to_worker_processes(few):
    """DataLoader workers and torch.multiprocessing share tensors; ours can be shared too."""
    path, tensors = few
    weight = penstock.load_file(path)["model.embed.weight"]
    assert same(weight.share_memory_(), tensors["model.embed.weight"])


# -------------------------------------------------------------------------------------- signals --

INTERRUPTED = """
    import gc, sys, time, penstock
    path, way = sys.argv[1:]
    from penstock import _prefetch

    # As on a GPU: the engine moves what is prefetched.
    def not_mapped(path):
        return _prefetch.Opened(_prefetch.open_model(path), None, "for a test")

    _prefetch.open_mapped = not_mapped

    def anonymous():
        gc.collect()
        for line in open("/proc/self/status"):
            if line.startswith("RssAnon"):
                return int(line.split()[1]) >> 10

    def work():
        if way == "load_file":
            penstock.load_file(path, framework="dlpack", copy=True)
        elif way == "progress":
            penstock.load_file(path, framework="dlpack", progress=True, copy=True)
        elif way == "stream":
            kept = list(penstock.stream(path, framework="dlpack", copy=True))
        elif way == "prefetch":
            penstock.prefetch(path, device="cpu").wait()
        elif way == "join":
            penstock.prefetch(path, device="cpu")
            penstock.load_file(path, framework="dlpack")

    penstock.load_file(path, framework="dlpack", keys=["t00"])
    before = anonymous()
    print("loading")
    try:
        work()
        print("loaded")
    except KeyboardInterrupt:
        print("interrupted")
    deadline = time.monotonic() + 5
    while anonymous() > before + 48 and time.monotonic() < deadline and way != "prefetch":
        time.sleep(0.02)
    print(anonymous() - before)
    if way == "prefetch":
        sys.exit()
    print(len(penstock.load_file(path, framework="dlpack", keys=["t03"])))
    """


@pytest.mark.alone
@pytest.mark.parametrize("way", ["load_file", "stream", "prefetch", "join", "progress"])
def test_ctrl_c_stops_a_load_at_once_and_frees_everything(holes, way):
    with Talk(INTERRUPTED, holes, way) as child:
        assert child.line() == "loading"
        time.sleep(0.06)
        start = time.monotonic()
        child.interrupt()
        assert child.line() == "interrupted"
        assert time.monotonic() - start < 1.0
        growth = int(child.line())
        if way != "prefetch":
            assert growth < 48, f"{growth} MiB were kept"
            assert child.line() == "1"
        child.end()


@pytest.mark.alone
def test_a_signal_handler_that_returns_does_not_disturb_a_load(holes):
    calls = []
    old = signal.signal(signal.SIGALRM, lambda *_: calls.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        start = time.monotonic()
        loaded = penstock.load_file(holes, keys=["t04", "t05", "t06"])
        end = time.monotonic()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert loaded["t04"][0] == 5 and loaded["t06"][0] == 7
    assert not loaded["t05"][1:].any()
    if end - start > 0.5:
        assert [moment for moment in calls if start < moment < end - 0.1], "handlers waited"


def test_an_exception_of_a_signal_handler_comes_out_of_the_load(holes):
    class Alarm(Exception):
        pass

    def handler(*_):
        raise Alarm

    old = signal.signal(signal.SIGALRM, handler)
    before = in_use("cpu")
    try:
        with pytest.raises(Alarm):
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            penstock.load_file(holes)
            time.sleep(0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert settled("cpu", before + 48 * MIB) < before + 48 * MIB


# ------------------------------------------------------------------------------------- prefetch --

@pytest.mark.alone
def test_a_load_joins_its_prefetch(big, device, monkeypatch):
    """Of what the engine moves: to a GPU, or where a file cannot be mapped."""
    monkeypatch.setattr(_prefetch, "open_mapped", lambda path: _prefetch.Opened(
        _prefetch.open_model(path), None, "for a test"))
    path, tensors = big
    total = sum(tensor.nbytes for tensor in tensors.values())
    penstock.load_file(path, device, keys="part.00", copy=True)
    before = in_use(device)
    penstock.prefetch(path, device=device).wait()
    fetched = in_use(device) - before
    loaded = penstock.load_file(path, device)
    assert_same(loaded, tensors)
    assert in_use(device) - before < 1.1 * total + 16 * MIB, "the bytes were moved twice"
    assert fetched > 0.9 * total, "the prefetch moved nothing to where it is wanted"
    del loaded
    assert settled(device, before + 16 * MIB) < before + 16 * MIB


@pytest.mark.alone
def test_a_prefetch_returns_at_once_and_works_without_being_held(big):
    path, tensors = big
    start = time.monotonic()
    penstock.prefetch(path, device="cpu")
    assert time.monotonic() - start < 0.5
    gc.collect()
    assert_same(penstock.load_file(path), tensors)


def test_two_loads_after_one_prefetch_share_nothing(few, device):
    path, tensors = few
    penstock.prefetch(path, device=device).wait()
    first, second = penstock.load_file(path, device), penstock.load_file(path, device)
    first["model.embed.weight"].zero_()
    assert_same(second, tensors)


@pytest.mark.parametrize("more", [
    {"keys": "model.layers.*"}, {"slices": {"model.embed.weight": (slice(2, 5),)}},
    {"dtype": "float16"}, {"arena": False}, {"framework": "dlpack", "keys": ["step"]},
    {"memory_limit": 1 << 20},
], ids=str)
def test_a_prefetch_serves_loads_of_every_kind(few, more):
    path, _ = few
    plain = penstock.load_file(path, **more)
    penstock.prefetch(path, device="cpu")
    joined = penstock.load_file(path, **more)
    if "framework" in more:
        assert set(joined) == set(plain)
    else:
        assert_same(joined, plain)


def test_a_prefetch_serves_into(few):
    path, tensors = few
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    penstock.prefetch(path, device="cpu")
    loaded = penstock.load_file(path, into=into)
    assert_same(into, tensors)
    assert loaded["step"].data_ptr() == into["step"].data_ptr()


def test_a_prefetched_folder_serves_load_model_and_stream(tmp_path, device):
    tensors = {}
    for number in range(3):
        part = {f"{number}.{i}": random_tensor(torch.float32, (50, i), seed=i) for i in range(9)}
        save_file(part, tmp_path / f"{number}.safetensors")
        tensors.update(part)
    penstock.prefetch(tmp_path, device=device)
    assert_same(penstock.load_model(tmp_path, device), tensors)
    penstock.prefetch(tmp_path, device=device)
    assert_same(dict(penstock.stream(tmp_path, device)), tensors)


def test_a_prefetch_of_the_default_device(few):
    path, tensors = few
    penstock.prefetch(path).wait()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert_same(penstock.load_file(path, device), tensors)


@pytest.mark.alone
def test_a_cancelled_prefetch_frees_and_the_load_is_right(holes, few):
    path, tensors = few
    penstock.load_file(path)
    before = in_use("cpu")
    fetch = penstock.prefetch(holes, device="cpu")
    time.sleep(0.05)
    start = time.monotonic()
    fetch.cancel()
    assert time.monotonic() - start < 1
    fetch.cancel()
    del fetch
    assert settled("cpu", before + 48 * MIB) < before + 48 * MIB
    fetch = penstock.prefetch(path, device="cpu")
    fetch.cancel()
    assert_same(penstock.load_file(path), tensors)


def test_many_prefetches_and_loads(few):
    path, tensors = few
    for turn in range(60):
        fetch = penstock.prefetch(path, device="cpu")
        if turn % 3 == 0:
            fetch.cancel()
        if turn % 3 == 1:
            fetch.wait()
        assert_same(penstock.load_file(path), tensors)


def test_a_prefetch_of_a_missing_file_fails_at_the_load(tmp_path):
    penstock.prefetch(tmp_path / "missing.safetensors", device="cpu")
    time.sleep(0.05)
    with pytest.raises(penstock.Error, match="missing.safetensors") as caught:
        penstock.load_file(tmp_path / "missing.safetensors")
    assert caught.value.errno == 2


def test_a_file_that_comes_after_a_failed_prefetch_is_loaded(tmp_path):
    path = tmp_path / "late.safetensors"
    penstock.prefetch(path, device="cpu")
    time.sleep(0.05)
    save_file({"a": torch.ones(3)}, path)
    assert_same(penstock.load_file(path), {"a": torch.ones(3)})


def test_waiting_for_a_failed_prefetch_tells(tmp_path):
    fetch = penstock.prefetch(tmp_path / "missing.safetensors", device="cpu")
    with pytest.raises(penstock.Error, match="missing.safetensors"):
        fetch.wait()


@pytest.mark.parametrize("how", ["replaced", "written over"])
def test_a_file_that_changed_after_its_prefetch_is_never_served_stale(tmp_path, how):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(1000)}, path)
    penstock.prefetch(path, device="cpu").wait()
    time.sleep(0.02)
    if how == "replaced":
        save_file({"a": torch.ones(1000)}, tmp_path / "new.safetensors")
        os.replace(tmp_path / "new.safetensors", path)
    else:
        content = path.read_bytes()[:-4000] + torch.ones(1000).numpy().tobytes()
        with open(path, "r+b") as file:
            file.write(content)
    try:
        loaded = penstock.load_file(path)
    except penstock.Error as error:
        assert "x.safetensors" in str(error)
    else:
        assert_same(loaded, {"a": torch.ones(1000)})


def test_a_saved_file_is_loaded_not_its_prefetched_past(tmp_path):
    path = tmp_path / "x.safetensors"
    for value in range(10):
        penstock.save_file({"a": torch.full((100,), value)}, path)
        assert penstock.load_file(path)["a"][50] == value
        penstock.prefetch(path, device="cpu").wait()


def test_a_prefetch_from_another_thread_is_joined(few):
    path, tensors = few
    with ThreadPoolExecutor(1) as pool:
        pool.submit(penstock.prefetch, path, "cpu").result()
    assert_same(penstock.load_file(path), tensors)


@pytest.mark.parametrize("moment", [0, 0.02, 0.2])
def test_the_interpreter_may_end_in_the_middle_of_a_prefetch(holes, moment):
    done = python("""
        import sys, time, penstock
        fetch = penstock.prefetch(sys.argv[1], device="cpu")
        time.sleep(float(sys.argv[2]))
        print("end")
        """, holes, moment, timeout=20)
    assert (done.stdout, done.stderr) == ("end\n", "")


def test_the_interpreter_may_end_while_a_daemon_thread_loads(holes):
    done = python("""
        import sys, threading, time, penstock
        threading.Thread(target=penstock.load_file, args=[sys.argv[1]], daemon=True,
                         kwargs={"framework": "dlpack"}).start()
        time.sleep(0.1)
        print("end")
        """, holes, timeout=20)
    assert (done.stdout, done.stderr) == ("end\n", "")


def test_tensors_may_live_until_the_very_end(few):
    done = python("""
        import sys, torch, penstock
        kept = penstock.load_file(sys.argv[1])
        sys.kept = kept
        torch.kept = penstock.load_file(sys.argv[1], arena=False)
        loop = [kept]; loop.append(loop)
        print("end")
        """, few[0])
    assert (done.stdout, done.stderr) == ("end\n", "")


FORKED = """
    import os, signal, sys, threading, time, penstock
    path, what = sys.argv[1:3]
    stop = False

    def busy(call):
        def run():
            while not stop:
                call()
        threading.Thread(target=run, daemon=True).start()
        time.sleep(0.05)

    hung = 0
    for turn in range(5):
        stop = False
        if what == "safe_open":
            file = penstock.safe_open(path, "np")
            names = file.keys()
            busy(lambda: [file.get_tensor(name) for name in names])
            child_does = lambda: (file.get_tensor(names[0]), file.__exit__())
        elif what == "file":
            file = penstock.File(path)
            memory = bytearray(1 << 20)
            busy(lambda: file.read(memory))
            child_does = lambda: (file.read(bytearray(1 << 20)), file.close())
        else:
            begun = penstock.prefetch(path, "cpu")
            busy(lambda: begun.wait())
            child_does = lambda: (begun.wait(), begun.cancel())
        child = os.fork()
        if not child:
            signal.alarm(10)
            child_does()
            os._exit(0)
        hung += os.waitpid(child, 0)[1] != 0
        stop = True
        time.sleep(0.02)
    print("hung", hung)
    """


@pytest.mark.parametrize("what", ["safe_open", "file", "prefetch"])
def test_a_forked_child_does_not_wait_for_threads_of_its_parent(few, what):
    assert python(FORKED, few[0], what).stdout.split() == ["hung", "0"]
