# SPDX-License-Identifier: MIT
"""penstock.safetensors beside the safetensors package: the same names, results and refusals."""
import inspect
import os
import pickle
import threading

import jax
import numpy
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
import safetensors.torch
import torch

import penstock
import penstock.safetensors
import penstock.safetensors.flax
import penstock.safetensors.numpy
import penstock.safetensors.torch
from support import DTYPES, F4, assert_same, outcome, python, random_tensor, same, write_raw

MODULES = ["", ".torch", ".numpy", ".flax"]
OPENED = [("pt", "mmap"), ("pt", "pread"), ("np", "mmap"), ("np", "pread"), ("jax", "mmap")]


def module(package, name):
    """A module of the package by its name."""
    return getattr(package, name[1:]) if name else package


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    tensors = {
        "cube": random_tensor(torch.int32, (4, 6, 8)),
        "row": torch.arange(10, dtype=torch.int16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 5),
        "flags": torch.tensor([True, False]),
    }
    path = tmp_path_factory.mktemp("mirror") / "x.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return path


def plain(result) -> tuple:
    """What can be compared of a tensor of any framework."""
    if isinstance(result, torch.Tensor):
        return type(result), result.dtype, tuple(result.shape), result.tolist()
    return type(result), str(result.dtype), result.shape, numpy.asarray(result).tobytes()


def agree(mine, theirs, words: bool = True) -> None:
    """Two calls give the same, or errors that the same programs catch."""
    result, error = outcome(theirs)
    if error is None:
        assert plain(mine()) == plain(result)
        return
    # Of a range that ends before it begins safetensors makes an error of the interpreter.
    known = safetensors.SafetensorError if isinstance(error, SystemError) else type(error)
    with pytest.raises(known) as caught:
        mine()
    if words and type(error) is safetensors.SafetensorError:
        assert str(caught.value) == str(error)
        assert isinstance(caught.value, penstock.safetensors.SafetensorError)


# ---------------------------------------------------------------------------------------- names --

