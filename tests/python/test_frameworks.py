# SPDX-License-Identifier: MIT
"""Tensors for numpy, JAX, CuPy and anything that speaks DLPack; and no framework that nobody asked
for."""
import gc
import os

import numpy
import pytest
import safetensors.numpy
import torch
from safetensors.torch import save_file

import penstock
from support import F4, PACKAGE, REFUSED, environment, python, random_tensor, raw, same

# Every test below holds for tensors that look into the file and for copies.
pytestmark = pytest.mark.usefixtures("each_way")

NUMPY = {
    "bool": torch.bool, "uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16,
    "uint16": torch.uint16, "int32": torch.int32, "uint32": torch.uint32, "int64": torch.int64,
    "uint64": torch.uint64, "float16": torch.float16, "float32": torch.float32,
    "float64": torch.float64, "complex64": torch.complex64,
}
ML = {
    "bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2, "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz, "float8_e8m0fnu": torch.float8_e8m0fnu,
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """One tensor of each kind, in a file that numpy alone can read and one that needs ml_dtypes."""
    folder = tmp_path_factory.mktemp("kinds")
    plain = {name: random_tensor(dtype, (3, 5)) for name, dtype in NUMPY.items()}
    save_file(plain, folder / "plain.safetensors")
    special = {name: random_tensor(dtype, (3, 5)) for name, dtype in ML.items()}
    save_file(special, folder / "special.safetensors")
    return folder, plain, special


# ---------------------------------------------------------------------------------------- numpy --

def test_numpy_arrays_are_those_of_safetensors(kinds):
    folder, _, _ = kinds
    mine = penstock.load_file(folder / "plain.safetensors", framework="np")
    theirs = safetensors.numpy.load_file(folder / "plain.safetensors")
    assert set(mine) == set(theirs)
    for name, array in theirs.items():
        assert type(mine[name]) is numpy.ndarray
        assert mine[name].dtype == array.dtype and mine[name].shape == array.shape
        assert mine[name].tobytes() == array.tobytes()


def test_numpy_arrays_are_plain(kinds, each_way):
    folder, _, _ = kinds
    for array in penstock.load_file(folder / "plain.safetensors", framework="np").values():
        assert array.flags.c_contiguous and array.flags.writeable and array.flags.aligned
        assert array.ctypes.data % 256 == 0 or each_way == "mapped"
        array[...] = 0
        assert not array.any()


def test_special_floats_are_those_of_ml_dtypes(kinds):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    folder, _, special = kinds
    loaded = penstock.load_file(folder / "special.safetensors", framework="np")
    assert set(loaded) == set(special)
    for name, array in loaded.items():
        assert array.dtype == numpy.dtype(getattr(ml_dtypes, name))
        assert array.tobytes() == raw(special[name]).numpy().tobytes()


def test_without_ml_dtypes_special_floats_are_an_error_that_tells(kinds):
    folder, _, _ = kinds
    said = python("""
        import sys
        sys.modules["ml_dtypes"] = None
        import penstock
        for name in ("bfloat16", "float8_e4m3fn"):
            try:
                penstock.load_file(sys.argv[1], framework="np", keys=[name])
            except Exception as error:
                print(type(error).__name__, error)
        print(len(penstock.load_file(sys.argv[2], framework="np")))
        """, folder / "special.safetensors", folder / "plain.safetensors").stdout.splitlines()
    assert len(said) == 3 and said[2] == str(len(NUMPY))
    assert "ml_dtypes" in said[0] and "bfloat16" in said[0].lower().replace("bf16", "bfloat16")
    assert "ml_dtypes" in said[1]


def test_numpy_outlives_the_dict(big):
    path, tensors = big
    array = penstock.load_file(path, framework="np", keys=["part.0*"])["part.01"][3:5]
    gc.collect()
    assert array.tobytes() == raw(tensors["part.01"][3:5]).numpy().tobytes()


def test_numpy_arrays_can_be_filled(kinds):
    folder, plain, _ = kinds
    into = {name: numpy.zeros((3, 5), name) for name in NUMPY}
    loaded = penstock.load_file(folder / "plain.safetensors", framework="np", into=into)
    for name, array in into.items():
        assert array.tobytes() == raw(plain[name]).numpy().tobytes()
        assert loaded[name].ctypes.data == array.ctypes.data


def test_a_read_only_array_is_not_filled(kinds):
    folder, _, _ = kinds
    array = numpy.zeros((3, 5), numpy.float32)
    array.flags.writeable = False
    with pytest.raises((*REFUSED, BufferError), match="float32"):
        penstock.load_file(folder / "plain.safetensors", framework="np", keys="float32",
                           into={"float32": array})
    assert not array.any()


def test_numpy_is_for_the_host(kinds):
    folder, _, _ = kinds
    with pytest.raises(REFUSED):
        penstock.load_file(folder / "plain.safetensors", "cuda:0", framework="np")


@pytest.mark.parametrize("arena", [True, False])
def test_numpy_slices_and_streams(kinds, arena):
    folder, plain, _ = kinds
    path = folder / "plain.safetensors"
    index = {"int32": (slice(1, 3), slice(2, 4))}
    loaded = penstock.load_file(path, framework="np", slices=index, arena=arena)
    assert loaded["int32"].tolist() == plain["int32"][1:3, 2:4].tolist()
    for name, array in penstock.stream(path, framework="np"):
        assert array.tobytes() == raw(plain[name]).numpy().tobytes()


# --------------------------------------------------------------------------------------- dlpack --

SHARED = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]


