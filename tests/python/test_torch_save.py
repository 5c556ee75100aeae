# SPDX-License-Identifier: MIT
"""save writes what torch.save writes, in a file that torch.load opens, all of it or none."""
import copyreg
import errno
import gc
import io
import os
import pickle
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import zipfile

import pytest
import torch

import penstock
from penstock import _penstock, _progress, _torch_save
from support import MIB, Talk, environment, held_below, outcome, python
from torch_objects import OBJECTS, alike


def record(path, name: str) -> bytes:
    with zipfile.ZipFile(path) as file:
        return next(file.read(entry) for entry in file.namelist()
                    if entry.split("/", 1)[1] == name)


def two_ways(tmp_path, thing, **more):
    """A file of Penstock's and one of torch's."""
    mine, theirs = tmp_path / "mine.pt", tmp_path / "theirs.pt"
    penstock.save(thing, mine, **more)
    torch.save(thing, theirs, **more)
    return mine, theirs


# -------------------------------------------------------------------------------- the same files --

@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OBJECTS)
def test_torch_loads_what_it_would_have_saved_itself(tmp_path, name):
    mine, theirs = two_ways(tmp_path, OBJECTS[name]())
    assert record(mine, "data.pkl") == record(theirs, "data.pkl")
    for weights_only in (True, False):
        result, error = outcome(lambda: torch.load(theirs, weights_only=weights_only))
        ours, our_error = outcome(lambda: torch.load(mine, weights_only=weights_only))
        assert type(our_error) is type(error)
        assert alike(ours, result)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OBJECTS)