@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_there_and_takes_the_same_arguments(name):
    mine, theirs = module(penstock.safetensors, name), module(safetensors, name)
    own = [each for each, thing in vars(theirs).items() if not each.startswith("_")
           and getattr(thing, "__module__", "").startswith(("safetensors", "builtins"))
           and callable(thing)]
    assert len(own) >= 4
    for each in own:
        if each == "SafetensorError" or name and hasattr(safetensors, each):
            continue
        wanted = inspect.signature(getattr(theirs, each)).parameters
        found = inspect.signature(getattr(mine, each)).parameters
        for parameter in wanted.values():
            assert found[parameter.name].kind == parameter.kind, (each, parameter)
        positional = [p.name for p in wanted.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
        assert list(found)[:len(positional)] == positional, each


@pytest.mark.parametrize("name", MODULES)
def test_arguments_that_may_be_left_out_are_the_same(name):
    mine, theirs = module(penstock.safetensors, name), module(safetensors, name)
    for each in ("load", "load_file", "load_model", "save", "save_file", "save_model"):
        if hasattr(theirs, each):
            wanted = inspect.signature(getattr(theirs, each)).parameters
            found = inspect.signature(getattr(mine, each)).parameters
            assert {p.name: p.default for p in wanted.values()} == \
                   {p.name: p.default for p in found.values()}, each


def test_the_release_whose_names_they_are_is_the_one_that_is_compared_with():
    assert penstock.safetensors.__version__ == safetensors.__version__


# --------------------------------------------------------------------------------------- slices --

INDICES = [
    "[:]", "[...]", "[()]", "[[]]", "[0]", "[-1]", "[3]", "[4]", "[-4]", "[-5]", "[1:3]", "[-2:]",
    "[:-1]", "[1:1]", "[3:1]", "[4:]", "[100:]", "[:4]", "[:5]", "[:100]", "[-100:2]", "[0:4:1]",
    "[:, 1]", "[:, 2:4]", "[:, :, 3:5]", "[..., 0]", "[..., 2:3]", "[1, ..., 2:3]", "[1, ...]",
    "[1, 2, 3]", "[1, 2, 3, ...]", "[1, 2, 3, 4]", "[1, 2, 3, 4, ...]", "[:, :, :, :]",
    "[..., ...]",
    "[:, 6]", "[:, -6]", "[:, -7]", "[0, -7]", "[::2]", "[1::2]", "[1:4:2]", "[0:5:2]", "[::100]",
    "[:, ::3]", "[:, :, ::8]", "[::-1]", "[::0]", "[::2**63]", "[::2**70]", "[::2**62]",
    "[None]", "[None, 0]", "[:, None, 2]", "[True]", "[False]", "[True, 0]", "[True:]",
    "[numpy.True_]", "[numpy.int64(2)]", "[numpy.int8(-1)]", "[numpy.uint64(1)]",
    "[numpy.array(2)]",
    "[numpy.int64(0):numpy.int32(2)]", "[numpy.array([0, 1])]", "[torch.tensor(2)]",
    "[torch.tensor([1])]", "[torch.tensor([True, False, True, False])]", "[[0, 1]]", "[[True]]",
    "[1.5]", "['a']", "[1:'a']", "['a':]", "[:, 1.5:2]", "[2**31]", "[-2**31 - 1]", "[2**70]",
    "[:2**63]", "[:2**70]", "[2**70:]", "[(0,)]", "[((0,),)]", "[range(2)]", "[b'a']", "[{}]",
    "[2:2, 20]", "[2:, 20:]", "[5:, 20]", "[0, 0, 0]", "[0:1, 0:1, 0:1]", "[3, 5, 7]",
    "[2:4, ::5, 1::3]",
]


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("name", ["cube", "row", "scalar", "empty", "flags"])
@pytest.mark.parametrize("framework, backend", OPENED)
def test_slices_are_taken_and_refused_alike(path, framework, backend, name):
    with penstock.safe_open(path, framework, backend=backend) as mine, \
            safetensors.safe_open(path, framework, backend=backend) as theirs:
        for index in INDICES:
            known = {"numpy": numpy, "torch": torch}
            agree(lambda: eval("s" + index, {**known, "s": mine.get_slice(name)}),
                  lambda: eval("s" + index, {**known, "s": theirs.get_slice(name)}))


@pytest.mark.parametrize("framework, backend", [("np", "mmap"), ("pt", "pread")])
def test_parts_that_safetensors_reads_lie_in_one_piece(path, framework, backend):
    with penstock.safe_open(path, framework, backend=backend) as file:
        for index in [(slice(None), 2), (slice(1, 4, 2),), (Ellipsis, slice(2, 5)), (1, 2, 3)]:
            part = file.get_slice("cube")[index]
            assert part.is_contiguous() if framework == "pt" else part.flags.c_contiguous


def test_arrays_of_numpy_are_each_the_caller_s_own(path):
    """What is written to one is not seen by the next, as with safetensors."""
    for opened in (safetensors.safe_open, penstock.safe_open):
        with opened(path, "np") as file:
            file.get_slice("row")[2:4][...] = 99
            file.get_tensor("row")[...] = 77
            again = file.get_tensors()["row"]
            assert again.tolist() == list(range(10)), opened
            again[...] = 55
            assert file.get_slice("row")[:].tolist() == list(range(10)), opened


# ------------------------------------------------------------------------------------ safe_open --

def test_a_closed_file_is_entered_again_and_says_that_it_is_closed(path):
    for opened in (safetensors.safe_open, penstock.safe_open):
        file = opened(path, "pt")
        with file as first, file as second:
            assert first is second is file
        with file as third:
            for call in (third.keys, third.offset_keys, third.metadata, third.get_tensors,
                         lambda: third.get_tensor("row"), lambda: third.get_slice("row")):
                with pytest.raises(safetensors.SafetensorError, match="closed"):
                    call()


def test_threads_may_read_while_another_closes(path):
    wrong = []

    def read(file):
        try:
            for _ in range(200):
                assert file.get_slice("row")[2:4].tolist() == [2, 3]
                assert file.get_tensor("row")[5] == 5
                assert len(file.get_tensors()) == 5
        except penstock.Error as error:
            if "closed" not in str(error):
                wrong.append(error)
        except Exception as error:  # an attribute that is gone, for instance
            wrong.append(error)

    for copy in (False, True) * 5:
        file = penstock.safe_open(path, "pt", copy=copy)
        threads = [threading.Thread(target=read, args=(file,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        file.__exit__(None, None, None)
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("arguments", [
    dict(framework=None), dict(framework=1), dict(framework="cobol"), dict(framework=""),
    dict(backend="gopher"), dict(backend=None), dict(device="abacus"), dict(device="cuda:x"),
    dict(device=-1), dict(device="cpu:1:2"), dict(framework="np", device="cuda"),
    dict(framework="numpy", device=0),
], ids=str)
def test_arguments_that_make_no_sense_are_refused_alike(path, arguments):
    arguments = {"framework": "pt", **arguments}
    agree(lambda: penstock.safe_open(path, **arguments),
          lambda: safetensors.safe_open(path, **arguments), words=False)


@pytest.mark.parametrize("ask", ["get_tensor", "get_slice"])
@pytest.mark.parametrize("name", ["none", "", "Row", 1, None, b"row"])
def test_a_tensor_that_is_not_there_is_refused_alike(path, ask, name):
    with penstock.safe_open(path, "pt") as mine, safetensors.safe_open(path, "pt") as theirs:
        agree(lambda: getattr(mine, ask)(name), lambda: getattr(theirs, ask)(name), words=False)


def test_a_file_that_is_not_there_is_told_alike(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("notafile", tmp_path / "neither"):
        with pytest.raises(FileNotFoundError) as theirs:
            safetensors.safe_open(name, "pt")
        with pytest.raises(FileNotFoundError) as mine:
            penstock.safe_open(name, "pt")
        assert str(mine.value) == str(theirs.value)
        assert not isinstance(mine.value, safetensors.SafetensorError)
        assert os.fspath(name) in mine.value.filename


def test_a_shard_that_is_not_there_is_the_one_that_is_named(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(penstock.Error, match="model-1.safetensors"):
        penstock.safe_open(tmp_path, "pt")


def test_a_handle_is_opened_by_its_name(path):
    for package in (safetensors, penstock.safetensors):
        with open(path, "rb") as file, package._safe_open_handle(file, "np") as handle:
            assert handle.get_tensor("row").tolist() == list(range(10))
        with pytest.raises(AttributeError):
            package._safe_open_handle(str(path), "np")


# ----------------------------------------------------------------------------------------- meta --

def test_on_the_device_meta_tensors_have_shapes_and_no_bytes(path, holes):
    whole = safetensors.torch.load_file(path)
    for device in ("meta", torch.device("meta")):
        loaded = penstock.load_file(path, device)
        assert {name: (tensor.dtype, tensor.shape, str(tensor.device))
                for name, tensor in loaded.items()} == \
               {name: (tensor.dtype, tensor.shape, "meta") for name, tensor in whole.items()}
    with penstock.safe_open(path, "pt", "meta") as file:
        assert file.get_tensor("cube").is_meta and file.get_tensors()["cube"].is_meta
        assert file.get_slice("cube")[:, 2:4, ::3].shape == (4, 2, 3)
    assert penstock.load_file(path, "meta", copy=True, slices={"cube": (..., slice(1, 3))})[
        "cube"].shape == (4, 6, 2)
    assert penstock.load_file(path, "meta", dtype=torch.float16)["scalar"].dtype == torch.float16
    assert dict(penstock.stream(path, "meta"))["row"].is_meta
    assert penstock.last_report().bytes == 0


def test_nothing_is_read_for_the_device_meta(holes):
    def read_so_far() -> int:
        with open("/proc/self/io", encoding="ascii") as file:
            return int(file.readline().split()[1])

    before = read_so_far()
    assert len(penstock.load_file(holes, "meta")) == 16
    assert read_so_far() - before < 4 << 20


def test_what_the_device_meta_cannot_do_is_refused(path):
    with pytest.raises(penstock.Error, match="torch"):
        penstock.load_file(path, "meta", framework="np")
    with pytest.raises(penstock.Error, match="no bytes"):
        penstock.load_file(path, "meta", into={"row": torch.empty(10, dtype=torch.int16)})


@pytest.mark.skipif(F4 is None, reason="this torch has no four-bit floats")
def test_packed_numbers_have_torch_s_shape_on_the_device_meta(tmp_path):
    safetensors.torch.save_file({"t": random_tensor(F4, (4, 6))}, tmp_path / "x.safetensors")
    assert penstock.load_file(tmp_path / "x.safetensors", "meta")["t"].shape == (4, 6)


# -------------------------------------------------------------------------------- bytes, in and out

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_every_dtype_are_the_same_and_come_back(dtype):
    tensors = {"b": random_tensor(dtype, (3, 4)), "a": random_tensor(dtype, (0, 2), seed=1)}
    content = penstock.safetensors.torch.save(tensors, {"k": "v"})
    assert type(content) is bytes and content == safetensors.torch.save(tensors, {"k": "v"})
    assert_same(penstock.safetensors.torch.load(content), tensors)


def test_bytes_of_numpy_and_jax_are_the_same_and_come_back():
    arrays = {"x": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
              "y": numpy.array(2, numpy.float16),
              "z": numpy.arange(4, dtype=">i4"), "n": numpy.zeros((2, 0), numpy.uint8)}
    content = penstock.safetensors.numpy.save(arrays)
    assert content == safetensors.numpy.save(arrays)
    theirs = safetensors.numpy.load(content)
    for name, array in penstock.safetensors.numpy.load(content).items():
        assert plain(array) == plain(theirs[name]), name
    of_jax = {dtype: jax.numpy.ones((2, 3), dtype)
              for dtype in ("bfloat16", "float32", "int8", "bool")}
    content = penstock.safetensors.flax.save(of_jax, {"k": "v"})
    assert content == safetensors.flax.save(dict(of_jax), {"k": "v"})
    for name, array in penstock.safetensors.flax.load(content).items():
        assert plain(array) == plain(of_jax[name])


def test_arrays_of_jax_are_saved_to_files(tmp_path):
    arrays = {"a": jax.numpy.arange(12.).reshape(3, 4).astype("bfloat16"), "b": jax.numpy.ones(())}
    for name, save in [("1", safetensors.flax.save_file), ("2", penstock.save_file),
                       ("3", penstock.safetensors.flax.save_file)]:
        save(dict(arrays), tmp_path / name, {"k": "v"})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert (tmp_path / "1").read_bytes() == (tmp_path / "3").read_bytes()
    for name, array in penstock.safetensors.flax.load_file(tmp_path / "1").items():
        assert plain(array) == plain(arrays[name])
    assert isinstance(arrays["a"], jax.Array)


def test_a_tensor_of_loaded_bytes_can_be_written_to():
    content = safetensors.torch.save({"a": torch.zeros(3)})
    loaded = penstock.safetensors.torch.load(content)["a"]
    loaded += 1
    assert penstock.safetensors.torch.load(content)["a"].tolist() == [0, 0, 0]


def test_raw_tensors_go_in_and_out_alike(tmp_path):
    array = numpy.arange(6, dtype=numpy.float32)
    described = {}
    for package in (safetensors, penstock.safetensors):
        spec = package.TensorSpec(dtype="float32", shape=(2, 3), data_ptr=array.ctypes.data,
                                  data_len=array.nbytes)
        content = package.serialize({"a": spec}, metadata={"k": "v"})
        package.serialize_file({"a": spec}, tmp_path / "x", metadata={"k": "v"})
        assert (tmp_path / "x").read_bytes() == content
        described[package] = (content, repr(spec), spec.dtype, spec.shape, spec.data_ptr,
                              spec.data_len, package.deserialize(content), package.serialize({}))
    assert described[safetensors] == described[penstock.safetensors]


def test_descriptions_that_safetensors_made_are_taken():
    array = numpy.arange(6, dtype=numpy.int16)
    spec = safetensors.TensorSpec(dtype="int16", shape=[6], data_ptr=array.ctypes.data,
                                  data_len=array.nbytes)
    assert penstock.safetensors.serialize({"a": spec}) == safetensors.serialize({"a": spec})


@pytest.mark.parametrize("wrong", [
    "package.TensorSpec(dtype='nonsense', shape=[1], data_ptr=0, data_len=0)",
    "package.TensorSpec(dtype='complex128', shape=[1], data_ptr=0, data_len=0)",
    "package.TensorSpec(dtype=None, shape=[1], data_ptr=0, data_len=0)",
    "package.TensorSpec(dtype='float32', shape=[-1], data_ptr=0, data_len=0)",
    "package.TensorSpec(dtype='float32', shape=3, data_ptr=0, data_len=0)",
    "package.TensorSpec(dtype='float32', shape=[1.5], data_ptr=0, data_len=0)",
    "package.TensorSpec('float32', [1], 0, 0)",
    "package.TensorSpec(dtype='float4_e2m1fn_x2', shape=[1 << 63], data_ptr=0, data_len=0)",
    "setattr(spec, 'dtype', 'F16')",
    "package.serialize({'a': {'dtype': 'float32', 'shape': [1], 'data_ptr': 0, 'data_len': 0}})",
    "package.serialize([])", "package.serialize({1: spec})",
    "package.serialize({'a': spec}, metadata={'k': 1})", "package.serialize({'a': spec}, [])",
    "package.serialize({'a': short})", "package.serialize_file({'a': short}, '/none/x')",
    "package.serialize_file({'a': spec}, '/none/x')", "package.serialize_file({'a': spec}, '/')",
    "package.deserialize(b'')", "package.deserialize(b'1234567')", "package.deserialize(b'x' * 99)",
    "package.deserialize(bytes(8) + b'{}')", "package.deserialize('text')",
    "package.deserialize(bytearray(16))", "package.deserialize(None)",
    "package.deserialize(content[:-1])", "package.deserialize(content + b'x')",
])
def test_raw_tensors_that_make_no_sense_are_refused_alike(wrong):
    array = numpy.arange(6, dtype=numpy.float32)

    def attempt(package):
        spec, short = (package.TensorSpec(dtype="float32", shape=[2, 3], data_len=length,
                                          data_ptr=array.ctypes.data) for length in (24, 7))
        content = package.serialize({"a": spec})
        return eval(wrong)  # noqa: S307 - of the list above

    error = outcome(lambda: attempt(safetensors))[1]
    assert error is not None
    # Twice the length of a dimension: safetensors reports it, Python cannot count so far.
    kind = (type(error), OverflowError) if "1 << 63" in wrong else type(error)
    with pytest.raises(kind):
        attempt(penstock.safetensors)


# --------------------------------------------------------------------------------------- saving --

BASE = torch.arange(12.).reshape(3, 4)


@pytest.mark.parametrize("tensors", [
    [BASE], {"a": [1.0]}, {"a": numpy.zeros(2)}, {"a": None}, {1: BASE}, {None: BASE},
    {"a": BASE.t()}, {"a": BASE[:, 1]}, {"a": BASE.to_sparse()},
    {"a": BASE, "b": BASE}, {"a": BASE, "b": BASE[1:]}, {"a": BASE, "b": BASE[:, 1:]},
    {"a": BASE, "b": BASE.t()}, {"a": BASE[:2], "b": BASE[1:]}, {"a": BASE[:, 0], "b": BASE[:, 1]},
    {"a": torch.empty(2, device="meta")}, {"a": BASE, "b": BASE.view(torch.int32)},
], ids=lambda tensors: str(tensors)[:60])
def test_what_safetensors_refuses_to_save_is_refused_alike(tmp_path, tensors):
    theirs, mine = safetensors.torch, penstock.safetensors.torch
    for call in (lambda package: package.save(tensors),
                 lambda package: package.save_file(tensors, tmp_path / "x")):
        error = outcome(lambda: call(theirs))[1]
        assert error is not None
        with pytest.raises(type(error)) as caught:
            call(mine)
        if "sparse" in str(error):
            assert str(caught.value) == str(error)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("tensors", [
    {"a": BASE[:1], "b": BASE[1:]}, {"a": BASE[1:2]}, {},
    {"a": torch.empty(0), "b": torch.empty(0)},
    {"a": torch.nn.Parameter(torch.ones(3))}, {"a": torch.ones(2, 1).t()},
], ids=lambda tensors: str(tensors)[:60])
def test_what_safetensors_saves_is_saved_alike(tmp_path, tensors):
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    penstock.safetensors.torch.save_file(tensors, tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert penstock.safetensors.torch.save(tensors) == (tmp_path / "mine").read_bytes()


@pytest.mark.parametrize("arguments", [
    ({"a": numpy.zeros(2, "complex128")},), ({"a": numpy.array("text")},),
    ({"a": numpy.zeros(2)}, {"k": 1}), ({"a": numpy.zeros(2)}, []),
], ids=str)
def test_arrays_that_cannot_be_saved_are_refused_alike(arguments):
    error = outcome(lambda: safetensors.numpy.save(*arguments))[1]
    assert error is not None
    with pytest.raises(type(error)):
        penstock.safetensors.numpy.save(*arguments)


def test_a_place_that_cannot_be_written_to_is_safetensors_error_and_python_s(tmp_path):
    (tmp_path / "file").write_text("")
    for name, kind in [("no/x", FileNotFoundError), ("file/x", NotADirectoryError)]:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.torch.save_file({"a": BASE}, tmp_path / name)
        with pytest.raises(safetensors.SafetensorError) as caught:
            penstock.safetensors.torch.save_file({"a": BASE}, tmp_path / name)
        assert isinstance(caught.value, kind) and isinstance(caught.value, penstock.Error)


# --------------------------------------------------------------------------------------- errors --

def damaged(folder) -> dict:
    entry = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    header = len(entry).to_bytes(8, "little") + entry
    contents = {
        "empty": b"", "short": b"1234", "noise": b"x" * 100,
        "no json": (4).to_bytes(8, "little") + b"{{{{", "header cut": header[:30],
        "cut": header + bytes(7), "more": header + bytes(9),
        "offsets": header.replace(b"[0,8]", b"[8,0]") + bytes(8),
        "dtype": header.replace(b"F32", b"F99") + bytes(8),
        "shape": header.replace(b"[2]", b"[3]") + bytes(8),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return contents


def test_a_damaged_file_is_safetensors_error_and_penstock_s(tmp_path):
    for name, content in damaged(tmp_path).items():
        for call in (lambda package, name=name: package.safe_open(tmp_path / name, "pt"),
                     lambda package, name=name: package.torch.load_file(tmp_path / name),
                     lambda package, name=name: package.numpy.load_file(tmp_path / name),
                     lambda package, content=content: package.deserialize(content)):
            with pytest.raises(safetensors.SafetensorError):
                call(safetensors)
            with pytest.raises(safetensors.SafetensorError) as caught:
                call(penstock.safetensors)
            assert isinstance(caught.value, penstock.Error), name
            assert isinstance(caught.value, penstock.safetensors.SafetensorError), name
            assert caught.value.hint or caught.value.message
        with pytest.raises(safetensors.SafetensorError):
            penstock.load_model(tmp_path / name)


def test_errors_travel_with_their_classes_and_words(path):
    with penstock.safe_open(path, "np") as file:
        for call in (lambda: file.get_slice("row")[99], lambda: file.get_tensor("none")):
            with pytest.raises(penstock.Error) as caught:
                call()
            again = pickle.loads(pickle.dumps(caught.value))
            assert type(again) is type(caught.value) and str(again) == str(caught.value)


def test_errors_are_safetensors_own_only_where_that_is_imported(tmp_path):
    """Penstock does not import it, and whoever does so later catches what is raised from then."""
    (tmp_path / "x").write_bytes(b"noise" * 9)
    done = python("""
        import sys
        import penstock, penstock.safetensors
        def attempt():
            try:
                penstock.load_file(sys.argv[1])
            except penstock.safetensors.SafetensorError as error:
                return error
        first = attempt()
        assert "safetensors" not in sys.modules
        import safetensors
        assert not isinstance(first, safetensors.SafetensorError)
        assert isinstance(attempt(), safetensors.SafetensorError)
        assert type(attempt()) is type(attempt())
        print(type(first).__module__, type(first).__name__, type(attempt()).__name__)
    """, tmp_path / "x")
    assert done.stdout.split() == ["penstock", "Error", "Error"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_there_is_no_gpu_torch_s_own_class_of_error_is_raised(path):
    error = outcome(lambda: torch.empty(1, device="cuda"))[1]
    for device in ("cuda", "cuda:0", 0):
        with pytest.raises(type(error)) as caught:
            penstock.load_file(path, device)
        assert isinstance(caught.value, penstock.Error)
        assert not isinstance(caught.value, safetensors.SafetensorError)


def test_the_class_of_the_error_can_be_imported_where_it_says():
    import importlib

    kind = penstock.safetensors.SafetensorError
    assert importlib.import_module(kind.__module__).SafetensorError is kind
    assert pickle.loads(pickle.dumps(kind("words"))).args == ("words",)


# -------------------------------------------------------------------------------------- modules --

class Tied(torch.nn.Module):
    def __init__(self, tied: bool = True, transposed: bool = False):
        super().__init__()
        self.b = torch.nn.Linear(4, 4)
        self.a = self.b if tied else torch.nn.Linear(4, 4)
        if transposed:
            self.b.weight = torch.nn.Parameter(torch.arange(16.).reshape(4, 4).t())


def opened(path) -> tuple:
    with safetensors.safe_open(path, "pt") as file:
        return file.metadata(), file.get_tensors()


@pytest.mark.parametrize("save", [penstock.save_model, penstock.safetensors.torch.save_model])
@pytest.mark.parametrize("metadata", [None, {"k": "v"}, {"b.bias": "mine"}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_modules_are_saved_alike(tmp_path, save, metadata, tied):
    model = Tied(tied)
    safetensors.torch.save_model(model, tmp_path / "theirs", metadata and dict(metadata))
    given = metadata and dict(metadata)
    save(model, tmp_path / "mine.safetensors", given)
    assert given == metadata, "the caller's dict is the caller's"
    theirs, mine = opened(tmp_path / "theirs"), opened(tmp_path / "mine.safetensors")
    assert mine[0] == theirs[0]
    assert_same(mine[1], theirs[1])


def test_a_filename_is_a_file_whatever_it_is_called(tmp_path):
    for save in (safetensors.torch.save_model, penstock.save_model):
        save(Tied(), filename=tmp_path / save.__module__, metadata={"k": "v"})
        metadata, tensors = opened(tmp_path / save.__module__)
        assert metadata["k"] == "v" and set(tensors) == {"a.weight", "a.bias"}


def test_tensors_that_are_not_contiguous_are_packed_or_refused(tmp_path):
    model = Tied(False, transposed=True)
    with pytest.raises(ValueError, match="use save_model.*force_contiguous=True"):
        penstock.save_model(model, tmp_path / "x.safetensors", force_contiguous=False)
    assert not (tmp_path / "x.safetensors").exists()
    penstock.save_model(model, tmp_path / "x.safetensors")
    assert same(opened(tmp_path / "x.safetensors")[1]["b.weight"], model.b.weight.detach())


def test_a_module_that_is_part_of_a_larger_tensor_is_refused_alike(tmp_path):
    model = Tied(False)
    model.b.weight = torch.nn.Parameter(torch.zeros(9, 4)[:4])
    for save in (safetensors.torch.save_model, penstock.save_model):
        with pytest.raises(RuntimeError, match="b.weight"):
            save(model, tmp_path / "x")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("file, into", [(True, True), (True, False), (False, True),
                                        (False, False), ("names", True)], ids=str)
def test_modules_are_loaded_alike(tmp_path, strict, file, into):
    source = Tied(bool(file))
    if file == "names":     # the other of two tied names is in the file
        safetensors.torch.save_file({name: tensor for name, tensor in source.state_dict().items()
                                     if name.startswith("b.")}, tmp_path / "x")
    else:
        safetensors.torch.save_model(source, tmp_path / "x")
    torch.manual_seed(1)
    theirs = Tied(into)
    expected, error = outcome(lambda: safetensors.torch.load_model(theirs, tmp_path / "x", strict))
    for load in (penstock.load_model, penstock.safetensors.torch.load_model):
        torch.manual_seed(1)
        mine = Tied(into)
        if error is not None:
            with pytest.raises(RuntimeError) as caught:
                load(mine, tmp_path / "x", strict)
            assert str(caught.value) == str(error)
        else:
            missing, unexpected = load(mine, tmp_path / "x", strict)
            assert (missing, sorted(unexpected)) == (expected[0], sorted(expected[1]))
        assert_same(mine.state_dict(), theirs.state_dict())


def test_load_model_takes_a_module_by_the_arguments_of_safetensors(tmp_path):
    source = Tied()
    penstock.safetensors.torch.save_model(source, tmp_path / "x")
    for arguments, named in [((tmp_path / "x", True, "cpu"), {}),
                             ((str(tmp_path / "x"),), {"backend": "pread", "device": "cpu"})]:
        model = Tied()
        assert penstock.load_model(model, *arguments, **named) == (set(), [])
        assert same(model.a.weight.detach(), source.a.weight.detach())
    model = Tied()
    assert penstock.load_model(model=model, filename=tmp_path / "x") == (set(), [])
    assert set(penstock.load_model(tmp_path / "x")) == {"a.weight", "a.bias"}
    with pytest.raises(FileNotFoundError):
        penstock.load_model(model, tmp_path / "none")


def test_names_that_other_packages_take_from_safetensors_torch():
    whole, part = torch.zeros(4, 4), torch.zeros(4)[:2]
    for package in (safetensors.torch, penstock.safetensors.torch):
        views = {"a": whole[:2], "b": whole[2:], "c": whole[1:3], "d": torch.zeros(3), "e": part,
                 "m": torch.zeros(2, device="meta")}
        assert package._find_shared_tensors(views) == [{"a", "b", "c"}, {"d"}, {"e"}]
        assert package._remove_duplicate_names({"x": whole, "y": whole, "z": whole[:1]}) == \
               {"x": ["y", "z"]}
        assert package._remove_duplicate_names({"x": whole, "y": whole}, preferred_names=["y"]) == \
               {"y": ["x"]}
        assert package._remove_duplicate_names({"x": whole, "y": whole}, discard_names=["x"]) == \
               {"y": ["x"]}
        assert package._is_complete(whole) and not package._is_complete(part)
        assert package._end_ptr(whole.view(-1)[::4]) - whole.data_ptr() == 52
        assert package.storage_ptr(whole[1:]) == whole.data_ptr()
        assert package.storage_size(part) == 16


# ---------------------------------------------------------------------------------------- files --

def test_files_are_loaded_alike(path):
    for backend in ("mmap", "pread"):
        assert_same(penstock.safetensors.torch.load_file(path, "cpu", backend=backend),
                    safetensors.torch.load_file(path, "cpu", backend=backend))
        for mine, theirs in [(penstock.safetensors.numpy, safetensors.numpy),
                             (penstock.safetensors.flax, safetensors.flax)]:
            found = theirs.load_file(path, backend=backend)
            loaded = mine.load_file(path, backend=backend)
            assert {name: plain(array) for name, array in loaded.items()} == \
                   {name: plain(array) for name, array in found.items()}


def test_a_dtype_that_torch_does_not_have_is_named(tmp_path):
    write_raw(tmp_path / "x", {"a": ("F6_E2M3", [4], bytes(3))})
    content = (tmp_path / "x").read_bytes()
    for call in (lambda: penstock.safetensors.torch.load_file(tmp_path / "x"),
                 lambda: penstock.safetensors.torch.load(content)):
        with pytest.raises(penstock.Error, match="F6_E2M3"):
            call()