def test_arrays_go_to_numpy_through_dlpack(kinds):
    folder, plain, _ = kinds
    arrays = penstock.load_file(folder / "plain.safetensors", framework="dlpack")
    assert set(arrays) == set(NUMPY)
    for name in SHARED + ["complex64", "uint16", "uint32", "uint64"]:
        assert isinstance(arrays[name], penstock.Array)
        array = numpy.from_dlpack(arrays[name])
        assert array.dtype == numpy.dtype(name) and array.shape == (3, 5)
        assert array.tobytes() == raw(plain[name]).numpy().tobytes()


def test_arrays_go_to_torch_through_dlpack(kinds, device):
    folder, plain, special = kinds
    arrays = penstock.load_file(folder / "plain.safetensors", device, framework="dlpack")
    for name in SHARED + ["complex64"]:
        tensor = torch.from_dlpack(arrays[name])
        assert tensor.device == torch.device(device)
        assert same(tensor, plain[name])
    arrays = penstock.load_file(folder / "special.safetensors", device, framework="dlpack")
    assert same(torch.from_dlpack(arrays["bfloat16"]), special["bfloat16"])


def test_dlpack_shares_memory_and_keeps_it(kinds):
    folder, plain, _ = kinds
    arrays = penstock.load_file(folder / "plain.safetensors", framework="dlpack")
    one, other = numpy.from_dlpack(arrays["int32"]), torch.from_dlpack(arrays["int32"])
    assert one.ctypes.data == other.data_ptr() == torch.from_dlpack(arrays["int32"]).data_ptr()
    other[0, 0] = 77
    assert one[0, 0] == 77
    del arrays, other
    gc.collect()
    assert one[2].tolist() == plain["int32"][2].tolist()


def test_a_capsule_that_nobody_takes_does_no_harm(kinds):
    folder, _, _ = kinds
    array = penstock.load_file(folder / "plain.safetensors", framework="dlpack")["int32"]
    for _ in range(100):
        array.__dlpack__()
        array.__dlpack__(max_version=(1, 0))
    capsule = array.__dlpack__()
    del array
    gc.collect()
    assert "dltensor" in repr(capsule)


def test_the_protocol_is_spoken_in_full(kinds, device):
    folder, _, _ = kinds
    array = penstock.load_file(folder / "plain.safetensors", device, framework="dlpack")["int32"]
    kind, number = array.__dlpack_device__()
    assert (int(kind), number) == ((1, 0) if device == "cpu" else (2, 0))
    assert "dltensor_versioned" in repr(array.__dlpack__(max_version=(1, 0)))
    assert "versioned" not in repr(array.__dlpack__(max_version=(0, 8)))
    array.__dlpack__(stream=None, max_version=(1, 0), dl_device=None, copy=None)
    array.__dlpack__(copy=False)


