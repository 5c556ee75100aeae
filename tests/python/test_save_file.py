# SPDX-License-Identifier: MIT
"""save_file writes the very bytes that safetensors.torch.save_file writes, all of them or none."""
import json
import os
import pathlib
import shutil
import stat
import threading
import time
from collections import UserDict

import numpy
import pytest
import safetensors.torch
import torch

import penstock
from penstock import _penstock, _progress
from support import (DTYPES, F4, PACKAGE, Talk, assert_same, environment, held_below, outcome,
                     python, random_tensor)

theirs = safetensors.torch.save_file


def written(save, path, tensors, **more) -> bytes:
    save(tensors, path, **more)
    return path.read_bytes()


def assert_same_file(tmp_path, tensors, device="cpu", **more):
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    mine = written(penstock.save_file, tmp_path / "mine.safetensors", moved, **more)
    assert mine == written(theirs, tmp_path / "theirs.safetensors", tensors, **more)


def header(content: bytes) -> dict:
    return json.loads(content[8:8 + int.from_bytes(content[:8], "little")])


# ------------------------------------------------------------------------------- the same bytes --

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_written_alike(tmp_path, device, dtype):
    tensors = {"a": random_tensor(dtype, (5, 6)), "b": random_tensor(dtype, (3,), seed=1),
               "none": random_tensor(dtype, (0, 2))}
    if dtype != F4:
        tensors["scalar"] = random_tensor(dtype, (), seed=2)
    assert_same_file(tmp_path, tensors, device)


@pytest.mark.parametrize("seed", range(5))
def test_dtypes_are_put_in_the_same_order(tmp_path, device, seed):
    tensors = {}
    for i in torch.randperm(60, generator=torch.Generator().manual_seed(seed)).tolist():
        tensors[f"t{i}"] = random_tensor(DTYPES[i % len(DTYPES)], (i % 7, 2), seed=i)
    assert_same_file(tmp_path, tensors, device)


def test_names_are_put_in_the_same_order(tmp_path):
    names = ["b", "a", "B", "a.b", "a/b", "a10", "a9", "ä", "z", "名", "\U0001f600", "￿", " ",
             "", "A", "_", "~", "é"]
    assert_same_file(tmp_path, {name: torch.full((3,), i) for i, name in enumerate(names)})


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "a/b", "tab\t\n\r\b\f", "\x01\x1f",
                                  "\x7f\x80\u2028", "<>&'", "x" * 3000])
def test_names_are_escaped_alike(tmp_path, name):
    assert_same_file(tmp_path, {name: torch.arange(3)})


@pytest.mark.parametrize("length", range(1, 18))
def test_the_header_is_filled_up_alike(tmp_path, length):
    assert_same_file(tmp_path, {"n" * length: torch.arange(3, dtype=torch.uint8)})


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"": ""},
                                      {"k": "a\"\\\n\x01ä名"}])
def test_metadata_is_written_alike(tmp_path, metadata):
    assert_same_file(tmp_path, {"a": torch.ones(3)}, metadata=metadata)
    if metadata != {}:
        assert_same_file(tmp_path, {}, metadata=metadata)


def test_nothing_at_all_is_a_file_that_can_be_read(tmp_path):
    """safetensors writes this case so that it can not read it again."""
    penstock.save_file({}, tmp_path / "x.safetensors", metadata={})
    assert safetensors.torch.load_file(tmp_path / "x.safetensors") == {}


def test_several_keys_of_metadata(tmp_path):
    """safetensors writes them in an order that changes; all else is the same."""
    tensors = {"a": torch.arange(5)}
    metadata = {f"key {i}": f"value {i}" for i in range(9)}
    mine = written(penstock.save_file, tmp_path / "mine.safetensors", tensors, metadata=metadata)
    other = written(theirs, tmp_path / "theirs.safetensors", tensors, metadata=metadata)
    assert header(mine) == header(other)
    assert list(header(mine))[0] == "__metadata__"
    assert len(mine) == len(other) and mine[:8] == other[:8] and mine[-40:] == other[-40:]


