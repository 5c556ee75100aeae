# SPDX-License-Identifier: MIT
"""What a load leaves in the page cache, now and later. Bytes are copied, as they are to a GPU."""
import inspect
import os
import random
import shutil
import subprocess

import numpy
import pytest
from safetensors.numpy import save_file

import penstock
from support import MIB, environment, python

# They look into the page cache, from which others throw files, and wait for a disk at rest.
pytestmark = [pytest.mark.alone, pytest.mark.skipif(not shutil.which("fincore"),
                                                    reason="there is no fincore")]

#: More than anything takes that comes by itself.
LONG = 60.0
SIZE = 8 * MIB


def resident(path) -> int:
    """Bytes of a file in the page cache, asked of the kernel."""
    done = subprocess.run(["fincore", "-nbo", "RES", path], capture_output=True, text=True,
                          check=True)
    return int(done.stdout)


def evict(path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def model(tmp_path):
    """A file that is not in the page cache, of eight tensors."""
    penstock.warming().stop()       # what other tests have left
    path = tmp_path / "model.safetensors"
    bits = numpy.random.default_rng(0)
    save_file({f"t{i}": bits.integers(0, 255, SIZE // 8, numpy.uint8) for i in range(8)}, path)
    evict(path)
    if resident(path):
        pytest.skip("this file system does not drop its page cache")
    penstock.load_file(path, framework="np", copy=True, cache="off")
    if not penstock.last_report().paths[0].path.startswith("direct"):
        pytest.skip("there is no direct I/O here")
    evict(path)
    yield path
    penstock.warming().stop()
    assert penstock.warming().wait(LONG)


def load(path, **options):
    return penstock.load_file(path, framework="np", copy=True, **options)


def test_after_brings_in_what_was_read_around_the_page_cache(model):
    load(model, cache="after")
    report = penstock.last_report()
    assert report.warming_bytes >= SIZE and "in the background" in report.cache_reason
    assert "in the background" in str(report) and report.as_dict()["warming_bytes"] >= SIZE
    assert penstock.warming().wait(LONG)
    assert resident(model) >= SIZE
    assert penstock.warming().left == 0 and penstock.warming().brought > SIZE - MIB
    load(model, cache="after")
    assert [path.path for path in penstock.last_report().paths] == ["cached"]
    assert penstock.last_report().warming_bytes == 0 == len(penstock.last_report().cache_reason)


def test_keep_has_it_there_at_once_and_drop_has_nothing(model):
    load(model, cache="keep")
    assert resident(model) >= SIZE and penstock.last_report().cache_reason == ""
    load(model, cache="drop")
    assert resident(model) == 0 == penstock.last_report().warming_bytes


def test_off_leaves_what_came_from_the_disk_out(model):
    load(model, cache="off")
    assert penstock.last_report().warming_bytes == 0
    assert "around the page cache" in penstock.last_report().cache_reason
    assert penstock.warming().wait(0) and resident(model) < SIZE // 8


def test_auto_is_after_where_memory_is_plentiful(model):
    load(model)
    assert penstock.last_report().warming_bytes >= SIZE
    penstock.warming().stop()
    load(model, cache="auto")
    assert penstock.last_report().warming_bytes >= SIZE


def test_what_is_stopped_is_given_up(model):
    before = penstock.warming().given_up
    load(model)
    penstock.warming().stop()
    assert penstock.warming().wait(LONG)
    now = penstock.warming()
    # Some of it may have been read by then.
    assert now.left == 0 and (now.given_up == before or now.reason)


def test_a_load_of_several_jobs_has_all_of_them_brought_in(model):
    for _ in penstock.stream(model, framework="np", copy=True, window=2 * MIB, cache="after"):
        pass
    assert penstock.last_report().warming_bytes >= SIZE
    assert penstock.warming().wait(LONG) and resident(model) >= SIZE


def test_reading_tensor_by_tensor_takes_one_descriptor(model):
    with penstock.safe_open(model, framework="np", copy=True, cache="after") as file:
        names = file.keys()
        random.Random(1).shuffle(names)
        for name in names:
            file.get_tensor(name)
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.islink(f"/proc/self/fd/{fd}")]
    assert links.count(str(model)) <= 1
    assert penstock.warming().wait(LONG) and resident(model) >= SIZE


def test_files_are_left_alone_unless_asked(model):
    penstock.fromfile(model, numpy.uint8)
    assert penstock.last_report().warming_bytes == 0
    evict(model)
    penstock.fromfile(model, numpy.uint8, cache="after")
    assert penstock.warming().wait(LONG) and resident(model) >= SIZE


def test_mapped_tensors_are_in_the_page_cache_anyway_unless_it_is_dropped(model):
    penstock.load_file(model, framework="np", cache="keep")
    assert [path.path for path in penstock.last_report().paths] == ["mapped-file"]
    assert penstock.last_report().cache_reason == ""
    penstock.load_file(model, framework="np", cache="drop")
    assert [path.path for path in penstock.last_report().paths] != ["mapped-file"]


def test_every_call_that_loads_has_the_option():
    for call in (penstock.load_model, penstock.load_file, penstock.stream, penstock.safe_open,
                 penstock.prefetch, penstock.from_pretrained, penstock.File, penstock.fromfile):
        assert "cache" in inspect.signature(call).parameters, call


@pytest.mark.parametrize("word", ["maybe", "KEEP", "", "after\0", 1, b"keep", True, "früher"])
def test_a_word_that_means_nothing_is_refused(model, word):
    with pytest.raises(penstock.Error, match="no such policy.*auto, keep, after, drop and off"):
        load(model, cache=word)


LOAD = """
    import sys, penstock
    penstock.load_file(sys.argv[1], framework="np", copy=True)
    print(penstock.last_report().warming_bytes)
"""


def test_the_environment_has_the_default(model):
    assert int(python(LOAD, model, env=environment(PENSTOCK_CACHE="off")).stdout) == 0
    assert int(python(LOAD, model, env=environment(PENSTOCK_CACHE="after")).stdout) >= SIZE
    assert int(python(LOAD, model, env=environment(PENSTOCK_CACHE="")).stdout) >= SIZE
    evict(model)
    python(LOAD, model, env=environment(PENSTOCK_CACHE="keep"))
    assert resident(model) >= SIZE
    failed = python(LOAD, model, env=environment(PENSTOCK_CACHE="sometimes"), check=False)
    assert failed.returncode and "PENSTOCK_CACHE" in failed.stderr and "sometimes" in failed.stderr


def test_a_forked_child_has_none_and_can_load(model):
    python("""
        import os, sys, penstock
        load = lambda: penstock.load_file(sys.argv[1], framework="np", copy=True, cache="after")
        load()
        child = os.fork()
        if not child:
            assert penstock.warming() == (0, 0, 0, "")
            load()
            assert penstock.warming().wait(60)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert penstock.warming().wait(60)
    """, model)
    assert resident(model) >= SIZE