def test_empty_and_scalar_arrays_go_through_dlpack(tmp_path):
    save_file({"s": torch.tensor(5), "e": torch.empty(0, 3)}, tmp_path / "x.safetensors")
    arrays = penstock.load_file(tmp_path / "x.safetensors", framework="dlpack")
    assert numpy.from_dlpack(arrays["s"]).shape == () and numpy.from_dlpack(arrays["s"]) == 5
    assert numpy.from_dlpack(arrays["e"]).shape == (0, 3)
    assert torch.from_dlpack(arrays["e"]).shape == (0, 3)


@pytest.mark.skipif(F4 is None, reason="this torch has no four-bit floats")
def test_kinds_that_no_framework_knows_can_be_had_as_arrays(tmp_path):
    save_file({"f4": random_tensor(F4, (4, 6))}, tmp_path / "x.safetensors")
    array = penstock.load_file(tmp_path / "x.safetensors", framework="dlpack")["f4"]
    assert isinstance(array, penstock.Array)


def test_special_floats_go_through_dlpack_or_say_why_not(kinds):
    folder, _, special = kinds
    arrays = penstock.load_file(folder / "special.safetensors", framework="dlpack")
    for name in ("float8_e4m3fn", "float8_e5m2"):
        try:
            tensor = torch.from_dlpack(arrays[name])
        except (BufferError, TypeError, RuntimeError, ValueError):
            continue
        assert torch.equal(raw(tensor), raw(special[name]))


# --------------------------------------------------------------------------------- jax and cupy --

def test_jax_arrays(kinds):
    jax = pytest.importorskip("jax")
    folder, plain, special = kinds
    loaded = penstock.load_file(folder / "plain.safetensors", framework="jax",
                                keys=["float32", "int32", "float16", "uint8", "bool"])
    for name, array in loaded.items():
        assert isinstance(array, jax.Array)
        assert array.dtype == numpy.dtype(name) and array.shape == (3, 5)
        assert numpy.asarray(array).tobytes() == raw(plain[name]).numpy().tobytes()
    half = penstock.load_file(folder / "special.safetensors", framework="jax",
                              keys=["bfloat16"])["bfloat16"]
    assert half.dtype == jax.numpy.bfloat16
    assert numpy.asarray(half).tobytes() == raw(special["bfloat16"]).numpy().tobytes()


def test_jax_arrays_outlive_the_dict_and_compute(big):
    jax = pytest.importorskip("jax")
    path, tensors = big
    array = penstock.load_file(path, framework="jax", keys="part.0*")["part.02"]
    gc.collect()
    assert numpy.asarray(array).tobytes() == raw(tensors["part.02"]).numpy().tobytes()
    assert (jax.numpy.zeros_like(array) == 0).all()


def test_cupy_arrays(kinds, device):
    cupy = pytest.importorskip("cupy")
    if device == "cpu":
        pytest.skip("CuPy is for GPUs")
    folder, plain, _ = kinds
    loaded = penstock.load_file(folder / "plain.safetensors", device, framework="cupy",
                                keys=SHARED)
    for name, array in loaded.items():
        assert isinstance(array, cupy.ndarray)
        assert array.get().tobytes() == raw(plain[name]).numpy().tobytes()


def test_a_framework_that_is_not_installed_is_named(kinds):
    folder, _, _ = kinds
    said = python("""
        import sys
        for name in ("torch", "numpy", "jax", "cupy"):
            sys.modules[name] = None
        import penstock
        for name in ("pt", "np", "jax", "cupy"):
            try:
                penstock.load_file(sys.argv[1], framework=name)
            except Exception as error:
                print(name, type(error).__name__, error)
        """, folder / "plain.safetensors").stdout.splitlines()
    assert len(said) == 4
    for name, line in zip(("torch", "numpy", "jax", "cupy"), said):
        assert name in line.split(" ", 1)[1].lower(), line


# ----------------------------------------------------------------------------- what is imported --

