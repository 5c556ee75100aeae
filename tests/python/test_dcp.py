# SPDX-License-Identifier: MIT
"""torch.distributed.checkpoint with penstock.dcp as its storage, against torch's own classes."""
import abc
import contextlib
import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import DTYPES, PACKAGE, assert_same, random_tensor
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

import penstock
from penstock import _penstock
from penstock import dcp as module
from penstock.dcp import Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore")
# In this process, whoever patched what: ours are derived from torch's own.
FileSystemWriter, FileSystemReader = Writer.__base__, Reader.__base__


def blank(state):
    """The same without its values."""
    if isinstance(state, dict):
        return {name: blank(value) for name, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def save(state, path, writer=Writer, **options):
    dcp.save(state, storage_writer=writer(path, **options))


def load(state, path, reader=Reader, **options):
    """What the checkpoint has in the place of this state."""
    found = blank(state)
    dcp.load(found, storage_reader=reader(path, **options))
    return found


def infos(path):
    """Where each item lies."""
    metadata = FileSystemReader(path).read_metadata()
    return {index.fqn: info for index, info in metadata.storage_data.items()}


def files(path):
    return sorted(name for name in os.listdir(path) if name.endswith(".distcp"))


@pytest.mark.parametrize("reader", [Reader, FileSystemReader], ids=["ours", "torchs"])
@pytest.mark.parametrize("writer", [Writer, FileSystemWriter], ids=["ours", "torchs"])
def test_every_dtype_comes_back_whoever_writes_and_reads(tmp_path, writer, reader):
    state = {}
    for number, dtype in enumerate(DTYPES):
        state[f"{dtype}"] = random_tensor(dtype, (70, 90), number)
        state[f"small {dtype}"] = random_tensor(dtype, (3,), number)
    save(state, tmp_path, writer)
    assert_same(load(state, tmp_path, reader), state)


@pytest.mark.parametrize("reader", [Reader, FileSystemReader], ids=["ours", "torchs"])
@pytest.mark.parametrize("writer", [Writer, FileSystemWriter], ids=["ours", "torchs"])
def test_tensors_of_every_make_and_values_that_are_none_come_back(tmp_path, writer, reader):
    base = torch.randn(200, 300)
    numbers = torch.randn(3000, dtype=torch.complex64)
    state = {"rows": base[20:90], "columns": base[:, 7:200], "turned": base.t(),
             "steps": base[::3, ::2], "empty": base[:0], "scalar": torch.tensor(2.5),
             "expanded": base[:1].expand(50, 300), "conj": numbers.conj(),
             "neg": numbers.conj().imag, "channels": torch.randn(4, 8, 9, 9).to(
                 memory_format=torch.channels_last),
             "parameter": torch.nn.Parameter(torch.randn(2000)), "values": {
                 "rate": 0.1, "list": [1, "two", {"three": torch.ones(4000)}], "none": None}}
    save(state, tmp_path, writer)
    found = load(state, tmp_path, reader)
    assert found.pop("values").pop("rate") == 0.1
    del state["values"]
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name


def test_storages_lie_at_pages_and_the_file_is_hardly_larger_than_torchs(tmp_path):
    state = {f"{i}": torch.randn(3000) for i in range(20)}
    state.update({f"step{i}": torch.tensor(float(i)) for i in range(100)})
    save(state, tmp_path / "ours")
    save(state, tmp_path / "torchs", FileSystemWriter)
    for name, info in infos(tmp_path / "ours").items():
        with open(tmp_path / "ours" / info.relative_path, "rb") as file:
            file.seek(info.offset)
            found = file.read(info.length).find(state[name].numpy().tobytes()) + info.offset
        assert found % 4096 == 0 or state[name].nbytes <= 4096, name
    ours, torchs = ((tmp_path / name / "__0_0.distcp").stat().st_size
                    for name in ("ours", "torchs"))
    assert ours < torchs + 20 * 8192


def test_what_is_read_may_have_other_numbers_strides_and_sizes_than_what_was_saved(tmp_path):
    state = {"same": torch.randn(300, 400), "number": torch.randn(300, 400),
             "turned": torch.randn(300, 400), "columns": torch.randn(300, 4000)}
    save(state, tmp_path)
    found = {"same": torch.zeros(300, 400), "number": torch.zeros(300, 400, dtype=torch.float64),
             "turned": torch.zeros(400, 300).t(), "columns": torch.zeros(300, 4500)[:, 200:4200]}
    dcp.load(found, storage_reader=Reader(tmp_path))
    for name, tensor in found.items():
        assert torch.equal(tensor.to(torch.float32), state[name]), name
    report = penstock.last_report()
    assert report.digested_bytes >= sum(t.nbytes for t in state.values())
    assert not report.unverified_bytes
    with pytest.raises(dcp.CheckpointException, match="same"):
        dcp.load({"same": torch.zeros(3, 4)}, storage_reader=Reader(tmp_path))


def test_a_damaged_byte_is_an_error_that_names_the_tensor(tmp_path):
    state = {name: torch.randn(100_000) for name in ("first", "second", "third")}
    save(state, tmp_path)
    info = infos(tmp_path)["second"]
    with open(tmp_path / info.relative_path, "r+b") as file:
        file.seek(info.offset + info.length // 2)
        file.write(b"damage")
    with pytest.raises(dcp.CheckpointException) as caught:
        load(state, tmp_path)
    error = caught.value.failures[0][0]
    assert isinstance(error, penstock.Error) and "tensor second" in str(error)
    assert str(error.filename).endswith(info.relative_path)
    assert info.offset <= error.offset < info.offset + info.length
    assert load(state, tmp_path, verify=False)["first"].equal(state["first"])


# ------------------------------------------------------------------------------------ async_save --

@pytest.mark.parametrize("state", [{"w": torch.ones(30_000)}, {"note": [1, 2]}],
                         ids=["tensor", "value"])
def test_a_file_that_is_cut_short_is_told_by_its_name(tmp_path, state):
    save(state, tmp_path)
    path = tmp_path / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(dcp.CheckpointException, match=r"__0_0\.distcp at byte .*cut short"):
        load(state, tmp_path)


def test_async_save_returns_when_the_state_may_change(tmp_path):
    state = {"large": torch.randn(2_000_000), "bits": torch.randn(700, 900)[:, 5:800],
             "values": [1, 2, 3], "count": torch.tensor(7)}
    want = copy.deepcopy(state)
    writer = Writer(tmp_path)
    future = dcp.async_save(state, storage_writer=writer)
    for name in ("large", "bits", "count"):
        state[name].zero_()
    state["values"].append(4)
    future.result()
    found = load(want, tmp_path)
    assert found["values"] == [1, 2, 3]
    for name in ("large", "bits", "count"):
        assert torch.equal(found[name], want[name]), name
    assert writer.report.bytes >= want["large"].nbytes and writer.report.gathering


def test_the_writer_is_its_own_stager_and_copies_nothing_before_the_job():
    state = {"weight": torch.randn(1000)}
    writer = Writer("/nowhere")
    assert isinstance(writer, dcp.staging.AsyncStager)
    assert writer.stage(state)["weight"] is state["weight"]


def test_a_save_that_fails_in_the_background_holds_nobody(tmp_path):
    class Failing(default_planner.DefaultSavePlanner):
        def create_local_plan(self):
            raise ValueError("no plan")

    future = dcp.async_save({"w": torch.randn(5000)}, storage_writer=Writer(tmp_path),
                            planner=Failing())
    assert isinstance(future.exception(), dcp.CheckpointException)
    (tmp_path / "file").write_text("")
    future = dcp.async_save({"w": torch.randn(5000)}, storage_writer=Writer(tmp_path / "file/x"))
    assert isinstance(future.exception(), dcp.CheckpointException)
    writer = Writer(tmp_path / "refused", transfer="GPU_DIRECT")
    future = dcp.async_save({"w": torch.randn(5000)}, storage_writer=writer)
    assert isinstance(future.exception(), dcp.CheckpointException)
    future = dcp.async_save({"w": torch.randn(5000)}, storage_writer=Writer(tmp_path / "good"))
    assert future.result()


def test_a_writer_that_stages_is_not_sent_to_another_process():
    writer = Writer("/nowhere")
    assert os.fspath(pickle.loads(pickle.dumps(writer)).path) == "/nowhere"
    writer.stage({})
    with pytest.raises(penstock.Error, match="async_stager"):
        pickle.dumps(writer)


def test_one_writer_serves_several_threads(tmp_path):
    writer = Writer(tmp_path / "unused")
    failures = []

    def work(number):
        try:
            for turn in range(3):
                name = tmp_path / f"{number}-{turn}"
                state = {"w": torch.full((50_000,), float(10 * number + turn))}
                dcp.save(state, checkpoint_id=name, storage_writer=writer, no_dist=True)
                assert load(state, name)["w"].equal(state["w"])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not (tmp_path / "unused").exists()


def test_two_saves_into_one_folder_at_a_time_are_refused(tmp_path):
    class Nested(default_planner.DefaultSavePlanner):
        def resolve_data(self, item):
            if not seen:
                seen.append(None)
                with pytest.raises(dcp.CheckpointException, match="under way"):
                    save({"w": torch.ones(3)}, tmp_path)
            return super().resolve_data(item)

    seen = []
    dcp.save({"w": torch.randn(3)}, storage_writer=Writer(tmp_path), planner=Nested())
    assert seen and files(tmp_path) == ["__0_0.distcp"]


def test_two_programs_that_save_into_one_folder_are_told_apart(tmp_path):
    class Watched(Writer):
        def finish(self, metadata, results):
            with pytest.raises(penstock.Error, match="this process writes"):
                _penstock.checkpoints_open(str(tmp_path), True, 0)
            super().finish(metadata, results)

    first = {"w": torch.zeros(30_000)}
    save(first, tmp_path, Watched)
    other = _penstock.checkpoints_open(str(tmp_path), True, 0)      # as another program would
    with pytest.raises(dcp.CheckpointException, match="writes checkpoints there"):
        save({"w": torch.ones(30_000)}, tmp_path)
    assert files(tmp_path) == ["__0_0.distcp"]
    assert load(first, tmp_path)["w"].equal(first["w"])
    other.close()
    save({"w": torch.ones(30_000)}, tmp_path)
    assert files(tmp_path) == ["__0_1.distcp"]


def test_a_save_that_failed_does_not_keep_its_program_from_the_next(tmp_path):
    state, stopped = {"w": torch.ones(3)}, Stopped(tmp_path)
    with pytest.raises(dcp.CheckpointException, match="stopped"):
        dcp.save(state, storage_writer=stopped)
    save(state, tmp_path)
    thread = threading.Thread(target=save, args=(state, tmp_path))
    thread.start()
    thread.join()
    assert files(tmp_path) == ["__0_1.distcp"]


class Stopped(Writer):
    """Fails when its files are there, as if another rank had no room for its own."""

    def finish(self, metadata, results):
        raise OSError("stopped")


def test_files_of_saves_that_fail_do_not_pile_up(tmp_path):
    old = {"w": torch.zeros(3)}
    save(old, tmp_path)
    (tmp_path / "__1_7.distcp").write_bytes(b"a file of another rank, which was killed")
    for value in range(3):
        with pytest.raises(dcp.CheckpointException, match="stopped"):
            save({"w": torch.full((3,), float(value))}, tmp_path, Stopped)
        assert files(tmp_path) == ["__0_0.distcp", "__0_1.distcp"]
    assert load(old, tmp_path)["w"].equal(old["w"])


def test_files_of_a_save_go_at_once_when_its_metadata_cannot_be_written(tmp_path, monkeypatch):
    old = {"w": torch.zeros(3)}
    save(old, tmp_path)
    monkeypatch.setattr(Writer, "storage_meta", lambda self: lambda: "no pickle of this")
    with pytest.raises(dcp.CheckpointException):
        save({"w": torch.ones(3)}, tmp_path)
    assert files(tmp_path) == ["__0_0.distcp"]
    assert load(old, tmp_path)["w"].equal(old["w"])


def test_metadata_never_names_what_is_not_there(tmp_path):
    class Lost(Writer):
        def finish(self, metadata, results):
            damage(tmp_path / "__0_1.distcp")
            super().finish(metadata, results)

    old = {"w": torch.zeros(3)}
    save(old, tmp_path)
    for damage, words in [(os.unlink, "given the same folder"),
                          (lambda path: os.truncate(path, 5), "has 5 bytes, of ")]:
        with pytest.raises(dcp.CheckpointException, match=words):
            save({"w": torch.ones(3)}, tmp_path, Lost)
        assert files(tmp_path) == ["__0_0.distcp"]
        assert load(old, tmp_path)["w"].equal(old["w"])


def test_a_save_that_begins_leaves_alone_what_others_name_or_write(tmp_path):
    """A rank's own checkpoint, one that torch's writer did not come to rename, and the files of a
    save in another thread that has yet to end."""
    class Slow(Writer):
        def finish(self, metadata, results):
            with pytest.raises(dcp.CheckpointException, match="stopped"):
                thread.start()
                thread.join()
                raise failures.pop()
            super().finish(metadata, results)

    def other():
        try:
            save(state, tmp_path, Stopped)
        except dcp.CheckpointException as error:
            failures.append(error)

    state, failures, thread = {"w": torch.randn(9)}, [], threading.Thread(target=other)
    (tmp_path / ".metadata.tmp").write_bytes(pickle.dumps(["__8_0.distcp"]))
    (tmp_path / "__9.metadata").write_bytes(pickle.dumps({"at": ("__9_3.distcp", 0)}))
    for name in ("__7_0.distcp", "__8_0.distcp", "__9_3.distcp"):
        (tmp_path / name).touch()
    with pytest.raises(dcp.CheckpointException, match="stopped"):
        save(state, tmp_path, Stopped)
    assert files(tmp_path) == ["__0_0.distcp", "__8_0.distcp", "__9_3.distcp"]
    save(state, tmp_path, Slow)
    assert load(state, tmp_path)["w"].equal(state["w"])


def test_a_forked_child_has_nothing_to_do_with_what_its_parent_saves(tmp_path, monkeypatch):
    if torch.cuda.is_initialized():
        pytest.skip("an earlier test started CUDA, with which torch cannot save in a child")
    folder = os.path.realpath(tmp_path)
    monkeypatch.setattr(module, "_under_way", {(os.getpid(), folder)})
    with module._lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            with contextlib.suppress(BaseException):
                save({"w": torch.ones(3)}, tmp_path)
                os._exit(0)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert files(tmp_path) == ["__0_0.distcp"]


# ------------------------------------------------------------------- in the place of another one --

def test_a_checkpoint_stays_whole_until_the_next_one_is(tmp_path):
    class Stopped(Writer):
        def finish(self, metadata, results):
            assert len(files(tmp_path)) == 2
            raise OSError("stopped")

    first = {"w": torch.zeros(30_000)}
    save(first, tmp_path, FileSystemWriter)
    with pytest.raises(dcp.CheckpointException):
        save({"w": torch.ones(30_000)}, tmp_path, Stopped)
    assert load(first, tmp_path, FileSystemReader)["w"].equal(first["w"])
    second = {"w": torch.full((30_000,), 2.0)}
    (tmp_path / "notes.distcp.txt").write_text("mine")
    save(second, tmp_path)
    assert load(first, tmp_path, FileSystemReader)["w"].equal(second["w"])
    assert files(tmp_path) == ["__0_1.distcp"] and (tmp_path / "notes.distcp.txt").exists()


def test_what_exists_is_not_replaced_with_overwrite_false(tmp_path):
    state = {"w": torch.ones(3)}
    save(state, tmp_path / "a/b/c", overwrite=False)
    with pytest.raises(dcp.CheckpointException, match="already exists"):
        save(state, tmp_path / "a/b/c", overwrite=False)


def test_ranks_without_collectives_have_a_checkpoint_each(tmp_path):
    state = {"w": torch.randn(5000)}
    for writer in (Writer, Writer):
        dcp.save(state, storage_writer=writer(tmp_path), use_collectives=False)
    assert sorted(os.listdir(tmp_path)) == ["__0.metadata", "__0_1.distcp"]


@pytest.mark.parametrize("options", [{"single_file_per_rank": False}, {"_extensions": [object()]}],
                         ids=["files", "extensions"])
def test_what_only_torch_writes_is_refused_with_words(tmp_path, options):
    with pytest.raises(penstock.Error, match="FileSystemWriter"):
        Writer(tmp_path, **options)


class Xor(StreamTransformExtension):
    """Stands for compression: bytes in the file are not those of the tensor."""

    @staticmethod
    def registry_name():
        return "xor"

    @staticmethod
    def from_descriptor(version):
        return Xor()

    def get_descriptor(self):
        return "xor/1"

    def transform_to(self, output):
        class Stream:
            def write(self, data):
                return output.write(bytes(byte ^ 255 for byte in bytes(data)))

            def flush(self):
                output.flush()

            def close(self):
                output.close()

        return Stream()

    def transform_from(self, stream):
        import io

        return io.BytesIO(bytes(byte ^ 255 for byte in stream.read()))


def test_what_went_through_an_extension_is_read_by_torch(tmp_path):
    state = {"w": torch.randn(3000)}
    save(state, tmp_path, FileSystemWriter, _extensions=[Xor()])
    registry = ExtensionRegistry()
    registry.register(Xor)
    assert load(state, tmp_path, _extension_registry=registry)["w"].equal(state["w"])


# --------------------------------------------------------------------------------- patch() & co. --

def test_patch_serves_torchs_classes_and_hands_on_what_it_cannot(tmp_path):
    state = {"w": torch.randn(5000)}
    with penstock.patch() as patch:
        dcp.save(state, checkpoint_id=tmp_path)
        found = {"w": torch.zeros(5000)}
        dcp.load(found, checkpoint_id=tmp_path)
        assert found["w"].equal(state["w"])

        class Derived(dcp.FileSystemWriter):
            """Knows torch's from within."""

        made = dcp.FileSystemWriter(tmp_path)
        assert isinstance(made, Writer) and isinstance(made, dcp.FileSystemWriter)
        assert not isinstance(Derived(tmp_path), Writer) and not isinstance(3, Writer)
        assert isinstance(Derived(tmp_path), dcp.FileSystemWriter)
        assert not isinstance(dcp.FileSystemWriter(tmp_path, single_file_per_rank=False), Writer)
        name = "torch.distributed.checkpoint.filesystem.FileSystem"
        assert patch.served[name + "Writer"] == 2 and patch.served[name + "Reader"] == 1
        assert sum(count for (what, _), count in patch.handed_on.items() if name in what) == 1
    assert dcp.FileSystemWriter is FileSystemWriter


def _lightnings_base():
    """As lightning has it, where that is not installed."""
    class CheckpointIO(abc.ABC):
        @abc.abstractmethod
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            """Of the trainer."""

        @abc.abstractmethod
        def load_checkpoint(self, path, map_location=None, weights_only=None):
            """Of the trainer."""

        @abc.abstractmethod
        def remove_checkpoint(self, path):
            """Of the trainer."""

        def teardown(self):
            """Of the trainer."""

    return CheckpointIO


def test_lightning_saves_and_loads_through_penstock(tmp_path, monkeypatch):
    try:
        import lightning.pytorch.plugins.io  # noqa: F401
    except ImportError:
        module = types.ModuleType("lightning.pytorch.plugins.io")
        module.CheckpointIO = _lightnings_base()
        for name in ("lightning", "lightning.pytorch", "lightning.pytorch.plugins"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "penstock.lightning", raising=False)
    from penstock.lightning import CheckpointIO

    plugin, path = CheckpointIO(memory_limit=8 << 20), tmp_path / "a/b/last.ckpt"
    state = {"state_dict": {"w": torch.randn(5000)}, "epoch": 3}
    plugin.save_checkpoint(state, path)
    assert torch.load(path)["epoch"] == 3
    found = plugin.load_checkpoint(path)
    assert found["state_dict"]["w"].equal(state["state_dict"]["w"])
    assert penstock.last_report().digested_bytes == 20_000
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint(state, path, storage_options={})
    plugin.remove_checkpoint(path)
    assert not path.exists()


# ------------------------------------------------------------------------------------ many ranks --

@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["reshard", "fsdp", "kill", "fail"])
def test_ranks_on_one_machine(tmp_path, scenario):
    """reshard: DTensors of 2 ranks go to 3 and on to 1. fsdp: the same of fully_shard with its
    optimizer, by async_save. kill: each rank at each moment of a save, and at random ones; what is
    there stays loadable. fail: saves that fail again and again leave no more than one did, and
    ranks that do not share a folder are told so."""
    program = Path(__file__).with_name("dcp_ranks.py")
    done = subprocess.run([sys.executable, program, scenario, tmp_path], text=True, timeout=300,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(PACKAGE)})
    assert done.returncode == 0, done.stdout[-3000:]