def test_the_order_of_metadata_does_not_change_from_run_to_run(tmp_path):
    metadata = {f"key {i}": "" for i in range(9)}
    content = [written(penstock.save_file, tmp_path / f"{i}.safetensors", {"a": torch.ones(1)},
                       metadata=metadata) for i in range(5)]
    assert len(set(content)) == 1


def test_an_empty_dict(tmp_path):
    assert_same_file(tmp_path, {})


def test_scalars_and_empty_tensors(tmp_path, device):
    assert_same_file(tmp_path, {"s": torch.tensor(1), "e": torch.empty(0), "f": torch.empty(4, 0),
                                "t": torch.tensor(True)}, device)


def test_many_tensors(tmp_path, device):
    assert_same_file(tmp_path, {f"block.{i}": random_tensor(torch.uint8, (i % 50,), seed=i)
                                for i in range(3000)}, device)


def test_a_large_file(tmp_path, big, device):
    path, tensors = big
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    penstock.save_file(moved, tmp_path / "x.safetensors")
    with open(path, "rb") as one, open(tmp_path / "x.safetensors", "rb") as other:
        while chunk := one.read(16 << 20):
            assert chunk == other.read(16 << 20)
        assert not other.read(1)
    report = penstock.last_report()
    assert report.bytes >= sum(tensor.nbytes for tensor in tensors.values())


def test_parameters_and_tensors_with_gradients(tmp_path):
    tensors = {"p": torch.nn.Parameter(torch.randn(3)), "g": torch.randn(3, requires_grad=True)}
    mine = written(penstock.save_file, tmp_path / "mine.safetensors", tensors)
    assert mine == written(theirs, tmp_path / "theirs.safetensors", tensors)


def test_views_that_do_not_overlap_may_share_a_storage(tmp_path):
    base = torch.arange(12).reshape(3, 4)
    assert_same_file(tmp_path, {"top": base[:1], "bottom": base[1:]})


