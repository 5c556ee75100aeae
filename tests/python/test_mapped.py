# SPDX-License-Identifier: MIT
"""Loads to the host look into the mapped file: what that costs, what it keeps, what it promises."""
import ctypes
import gc
import io
import mmap
import os
import pickle
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from support import (F4, MIB, assert_same, held_below, python, random_tensor, same, write_holes,
                     write_raw)

import penstock
from penstock import _mapped

TENSORS = {"a": random_tensor(torch.float32, (6, 10, 8)), "b": random_tensor(torch.bfloat16, (7,)),
           "c": torch.tensor(5), "d": torch.empty((0, 3)),
           "e": random_tensor(torch.uint8, (3, MIB), 1)}


@pytest.fixture
def path(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def maps(path) -> int:
    """How many mappings of a file this process has."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum(str(path) in line for line in file)


def paths() -> list[str]:
    return [each.path for each in penstock.last_report().paths]


def get(path, name, **options):
    with penstock.safe_open(path, **options) as file:
        return file.get_tensor(name)


def get_all(path, **options):
    with penstock.safe_open(path, **options) as file:
        return file.get_tensors()


CALLS = {
    "load_file": penstock.load_file,
    "load_model": penstock.load_model,
    "load_folder": lambda path, **options: penstock.load_model(path.parent, **options),
    "stream": lambda path, **options: dict(penstock.stream(path, **options)),
    "get_tensor": lambda path, **options: {name: get(path, name, **options) for name in TENSORS},
    "get_tensors": get_all,
}


@pytest.fixture(params=CALLS)
def load(request):
    return CALLS[request.param]


# --------------------------------------------------------------------------------- what one gets --

def test_tensors_look_into_the_file(path, load):
    loaded = load(path)
    assert_same(loaded, TENSORS)
    assert maps(path) and paths() == ["mapped-file"]


@pytest.mark.parametrize("device", ["cpu", "host", None, torch.device("cpu"), "cpu:0"], ids=str)
def test_whatever_the_host_is_called(path, device):
    assert_same(penstock.load_file(path, device), TENSORS)
    assert paths() == ["mapped-file"]


def test_each_tensor_has_a_storage_of_exactly_its_bytes(path, load):
    for tensor in load(path).values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.storage_offset() == 0
        saved = io.BytesIO()
        torch.save(tensor, saved)
        assert len(saved.getvalue()) < tensor.nbytes + 4096


def test_what_is_written_to_a_tensor_never_reaches_the_file(path, load):
    before = path.read_bytes()
    for tensor in load(path).values():
        tensor.zero_()
        assert not tensor.any()
    assert path.read_bytes() == before
    assert_same(load(path), TENSORS)


def test_arrays_of_numpy_can_be_written_to(path):
    before = path.read_bytes()
    for name, array in penstock.load_file(path, framework="np", keys=["a", "c", "e"]).items():
        assert array.flags.writeable and array.flags.aligned
        assert array.tobytes() == TENSORS[name].numpy().tobytes()
        array[...] = 0
    assert path.read_bytes() == before


def test_jax_arrays_are_right(path):
    pytest.importorskip("jax")
    for name, array in penstock.load_file(path, framework="jax", keys=["a", "e"]).items():
        assert numpy.asarray(array).tobytes() == TENSORS[name].numpy().tobytes()


def test_two_tensors_of_one_handle_share_their_pages_as_with_safetensors(path):
    from safetensors import safe_open

    for opened in penstock.safe_open, safe_open:
        with opened(path, "pt") as file:
            file.get_tensor("a").fill_(2)
            assert (file.get_tensor("a") == 2).all()


@pytest.mark.skipif(F4 is None, reason="this torch has no 4-bit numbers")
def test_numbers_of_four_bits(tmp_path):
    write_raw(tmp_path / "x.safetensors", {"a": ("F4", (2, 4), bytes(range(4)))})
    found = penstock.load_file(tmp_path / "x.safetensors")["a"]
    assert found.dtype == F4 and found.shape == (2, 2)
    assert bytes(found.view(torch.uint8).flatten().tolist()) == bytes(range(4))


@pytest.mark.parametrize("length", range(200, 208))
def test_what_is_not_aligned_is_copied_for_numpy_alone(tmp_path, length):
    file = tmp_path / "x.safetensors"
    write_raw(file, {"wide": ("F64", (2,), bytes(range(16))), "bytes": ("U8", (3,), b"abc"),
                     "complex": ("C64", (1,), b"01234567")}, header_length=length)
    arrays = penstock.load_file(file, framework="np")
    for array in arrays.values():
        assert array.flags.aligned
    assert arrays["wide"].tobytes() == bytes(range(16)) and arrays["bytes"].tobytes() == b"abc"
    report = penstock.last_report()
    assert report.bytes == 27 == sum(each.bytes for each in report.paths)
    moved = sum(each.bytes for each in report.paths if each.path != "mapped-file")
    refused = [each for each in report.refused if each.path == "mapped-file"]
    assert sum(each.bytes for each in refused) == moved
    assert moved >= 16 or length % 8 == 0
    assert all("aligned" in each.reason for each in refused)
    tensors = penstock.load_file(file)
    assert paths() == ["mapped-file"]
    assert tensors["wide"].numpy().tobytes() == bytes(range(16))


def test_a_conversion_reads_out_of_the_file(path, load):
    loaded = load(path, dtype="float64") if load in (penstock.load_file, penstock.load_model) \
        else penstock.load_model(path, dtype=torch.float64)
    assert torch.equal(loaded["a"], TENSORS["a"].double()) or TENSORS["a"].isnan().any()
    assert loaded["a"].dtype == loaded["b"].dtype == torch.float64
    assert same(loaded["e"], TENSORS["e"])
    assert paths() == ["mapped-file"]


# ---------------------------------------------------------------------------------------- slices --

def test_rows_are_views_with_a_storage_of_their_own(path):
    found = penstock.load_file(path, slices={"a": slice(2, 4)}, keys="a")["a"]
    assert paths() == ["mapped-file"] and penstock.last_report().bytes == found.nbytes
    assert same(found, TENSORS["a"][2:4])
    assert found.untyped_storage().nbytes() == found.nbytes
    with penstock.safe_open(path) as file:
        whole, part = file.get_tensor("a"), file.get_slice("a")[2:4]
        assert part.data_ptr() == whole[2:].data_ptr()
        assert part.untyped_storage().nbytes() == part.nbytes


def test_columns_of_get_slice_are_views_as_with_safetensors(path):
    with penstock.safe_open(path) as file:
        whole, part = file.get_tensor("a"), file.get_slice("a")[:, 3:5]
        assert same(part, TENSORS["a"][:, 3:5])
        assert part.data_ptr() == whole[:, 3:].data_ptr()
        array = penstock.safe_open(path, "np").get_slice("a")[:, 3:5]
        assert array.tobytes() == TENSORS["a"][:, 3:5].contiguous().numpy().tobytes()


def test_columns_of_a_load_are_contiguous_copies_and_the_report_says_so(path):
    loaded = penstock.load_file(path, slices={"a": (slice(None), slice(3, 5))})
    assert same(loaded["a"], TENSORS["a"][:, 3:5]) and loaded["a"].is_contiguous()
    assert list(loaded) == list(penstock.load_file(path))
    penstock.load_file(path, slices={"a": (slice(None), slice(3, 5))})
    report = penstock.last_report()
    assert len(report.paths) == 2 and report.bytes == sum(t.nbytes for t in loaded.values())
    assert [each.bytes for each in report.refused if each.path == "mapped-file"] \
        == [loaded["a"].nbytes]


# ----------------------------------------------------------------------------- how long it lives --

def test_tensors_outlive_the_dict_the_handle_and_the_file(path, load):
    kept = load(path)["a"]
    path.unlink()
    gc.collect()
    assert same(kept, TENSORS["a"])


def test_the_mapping_goes_with_the_last_tensor_and_no_descriptor_is_left(path, load):
    loaded = load(path)
    gc.collect()
    wait_for(lambda: not held_below(path.parent))
    kept = loaded["b"]
    del loaded
    gc.collect()
    assert maps(path) == 1
    del kept
    gc.collect()
    wait_for(lambda: not maps(path))


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_hundred_thousand_tensors_need_one_mapping(tmp_path):
    file = tmp_path / "x.safetensors"
    write_holes(file, dict.fromkeys((f"t{i}" for i in range(100_000)), 3))
    loaded = penstock.load_file(file)
    assert maps(file) == 1
    assert all(int(loaded[f"t{i}"][0]) == i % 255 + 1 for i in range(0, 100_000, 999))


def test_what_is_only_looked_at_takes_no_memory_of_its_own(tmp_path):
    file = tmp_path / "x.safetensors"
    write_holes(file, {f"t{i}": 64 * MIB for i in range(4)})
    grown = python("""
        import sys, penstock

        def anonymous():
            for line in open("/proc/self/status"):
                if line.startswith("RssAnon"):
                    return int(line.split()[1]) << 10

        before = anonymous()
        loaded = penstock.load_file(sys.argv[1], framework="np")
        assert sum(int(array.max()) for array in loaded.values()) == 10
        print(anonymous() - before)
        """, file).stdout
    assert int(grown) < 40 * MIB      # numpy itself, mostly


def test_a_child_writes_to_pages_of_its_own_and_lets_go_by_itself(tmp_path):
    """Also when threads of the parent were bringing pages in at the moment of the fork."""
    file = tmp_path / "x.safetensors"
    write_holes(file, {"a": 600 * MIB})
    lines = python("""
        import os, sys, time, penstock

        def maps():
            return sum(sys.argv[1] in line for line in open("/proc/self/maps"))

        loaded = penstock.load_file(sys.argv[1], framework="np")
        child = os.fork()
        if not child:
            loaded["a"][:] = 7
            ok = int(loaded["a"][5]) == 7 and maps() == 1
            del loaded
            os._exit(0 if ok and not maps() else 1)
        print(os.waitpid(child, 0)[1], int(loaded["a"][0]), int(loaded["a"][5]))
        """, file).stdout
    assert lines == "0 1 0\n"


def test_tensors_can_be_pickled_and_sent_to_worker_processes(path):
    loaded = penstock.load_file(path)
    assert same(pickle.loads(pickle.dumps(loaded["a"])), TENSORS["a"])
    loader = torch.utils.data.DataLoader(loaded["e"][:, :100], num_workers=1)
    assert torch.equal(torch.cat(list(loader)), TENSORS["e"][:, :100])
    assert same(loaded["a"].share_memory_(), TENSORS["a"])


def test_threads_may_load_the_same_file(path):
    failed = []

    def work():
        try:
            for _ in range(20):
                assert_same(penstock.load_file(path), TENSORS)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    gc.collect()
    wait_for(lambda: not maps(path))


def test_files_in_memory(path):
    if not os.path.isdir("/dev/shm"):
        pytest.skip("there is no /dev/shm")
    place = f"/dev/shm/penstock-test-{os.getpid()}.safetensors"
    shutil.copy(path, place)
    try:
        assert_same(penstock.load_file(place), TENSORS)
        assert paths() == ["mapped-file"]
    finally:
        os.unlink(place)


# ----------------------------------------------------------------------------- files that change --

def test_another_file_under_the_name_is_harmless(path, tmp_path):
    loaded = penstock.load_file(path)
    save_file({"z": torch.zeros(9)}, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    assert_same(loaded, TENSORS)


def test_what_is_written_to_the_file_in_place_shows_until_the_tensor_is_written_to(path):
    loaded = penstock.load_file(path)
    loaded["a"][0, 0, 0] = 1.0      # this page is the tensor's own from here on
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size - 2 * MIB)
        file.write(b"\xee" * (2 * MIB))
    assert (loaded["e"][1:] == 0xee).all()
    assert loaded["a"][0, 0, 0] == 1.0


def test_a_file_that_is_cut_ends_the_process_as_with_safetensors(tmp_path):
    """A promise of the engine that a mapping cannot keep, and docs/python.md says so."""
    for loader in "import penstock; load = penstock.load_file", \
            "from safetensors.torch import load_file as load":
        file = tmp_path / "x.safetensors"
        write_holes(file, {"a": MIB})
        done = python(f"""
            import os, sys, torch
            {loader}
            loaded = load(sys.argv[1])
            os.truncate(sys.argv[1], 4096)
            loaded["a"].sum()
            """, file, check=False)
        assert done.returncode == -signal.SIGBUS


def test_header_and_bytes_are_of_the_same_file(path, tmp_path, monkeypatch):
    """Another file, of the same size, takes the name between the two openings."""
    new = {name.replace("a", "z"): tensor for name, tensor in TENSORS.items()}
    save_file(new, tmp_path / "new")
    assert path.stat().st_size == (tmp_path / "new").stat().st_size
    open_model, changes = _mapped.open_model, [1]

    def change_after(name):
        model = open_model(name)
        if changes:
            changes.pop()
            os.replace(tmp_path / "new", path)
        return model

    monkeypatch.setattr(_mapped, "open_model", change_after)
    assert_same(penstock.load_file(path), new)
    assert paths() == ["mapped-file"]


def test_a_file_that_keeps_changing_is_left_to_the_engine_which_notices(path, monkeypatch):
    open_model = _mapped.open_model

    def change_after(name):
        model = open_model(name)
        os.utime(path)
        return model

    monkeypatch.setattr(_mapped, "open_model", change_after)
    with pytest.raises(penstock.Error, match="chang"):
        penstock.load_file(path)


# -------------------------------------------------------------------------------- when it is not --

@pytest.mark.parametrize("options", [
    {"copy": True}, {"arena": True}, {"arena": False}, {"memory_limit": 64 * MIB},
    {"transfer": "CPU_ONLY"}, {"backend": "pread"}, {"copy": True, "dtype": "float32"},
], ids=str)
def test_who_asks_for_a_copy_gets_one(path, options):
    loaded = penstock.load_file(path, **options)
    assert not maps(path) and "mapped-file" not in paths()
    assert same(loaded["e"], TENSORS["e"])
    assert not [each for each in penstock.last_report().refused if each.path == "mapped-file"]


@pytest.mark.parametrize("options", [
    {"copy": True}, {"memory_limit": 64 * MIB}, {"transfer": "CPU_ONLY"}, {"backend": "pread"},
], ids=str)
def test_who_asks_a_handle_for_copies_gets_them(path, options):
    with penstock.safe_open(path, **options) as file:
        assert same(file.get_tensor("e"), TENSORS["e"])
        assert same(file.get_slice("a")[:, 3:5], TENSORS["a"][:, 3:5])
        assert not maps(path) and "mapped-file" not in paths()


def test_a_stream_of_copies(path):
    assert_same(dict(penstock.stream(path, copy=True)), TENSORS)
    assert "mapped-file" not in paths()


def test_into_is_filled_by_the_engine(path):
    mine = torch.empty_like(TENSORS["a"])
    penstock.load_file(path, into={"a": mine})
    assert same(mine, TENSORS["a"])
    assert "mapped-file" not in paths()


def test_where_the_system_refuses_to_map_the_engine_copies_and_says_why(path, monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(_mapped._penstock, "map_file", refuse)
    assert_same(penstock.load_file(path), TENSORS)
    refused = penstock.last_report().refused
    assert ("mapped-file", "Cannot allocate memory") in \
        [(each.path, each.reason.rpartition(": ")[2]) for each in refused]
    with penstock.safe_open(path) as file:
        assert same(file.get_tensor("e"), TENSORS["e"])
    assert any(each.path == "mapped-file" for each in penstock.last_report().refused)


def test_a_report_of_mapped_bytes_claims_no_speed(path, load):
    load(path)
    report = penstock.last_report()
    assert report.bytes == sum(each.bytes for each in report.paths) > 0
    assert report.gb_per_s == 0 and report.storage_bytes == 0 and report.requests == 0
    assert "GB/s" not in str(report) and "mapped-file" in str(report)
    assert report.as_dict()["paths"][0]["reason"]


def test_no_bar_is_shown_where_nothing_moves(path, capfd):
    penstock.load_file(path, progress=True)
    assert capfd.readouterr() == ("", "")


def test_a_warning_names_the_line_of_the_caller(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "other.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1.safetensors"}}')
    for call in penstock.load_model, penstock.stream, penstock.safe_open:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(tmp_path)
        assert {each.filename for each in caught} == {__file__}


# ------------------------------------------------------------------------------------ cold files --

def cached(file) -> int:
    """Bytes of a file in the page cache."""
    with open(file, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        with mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            libc = ctypes.CDLL(None, use_errno=True)
            address = ctypes.addressof(window := ctypes.c_char.from_buffer(mapped))
            assert not libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
            del window
    return sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE


@pytest.fixture
def cold(tmp_path):
    """A file of two tensors of 48 MiB and 64 MiB of small ones that is not in the page cache. When
    some of it is brought in, the kernel may read 8 MiB and more beyond each place."""
    file = tmp_path / "cold.safetensors"
    save_file({"a": torch.arange(6 * MIB), "b": torch.arange(6 * MIB) + 1,
               **{f"s{i:03}": torch.full((MIB // 4,), i % 200, dtype=torch.uint8)
                  for i in range(256)}}, file)
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(file) > MIB:
        pytest.skip("this file system keeps files in the page cache")
    return file


def test_a_cold_file_is_brought_in_without_anybody_looking(cold):
    loaded = penstock.load_file(cold)
    wait_for(lambda: cached(cold) >= cold.stat().st_size)
    assert torch.equal(loaded["b"], torch.arange(6 * MIB) + 1)


def test_bytes_are_right_while_they_are_brought_in(cold):
    loaded = penstock.load_file(cold)
    assert torch.equal(loaded["b"], torch.arange(6 * MIB) + 1)
    assert all((loaded[f"s{i:03}"] == i % 200).all() for i in range(256))


def test_only_what_was_asked_for_is_brought_in(cold):
    loaded = penstock.load_file(cold, keys="a")
    wait_for(lambda: cached(cold) >= 48 * MIB)
    time.sleep(0.1)
    assert cached(cold) < 96 * MIB
    assert int(loaded["a"][-1]) == 6 * MIB - 1


def test_a_large_tensor_of_a_handle_is_brought_in(cold):
    with penstock.safe_open(cold) as file:
        tensor = file.get_tensor("b")
        wait_for(lambda: cached(cold) >= 48 * MIB)
        assert int(tensor[-1]) == 6 * MIB


def test_small_tensors_one_after_the_other_are_brought_in_ahead(cold):
    with penstock.safe_open(cold) as file:
        for name in file.offset_keys():
            tensor = file.get_tensor(name)
            if name.startswith("s") and int(name[1:]) >= 70:
                break
        # Two zones of 16 MiB were looked into, and four are read ahead.
        wait_for(lambda: cached(cold) >= (96 + 17) * MIB)
        del tensor


def test_a_stream_brings_in_its_window(cold):
    stream = penstock.stream(cold, window=96 * MIB)
    next(stream)
    wait_for(lambda: cached(cold) >= 90 * MIB)
    time.sleep(0.1)
    assert cached(cold) < 150 * MIB
    assert len(list(stream)) == 257


def test_a_prefetch_brings_the_file_in_and_a_load_joins(cold):
    begun = penstock.prefetch(cold, "cpu")
    begun.wait()
    assert cached(cold) >= cold.stat().st_size - MIB
    loaded = penstock.load_file(cold, keys="b")
    assert maps(cold) == 1 and begun.maps is None
    assert torch.equal(loaded["b"], torch.arange(6 * MIB) + 1)


def test_no_more_is_brought_in_than_half_of_the_free_memory_holds(cold, monkeypatch):
    monkeypatch.setattr(_mapped, "_ALWAYS_FITS", 0)
    monkeypatch.setattr(_mapped._penstock, "memory_available", lambda: 64 * MIB)
    loaded = penstock.load_file(cold)
    wait_for(lambda: cached(cold) >= 32 * MIB)
    time.sleep(0.1)
    assert cached(cold) < 80 * MIB
    assert loaded


def test_free_memory_is_what_the_engine_counts_with_control_groups():
    """Of a group that is full nothing is left, however much the machine has: tests/unit has that.
    Here: no more than the machine says, nor than the groups that are to be seen allow."""
    limits = [int(line.split()[1]) << 10 for line in open("/proc/meminfo")
              if line.startswith("MemTotal:")]
    group = next((line.strip().partition("::")[2] for line in open("/proc/self/cgroup")
                  if line.startswith("0::")), None)
    for folder in () if group is None else (Path("/sys/fs/cgroup" + group), Path("/sys/fs/cgroup")):
        text = (folder / "memory.max").read_text().strip() if (folder / "memory.max").exists() \
            else "max"
        limits += [int(text)] if text != "max" else []
    assert 0 < _mapped._penstock.memory_available() <= min(limits)


@pytest.fixture(params=["owner", "reader"])
def whose(request, monkeypatch):
    """The kernel tells the owner of a file what of it is cached, and others nothing."""
    if request.param == "reader":
        monkeypatch.setattr(_mapped.os, "geteuid", lambda: 12345)
        monkeypatch.setattr(_mapped.os, "access", lambda *_, **__: False)


def test_a_cold_file_is_noticed_by_whoever_reads_it(cold, whose):
    loaded = penstock.load_file(cold)
    wait_for(lambda: cached(cold) >= cold.stat().st_size)
    assert loaded


@pytest.mark.alone
def test_a_cached_file_starts_no_thread(path, whose):
    path.read_bytes()
    penstock.load_file(path)
    before = os.listdir("/proc/self/task")
    loaded = penstock.load_file(path)
    assert len(os.listdir("/proc/self/task")) <= len(before) and loaded


def test_bringing_in_ends_when_the_tensors_are_gone(tmp_path):
    file = tmp_path / "x.safetensors"
    write_holes(file, {"a": 2000 * MIB})
    tasks = len(os.listdir("/proc/self/task"))
    loaded = penstock.load_file(file, framework="np")
    del loaded
    wait_for(lambda: not maps(file) and len(os.listdir("/proc/self/task")) <= tasks)
    assert cached(file) < 1500 * MIB


@pytest.mark.alone
def test_a_process_that_ends_does_not_wait_for_it(tmp_path):
    file = tmp_path / "x.safetensors"
    write_holes(file, {"a": 8000 * MIB})
    python("""
        import sys, penstock
        loaded = penstock.load_file(sys.argv[1], framework="dlpack")
        """, file)
    assert cached(file) < 7000 * MIB


def test_a_file_that_is_cut_while_it_is_brought_in_hurts_nobody_who_does_not_look(tmp_path):
    file = tmp_path / "x.safetensors"
    write_holes(file, {"a": 1000 * MIB})
    python("""
        import os, sys, time, penstock
        loaded = penstock.load_file(sys.argv[1], framework="dlpack")
        os.truncate(sys.argv[1], 4096)
        deadline = time.monotonic() + 10
        while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        """, file)
