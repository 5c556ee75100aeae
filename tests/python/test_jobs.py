# SPDX-License-Identifier: MIT
"""Jobs, memory and devices of the extension module when threads let go of them at bad moments.

What a job writes into must live until the job is over, whoever stops it; and whoever lets go of
something that takes long to free must not stop the other threads meanwhile.
"""
import pytest

from support import PACKAGE, environment, python

FAKES = PACKAGE.parent / "tests/fakes"


def test_what_a_stopped_job_writes_into_outlives_it():
    """stop_all() waits for a job while another thread lets go of the last reference to it."""
    done = python("""
        import threading, time
        from penstock import _penstock as engine

        class Keeps:
            def __init__(self):
                self.buffer = bytearray(64 << 20)
            def __del__(self):
                events.append("memory gone")

        events = []
        source = engine.Object("pattern:64M,latency=1s", 1)
        keeps = Keeps()
        _, address, size, *_ = view = engine.view_of_buffer(keeps.buffer, True)
        jobs = [engine.start(1, engine.Device("host"), [(source, 0, address, size)], keeps)]
        del view, keeps

        def let_go():
            time.sleep(0.2)
            jobs.clear()
            events.append("job gone")

        thread = threading.Thread(target=let_go)
        thread.start()
        engine.stop_all()
        events.append("stopped")
        thread.join()
        print(*events, sep=", ")
        """)
    assert done.stdout.strip() == "job gone, memory gone, stopped"


@pytest.mark.alone
def test_a_job_that_is_stopped_elsewhere_gives_no_memory_yet(tmp_path):
    """Neither does it take part in anything else: its handle is being waited for."""
    python("""
        import threading, time
        from penstock import _penstock as engine

        source = engine.Object("pattern:64M,latency=1s", 1)
        memory = engine.Memory(engine.Device("host"), 64 << 20)
        job = engine.start(1, engine.Device("host"), [(source, 0, memory.address, 64 << 20)],
                           memory)
        thread = threading.Thread(target=engine.stop_all)
        thread.start()
        time.sleep(0.2)
        for call in (job.wait, job.memory, job.landed, job.progress):
            try:
                call()
            except ValueError:
                continue
            raise AssertionError(call)
        job.cancel()
        thread.join()
        """)


# Prints the longest time for which another thread did not run, while `let_go` ran for `seconds`.
TICKS = """
    import sys, threading, time
    from penstock import _penstock as engine

    def measure(let_go):
        ticks, stop = [], threading.Event()
        def tick():
            while not stop.is_set():
                ticks.append(time.monotonic())
                time.sleep(0.002)
        thread = threading.Thread(target=tick)
        thread.start()
        time.sleep(0.05)
        start = time.monotonic()
        let_go()
        end = time.monotonic()
        stop.set()
        thread.join()
        during = [start] + [moment for moment in ticks if start <= moment <= end] + [end]
        print(end - start, max(b - a for a, b in zip(during, during[1:])))

    device = engine.Device("cuda:0")
    """
LET_GO = {
    "memory": ("cuMemFree:*=600", """
    things = [engine.Memory(device, 1 << 20)]
    """),
    "array": ("cuMemFree:*=600", """
    things = [engine.Memory(device, 1 << 20)]
    things = [things[0].array(0, 4, (1 << 20,))]
    """),
    "job": ("cuMemFree:*=600", """
    model = engine.Model(sys.argv[1])
    job = model.select([(0, None, None)]).load(device)
    job.wait()
    things = [job]
    del job
    """),
    "device": ("cuInit:*=600", """
    things = [device]
    del device
    """),
}


@pytest.mark.parametrize("kind", LET_GO)
def test_other_threads_run_while_something_is_freed(kind, few):
    """The fake driver takes 600 ms for it."""
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip("no fake driver beside this package")
    delay, code = LET_GO[kind]
    env = environment(LD_LIBRARY_PATH=str(FAKES), FAKE_CUDA_STRICT="1",
                      FAKE_CUDA_ABORT_ON_LEAK="1", FAKE_CUDA_DELAY=delay)
    done = python(TICKS + code + "measure(things.clear)", few[0], env=env)
    seconds, longest = map(float, done.stdout.split())
    assert seconds > 0.4, "it was not slow"
    assert longest < 0.3