@pytest.mark.parametrize("code, absent", [
    ("import penstock", ["torch", "numpy", "jax", "cupy", "transformers", "safetensors", "tqdm"]),
    ("import penstock; penstock.load_file(path, framework='dlpack')",
     ["torch", "numpy", "jax", "cupy"]),
    ("import penstock; penstock.load_file(path, framework='np')", ["torch", "jax", "cupy"]),
    ("import penstock; list(penstock.stream(path, framework='np'))", ["torch", "jax"]),
    ("import penstock; penstock.safe_open(path, 'np').get_slice('int32')[1:]", ["torch", "jax"]),
    ("import penstock; penstock.prefetch(path, 'cpu').wait()", ["torch", "numpy", "jax"]),
    ("import penstock; penstock.load_file(path, framework='dlpack', progress=True)",
     ["torch", "numpy", "tqdm"]),
])
def test_nothing_is_imported_that_nobody_asked_for(kinds, code, absent):
    folder, _, _ = kinds
    said = python(f"import sys\npath = sys.argv[1]\n{code}\n"
                  f"print([name for name in {absent} if name in sys.modules])",
                  folder / "plain.safetensors").stdout
    assert said.splitlines()[-1] == "[]"


def test_devices_of_torch_are_understood_without_importing_it(kinds):
    """An object that says it is a torch.device is only there when torch is."""
    folder, plain, _ = kinds
    loaded = penstock.load_file(folder / "plain.safetensors", torch.device("cpu"), framework="np")
    assert loaded["int32"].tolist() == plain["int32"].tolist()


def test_the_package_runs_from_its_folder_alone(kinds):
    """No environment but the path: libraries beside the package are found."""
    folder, _, _ = kinds
    env = {"PYTHONPATH": environment()["PYTHONPATH"], "PATH": os.environ.get("PATH", ""),
           "HOME": os.environ.get("HOME", "/")}
    said = python("""
        import sys, penstock
        print(len(penstock.load_file(sys.argv[1], framework="dlpack")))
        """, folder / "plain.safetensors", env=env).stdout
    assert int(said) == len(NUMPY)


# --------------------------------------------------------------------------------- a GPU in play --

FAKES = PACKAGE.parent / "tests" / "fakes"
TO_GPU = """
    import sys, penstock
    path, folder = sys.argv[1:]
    {code}
    for name, array in arrays.items():
        assert tuple(map(int, array.__dlpack_device__())) == (2, 0)
        with penstock.File(f"{{folder}}/{{name}}", "w") as file:
            file.write(array)
    del arrays, array
    print("fine")
    """


@pytest.mark.parametrize("code", [
    "arrays = penstock.load_file(path, 'cuda:0', framework='dlpack')",
    "arrays = penstock.load_file(path, 0, framework='dlpack', arena=False)",
    "arrays = dict(penstock.stream(path, 'cuda:0', framework='dlpack', window=100))",
    "penstock.prefetch(path); arrays = penstock.load_file(path, 'cuda', framework='dlpack')",
    "fetch = penstock.prefetch(path); fetch.wait(); fetch.cancel(); del fetch; "
    "arrays = penstock.load_model(path, 'cuda:0', framework='dlpack')",
    "arrays = penstock.load_file(path, 'cuda:0', framework='dlpack', memory_limit=65536)",
])
def test_bytes_reach_the_memory_of_a_gpu_and_nothing_leaks(kinds, tmp_path, code):
    """By way of the fake driver, which runs copies as late as is lawful and counts what it gave."""
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip("no fake driver beside this package")
    folder, plain, _ = kinds
    env = environment(LD_LIBRARY_PATH=str(FAKES), FAKE_CUDA_STRICT="1",
                      FAKE_CUDA_ABORT_ON_LEAK="1")
    done = python(TO_GPU.format(code=code), folder / "plain.safetensors", tmp_path,
                  env=env)
    assert done.stdout == "fine\n" and done.stderr == ""
    for name, tensor in plain.items():
        assert (tmp_path / name).read_bytes() == raw(tensor).numpy().tobytes(), name
