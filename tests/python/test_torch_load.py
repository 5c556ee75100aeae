# SPDX-License-Identifier: MIT
"""load gives what torch.load gives, verified, and refuses what is damaged or not to be trusted."""
import gc
import io
import os
import pickle
import struct
import time
import warnings
import zipfile
from functools import partial

import pytest
import torch

import penstock
from penstock import _torch_load
from support import MIB, Talk, held_below, outcome, python
from torch_objects import OBJECTS, Looker, Plain, alike, optimizer_state

SAVES = {"penstock": penstock.save, "torch": torch.save}


@pytest.fixture(params=SAVES)
def save(request):
    """Files of either."""
    return SAVES[request.param]


def both(path, **more):
    """What penstock.load gives, and what torch.load gives."""
    return (outcome(lambda: penstock.load(path, **more)), outcome(lambda: torch.load(path, **more)))


# --------------------------------------------------------------------------------- the same objec

@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_come_back_as_torch_gives_them(tmp_path, save, name):
    save(OBJECTS[name](), tmp_path / "x.pt")
    for weights_only in (True, False):
        (mine, error), (theirs, their_error) = both(tmp_path / "x.pt", weights_only=weights_only)
        assert type(error) is type(their_error)
        assert alike(mine, theirs)


def test_weights_only_is_the_default(tmp_path, save):
    save(Plain(), tmp_path / "x.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed") as error:
        penstock.load(tmp_path / "x.pt")
    assert "torch_objects.Plain" in str(error.value)
    assert "add_safe_globals" in str(error.value)
    assert penstock.load(tmp_path / "x.pt", weights_only=False) == Plain()


def test_nothing_of_a_pickle_runs_that_is_not_allowed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save([torch.ones(10), Evil()], tmp_path / "x.pt")
    with pytest.raises(pickle.UnpicklingError):
        penstock.load(tmp_path / "x.pt")
    assert not (tmp_path / "made").exists()
    penstock.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "made").exists()


def test_classes_that_are_marked_safe(tmp_path, save):
    save(Plain(), tmp_path / "x.pt")
    with torch.serialization.safe_globals([Plain]):
        assert penstock.load(tmp_path / "x.pt") == Plain()
    with pytest.raises(pickle.UnpicklingError):
        penstock.load(tmp_path / "x.pt")


def test_safe_classes_that_look_at_numbers_see_them(tmp_path, save):
    """A storage is handed out when its bytes are there, not before."""
    things = [Looker(torch.full((100_000,), float(i))) for i in range(30)]
    save(things, tmp_path / "x.pt")
    with torch.serialization.safe_globals([Looker]):
        found = penstock.load(tmp_path / "x.pt")
    assert [thing.total for thing in found] == [100_000.0 * i for i in range(30)]