def test_every_crc_is_true_and_every_storage_aligned(tmp_path, name):
    penstock.save(OBJECTS[name](), tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        assert file.testzip() is None
        for entry in file.infolist():
            assert entry.compress_type == zipfile.ZIP_STORED
            assert entry.CRC or not entry.file_size
    with open(tmp_path / "x.pt", "rb") as file:
        reader = torch._C.PyTorchFileReader(file)
        for entry in reader.get_all_records():
            if entry.startswith("data/"):
                packed = len(reader.get_record(entry)) < 32 << 10
                assert reader.get_record_offset(entry) % (64 if packed else 4096) == 0


def test_a_file_of_small_tensors_is_hardly_larger_than_torchs(tmp_path):
    state = {f"tensor {i}": torch.full((64,), float(i)) for i in range(2000)}
    state["large"] = torch.arange(100_000)
    mine, theirs = two_ways(tmp_path, state)
    assert mine.stat().st_size < 1.2 * theirs.stat().st_size
    assert penstock.last_report().requests < 100
    assert alike(torch.load(mine), state)
    assert alike(penstock.load(mine), state)
    assert penstock.last_report().unverified_bytes == 0


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(tmp_path, protocol):
    mine, theirs = two_ways(tmp_path, OBJECTS["checkpoint"](), pickle_protocol=protocol)
    assert record(mine, "data.pkl") == record(theirs, "data.pkl")
    assert alike(torch.load(mine, weights_only=False), torch.load(theirs, weights_only=False))


def test_a_pickle_module_of_the_callers(tmp_path):
    class Other:
        __name__ = "other"
        used = 0

        class Pickler(pickle.Pickler):
            def dump(self, thing):
                Other.used += 1
                super().dump(thing)

    penstock.save([torch.ones(3)], tmp_path / "x.pt", Other)
    assert Other.used == 1
    assert torch.equal(torch.load(tmp_path / "x.pt")[0], torch.ones(3))


def test_plain_tensors_do_not_pass_through_torchs_reducer(tmp_path, monkeypatch):
    asked, own = [], torch.Tensor.__reduce_ex__
    monkeypatch.setattr(torch.Tensor, "__reduce_ex__",
                        lambda tensor, protocol: asked.append(tensor) or own(tensor, protocol))
    penstock.save([torch.full((2,), float(i)) for i in range(300)], tmp_path / "x.pt")
    assert len(asked) == 1      # a sample, to see that it does what is known


def test_tensors_with_names_are_left_to_torch(tmp_path, monkeypatch):
    """Some versions have them, and refuse to save them."""
    named, own = torch.ones(2), torch.Tensor.__reduce_ex__

    def reduce(tensor, protocol):
        if tensor is named:
            raise RuntimeError("NYI")
        return own(tensor, protocol)

    monkeypatch.setattr(torch.Tensor, "has_names", lambda tensor: tensor is named, raising=False)
    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", reduce)
    with pytest.raises(RuntimeError, match="NYI"):
        penstock.save([torch.zeros(2), named], tmp_path / "x.pt")


@pytest.mark.parametrize("registered", [False, True])
def test_a_reducer_that_is_not_torchs_own_is_used(tmp_path, monkeypatch, registered):
    def reduce(tensor, *_):
        return torch.tensor, (tensor.tolist(),)

    if registered:
        monkeypatch.setitem(copyreg.dispatch_table, torch.Tensor, reduce)
    else:
        monkeypatch.setattr(torch.Tensor, "__reduce_ex__", reduce)
    mine, theirs = two_ways(tmp_path, [torch.ones(2), torch.zeros(3)])
    assert b"storage" not in record(theirs, "data.pkl")
    assert record(mine, "data.pkl") == record(theirs, "data.pkl")


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_whatever_happens(tmp_path, enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        penstock.save(torch.ones(2), tmp_path / "x.pt")
        with pytest.raises(Exception, match="pickle"):
            penstock.save(lambda: None, tmp_path / "x.pt")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_torch_maps_the_file_too(tmp_path):
    """torch computes where storages lie in files of its own; in ours it has to look."""
    from torch.utils.serialization import config

    state = {"a": torch.arange(1000.0), "b": torch.arange(7), "c": torch.arange(3000.0)}
    penstock.save(state, tmp_path / "x.pt")
    for computes in (False, True):
        with config.patch("load.calculate_storage_offsets", computes):
            assert alike(torch.load(tmp_path / "x.pt", mmap=True), state)


def test_fake_tensors_know_where_the_bytes_are(tmp_path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    state = {"a": torch.arange(1000.0), "b": torch.arange(9.0)}
    penstock.save(state, tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    with FakeTensorMode():
        found = torch.load(tmp_path / "x.pt")
    for name, tensor in state.items():
        at = found[name].untyped_storage()._checkpoint_offset
        assert content[at:at + tensor.nbytes] == tensor.numpy().tobytes()


def test_two_dtypes_of_one_storage_are_refused_as_by_torch(tmp_path):
    tensor = torch.arange(8.0)
    for save in penstock.save, torch.save:
        with pytest.raises(RuntimeError, match="view the same data"):
            save([tensor, tensor.view(torch.int32)], tmp_path / "x.pt")


def test_what_cannot_be_pickled_is_refused_as_by_torch(tmp_path):
    for save in penstock.save, torch.save:
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError)) as error:
            save({"f": lambda: 0}, tmp_path / "x.pt")
        assert not isinstance(error.value, penstock.Error)
    (tmp_path / "x.pt").write_bytes(b"old")
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        penstock.save({"f": threading.Lock()}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").read_bytes() == b"old"


def test_names_of_files(tmp_path, monkeypatch):
    for name in "ä名.pt", "with space", "a.b.c", "x" * 200:
        penstock.save([torch.ones(2)], tmp_path / name)
        assert torch.load(tmp_path / name)[0].tolist() == [1, 1]
    monkeypatch.chdir(tmp_path)
    penstock.save([torch.ones(2)], "null:")
    assert torch.load("null:")[0].tolist() == [1, 1]


def test_memory_of_torch_is_saved_from_where_it_is(tmp_path):
    """Shared, pinned or not aligned: only the address counts."""
    shared = torch.arange(5000.0)
    shared.share_memory_()
    odd = torch.frombuffer(bytearray(range(101)), dtype=torch.uint8, offset=1)
    penstock.save([shared, odd], tmp_path / "x.pt")
    assert alike([tensor.tolist() for tensor in torch.load(tmp_path / "x.pt")],
                 [shared.tolist(), odd.tolist()])


def test_saving_ten_thousand_tensors(tmp_path, device):
    state = {f"layer.{i}": torch.full((i % 50,), float(i), device=device) for i in range(10_000)}
    penstock.save(state, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt")
    assert list(found) == list(state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


# ------------------------------------------------------------------------------- handed to torch --

def test_file_objects_are_torchs(tmp_path):
    buffer = io.BytesIO()
    penstock.save([torch.ones(3)], buffer)
    buffer.seek(0)
    assert torch.load(buffer)[0].tolist() == [1, 1, 1]
    assert penstock.last_report().paths[0].path == "torch"


def test_the_format_before_zip_is_torchs(tmp_path):
    penstock.save([torch.ones(3)], tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt")[0].tolist() == [1, 1, 1]
    assert penstock.last_report().unverified_bytes == (tmp_path / "x.pt").stat().st_size


def test_files_without_bytes_are_torchs(tmp_path):
    with torch.serialization.skip_data():
        penstock.save([torch.ones(3)], tmp_path / "x.pt")
    assert penstock.last_report().paths[0].path == "torch"


def test_what_is_no_file_is_torchs(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code = "import sys, torch, io; print(torch.load(io.BytesIO(open(sys.argv[1], 'rb').read())))"
    reader = subprocess.Popen([sys.executable, "-c", code, tmp_path / "pipe"], text=True,
                              stdout=subprocess.PIPE)
    penstock.save(torch.ones(2), tmp_path / "pipe")
    assert "tensor([1., 1.])" in reader.communicate(timeout=60)[0]


def test_a_way_that_torch_does_not_have_is_not_handed_on(tmp_path):
    with pytest.raises(penstock.Error, match="file"):
        penstock.save([torch.ones(3)], io.BytesIO(), transfer="CPU_ONLY")


def test_storages_on_meta_fail_as_with_torch(tmp_path):
    for save in penstock.save, torch.save:
        result = outcome(lambda: save(torch.UntypedStorage(4, device="meta"), tmp_path / "x.pt"))
        assert isinstance(result[1], (NotImplementedError, RuntimeError))


# ------------------------------------------------------------------------------------- transfers --

@pytest.mark.parametrize("transfer", ["auto", 1, "1", "CPU_ONLY", "cpu_only", "Storage->CPU"])
def test_transfer_types_of_the_host(tmp_path, transfer):
    penstock.save([torch.arange(100_000.0)], tmp_path / "x.pt", transfer=transfer)
    assert torch.load(tmp_path / "x.pt")[0].sum() == torch.arange(100_000.0).sum()


@pytest.mark.parametrize("transfer", [0, "GPU_DIRECT", "Storage->GPU", "Storage->CPU->GPU_ASYNC",
                                      "Storage->PAGE_CACHE->CPU->GPU", "Storage->GPU_BATCH"])
def test_transfer_types_of_gpus_are_refused_without_one(tmp_path, transfer):
    (tmp_path / "x.pt").write_bytes(b"old")
    with pytest.raises(penstock.Error, match="use transfer type"):
        penstock.save([torch.ones(10)], tmp_path / "x.pt", transfer=transfer)
    assert (tmp_path / "x.pt").read_bytes() == b"old"


def test_a_transfer_type_that_there_is_not(tmp_path):
    with pytest.raises(ValueError, match="no such type"):
        penstock.save([torch.ones(10)], tmp_path / "x.pt", transfer="Storage->TPU")


def test_the_report_says_what_was_digested(tmp_path):
    penstock.save({"a": torch.zeros(3 * MIB // 4), "b": torch.zeros(100)}, tmp_path / "x.pt")
    report = penstock.last_report()
    assert report.bytes >= 3 * MIB + 400
    assert report.digested_bytes >= 3 * MIB + 400
    assert report.unverified_bytes == 0
    assert "unverified" not in str(report)


@pytest.mark.parametrize("limit", [1, 65536, 131071])
def test_a_memory_limit_that_is_too_small_is_told_the_least(tmp_path, limit):
    with pytest.raises(penstock.Error, match=f"cannot keep .* {limit} bytes are .* 128 KiB"):
        penstock.save([torch.ones(MIB)], tmp_path / "x.pt", memory_limit=limit)
    penstock.save([torch.ones(MIB)], tmp_path / "x.pt", memory_limit=128 << 10)
    with pytest.raises(penstock.Error, match=f"{limit} bytes are .* 128 KiB"):
        penstock.load(tmp_path / "x.pt", memory_limit=limit)


def test_a_small_memory_limit_is_kept(tmp_path):
    penstock.save([torch.ones(16 * MIB // 4)], tmp_path / "x.pt", memory_limit=4 * MIB)
    assert penstock.last_report().pinned_bytes <= 4 * MIB
    assert torch.load(tmp_path / "x.pt")[0].sum() == 4 * MIB


def test_progress_is_shown(tmp_path, capsys):
    penstock.save([torch.ones(100)], tmp_path / "x.pt", progress=True)
    assert "x.pt: 100%" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ whole files

def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path):
    penstock.save({"a": torch.zeros(10)}, tmp_path / "x.pt")
    os.chmod(tmp_path / "x.pt", 0o640)
    before = open(tmp_path / "x.pt", "rb")
    penstock.save({"a": torch.ones(10)}, tmp_path / "x.pt")
    with before:
        assert torch.load(before)["a"].sum() == 0
    assert torch.load(tmp_path / "x.pt")["a"].sum() == 10
    assert stat.S_IMODE((tmp_path / "x.pt").stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["x.pt"]


def test_a_link_keeps_leading_to_the_file(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "latest.pt").symlink_to("there/x.pt")
    penstock.save([torch.ones(2)], tmp_path / "latest.pt")
    assert (tmp_path / "latest.pt").is_symlink()
    assert torch.load(tmp_path / "there/x.pt")[0].tolist() == [1, 1]


@pytest.mark.parametrize("place, error", [("none/x.pt", FileNotFoundError), ("", OSError),
                                          ("file/x.pt", NotADirectoryError)])
def test_places_where_nothing_can_be_written(tmp_path, place, error):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(error) as caught:
        penstock.save([torch.ones(2)], tmp_path / place)
    assert isinstance(caught.value, penstock.Error)
    assert os.listdir(tmp_path) == ["file"]


LIMITED = """
    import os, resource, signal, sys, torch, penstock

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in map(int, sys.argv[2:]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            penstock.save({"a": torch.ones(4 << 20)}, sys.argv[1])
        except penstock.Error as error:
            print(error.errno, torch.load(sys.argv[1])["a"].tolist(),
                  os.listdir(os.path.dirname(sys.argv[1])))
"""


def test_a_file_that_may_not_grow_leaves_the_old_one(tmp_path):
    penstock.save({"a": torch.zeros(2)}, tmp_path / "x.pt")
    limits = [100, 5000, MIB, 10 * MIB, 16 * MIB + 4096]
    said = python(LIMITED, tmp_path / "x.pt", *limits).stdout
    assert said.splitlines() == [f"{errno.EFBIG} [0.0, 0.0] ['x.pt']"] * len(limits)


FULL = """
    import os, sys, torch, penstock

    os.chdir(sys.argv[1])
    penstock.save({"a": torch.zeros(10)}, "x.pt")
    try:
        penstock.save({"a": torch.ones(4 << 20)}, "x.pt")
    except penstock.Error as error:
        print(error.errno)
    assert penstock.load("x.pt")["a"].tolist() == [0] * 10
    print(os.listdir())
"""


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """A small one of memory, in a name space of its own."""
    script = tmp_path / "full.py"
    script.write_text(textwrap.dedent(FULL))
    (tmp_path / "disk").mkdir()
    done = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
                           'mount -t tmpfs -o size=8M tmpfs "$1" || exit 77; exec "$2" "$3" "$1"',
                           "sh", tmp_path / "disk", sys.executable, script], text=True,
                          capture_output=True, env=environment())
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no file system can be mounted: {done.stderr}")
    assert done.stdout.splitlines() == [str(errno.ENOSPC), "['x.pt']"], done.stderr


INTERRUPTED = """
    import sys, torch, penstock

    state = {f"t{i}": torch.ones(32 << 18) for i in range(24)}
    print("ready")
    sys.stdin.readline()
    print("go")
    try:
        while True:
            penstock.save(state, sys.argv[1])
    except KeyboardInterrupt:
        print("stopped")
    print(penstock.load(sys.argv[1])["t0"].sum().item() if len(sys.argv) > 2 else "")
"""


def test_ctrl_c_stops_a_save_and_leaves_a_whole_file(tmp_path):
    penstock.save({"t0": torch.zeros(10)}, tmp_path / "x.pt")
    with Talk(INTERRUPTED, tmp_path / "x.pt") as process:
        assert process.line() == "ready"
        process.process.stdin.write("\n")
        process.process.stdin.flush()
        assert process.line() == "go"
        time.sleep(0.3)
        process.interrupt()
        assert "stopped" in process.end()[0]
    assert penstock.load(tmp_path / "x.pt")["t0"].sum() in (0, 32 << 18)
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("written", [False, True])
def test_a_failed_save_gives_its_space_back_though_its_exception_is_kept(tmp_path, monkeypatch,
                                                                         written):
    def interrupted(job, label, progress):
        while written and not job.wait_for(1):
            pass
        raise KeyboardInterrupt     # as where a bar is drawn: nobody has stopped the job

    monkeypatch.setattr(_progress, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        penstock.save([torch.zeros(MIB)], tmp_path / "x.pt")
    assert kept.value is not None and held_below(tmp_path) == []
    assert os.listdir(tmp_path) == []


def test_an_error_keeps_no_file_open(tmp_path):
    for _ in range(3):
        outcome(lambda: penstock.save([torch.ones(10)], tmp_path / "x.pt", transfer="GPU_DIRECT"))
    assert not held_below(tmp_path)


def save_for_ever(state, target) -> int:
    """A process that saves until it is killed; its number."""
    child = os.fork()
    if not child:
        try:
            while True:
                penstock.save(state, target)
        finally:
            os._exit(1)
    return child


def kill_savers(folder, seconds: float) -> int:
    """Kill savers at moments all over their work; what is found then must be one whole save."""
    target, count = folder / "x.pt", 0
    penstock.save({f"t{i}": torch.zeros(1 << 16) for i in range(16)}, target)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        child = save_for_ever({f"t{i}": torch.full((1 << 16,), float(count + 1))
                               for i in range(16)}, target)
        time.sleep(0.1 * (count * 0.618034 % 1))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = penstock.load(target)
        assert penstock.last_report().unverified_bytes == 0
        values = {float(value) for tensor in found.values() for value in (tensor[0], tensor[-1])}
        assert len(found) == 16 and len(values) == 1, values
        with zipfile.ZipFile(target) as file:
            assert file.testzip() is None
        count += 1
    # A kill between link and rename leaves one name, which the next writer removes.
    penstock.save([torch.ones(1)], target)
    assert os.listdir(folder) == ["x.pt"]
    return count


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new(tmp_path):
    assert kill_savers(tmp_path, 15) > 10


# --------------------------------------------------------------------------------------- threads --

def test_other_threads_run_while_bytes_move(tmp_path):
    """A save of 256 MB lets another thread count. One that kept the lock would let it run before
    and after, which is a matter of single steps: there is one tensor to pickle."""
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    state = [torch.ones(64 << 20)]
    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = counted[0]
        penstock.save(state, tmp_path / "x.pt")
        during = counted[0] - before
    finally:
        stop.set()
        thread.join()
    assert during > 100


def test_threads_save_beside_each_other(tmp_path):
    failures = []

    def work(number):
        try:
            for turn in range(5):
                penstock.save({"n": torch.full((1000,), float(number))}, tmp_path / f"{number}.pt")
                assert torch.load(tmp_path / f"{number}.pt")["n"].sum() == 1000 * number
                penstock.save({"n": torch.full((50_000,), float(number))}, tmp_path / "all.pt")
        except Exception as error:  # told in the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(torch.load(tmp_path / "all.pt")["n"].unique()) == 1


# ----------------------------------------------------------------------------------------- patch --

def test_what_a_patch_asks():
    assert _torch_save.why_torch_saves({}, "x.pt") == ""
    assert "file" in _torch_save.why_torch_saves({}, io.BytesIO())
    assert _torch_save.why_torch_saves({}, "x.pt", pickle, 2, False)


def test_torch_called_by_penstock_is_not_called_back(tmp_path, monkeypatch):
    """As under a patch, where torch.save is Penstock's: what is handed on ends in torch."""
    original = torch.save

    def patched(*args, **kwargs):
        serve = original if _torch_save.why_torch_saves(*args, **kwargs) else penstock.save
        return serve(*args, **kwargs)

    monkeypatch.setattr(torch, "save", patched)
    torch.save([torch.ones(2)], tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    penstock.save([torch.ones(2)], tmp_path / "y.pt", _use_new_zipfile_serialization=False)
    assert torch.load(tmp_path / "x.pt")[0].tolist() == torch.load(tmp_path / "y.pt")[0].tolist()


def test_a_pickler_asks_once_about_a_type_that_is_no_storage():
    def answer(thing):
        asked.append(thing)
        if thing == "bad":
            raise LookupError("bad")
        return thing if isinstance(thing, float) else None

    asked, ask = [], _penstock.ask_by_type(answer)
    assert [ask(1), ask(2), ask(1.5), ask(2.5)] == [None, None, 1.5, 2.5]
    with pytest.raises(LookupError):
        ask("bad")
    assert asked == [1, 1.5, 2.5, "bad"]
