# SPDX-License-Identifier: MIT
"""penstock.File, fromfile and tofile: bytes between files and the memory of anybody.

What needs CUDA memory runs in a process of its own over the fake driver.
"""
import array
import copy
import errno
import gc
import mmap
import os
import pickle
import signal
import textwrap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch

import penstock
from support import MIB, PACKAGE, Talk, environment, outcome, python

FAKES = PACKAGE.parent / "tests/fakes"


def noise(size: int, seed: int = 0) -> bytes:
    return numpy.random.default_rng(seed).bytes(size)


@pytest.fixture
def source(tmp_path):
    """A file of 3 MiB and a bit, and its bytes."""
    data = noise(3 * MIB + 77)
    path = tmp_path / "source.bin"
    path.write_bytes(data)
    return path, data


def alone(path: Path) -> bool:
    """Is there nothing beside it, such as a half-written file?"""
    return os.listdir(path.parent) == [path.name]


# -------------------------------------------------------------------------------------- buffers --

BUFFERS = {
    "bytearray": bytearray,
    "memoryview": lambda size: memoryview(bytearray(size)),
    "array.array": lambda size: array.array("B", bytes(size)),
    "mmap": lambda size: mmap.mmap(-1, size),
    "numpy uint8": lambda size: numpy.zeros(size, numpy.uint8),
    "numpy 2-D": lambda size: numpy.zeros((2, size // 8, 4), numpy.uint8),
    "numpy dates": lambda size: numpy.zeros(size // 8, "datetime64[s]"),
    "numpy records": lambda size: numpy.zeros(size // 8, [("a", "<i4"), ("b", ">f4")]),
    "torch float32": lambda size: torch.zeros(size // 4),
    "torch bfloat16 2-D": lambda size: torch.zeros((size // 8, 4), dtype=torch.bfloat16),
    "torch float8": lambda size: torch.zeros(size, dtype=torch.float8_e4m3fn),
    "torch complex": lambda size: torch.zeros(size // 8, dtype=torch.complex64),
    "torch bool": lambda size: torch.zeros(size, dtype=torch.bool),
    "torch parameter": lambda size: torch.nn.Parameter(torch.zeros(size // 4)),
    "torch part": lambda size: torch.zeros(size // 4 + 10)[7:-3],
}


def content(buffer) -> bytes:
    if isinstance(buffer, torch.Tensor):
        return buffer.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(buffer, numpy.ndarray):
        return buffer.tobytes()
    return bytes(buffer)


@pytest.mark.parametrize("kind", BUFFERS)
def test_every_kind_of_memory_is_read_into_and_written_from(tmp_path, source, kind):
    path, data = source
    size = 1 * MIB
    buffer = BUFFERS[kind](size)
    with penstock.File(path) as file:
        assert file.read(buffer, file_offset=123) == size
    wanted = data[123:123 + size]
    assert content(buffer) == wanted
    with penstock.File(tmp_path / "out", "w") as file:
        assert file.write(buffer) == size
    assert (tmp_path / "out").read_bytes() == wanted


def test_bfloat16_of_numpy(tmp_path, source):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    path, data = source
    got = numpy.zeros(1000, ml_dtypes.bfloat16)
    with penstock.File(path) as file:
        assert file.read(got) == 2000
    assert got.tobytes() == data[:2000]


def test_arrays_without_dimensions(source):
    path, data = source
    number, tensor = numpy.zeros((), "<i8"), torch.zeros((), dtype=torch.int64)
    with penstock.File(path) as file:
        assert file.read(number) == file.read(tensor) == 8
    assert number == tensor.item() == int.from_bytes(data[:8], "little", signed=True)


def test_what_is_read_only_can_be_written_to_a_file(tmp_path):
    jax = pytest.importorskip("jax")
    fixed = numpy.arange(5)
    fixed.flags.writeable = False
    for thing in (b"bytes", fixed, memoryview(b"view"), jax.numpy.arange(6.0), numpy.float64(3.5)):
        penstock.tofile(thing, tmp_path / "out")
        wanted = bytes(thing) if isinstance(thing, (bytes, memoryview)) else \
            numpy.asarray(thing).tobytes()
        assert (tmp_path / "out").read_bytes() == wanted


def test_what_is_read_only_is_not_read_into(source):
    jax = pytest.importorskip("jax")
    path, _ = source
    fixed = numpy.zeros(5)
    fixed.flags.writeable = False
    numbers = jax.numpy.zeros(3)
    with penstock.File(path) as file:
        for thing in (b"bytes", memoryview(b"view"), fixed, numbers):
            with pytest.raises(ValueError, match="read-only"):
                file.read(thing)
    assert not fixed.any() and not numbers.any()


@pytest.mark.parametrize("thing", [
    numpy.zeros((4, 4))[:, 1], numpy.zeros(9)[::2], numpy.asfortranarray(numpy.zeros((3, 4))),
    torch.zeros(4, 4).t(), torch.zeros(9)[::2], memoryview(bytearray(9))[::2],
], ids=["column", "every second", "Fortran", "transposed", "steps", "memoryview"])
def test_what_is_not_contiguous_is_refused(tmp_path, source, thing):
    with penstock.File(source[0]) as file, pytest.raises(ValueError, match="contiguous"):
        file.read(thing)
    with pytest.raises(ValueError, match="contiguous"):
        penstock.tofile(thing, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [-1, 1 << 63, 1 << 64, 1 << 70])
def test_a_size_that_no_file_has_is_refused(tmp_path, size):
    with pytest.raises(ValueError, match="in bytes"):
        penstock.File(tmp_path / "out", "w", size=size)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [None, "x", 2.5, [], b"1"], ids=repr)
def test_a_size_that_is_no_number_is_refused(tmp_path, size):
    with pytest.raises(TypeError, match="as an integer"):
        penstock.File(tmp_path / "out", "w", size=size)


@pytest.mark.parametrize("arguments", [
    {"dtype": "nope"}, {"dtype": "zeros"}, {"dtype": numpy.float32}, {"dtype": 3},
    {"dtype": torch.float32, "device": "nope"}, {"dtype": torch.float32, "device": -1},
    {"dtype": torch.float32, "device": 2.5}, {"dtype": torch.float32, "device": "meta"},
], ids=str)
def test_an_array_that_torch_cannot_make_is_refused(source, arguments):
    with pytest.raises(penstock.Error) as caught:
        penstock.fromfile(source[0], like="torch", **arguments)
    assert isinstance(caught.value, ValueError)


def test_open_files_are_not_copied(tmp_path, few):
    with penstock.File(tmp_path / "out", "w") as file, penstock.safe_open(few[0]) as opened:
        for thing in (file, opened):
            for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="open the file again"):
                    attempt(thing)
        file.write(b"content")
    assert (tmp_path / "out").read_bytes() == b"content"


COMPLEX = torch.tensor([[1 + 2j, 3 - 4j]], dtype=torch.complex64)
ROWS = torch.arange(12.0).reshape(3, 4)
# What cannot be written as it is, and what each message advises, word by word.
ADVICE = {
    ".contiguous()": torch.Tensor.contiguous,
    ".resolve_conj()": torch.Tensor.resolve_conj,
    ".resolve_neg()": torch.Tensor.resolve_neg,
    ".to_dense()": torch.Tensor.to_dense,
    ".to_padded_tensor(0)": lambda tensor: tensor.to_padded_tensor(0),
    "torch.empty_like(tensor, device='cpu')": lambda tensor: torch.empty_like(tensor, device="cpu"),
    "numpy.ascontiguousarray()": numpy.ascontiguousarray,
}
NOT_AS_THEY_ARE = {
    "transposed": lambda: ROWS.T,
    "expanded": lambda: torch.ones(1).expand(3),
    "conjugated": lambda: COMPLEX.conj(),
    "conjugated and transposed": lambda: COMPLEX.mH,
    "negated": lambda: torch._neg_view(ROWS),
    "imaginary part of a conjugate": lambda: COMPLEX.conj().imag,
    "sparse": lambda: ROWS.to_sparse(),
    "sparse rows": lambda: ROWS.to_sparse_csr(),
    "mkldnn": lambda: ROWS.to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([ROWS, ROWS]),
    "jagged": lambda: torch.nested.nested_tensor([ROWS, ROWS], layout=torch.jagged),
    "meta": lambda: ROWS.to("meta"),
    "Fortran": lambda: numpy.asfortranarray(ROWS.numpy()),
    "memoryview": lambda: memoryview(bytearray(b"12345678"))[::2],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", NOT_AS_THEY_ARE)
def test_what_the_message_advises_helps(tmp_path, case):
    thing = NOT_AS_THEY_ARE[case]()
    followed = []
    while (error := outcome(lambda: penstock.tofile(thing, tmp_path / "out"))[1]) is not None:
        assert isinstance(error, ValueError), error
        advised = [words for words in ADVICE if words in str(error)]
        assert len(advised) == 1 and advised[0] not in followed, error
        followed += advised
        thing = ADVICE[advised[0]](thing)
    assert followed
    plain = NOT_AS_THEY_ARE[case]()
    if case in ("transposed", "expanded", "Fortran") or "conj" in case or case == "negated":
        plain = plain.resolve_conj().resolve_neg() if torch.is_tensor(plain) else plain
        assert (tmp_path / "out").read_bytes() == numpy.asarray(plain).tobytes()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [name for name, make in NOT_AS_THEY_ARE.items()
                                  if name not in ("Fortran", "memoryview", "nested", "jagged")])
def test_what_cannot_be_filled_says_what_can(tmp_path, source, case):
    """In File.read() and load_file(into=) alike."""
    tensor = NOT_AS_THEY_ARE[case]()
    new = torch.empty(tensor.shape, dtype=tensor.dtype)
    penstock.save_file({"a": new}, tmp_path / "x.safetensors")
    with penstock.File(source[0]) as file:
        with pytest.raises(ValueError, match=r"new one of torch.empty\(\)"):
            file.read(tensor)
        assert file.read(new) == new.nbytes
    with pytest.raises(ValueError, match=r"new one of torch.empty\(\)"):
        penstock.load_file(tmp_path / "x.safetensors", into={"a": tensor})
    penstock.load_file(tmp_path / "x.safetensors", into={"a": new})


def test_a_tensor_that_only_stands_for_another_is_refused(tmp_path):
    from torch._subclasses import FakeTensorMode

    for tensor in (FakeTensorMode().from_tensor(ROWS), torch._to_functional_tensor(ROWS)):
        for call in (lambda: penstock.tofile(tensor, tmp_path / "out"),
                     lambda: penstock.save_file({"name": tensor}, tmp_path / "out")):
            with pytest.raises(ValueError, match="no memory of its own"):
                call()
    assert os.listdir(tmp_path) == []


def test_things_without_bytes_are_refused(source):
    with penstock.File(source[0]) as file:
        for thing in (5, "text", None, [1, 2], object()):
            with pytest.raises(TypeError, match="tensor, an array or a bytearray"):
                file.read(thing)
        for thing in (numpy.empty(3, object), memoryview(numpy.empty(3, object))):
            with pytest.raises(ValueError, match="Python objects"):
                file.read(thing)
        with pytest.raises(ValueError, match="meta"):
            file.read(torch.empty(3, device="meta"))


def test_a_buffer_in_use_cannot_change_its_size():
    with penstock.File("pattern:8M,rate=40M") as file:
        buffer = bytearray(8 * MIB)
        future = file.read_async(buffer)
        with pytest.raises(BufferError):
            buffer.append(1)
        future.get()
        buffer.append(1)


# ------------------------------------------------------------------------- sizes and offsets --

@pytest.mark.parametrize("file_offset,dev_offset,size", [
    (0, 0, None), (0, 0, 1), (1, 3, 4095), (4096, 4096, 8192), (511, 513, MIB), (77, 0, 2 * MIB),
])
def test_sizes_and_offsets(tmp_path, source, file_offset, dev_offset, size):
    path, data = source
    buffer = bytearray(len(data))
    count = len(data) if size is None else size
    with penstock.File(path) as file:
        assert file.read(buffer, size, file_offset, dev_offset) == count
    wanted = bytearray(len(data))
    wanted[dev_offset:dev_offset + count] = data[file_offset:file_offset + count]
    assert buffer == wanted
    with penstock.File(tmp_path / "out", "w") as file:
        assert file.write(data, size, file_offset, dev_offset) == count
        assert file.nbytes() == file_offset + count
    # What nobody wrote is zero.
    assert (tmp_path / "out").read_bytes() == bytes(file_offset) + \
        data[dev_offset:dev_offset + count]


def test_reading_ends_with_the_file(source):
    path, data = source
    buffer = bytearray(100)
    with penstock.File(path) as file:
        assert file.nbytes() == len(data)
        assert file.read(buffer, file_offset=len(data) - 10) == 10
        assert buffer == data[-10:] + bytes(90)
        assert file.read(buffer, file_offset=len(data)) == 0
        assert file.read(buffer, file_offset=10 * len(data)) == 0
        assert file.read(buffer, size=0, file_offset=10 * len(data)) == 0
        with pytest.raises(penstock.Error) as caught:
            file.read(buffer, size=11, file_offset=len(data) - 10)
    assert caught.value.errno == errno.ERANGE and caught.value.filename == str(path)
    assert "Leave size out" in caught.value.hint


def test_nothing_is_moved_where_there_is_no_room(tmp_path, source):
    for nothing in (bytearray(), numpy.zeros(0), torch.zeros(0), numpy.zeros((3, 0))):
        with penstock.File(source[0]) as file:
            assert file.read(nothing) == 0 and file.read(nothing, 0) == 0
        penstock.tofile(nothing, tmp_path / "empty")
        assert (tmp_path / "empty").read_bytes() == b""
    with penstock.File(tmp_path / "empty") as file:
        assert file.nbytes() == 0 and file.read(bytearray(5)) == 0


@pytest.mark.parametrize("wrong", [
    {"file_offset": -1}, {"file_offset": 1 << 64}, {"file_offset": (1 << 63) - 5}, {"size": -1},
    {"size": 101}, {"size": 1 << 64}, {"dev_offset": -1}, {"dev_offset": 101},
    {"size": 51, "dev_offset": 50},
])
def test_bad_numbers_are_refused_before_anything_moves(tmp_path, source, wrong):
    buffer = bytearray(100)
    with penstock.File(source[0]) as file, pytest.raises(ValueError):
        file.read(buffer, **wrong)
    with penstock.File(tmp_path / "out", "w") as file:
        with pytest.raises(ValueError):
            file.write(buffer, **wrong)
        assert file.nbytes() == 0
    assert buffer == bytes(100) and (tmp_path / "out").read_bytes() == b""


@pytest.mark.parametrize("wrong", [{"size": 1.5}, {"file_offset": "1"}, {"dev_offset": None}])
def test_what_is_no_number_is_refused(source, wrong):
    with penstock.File(source[0]) as file, pytest.raises(TypeError):
        file.read(bytearray(10), **wrong)


def test_numbers_of_numpy_are_numbers(source):
    path, data = source
    buffer = bytearray(10)
    with penstock.File(path) as file:
        assert file.read(buffer, numpy.int64(5), numpy.uint32(7), numpy.int8(2)) == 5
    assert buffer[2:7] == data[7:12]


# ------------------------------------------------------------------------------- opening, names --

def test_errors_have_words(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        penstock.File(tmp_path / "absent")
    assert isinstance(caught.value, penstock.Error) and "absent" in str(caught.value)
    with pytest.raises(penstock.Error):
        penstock.File(tmp_path / "absent", "r+")
    with pytest.raises(IsADirectoryError):
        penstock.File(tmp_path)
    with pytest.raises(penstock.Error, match="Create the directory"):
        penstock.File(tmp_path / "no/such/folder", "w")
    assert os.listdir(tmp_path) == []


def test_modes_are_three(tmp_path):
    for mode in ("w+", "a", "x", "rb", "", "read"):
        with pytest.raises(ValueError, match="mode is 'r', 'w' or 'r\\+'"):
            penstock.File(tmp_path / "x", mode)
    for size, mode in ((-1, "w"), (5, "r"), (5, "r+")):
        with pytest.raises(ValueError, match="size"):
            penstock.File(tmp_path / "x", mode, size=size)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_may_not_be_written_shows_at_once(source):
    source[0].chmod(0o400)
    with pytest.raises(PermissionError):
        penstock.File(source[0], "r+")


def test_bytes_and_paths_are_names(tmp_path, source):
    for name in (str(source[0]), os.fsencode(source[0]), source[0]):
        with penstock.File(name) as file:
            assert file.read(bytearray(3)) == 3
    odd = os.fsencode(tmp_path) + b"/\xff\xfe name"
    penstock.tofile(b"odd", odd)
    assert penstock.fromfile(odd, "u1").tobytes() == b"odd"
    with penstock.File(odd) as file, pytest.raises(penstock.Error):
        file.read(bytearray(10), 10)


def test_the_wrong_direction_is_refused(tmp_path, source):
    with penstock.File(source[0]) as file, pytest.raises(ValueError, match="mode 'r'"):
        file.write(b"abc")
    with penstock.File(tmp_path / "out", "w") as file, pytest.raises(ValueError, match="mode 'w'"):
        file.read(bytearray(3))


def test_a_closed_file_says_so(tmp_path, source):
    for mode, path in (("r", source[0]), ("r+", source[0]), ("w", tmp_path / "out")):
        file = penstock.File(path, mode)
        assert not file.closed
        file.close()
        file.close()
        assert file.closed and "closed" in repr(file)
        for call in (lambda: file.read(bytearray(1)), lambda: file.write(b"a"), file.nbytes,
                     file.flush, file.__enter__, lambda: file.read_async(bytearray(1))):
            with pytest.raises(ValueError, match="closed"):
                call()


def test_options_are_honoured(tmp_path, source):
    path, data = source
    with pytest.raises(penstock.Error, match="transfer"):
        penstock.File(path, transfer="warp")
    buffer = bytearray(len(data))
    with penstock.File(path, transfer="CPU_ONLY", memory_limit=1 * MIB) as file:
        file.read(buffer)
        assert penstock.last_report().pinned_bytes <= 1 * MIB
    assert buffer == data
    with penstock.File(path, transfer="MAPPED") as file, pytest.raises(penstock.Error):
        file.read(buffer)


def test_reports_and_bars(capfd, source):
    path, data = source
    with penstock.File(path) as file:
        file.read(bytearray(len(data)), progress=True)
    report = penstock.last_report()
    assert report.bytes == len(data) and report.device == "host"
    assert sum(part.bytes for part in report.paths) == len(data)
    assert "source.bin: 100%" in capfd.readouterr().err


def test_relative_names_survive_a_change_of_folder(monkeypatch, source):
    path, data = source
    monkeypatch.chdir(path.parent)
    with penstock.File("source.bin", "r+") as file:
        monkeypatch.chdir("/")
        file.write(b"new", file_offset=5)
        buffer = bytearray(10)
        file.read(buffer)
    assert buffer == data[:5] + b"new" + data[8:10]


# ---------------------------------------------------------------------------- writing a new file --

def test_a_new_file_appears_at_close(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    with penstock.File(path, "w") as file:
        file.write(b"new content")
        assert path.read_text() == "old" and alone(path)
    assert path.read_text() == "new content" and alone(path)


def test_an_exception_leaves_the_old_file(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    with pytest.raises(KeyError, match="mine"):
        with penstock.File(path, "w") as file:
            file.write(b"new")
            file.write_async(noise(MIB), file_offset=3)
            raise KeyError("mine")
    assert file.closed and path.read_text() == "old" and alone(path)


def test_a_file_is_written_where_it_was_opened(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with penstock.File("out.bin", "w") as file:
        file.write(noise(5000))
        os.chdir("../b")
    assert (tmp_path / "a" / "out.bin").read_bytes() == noise(5000)
    assert not os.listdir(tmp_path / "b")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    with pytest.raises(penstock.Error):
        with penstock.File(path, "w", size=10) as file:
            file.write(bytes(11))
    assert path.read_text() == "old" and alone(path)


def test_space_can_be_reserved(tmp_path):
    path = tmp_path / "out"
    with penstock.File(path, "w", size=5000) as file:
        assert file.nbytes() == 5000
        file.write(b"end", file_offset=4997)
    assert path.read_bytes() == bytes(4997) + b"end"
    with pytest.raises(penstock.Error) as caught:
        penstock.File(path, "w", size=1 << 60)
    assert caught.value.operation and path.stat().st_size == 5000 and alone(path)


def test_a_file_that_is_not_closed_does_not_appear_and_says_so(tmp_path):
    path = tmp_path / "out"
    file = penstock.File(path, "w")
    file.write(b"lost")
    with pytest.warns(RuntimeWarning, match="never closed: it does not exist"):
        del file
        gc.collect()
    assert os.listdir(tmp_path) == []


def test_the_loss_is_shown_without_any_setting(tmp_path):
    done = python("import penstock, sys; f = penstock.File(sys.argv[1], 'w'); f.write(b'lost')",
                  tmp_path / "out")
    assert "never closed" in done.stderr and os.listdir(tmp_path) == []


def test_files_that_were_read_and_not_closed_warn_as_python_s_do(source):
    for mode in ("r", "r+"):
        file = penstock.File(source[0], mode)
        with pytest.warns(ResourceWarning, match="unclosed file"):
            del file
            gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FileNotFoundError):
            penstock.File("/absent/file")
        gc.collect()


KILLED = """
    import penstock, sys
    f = penstock.File(sys.argv[1], "w")
    data = bytearray(64 << 20)
    f.write(data)
    for i in range(1000):
        f.write_async(data, file_offset=i * len(data) % (1 << 30))
        if not i:
            print("writing")
"""


def test_killed_in_the_middle_nothing_is_left(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    with Talk(KILLED, path) as talk:
        assert talk.line() == "writing"
        talk.process.send_signal(signal.SIGKILL)
        talk.process.wait()
    assert path.read_text() == "old" and alone(path)


# ------------------------------------------------------------------------------------ in place --

def test_reads_see_what_was_written_before(source):
    path, data = source
    model = bytearray(data)
    random = numpy.random.default_rng(3)
    with penstock.File(path, "r+") as file:
        for turn in range(60):
            at = int(random.integers(0, len(model) - 1))
            size = int(random.integers(0, min(200_000, len(model) - at)))
            if turn % 3:
                piece = noise(size, turn)
                assert file.write(piece, file_offset=at) == size
                model[at:at + size] = piece
            else:
                buffer = bytearray(size)
                assert file.read(buffer, file_offset=at) == size
                assert buffer == model[at:at + size]
    assert path.read_bytes() == model


def test_writes_that_nobody_waited_for_are_seen_too(source):
    path, data = source
    with penstock.File(path, "r+") as file:
        for i in range(20):
            file.write_async(bytes([i]) * 1000, file_offset=i * 1000)
        buffer = bytearray(20_000)
        file.read(buffer)
    assert buffer == b"".join(bytes([i]) * 1000 for i in range(20))


def test_a_read_under_way_is_not_disturbed_by_a_write(tmp_path):
    path = tmp_path / "big"
    path.write_bytes(bytes(64 * MIB))
    with penstock.File(path, "r+") as file:
        buffer = bytearray(64 * MIB)
        reading = file.read_async(buffer)
        file.write(b"x" * MIB)
        assert reading.get() == 64 * MIB and not any(buffer[:MIB])


def test_writing_beyond_the_end_grows_the_file(source):
    path, data = source
    with penstock.File(path, "r+") as file:
        file.write(b"more", file_offset=len(data))
        assert file.nbytes() == len(data) + 4
        file.write(b"far", file_offset=len(data) + 100_000)
        buffer = bytearray(20)
        assert file.read(buffer, file_offset=len(data) - 2) == 20
        assert buffer == data[-2:] + b"more" + bytes(14)
    assert path.read_bytes() == data + b"more" + bytes(99_996) + b"far"


def test_flush_may_be_called_at_any_time(source):
    path, data = source
    with penstock.File(path, "r+") as file:
        file.flush()
        file.write_async(b"one")
        file.flush()
        file.flush()
        file.write(b"two", file_offset=3)
        file.flush()
    assert path.read_bytes()[:7] == b"onetwo" + data[6:7]


def test_after_an_exception_what_was_written_in_place_stays(source):
    path, data = source
    with pytest.raises(KeyError):
        with penstock.File(path, "r+") as file:
            file.write_async(b"stays" * 1000)
            raise KeyError
    assert path.read_bytes() == b"stays" * 1000 + data[5000:]


def test_a_file_that_grows_meanwhile_is_read_as_it_is_now(source):
    path, data = source
    with penstock.File(path) as file:
        buffer = bytearray(4)
        assert file.read(buffer) == 4
        with open(path, "ab") as other:
            other.write(b"tail")
        assert file.nbytes() == len(data) + 4
        assert file.read(buffer, file_offset=len(data)) == 4 and buffer == b"tail"


def test_a_file_that_is_replaced_meanwhile_is_still_the_old_one(tmp_path, source):
    path, data = source
    with penstock.File(path) as file:
        (tmp_path / "other").write_text("other")
        os.replace(tmp_path / "other", path)
        buffer = bytearray(len(data))
        assert file.read(buffer) == len(data) and buffer == data
        path.unlink()
        assert file.read(buffer) == len(data)


def test_a_replaced_file_is_not_written_to_by_mistake(tmp_path, source):
    path, _ = source
    with penstock.File(path, "r+") as file:
        file.write(b"mine")
        file.flush()
        (tmp_path / "other").write_text("other")
        os.replace(tmp_path / "other", path)
        for call in (lambda: file.write(b"mine"), lambda: file.read(bytearray(4))):
            with pytest.raises(penstock.Error) as caught:
                call()
            assert caught.value.errno == errno.ESTALE
    assert path.read_text() == "other"


# ------------------------------------------------------------------------------------- futures --

def test_many_reads_at_once(source):
    path, data = source
    step = 100_001
    with penstock.File(path) as file:
        buffers = [bytearray(step) for _ in range(0, len(data), step)]
        futures = [file.read_async(b, file_offset=i * step) for i, b in enumerate(buffers)]
        assert sum(future.get() for future in futures) == len(data)
    assert b"".join(buffers)[:len(data)] == data


def test_many_writes_at_once(tmp_path):
    data, step = noise(3 * MIB + 5), 100_001
    with penstock.File(tmp_path / "out", "w") as file:
        futures = [file.pwrite(data, min(step, len(data) - at), at, at)
                   for at in range(0, len(data), step)]
        assert sum(future.get() for future in futures) == len(data)
    assert (tmp_path / "out").read_bytes() == data


def test_futures_that_nobody_waited_for_are_done_at_close(tmp_path, source):
    path, data = source
    buffer = bytearray(len(data))
    with penstock.File(path) as file:
        file.read_async(buffer)
    assert buffer == data
    with penstock.File(tmp_path / "out", "w") as file:
        for at in range(0, len(data), MIB):
            file.write_async(data[at:at + MIB], file_offset=at)
    assert (tmp_path / "out").read_bytes() == data


def test_get_may_be_called_again_and_from_threads(source):
    path, data = source
    with penstock.File(path) as file, ThreadPoolExecutor(4) as pool:
        future = file.read_async(bytearray(len(data)))
        assert [f.result() for f in [pool.submit(future.get) for _ in range(8)]] == [len(data)] * 8
        assert future.done() and future.get() == len(data)
    assert future.get() == len(data)


def test_done_does_not_wait():
    with penstock.File("pattern:256M,rate=20M") as file, ThreadPoolExecutor(1) as pool:
        future = file.read_async(bytearray(256 * MIB))
        begun = time.monotonic()
        assert not future.done()
        waiter = pool.submit(future.get)
        time.sleep(0.2)
        assert not future.done(), "while somebody else waits"
        assert time.monotonic() - begun < 5
        future.cancel()
        with pytest.raises(penstock.Error):
            waiter.result()
        assert future.done()


def test_cancelled_futures_raise_each_time():
    file = penstock.File("pattern:1G,rate=50M")
    future = file.read_async(bytearray(200 * MIB))
    future.cancel()
    for _ in range(2):
        with pytest.raises(penstock.Error) as caught:
            future.get()
        assert caught.value.errno == errno.ECANCELED
    assert future.done()
    future.cancel()
    file.close()


def test_a_failed_write_that_nobody_asked_for_is_raised_by_close(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    file = penstock.File(path, "w")
    file.write_async(bytes(256 * MIB)).cancel()
    with pytest.raises(penstock.Error) as caught:
        file.close()
    assert caught.value.errno == errno.ECANCELED
    assert file.closed and path.read_text() == "old" and alone(path)


def test_a_failure_that_was_told_is_not_told_again(tmp_path):
    path = tmp_path / "out"
    with penstock.File(path, "w") as file:
        future = file.write_async(bytes(256 * MIB))
        future.cancel()
        with pytest.raises(penstock.Error):
            future.get()
        file.write(b"fine after all")
    assert path.read_bytes()[:14] == b"fine after all"


def test_a_future_outlives_its_file(source):
    path, data = source
    buffer = bytearray(len(data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        future = penstock.File(path).read_async(buffer)
        gc.collect()
    assert future.get() == len(data) and buffer == data


def test_futures_dropped_with_their_file_stop():
    begun = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        file = penstock.File("pattern:4G,rate=20M")
        file.read_async(bytearray(64 * MIB))
        del file
        gc.collect()
    assert time.monotonic() - begun < 20


def test_threads_share_a_file(tmp_path):
    path = tmp_path / "shared"
    path.write_bytes(bytes(64 * 4096))

    def work(number):
        for turn in range(5):
            piece = bytes([number + 1]) * 4096
            file.write(piece, file_offset=number * 4096)
            buffer = bytearray(4096)
            file.read(buffer, file_offset=number * 4096)
            assert buffer == piece

    with penstock.File(path, "r+") as file, ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(64)))
    assert path.read_bytes() == b"".join(bytes([n + 1]) * 4096 for n in range(64))


INTERRUPTED = """
    import penstock, sys, threading
    path = sys.argv[1]
    buffer = bytearray(256 << 20)
    try:
        with penstock.File(path, "w") as out, penstock.File("pattern:1G,rate=10M") as file:
            out.write(b"new")
            future = file.read_async(buffer)
            print("reading")
            WAIT
    except KeyboardInterrupt:
        print("interrupted", out.closed, file.closed)
    try:
        future.get()
    except penstock.Error as error:
        print(error.errno)
"""


@pytest.mark.parametrize("waiting", ["future.get()", "file.close()",
                                     "file.read(bytearray(200 << 20))", "threading.Event().wait()"])
def test_ctrl_c_stops_at_once_and_commits_nothing(tmp_path, waiting):
    path = tmp_path / "out"
    path.write_text("old")
    with Talk(INTERRUPTED.replace("WAIT", waiting), path) as talk:
        assert talk.line() == "reading"
        time.sleep(0.3)
        begun = time.monotonic()
        talk.interrupt()
        assert talk.line() == "interrupted True True"
        assert time.monotonic() - begun < 5
        assert talk.line() == str(errno.ECANCELED)
        talk.end()
    assert path.read_text() == "old" and alone(path)


# --------------------------------------------------------------------------------- KvikIO's way --

def test_calls_as_kvikio_s_users_write_them(tmp_path):
    values = numpy.arange(1000, dtype="f4")
    file = penstock.File(tmp_path / "data", "w")
    assert file.write(values) == values.nbytes
    file.close()
    file = penstock.File(tmp_path / "data", "r")
    got = numpy.empty_like(values)
    assert file.read(got) == got.nbytes and (got == values).all()
    halves = [numpy.empty(500, "f4"), numpy.empty(500, "f4")]
    futures = [file.pread(halves[0], task_size=4096),
               file.pread(halves[1], file_offset=halves[0].nbytes)]
    assert [future.get() for future in futures] == [2000, 2000]
    assert (numpy.concatenate(halves) == values).all()
    assert file.raw_read(got, got.nbytes // 2, got.nbytes // 2, 0) == 2000
    assert (got[:500] == values[500:]).all() and not file.closed
    file.close()
    with penstock.File(tmp_path / "data", "r+") as file:
        assert file.pwrite(values[::-1].copy(), task_size=1 << 20).get() == values.nbytes
        assert file.raw_write(values, 4, 0, 4) == 4
    assert penstock.fromfile(tmp_path / "data", "f4")[[0, 1]].tolist() == [1, 998]


# --------------------------------------------------------------------------- fromfile and tofile --

@pytest.mark.parametrize("dtype", ["u1", "<f4", ">i8", "c16", "datetime64[s]", float,
                                   numpy.dtype([("a", "<i2"), ("b", "<f8")])])
def test_fromfile_is_numpy_s(source, dtype):
    path, _ = source
    for count, offset in ((-1, 0), (10, 0), (0, 0), (5, 3), (-1, 77)):
        mine = penstock.fromfile(path, dtype, count, offset)
        wanted = numpy.fromfile(path, dtype, count, offset=offset)
        assert mine.dtype == wanted.dtype and mine.tobytes() == wanted.tobytes()
        assert mine.flags.writeable
    assert penstock.fromfile(path, dtype, offset=10 * MIB).shape == (0,)


def test_fromfile_gives_torch_tensors(source, device):
    path, data = source
    for dtype in (torch.bfloat16, "bfloat16"):
        mine = penstock.fromfile(path, dtype, 100, 2, like="torch", device=device)
        assert mine.dtype == torch.bfloat16 and str(mine.device) == device
        assert content(mine.cpu()) == data[2:202]
    like = penstock.fromfile(path, torch.uint8, like=mine)
    assert like.device == mine.device and content(like.cpu()) == data
    assert penstock.fromfile(path, count=1, like="torch").dtype == torch.float64


def test_fromfile_refuses_in_words(source):
    path, data = source
    with pytest.raises(penstock.Error, match="the file has"):
        penstock.fromfile(path, "u1", len(data) + 1)
    with pytest.raises(penstock.Error, match="numpy arrays are in host memory"):
        penstock.fromfile(path, "u1", device="cuda:0")
    with pytest.raises(penstock.Error, match="'numpy', 'cupy' or 'torch'"):
        penstock.fromfile(path, "u1", like="tensorflow")
    with pytest.raises(ValueError):
        penstock.fromfile(path, object)
    with pytest.raises(ValueError):
        penstock.fromfile(path, "V0")
    with pytest.raises(ValueError, match="negative"):
        penstock.fromfile(path, "u1", offset=-1)
    with pytest.raises(FileNotFoundError):
        penstock.fromfile("/absent", "u1")


def test_tofile_is_numpy_s(tmp_path):
    for values in (numpy.arange(10), numpy.zeros((3, 4, 5)), numpy.zeros(0), torch.arange(7)):
        penstock.tofile(values, tmp_path / "mine")
        numpy.asarray(values).tofile(tmp_path / "theirs")
        assert (tmp_path / "mine").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_fromfile_and_tofile_need_no_torch(tmp_path):
    python("""
        import sys, penstock
        penstock.tofile(b"abcd", sys.argv[1])
        assert "numpy" not in sys.modules
        assert penstock.fromfile(sys.argv[1], "u1").tobytes() == b"abcd"
        assert "torch" not in sys.modules
    """, tmp_path / "x")


# ----------------------------------------------------------------------------------------- GPU --

# Memory of the fake GPU as three kinds of object: the engine's own array, one that only has the
# interface, and one that speaks DLPack alone.
ON_THE_GPU = """
    import ctypes, json, sys
    import penstock

    folder, size = sys.argv[1], int(sys.argv[2])
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(folder + "/room.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)

    def room():
        return penstock.load_file(folder + "/room.safetensors", "cuda:0", framework="dlpack")["x"]

    class Interface:
        def __init__(self, array, **more):
            self.array, self.more = array, more

        @property
        def __cuda_array_interface__(self):
            return {**self.array.__cuda_array_interface__, **self.more}

    class Capsule:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, stream=None):
            return self.array.__dlpack__()

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    def content(array):
        # Past Penstock, by the driver's own call: the CPU cannot look at the memory.
        cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        got = ctypes.create_string_buffer(size)
        assert not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        assert not cuda.cuCtxSetCurrent(context)
        assert not cuda.cuMemcpyDtoH_v2(got, ctypes.c_uint64(array.address), ctypes.c_size_t(size))
        assert not cuda.cuDevicePrimaryCtxRelease_v2(0)
        return got.raw

    data = open(folder + "/data", "rb").read()
"""


def on_the_gpu(tmp_path, code: str, size: int = 2 * MIB + 33, **env) -> str:
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip(f"there is no fake libcuda.so.1 in {FAKES}")
    (tmp_path / "data").write_bytes(noise(size))
    script = textwrap.dedent(ON_THE_GPU) + textwrap.dedent(code)
    return python(script, tmp_path, size, env=environment(
        LD_LIBRARY_PATH=str(FAKES), FAKE_CUDA_STRICT="1", **env)).stdout


def test_gpu_memory_is_read_into_and_written_from(tmp_path):
    out = on_the_gpu(tmp_path, """
        for number, kind in enumerate((lambda a: a, Interface, Capsule)):
            array = room()
            with penstock.File(folder + "/data") as file:
                assert file.read(kind(array)) == size
                assert penstock.last_report().device == "cuda:0"
            assert content(array) == data
            with penstock.File(folder + "/out", "w") as file:
                parts = [file.write_async(kind(array), min(size - at, 300000), at, at)
                         for at in range(0, size, 300000)]
                assert sum(part.get() for part in parts) == size
            assert open(folder + "/out", "rb").read() == data
            with penstock.File(folder + "/out", "r+") as file:
                file.write(kind(array), 1000, 5, 2000)
                assert file.read(kind(array), 1010, 0, 7) == 1010
            assert content(array)[7:1017] == data[:5] + data[2000:3000] + data[1005:1010]
            print(number)
    """)
    assert out.split() == ["0", "1", "2"]


def test_gpu_memory_is_freed_after_the_job_not_before(tmp_path):
    on_the_gpu(tmp_path, """
        import gc
        out = penstock.File(folder + "/out", "w")
        array = room()
        penstock.File(folder + "/data").read(array)
        future = out.write_async(array)
        del array
        gc.collect()
        future.get()
        out.close()
        assert open(folder + "/out", "rb").read() == data
    """)


def test_gpu_arrays_are_looked_at_closely(tmp_path):
    on_the_gpu(tmp_path, """
        def refused(thing, word):
            try:
                penstock.File(folder + "/data").read(thing)
            except ValueError as error:
                assert word in str(error), error
            else:
                raise AssertionError(word)

        array = room()
        address = array.address
        refused(Interface(array, strides=(2,)), "contiguous")
        refused(Interface(array, data=(address, True)), "read-only")
        refused(Interface(array, mask=1), "mask")
        half = Interface(array, shape=(10, 5), typestr="<f4", strides=(20, 4))
        assert penstock.File(folder + "/data").read(half) == 200
        one = Interface(array, shape=(1, 5), typestr="<f4", strides=(400, 4))
        assert penstock.File(folder + "/data").read(one) == 20
        none = Interface(array, shape=(0, 5), strides=(1, 1), data=(0, False))
        assert penstock.File(folder + "/data").read(none) == 0
        assert penstock.File(folder + "/data").read(Interface(array, stream=2)) == size
        assert content(array) == data
        try:
            penstock.File(folder + "/data").read(Interface(array, stream=12345))
        except penstock.Error as error:
            assert error.domain == "cuda", error
        else:
            raise AssertionError("a stream that does not exist was taken, so it was not looked at")
    """)


def test_the_second_gpu_is_the_second(tmp_path):
    on_the_gpu(tmp_path, """
        second = penstock.load_file(folder + "/room.safetensors", 1, framework="dlpack")["x"]
        for thing in (second, Capsule(second)):
            penstock.File(folder + "/data").read(thing)
            assert penstock.last_report().device == "cuda:1"
    """, FAKE_CUDA_DEVICES="2")


def test_files_and_torch_s_gpu_memory(tmp_path, source, device):
    path, data = source
    tensor = torch.zeros(len(data), dtype=torch.uint8, device=device)
    with penstock.File(path) as file:
        assert file.read(tensor) == len(data)
    assert content(tensor.cpu()) == data
    weights = torch.nn.Parameter(torch.randn(1000, 10, device=device).to(torch.bfloat16))
    penstock.tofile(weights, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content(weights.cpu())