@pytest.mark.parametrize("name, value, weights_only, runs", [
    ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1", False, False),
    ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1", None, True),
    ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1", True, False),
    ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0", None, False)])
def test_torchs_environment_variables_count(tmp_path, monkeypatch, name, value, weights_only, runs):
    torch.save(Plain(), tmp_path / "x.pt")
    monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (mine, error), (theirs, their_error) = both(tmp_path / "x.pt", weights_only=weights_only)
    assert type(error) is type(their_error)
    assert (error is None) == runs and mine == theirs


def test_a_pickle_module_of_the_callers(tmp_path):
    class Other:
        class Unpickler(pickle.Unpickler):
            pass

    torch.save(Plain(), tmp_path / "x.pt")
    assert penstock.load(tmp_path / "x.pt", pickle_module=pickle, weights_only=False) == Plain()
    assert penstock.load(tmp_path / "x.pt", None, Other, weights_only=False) == Plain()
    with pytest.raises(RuntimeError, match="pickle_module"):
        penstock.load(tmp_path / "x.pt", pickle_module=pickle, weights_only=True)


def test_texts_of_python_2(tmp_path):
    torch.save([torch.ones(2)], tmp_path / "x.pt")
    assert penstock.load(tmp_path / "x.pt", encoding="latin1", weights_only=False)[0].sum() == 2
    with pytest.warns(UserWarning, match="weights_only=False"):
        penstock.load(tmp_path / "x.pt", encoding="ascii")


def test_memory_is_torchs_own(tmp_path, save):
    """Tensors can grow, and each goes by itself."""
    save({"a": torch.ones(4), "b": torch.ones(16 * MIB)}, tmp_path / "x.pt")
    found = penstock.load(tmp_path / "x.pt")
    found["a"].resize_(1000)
    assert found["a"].shape == (1000,) and found["a"].untyped_storage().resizable()
    weak = found["b"].untyped_storage()._weak_ref()
    del found["b"]
    assert torch.UntypedStorage._expired(weak)


# ------------------------------------------------------------------------------------ map_locatio

def swap(storage, location):
    return storage if location == "cpu" else None


@pytest.mark.parametrize("where", [None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, {},
                                   {"cuda:0": "cpu"}, swap, lambda storage, location: storage,
                                   lambda storage, location: None],
                         ids=["none", "text", "device", "map", "empty map", "other map", "some",
                              "as it is", "nothing"])
def test_map_location(tmp_path, save, where):
    state = optimizer_state()
    save(state, tmp_path / "x.pt")
    assert alike(penstock.load(tmp_path / "x.pt", map_location=where), state)
    assert alike(penstock.load(tmp_path / "x.pt", where), state)


def test_a_function_gets_storages_and_locations(tmp_path, save):
    seen, their = [], []
    save([torch.arange(3), torch.arange(5.0), torch.empty(0)], tmp_path / "x.pt")
    for load, calls in (penstock.load, seen), (torch.load, their):
        def note(storage, location, calls=calls):
            calls.append((type(storage), storage.tolist(), location))
            return storage
        load(tmp_path / "x.pt", map_location=note)
    assert seen == their


@pytest.mark.parametrize("where", ["cuda:0", "cuda", torch.device("cuda", 0), {"cpu": "cuda:7"},
                                   "nowhere", "xpu", {"cpu": "nowhere"}], ids=str)
def test_places_that_there_are_not_fail_as_with_torch(tmp_path, where):
    if torch.cuda.is_available() and "cuda" in str(where):
        pytest.skip("there is a GPU")
    torch.save([torch.ones(3)], tmp_path / "x.pt")
    (mine, error), (_, their_error) = both(tmp_path / "x.pt", map_location=where)
    assert mine is None
    assert type(error) is type(their_error) and str(error) == str(their_error)


def on_cuda(path) -> None:
    """A file as if its tensors had been on a GPU."""
    torch.save({"a": torch.arange(3.0), "b": torch.arange(4)}, path)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        entries = {entry: file.read(entry) for entry in file.namelist()}
    assert content
    with zipfile.ZipFile(path, "w") as file:
        for name, data in entries.items():
            file.writestr(name, data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
                          if name.endswith("data.pkl") else data)


def test_files_of_gpus_come_to_the_host(tmp_path):
    on_cuda(tmp_path / "x.pt")
    for where in "cpu", {"cuda:0": "cpu"}, lambda storage, location: storage:
        (mine, error), (theirs, _) = both(tmp_path / "x.pt", map_location=where)
        assert error is None and alike(mine, theirs)
    assert penstock.load(tmp_path / "x.pt", device="cpu")["a"].tolist() == [0, 1, 2]
    if not torch.cuda.is_available():
        (_, error), (_, their_error) = both(tmp_path / "x.pt")
        assert str(error) == str(their_error) and "map_location" in str(error)


def test_a_device_is_a_short_map_location(tmp_path, save, device):
    save({"a": torch.arange(3.0)}, tmp_path / "x.pt")
    found = penstock.load(tmp_path / "x.pt", device=device)
    assert str(found["a"].device) == device and found["a"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="map_location"):
        penstock.load(tmp_path / "x.pt", device=device, map_location="cpu")


# ---------------------------------------------------------------------------------- verification --

def test_digests_of_our_files_are_compared(tmp_path):
    penstock.save({"a": torch.zeros(3 * MIB), "b": torch.ones(10)}, tmp_path / "x.pt")
    penstock.load(tmp_path / "x.pt")
    report = penstock.last_report()
    assert report.digested_bytes == report.bytes == 12 * MIB + 40
    assert report.unverified_bytes == 0


def test_crcs_of_torchs_files_are_compared(tmp_path):
    torch.save({"a": torch.zeros(3 * MIB), "b": torch.ones(10)}, tmp_path / "x.pt")
    penstock.load(tmp_path / "x.pt")
    report = penstock.last_report()
    assert (report.digested_bytes, report.unverified_bytes) == (12 * MIB + 40, 0)


def test_files_without_sums_are_unverified_and_say_so(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.zeros(MIB)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    penstock.load(tmp_path / "x.pt")
    report = penstock.last_report()
    assert (report.digested_bytes, report.unverified_bytes) == (0, 4 * MIB)
    assert "unverified" in str(report)


def test_verification_can_be_left_out_and_that_is_told(tmp_path, save):
    save({"a": torch.zeros(MIB)}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", storage_at(tmp_path / "x.pt", "data/0") + 1000)
    penstock.load(tmp_path / "x.pt", verify=False)
    report = penstock.last_report()
    assert (report.digested_bytes, report.unverified_bytes) == (0, 4 * MIB)


def storage_at(path, name: str) -> int:
    with open(path, "rb") as file:
        return torch._C.PyTorchFileReader(file).get_record_offset(name)


def flip(path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 2 * MIB, 4 * MIB - 1])
def test_a_byte_that_differs_is_named_with_file_and_tensor(tmp_path, save, at):
    save({"first": torch.ones(MIB), "model": {"second": torch.ones(MIB)}}, tmp_path / "x.pt")
    where = storage_at(tmp_path / "x.pt", "data/1")
    flip(tmp_path / "x.pt", where + at)
    with pytest.raises(penstock.Error) as error:
        penstock.load(tmp_path / "x.pt")
    assert "model.second" in str(error.value)
    assert error.value.object.endswith("x.pt")
    assert where <= error.value.offset <= where + at


def test_damage_that_would_break_the_unpickler_is_named_as_damage(tmp_path):
    """Indices out of range, for instance, are the result and not the cause."""
    penstock.save(torch.eye(200).to_sparse(), tmp_path / "x.pt")
    flip(tmp_path / "x.pt", storage_at(tmp_path / "x.pt", "data/0") + 7)
    with pytest.raises(penstock.Error, match="x.pt"):
        penstock.load(tmp_path / "x.pt")
    penstock.save(torch.eye(200).to_sparse(), tmp_path / "x.pt")
    assert penstock.load(tmp_path / "x.pt").is_sparse
    torch.save(torch.eye(20).to_sparse(), tmp_path / "y.pt")
    assert torch.load(tmp_path / "y.pt").is_sparse


@pytest.mark.filterwarnings("ignore")
def test_damage_anywhere_is_found_or_harmless(tmp_path, save):
    """Every byte of a small file, changed: an error, or the very object that was saved."""
    state = {"weights": torch.arange(40.0), "more": torch.arange(7)}
    path = tmp_path / "x.pt"
    save(state, path)
    content = path.read_bytes()
    interesting = [at for at in range(len(content))
                   if content[at] or at % 61 == 0 or content[max(at - 8, 0):at + 8].strip(b"\0")]
    errors = 0
    for at in interesting:
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x21]) + content[at + 1:])
        found, error = outcome(lambda: penstock.load(path))
        errors += error is not None
        assert error is not None or alike(found, state), f"byte {at}"
    assert errors > len(state["weights"]) * 4


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_was_cut_is_refused(tmp_path, save):
    path = tmp_path / "x.pt"
    save({"weights": torch.arange(4000.0)}, path)
    content = path.read_bytes()
    for length in {1, 2, 4, 30, 1000, 4096, len(content) // 2, len(content) - 22,
                   len(content) - 1}:
        path.write_bytes(content[:length])
        with pytest.raises(Exception) as error:
            penstock.load(path)
        assert not isinstance(error.value, (MemoryError, AssertionError)), length
        assert isinstance(error.value, penstock.Error) or length < 4, length


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "empty.pt").touch()
    with pytest.raises(EOFError, match="empty.pt"):
        penstock.load(tmp_path / "empty.pt")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.pt") as error:
        penstock.load(tmp_path / "none.pt")
    assert isinstance(error.value, penstock.Error)
    with pytest.raises(OSError):
        penstock.load(tmp_path)