def test_what_was_loaded_can_be_saved_again(tmp_path, device):
    """Tensors of an arena share memory, but no bytes."""
    tensors = {f"t{i}": random_tensor(torch.float32, (i,), seed=i) for i in range(1, 30)}
    theirs(tensors, tmp_path / "x.safetensors")
    for arena in (True, False):
        loaded = penstock.load_file(tmp_path / "x.safetensors", device, arena=arena)
        penstock.save_file(loaded, tmp_path / "mine.safetensors")
        assert (tmp_path / "mine.safetensors").read_bytes() == \
            (tmp_path / "x.safetensors").read_bytes()
        theirs(loaded, tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").read_bytes() == \
            (tmp_path / "x.safetensors").read_bytes()


def test_a_file_can_be_saved_over_itself(few):
    path, tensors = few
    before = path.read_bytes()
    penstock.save_file(penstock.load_file(path), path, metadata={"format": "pt"})
    assert path.read_bytes() == before


def test_the_call_returns_nothing_and_takes_paths(tmp_path):
    assert penstock.save_file({"a": torch.ones(1)}, str(tmp_path / "a.safetensors")) is None
    assert penstock.save_file({"a": torch.ones(1)}, tmp_path / "b.safetensors", None) is None
    assert penstock.save_file(tensors={"a": torch.ones(1)},
                              filename=pathlib.Path(tmp_path / "c.safetensors"),
                              metadata=None) is None
    assert len({(tmp_path / f"{name}.safetensors").read_bytes() for name in "abc"}) == 1


def test_numpy_arrays_are_saved_as_safetensors_saves_them(tmp_path):
    import numpy
    import safetensors.numpy

    arrays = {"a": numpy.arange(6).reshape(2, 3), "b": numpy.ones(3, numpy.float16)}
    penstock.save_file(arrays, tmp_path / "mine.safetensors")
    safetensors.numpy.save_file(arrays, tmp_path / "theirs.safetensors")
    assert (tmp_path / "mine.safetensors").read_bytes() == \
        (tmp_path / "theirs.safetensors").read_bytes()


class OfSomebody(numpy.ndarray):
    """A class of arrays that numpy itself does not have."""


ROWS = numpy.arange(12.0).reshape(3, 4)
ARRAYS = {
    "a class of somebody": lambda folder: {"a": ROWS.view(OfSomebody)},
    "matrix": lambda folder: {"a": numpy.matrix(ROWS)},
    "memmap": lambda folder: {"a": numpy.load(folder / "rows.npy", mmap_mode="r")},
    "masked": lambda folder: {"a": numpy.ma.array(ROWS, mask=ROWS > 3)},
    "recarray": lambda folder: {"a": ROWS.view(numpy.recarray)},
    "big-endian": lambda folder: {"a": ROWS.astype(">f4"), "b": numpy.arange(3).astype(">c8")},
    "the same twice": lambda folder: {"a": ROWS, "b": ROWS},
    "overlapping": lambda folder: {"a": ROWS, "b": ROWS[1:]},
    "read-only": lambda folder: {"a": numpy.frombuffer(b"abcd", numpy.uint8)},
    "no dict": lambda folder: UserDict(a=ROWS),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_of_any_class_are_saved_as_safetensors_saves_them(tmp_path, case):
    import safetensors.numpy

    numpy.save(tmp_path / "rows.npy", ROWS)
    arrays = ARRAYS[case](tmp_path)
    penstock.save_file(arrays, tmp_path / "mine.safetensors")
    safetensors.numpy.save_file(arrays, tmp_path / "theirs.safetensors")
    assert (tmp_path / "mine.safetensors").read_bytes() == \
        (tmp_path / "theirs.safetensors").read_bytes()


def test_jax_arrays_are_saved_as_safetensors_saves_them(tmp_path):
    jax = pytest.importorskip("jax.numpy")
    from safetensors.flax import save_file as theirs_of_jax

    arrays = {"a": jax.arange(6).reshape(2, 3), "t": jax.arange(6.0).reshape(2, 3).T,
              "b": jax.ones(3, jax.bfloat16), "s": jax.float16(3)}
    penstock.save_file(arrays, tmp_path / "mine.safetensors")
    theirs_of_jax(dict(arrays), tmp_path / "theirs.safetensors")
    assert (tmp_path / "mine.safetensors").read_bytes() == \
        (tmp_path / "theirs.safetensors").read_bytes()


@pytest.mark.parametrize("align", [8, 64, 4096, 1 << 16])
@pytest.mark.parametrize("names", [1, 2, 50, 300])
def test_aligned_files_differ_in_spaces_alone(tmp_path, align, names):
    tensors = {f"tensor.{i}": random_tensor(torch.float32, (i,), seed=i) for i in range(names)}
    plain = written(theirs, tmp_path / "theirs.safetensors", tensors, metadata={"a": "b"})
    mine = written(penstock.save_file, tmp_path / "mine.safetensors", tensors,
                   metadata={"a": "b"}, align=align)
    start, plain_start = (8 + int.from_bytes(each[:8], "little") for each in (mine, plain))
    assert start % align == 0 and start - plain_start < align
    assert mine[start:] == plain[plain_start:]
    assert mine[8:plain_start] == plain[8:plain_start]
    assert mine[plain_start:start] == b" " * (start - plain_start)
    assert_same(safetensors.torch.load_file(tmp_path / "mine.safetensors"), tensors)
    assert_same(penstock.load_file(tmp_path / "mine.safetensors"), tensors)


@pytest.mark.parametrize("align", [1, 7, 4095, 1 << 21, -8])
def test_an_alignment_that_cannot_be_is_refused(tmp_path, align):
    with pytest.raises(ValueError, match="4096"):
        penstock.save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors", align=align)
    assert os.listdir(tmp_path) == []


FAKES = PACKAGE.parent / "tests/fakes"
ON_GPUS = """
    import sys, penstock
    source, target = sys.argv[1:]
    arrays = penstock.load_file(source, 0, framework="dlpack")
    others = penstock.load_file(source, 1, framework="dlpack")
    host = penstock.load_file(source, framework="dlpack")
    mixed = {name: (arrays, others, host)[i % 3][name] for i, name in enumerate(sorted(arrays))}
    penstock.save_file(mixed, target, metadata={"format": "pt"})
    print(penstock.last_report().device)
    del arrays, others, host, mixed
    """


def test_tensors_of_two_gpus_and_the_host_are_saved_together(tmp_path):
    """By way of the fake driver, which runs copies as late as is lawful and counts what it gave."""
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip("no fake driver beside this package")
    tensors = {f"t{i}": random_tensor(DTYPES[i % len(DTYPES)], (i * 37 % 500, 6), seed=i)
               for i in range(120)}
    theirs(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    env = environment(LD_LIBRARY_PATH=str(FAKES), FAKE_CUDA_STRICT="1", FAKE_CUDA_DEVICES="2",
                      FAKE_CUDA_ABORT_ON_LEAK="1")
    done = python(ON_GPUS, tmp_path / "theirs.safetensors", tmp_path / "mine.safetensors", env=env)
    assert done.stdout == "cuda:0+cuda:1+host\n" and done.stderr == ""
    assert (tmp_path / "mine.safetensors").read_bytes() == \
        (tmp_path / "theirs.safetensors").read_bytes()


def test_what_is_queued_on_the_current_stream_is_saved(tmp_path, device):
    """As it will be when that is done, not as it is when save_file is called."""
    if device == "cpu":
        pytest.skip("the host has no streams")
    stream = torch.cuda.Stream(device)
    tensor = torch.zeros(8 << 20, device=device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(7)
        penstock.save_file({"a": tensor}, tmp_path / "x.safetensors")
    assert (penstock.load_file(tmp_path / "x.safetensors")["a"] == 7).all()


# ----------------------------------------------------------------------- the same kind of error --

BASE = torch.arange(12.0).reshape(3, 4)
COMPLEX = torch.ones(2, dtype=torch.complex64)
REFUSALS = {
    "transposed": lambda: {"name": BASE.T},
    "strided": lambda: {"name": BASE[:, :2]},
    "expanded": lambda: {"name": torch.zeros(1).expand(3)},
    "the same twice": lambda: {"name": BASE, "other": BASE},
    "overlapping": lambda: {"name": BASE, "other": BASE[1:]},
    "a tensor and its conjugate": lambda: {"name": COMPLEX, "other": COMPLEX.conj()},
    "sparse": lambda: {"name": BASE.to_sparse()},
    "list": lambda: {"name": [1, 2]},
    "no dict": lambda: [BASE],
    "number as name": lambda: {1: BASE},
    "complex128": lambda: {"name": torch.zeros(2, dtype=torch.complex128)},
    "meta": lambda: {"name": torch.zeros(2, device="meta")},
    "real part": lambda: {"name": torch.zeros(2, dtype=torch.complex64).real},
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_safetensors_refuses_is_refused_and_leaves_the_old_file(tmp_path, case):
    tensors = REFUSALS[case]()
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    _, error = outcome(lambda: theirs(tensors, tmp_path / "theirs.safetensors"))
    kinds = (type(error), ValueError, TypeError, penstock.Error) if isinstance(
        error, (KeyError, NotImplementedError)) else type(error)
    with pytest.raises(kinds, match="name|dict|str"):
        penstock.save_file(tensors, path)
    assert path.read_bytes() == b"old"
    assert [entry for entry in os.listdir(tmp_path) if entry != "x.safetensors"] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make, advice", [
    (lambda: BASE.T, r"\.contiguous\(\)"),
    (lambda: BASE.to_sparse(), r"\.to_dense\(\)"),
    (lambda: BASE.to_sparse_csr(), r"\.to_dense\(\)"),
    (lambda: torch.nested.nested_tensor([BASE, BASE]), r"\.unbind\(\)"),
    (lambda: torch.nested.nested_tensor([BASE], layout=torch.jagged), r"\.unbind\(\)"),
    (lambda: BASE.to("meta"), "no bytes"),
    (lambda: torch.quantize_per_tensor(BASE, 0.1, 0, torch.qint8), r"\.dequantize\(\)"),
], ids=["transposed", "sparse", "sparse rows", "nested", "jagged", "meta", "quantised"])
def test_what_cannot_be_saved_is_told_by_name_with_what_to_do(tmp_path, make, advice):
    with pytest.raises(ValueError, match=f"cannot save the.name: .*{advice}"):
        penstock.save_file({"the.name": make()}, tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": None}, "text", [("a", "b")]],
                         ids=str)
def test_metadata_must_be_a_dict_of_strings(tmp_path, metadata):
    with pytest.raises((TypeError, ValueError)):
        penstock.save_file({"a": BASE}, tmp_path / "x.safetensors", metadata=metadata)
    assert os.listdir(tmp_path) == []


def test_a_name_that_the_format_keeps_for_itself_is_refused(tmp_path):
    """safetensors writes this and can not read it again."""
    with pytest.raises((ValueError, penstock.Error), match="__metadata__"):
        penstock.save_file({"__metadata__": BASE}, tmp_path / "x.safetensors")


@pytest.mark.skipif(F4 is None, reason="this torch has no float4")
def test_a_pair_of_4_bit_numbers_without_a_dimension_is_refused(tmp_path):
    """safetensors refuses it too; what it advises can be saved and comes back."""
    pair = torch.tensor(0x2B, dtype=torch.uint8).view(F4)
    assert outcome(lambda: theirs({"name": pair}, tmp_path / "x.safetensors"))[1]
    with pytest.raises(ValueError, match=r"name.*reshape\(1\)"):
        penstock.save_file({"name": pair}, tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == []
    penstock.save_file({"name": pair.reshape(1)}, tmp_path / "x.safetensors")
    assert_same(penstock.load_file(tmp_path / "x.safetensors"), {"name": pair.reshape(1)})


def test_lone_surrogates_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'a\\ud800b' is not"):
        penstock.save_file({"a\ud800b": BASE}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"'\\udcff' is not"):
        penstock.save_file({"a": BASE}, tmp_path / "x.safetensors", metadata={"k": "\udcff"})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("tensors, metadata", [
    ({"\x1b[31m\u202e": 5}, None), ({"\x1b[31m\ud800": BASE}, None),
    ({"\x1b[31m": BASE, "b": BASE}, None), ({"\x1b[31m": BASE.to_sparse()}, None),
    ({"a": BASE}, {"\x1b[31m": 3})])
def test_names_that_are_refused_cannot_command_the_terminal(tmp_path, tensors, metadata):
    with pytest.raises((ValueError, TypeError, RuntimeError, OSError)) as caught:
        penstock.save_file(tensors, tmp_path / "x.safetensors", metadata)
    assert r"\x1b[31m" in str(caught.value) and str(caught.value).isprintable()


def test_a_folder_that_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(penstock.Error, match="nowhere") as caught:
        penstock.save_file({"a": BASE}, tmp_path / "nowhere" / "x.safetensors")
    assert caught.value.errno == 2


def test_a_folder_in_the_way_is_an_error(tmp_path):
    with pytest.raises(penstock.Error, match="folder"):
        (tmp_path / "folder").mkdir()
        penstock.save_file({"a": BASE}, tmp_path / "folder")


# ------------------------------------------------------------------------------- all or nothing --

def test_mode_bits_of_the_old_file_are_kept(tmp_path):
    path = tmp_path / "x.safetensors"
    for mode in (0o640, 0o600, 0o444, 0o664):
        path.write_bytes(b"old")
        path.chmod(mode)
        penstock.save_file({"a": BASE}, path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert_same(safetensors.torch.load_file(path), {"a": BASE})
        path.unlink()


def test_a_new_file_has_the_mode_that_umask_leaves(tmp_path):
    old = os.umask(0o027)
    try:
        penstock.save_file({"a": BASE}, tmp_path / "x.safetensors")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x.safetensors").stat().st_mode) == 0o640


def test_nothing_but_the_file_is_left(tmp_path):
    penstock.save_file({"a": BASE}, tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "x.safetensors"
    sizes = set()
    with Talk("""
        import sys, numpy, penstock
        arrays = [{"a": numpy.full(1 << 20, i)} for i in range(2)]
        print("ready")
        for i in range(20):
            penstock.save_file(arrays[i % 2], sys.argv[1])
        print("done")
        """, path) as saver:
        assert saver.line() == "ready"
        while saver.process.poll() is None:
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue
            sizes.add(len(content))
            assert content[-(8 << 20):][:8] == content[-8:], "two saves in one file"
        assert saver.line() == "done"
    assert len(sizes) == 1


def test_a_limit_on_file_size_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    said = python("""
        import resource, sys, numpy, penstock
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            penstock.save_file({"a": numpy.zeros(8 << 20, numpy.uint8)}, sys.argv[1])
        except penstock.Error as error:
            print(error.errno, error)
        """, path).stdout
    assert said.startswith("27 ") and "x.safetensors" in said
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.safetensors"]


FULL = """
    import os, subprocess, sys, numpy, penstock
    libc = __import__("ctypes").CDLL(None, use_errno=True)
    def mount(*words):
        if subprocess.run(["mount", *words], capture_output=True).returncode:
            print("no mount")
            sys.exit()
    if libc.unshare(0x20000):
        print("no mount")
        sys.exit()
    mount("--make-rprivate", "/")
    folder, what = sys.argv[1:]
    mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", folder)
    path = folder + "/x.safetensors"
    open(path, "wb").write(b"old")
    if what == "read-only":
        mount("-o", "remount,ro", folder)
    size = (8 << 20) if what == "full" else 8
    try:
        penstock.save_file({"a": numpy.zeros(size, numpy.uint8)}, path)
        print("saved")
    except penstock.Error as error:
        print(error.errno, error)
    assert open(path, "rb").read() == b"old"
    assert os.listdir(folder) == ["x.safetensors"], os.listdir(folder)
    """


@pytest.mark.parametrize("what, number", [("full", 28), ("read-only", 30)])
def test_a_full_or_read_only_store_leaves_the_old_file(tmp_path, what, number):
    if not shutil.which("mount"):
        pytest.skip("no mount(8) here")
    said = python(FULL, tmp_path, what).stdout
    if said.startswith("no mount"):
        pytest.skip("may not mount a file system here")
    assert said.startswith(f"{number} ") and "x.safetensors" in said


def test_a_folder_that_may_not_be_written_leaves_the_old_file(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(penstock.Error) as caught:
            penstock.save_file({"a": BASE}, path)
        assert caught.value.errno == 13
        assert path.read_bytes() == b"old"
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("how", ["not started", "interrupted", "not committed"])
def test_a_failed_save_gives_its_space_back_though_its_exception_is_kept(tmp_path, monkeypatch,
                                                                         how):
    folder = tmp_path / "models"
    folder.mkdir()

    def interrupted(job, label, progress):
        raise KeyboardInterrupt     # as where a bar is drawn: nobody has stopped the job

    def not_committed(job, label, progress):
        while not job.wait_for(1):
            pass
        shutil.rmtree(folder)
        return job.wait()

    if how != "not started":
        monkeypatch.setattr(_progress, "wait",
                            interrupted if how == "interrupted" else not_committed)
    with pytest.raises((penstock.Error, KeyboardInterrupt)) as kept:
        penstock.save_file({"a": torch.zeros(8 << 20)}, folder / "x.safetensors",
                           transfer="GPU_DIRECT" if how == "not started" else "auto")
    assert kept.value is not None and held_below(tmp_path) == []
    assert not folder.exists() or os.listdir(folder) == []


@pytest.mark.alone
def test_ctrl_c_stops_a_save_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    with Talk("""
        import sys, numpy, penstock
        zeros = numpy.zeros(2 << 30, numpy.uint8)  # of the one page of zeros: no memory
        print("saving")
        try:
            penstock.save_file({"a": zeros}, sys.argv[1])
            print("saved")
        except KeyboardInterrupt:
            print("interrupted")
        penstock.save_file({"a": zeros[:100]}, sys.argv[1] + ".after")
        print("usable")
        """, path) as saver:
        assert saver.line() == "saving"
        time.sleep(0.15)
        start = time.monotonic()
        saver.interrupt()
        assert saver.line() == "interrupted"
        assert time.monotonic() - start < 1.5
        assert saver.line() == "usable"
        saver.end()
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["x.safetensors", "x.safetensors.after"]


def test_a_store_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    start = _penstock.save_safetensors
    for fault, number in (("fail:*:EIO", 5), ("fail:1:ENOSPC", 28)):
        monkeypatch.setattr(_penstock, "save_safetensors",
                            lambda *args, fault=fault, **named: start(*args, fault, **named))
        with pytest.raises(penstock.Error, match="x.safetensors") as caught:
            penstock.save_file({"a": torch.ones(1000)}, path)
        assert caught.value.errno == number
        assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.safetensors"]


def test_other_threads_run_while_bytes_move(tmp_path, monkeypatch):
    """The store takes 0.3 s for each request; Python's lock is free meanwhile."""
    start = _penstock.save_safetensors
    monkeypatch.setattr(_penstock, "save_safetensors",
                        lambda *args, **named: start(*args, "delay:*:300ms", **named))
    counted, stop = [], threading.Event()

    def count():
        while not stop.wait(0.001):
            counted.append(time.monotonic())

    thread = threading.Thread(target=count)
    thread.start()
    penstock.save_file({"a": torch.ones(1000)}, tmp_path / "x.safetensors")
    stop.set()
    thread.join()
    assert len(counted) > 20


def test_a_save_under_way_when_python_ends_is_stopped(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    python("""
        import sys, numpy, penstock
        from penstock import _penstock
        from penstock._device import open_device
        array = numpy.zeros(1 << 20, numpy.uint8)
        kept = _penstock.save_safetensors(
            sys.argv[1], [("a", 4, array.shape, array.ctypes.data, open_device("host"))], None, 0,
            0, [], array, 0, 128 << 20, "delay:*:300ms")
        assert kept.progress()[1] > 1 << 20
        """, path)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.safetensors"]


def test_names_and_metadata_may_hold_nul(tmp_path):
    import safetensors

    path = tmp_path / "x.safetensors"
    tensors = {"a\0b": torch.ones(1), "a": torch.zeros(2), "\0": torch.ones(3)}
    metadata = {"k\0": "v", "k": "\0v", "": "\0"}
    penstock.save_file(tensors, path, metadata)
    loaded = penstock.load_file(path)
    assert {name: len(tensor) for name, tensor in loaded.items()} == {"a\0b": 1, "a": 2, "\0": 3}
    assert list(penstock.load_file(path, keys=["a\0b"])) == ["a\0b"]
    assert list(penstock.load_file(path, keys="a\0*")) == ["a\0b"]
    for opened in (penstock.safe_open(path), safetensors.safe_open(path, "pt")):
        with opened as file:
            assert sorted(file.keys()) == ["\0", "a", "a\0b"]
            assert file.metadata() == metadata
            assert len(file.get_tensor("a\0b")) == 1


@pytest.mark.parametrize("header, metadata", [("{}", None), ('{"__metadata__":null}', None),
                                              ('{"__metadata__":{}}', {})])
def test_no_metadata_is_not_empty_metadata(tmp_path, header, metadata):
    import safetensors

    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    for opened in (penstock.safe_open(path), safetensors.safe_open(path, "pt")):
        with opened as file:
            assert file.metadata() == metadata


def test_a_header_that_is_too_long_is_refused_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="100000000"):
        penstock.save_file({"a": torch.ones(1)}, path, {"k": "v" * 100_000_000})
    assert path.read_bytes() == b"old"


def test_numpy_scalars_stay_scalars(tmp_path):
    import safetensors.numpy

    arrays = {"s": numpy.float32(3).reshape(()), "t": numpy.arange(6).reshape(2, 3).T}
    penstock.save_file(arrays, tmp_path / "mine.safetensors")
    loaded = safetensors.numpy.load_file(tmp_path / "mine.safetensors")
    assert loaded["s"].shape == () and loaded["s"] == 3
    assert (loaded["t"] == arrays["t"]).all()


def test_conjugate_views_are_saved_as_what_they_mean(tmp_path):
    numbers = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    penstock.save_file({"c": numbers.conj()}, tmp_path / "x.safetensors")
    assert penstock.load_file(tmp_path / "x.safetensors")["c"].tolist() == [1 - 2j, 3 + 4j]