def test_a_zip_of_something_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        file.writestr("readme", "hello")
    with pytest.raises(penstock.Error):
        penstock.load(tmp_path / "x.pt")


def rewritten(path, change) -> None:
    """The file with records changed: change(name, data) -> data, or None to leave it out."""
    with zipfile.ZipFile(path) as file:
        entries = [(entry, file.read(entry)) for entry in file.namelist()]
    with zipfile.ZipFile(path, "w") as file:
        for name, data in entries:
            data = change(name.split("/", 1)[1], data)
            if data is not None:
                file.writestr(name, data)


def test_a_file_that_somebody_has_compressed_is_refused_in_words(tmp_path):
    torch.save([torch.ones(1000)], tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        entries = [(entry, file.read(entry)) for entry in file.namelist()]
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in entries:
            file.writestr(name, data)
    with pytest.raises(penstock.Error, match="compressed"):
        penstock.load(tmp_path / "x.pt")


def test_a_storage_that_is_missing(tmp_path):
    torch.save([torch.ones(3), torch.ones(4)], tmp_path / "x.pt")
    rewritten(tmp_path / "x.pt", lambda name, data: None if name == "data/1" else data)
    (mine, error), (_, their_error) = both(tmp_path / "x.pt")
    assert mine is None and their_error is not None
    assert isinstance(error, penstock.Error) and "'1'" in str(error)


@pytest.mark.parametrize("size", [0, 4, 11, 13, 4096])
def test_a_storage_of_another_size_than_the_pickle_says(tmp_path, size):
    torch.save([torch.ones(3)], tmp_path / "x.pt")
    rewritten(tmp_path / "x.pt", lambda name, data: bytes(size) if name == "data/0" else data)
    with pytest.raises(penstock.Error, match="12"):
        penstock.load(tmp_path / "x.pt")


@pytest.mark.parametrize("left", [0, 4, 36])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_tensor_that_is_larger_than_its_storage(tmp_path, save, weights_only, left):
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(left)
    save([torch.zeros(3), tensor], tmp_path / "x.pt")
    with pytest.raises(penstock.Error, match=f"needs 40 bytes of storage data/1, which has {left}"):
        penstock.load(tmp_path / "x.pt", weights_only=weights_only)


def test_a_storage_that_claims_more_than_there_is(tmp_path):
    """The size in the pickle is not believed: nothing of that size is allocated."""
    torch.save([torch.ones(3)], tmp_path / "x.pt")
    rewritten(tmp_path / "x.pt", lambda name, data: data.replace(
        b"K\x03tq", b"\x8a\x07" + struct.pack("<Q", 1 << 50)[:7] + b"tq")
        if name == "data.pkl" else data)
    with pytest.raises(penstock.Error):
        penstock.load(tmp_path / "x.pt")


# ------------------------------------------------------------------------------- handed to torch --

def test_the_format_before_zip_is_torchs(tmp_path):
    torch.save([torch.ones(3)], tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert penstock.load(tmp_path / "x.pt")[0].tolist() == [1, 1, 1]
    report = penstock.last_report()
    assert report.paths[0].path == "torch" and "before zip" in report.paths[0].reason
    assert report.unverified_bytes == (tmp_path / "x.pt").stat().st_size


def test_file_objects_are_torchs(tmp_path, save):
    save([torch.ones(3)], tmp_path / "x.pt")
    with open(tmp_path / "x.pt", "rb") as file:
        assert penstock.load(file)[0].tolist() == [1, 1, 1]
    assert penstock.load(io.BytesIO((tmp_path / "x.pt").read_bytes()))[0].tolist() == [1, 1, 1]


def test_mapping_is_torchs(tmp_path, save):
    save([torch.ones(3)], tmp_path / "x.pt")
    assert penstock.load(tmp_path / "x.pt", mmap=True)[0].tolist() == [1, 1, 1]
    assert penstock.last_report().paths[0].path == "torch"


def test_meta_is_torchs(tmp_path, save):
    save([torch.ones(3)], tmp_path / "x.pt")
    for where in "meta", torch.device("meta"):
        assert penstock.load(tmp_path / "x.pt", map_location=where)[0].is_meta


def test_fake_tensors_are_torchs(tmp_path, save):
    from torch._subclasses.fake_tensor import FakeTensorMode

    save([torch.ones(3)], tmp_path / "x.pt")
    with FakeTensorMode():
        assert penstock.load(tmp_path / "x.pt")[0].shape == (3,)


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_torchs(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "x.pt")
    assert penstock.load(tmp_path / "x.pt", weights_only=False)(torch.ones(2)).shape == (2,)
    with pytest.raises(RuntimeError, match="TorchScript"):
        penstock.load(tmp_path / "x.pt")


def test_bytes_in_another_order_are_torchs(tmp_path):
    torch.save([torch.arange(3.0)], tmp_path / "x.pt")
    rewritten(tmp_path / "x.pt", lambda name, data: b"big" if name == "byteorder" else data)
    (mine, _), (theirs, _) = both(tmp_path / "x.pt")
    assert alike(mine, theirs)
    assert penstock.last_report().paths[0].path == "torch"


def test_safetensors_are_what_torch_makes_of_them(tmp_path, few):
    path, tensors = few
    (mine, error), (theirs, their_error) = both(path)
    # Before torch 2.12 or so it made nothing of them.
    assert type(error) is type(their_error) and alike(mine, theirs)


def test_a_way_that_torch_does_not_have_is_not_handed_on(tmp_path):
    torch.save([torch.ones(3)], tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(penstock.Error, match="before zip"):
        penstock.load(tmp_path / "x.pt", transfer="CPU_ONLY")


# ------------------------------------------------------------------------------------- transfers --

@pytest.mark.parametrize("transfer", ["auto", 1, "1", "CPU_ONLY", "Storage->CPU", "storage->cpu"])
def test_transfer_types_of_the_host(tmp_path, save, transfer):
    state = {"a": torch.arange(100_000.0), "b": torch.arange(5)}
    save(state, tmp_path / "x.pt")
    assert alike(penstock.load(tmp_path / "x.pt", transfer=transfer), state)
    assert penstock.last_report().unverified_bytes == 0


@pytest.mark.parametrize("transfer", [0, "GPU_DIRECT", "Storage->GPU", "Storage->CPU->GPU_ASYNC",
                                      "Storage->PAGE_CACHE->CPU->GPU", "Storage->GPU_BATCH"])
def test_transfer_types_of_gpus_are_refused_without_one(tmp_path, save, transfer):
    save([torch.ones(10)], tmp_path / "x.pt")
    with pytest.raises(penstock.Error, match="use transfer type"):
        penstock.load(tmp_path / "x.pt", transfer=transfer)


def test_a_small_memory_limit_is_kept(tmp_path, save):
    save([torch.ones(16 * MIB // 4)], tmp_path / "x.pt")
    assert penstock.load(tmp_path / "x.pt", memory_limit=4 * MIB)[0].sum() == 4 * MIB
    assert penstock.last_report().pinned_bytes <= 4 * MIB


def test_progress_is_shown(tmp_path, save, capsys):
    save([torch.ones(100)], tmp_path / "x.pt")
    penstock.load(tmp_path / "x.pt", progress=True)
    assert "x.pt: 100%" in capsys.readouterr().err


def test_loading_ten_thousand_tensors(tmp_path, save, device):
    state = {f"layer.{i}": torch.full((i % 50,), float(i)) for i in range(10_000)}
    save(state, tmp_path / "x.pt")
    found = penstock.load(tmp_path / "x.pt", device=device)
    assert list(found) == list(state)
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in state.items())


# -------------------------------------------------------------------------------- ends and thread

INTERRUPTED = """
    import sys, torch, penstock

    print("go")
    try:
        while True:
            penstock.load(sys.argv[1])
    except KeyboardInterrupt:
        print("stopped")
    print(penstock.load(sys.argv[1])[0].sum().item())
"""


def test_ctrl_c_stops_a_load(tmp_path):
    penstock.save([torch.ones(MIB) for _ in range(32)], tmp_path / "x.pt")
    with Talk(INTERRUPTED, tmp_path / "x.pt") as process:
        assert process.line() == "go"
        time.sleep(0.3)
        process.interrupt()
        assert process.end()[0].split() == ["stopped", str(float(MIB))]


def test_an_error_keeps_no_file_open(tmp_path):
    """Not even until the next collection of garbage, which may be far."""
    # What brings a file into the page cache afterwards has it open meanwhile.
    load = partial(penstock.load, tmp_path / "x.pt", cache="off")
    penstock.save([torch.ones(MIB), Plain()], tmp_path / "x.pt")
    gc.collect()
    gc.disable()
    try:
        assert isinstance(outcome(load)[1], pickle.UnpicklingError)
        assert not held_below(tmp_path)
        flip(tmp_path / "x.pt", storage_at(tmp_path / "x.pt", "data/0") + 5)
        assert isinstance(outcome(load)[1], penstock.Error)
        assert not held_below(tmp_path)
    finally:
        gc.enable()


def test_a_file_that_is_replaced_meanwhile_is_read_to_its_end(tmp_path):
    """The open file is the old one."""
    penstock.save([torch.ones(MIB) for _ in range(8)], tmp_path / "x.pt")
    code = """
        import sys, torch, penstock
        for turn in range(40):
            penstock.save([torch.full((1 << 20,), float(turn)) for _ in range(8)], sys.argv[1])
    """
    with Talk(code, tmp_path / "x.pt") as process:
        while process.process.poll() is None:
            found = penstock.load(tmp_path / "x.pt")
            assert len({tensor[0].item() for tensor in found}) == 1
        process.end()


def test_loading_needs_no_torch_before_it_is_called(tmp_path):
    torch.save([torch.ones(3)], tmp_path / "x.pt")
    said = python("""
        import sys, penstock
        assert "torch" not in sys.modules
        print(penstock.load(sys.argv[1])[0].tolist())
    """, tmp_path / "x.pt").stdout
    assert said.strip() == "[1.0, 1.0, 1.0]"


# ----------------------------------------------------------------------------------------- patch --

def test_what_a_patch_asks(tmp_path):
    assert _torch_load.why_torch_loads("x.pt") == ""
    assert "file" in _torch_load.why_torch_loads(io.BytesIO())
    assert _torch_load.why_torch_loads("x.pt", mmap=True)
    assert _torch_load.why_torch_loads("x.safetensors")


def test_torch_called_by_penstock_is_not_called_back(tmp_path, monkeypatch):
    """As under a patch, where torch.load is Penstock's: what is handed on ends in torch."""
    original = torch.load

    def patched(*args, **kwargs):
        serve = original if _torch_load.why_torch_loads(*args, **kwargs) else penstock.load
        return serve(*args, **kwargs)

    monkeypatch.setattr(torch, "load", patched)
    torch.save([torch.ones(2)], tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert torch.load(tmp_path / "x.pt")[0].tolist() == [1, 1]
    assert penstock.load(tmp_path / "x.pt")[0].tolist() == [1, 1]
