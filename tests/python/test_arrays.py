# SPDX-License-Identifier: MIT
"""penstock.Array close up: what its DLPack capsules and buffers say, and who frees its memory."""
import ctypes
import gc

import numpy
import pytest

import penstock
from penstock import _penstock as engine
from support import python

DTYPE = {name: number for number, (name, _) in enumerate(engine.DTYPES)}
F_CONTIGUOUS, C_CONTIGUOUS, FORMAT = 0x0058, 0x0038, 0x0004


class Tensor(ctypes.Structure):
    """DLPack's tensor, as far as it is looked at here."""
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class Versioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32),
                ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("tensor", Tensor)]


class Buffer(ctypes.Structure):
    """Room for a Py_buffer, which has 11 words."""
    _fields_ = [("words", ctypes.c_void_p * 16)]


def array(dtype: str, shape: tuple, size: int = 1 << 12) -> penstock.Array:
    return engine.Memory(engine.Device("host"), size).array(0, DTYPE[dtype], shape)


def pointer(capsule: object, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, name)


def test_a_capsule_lives_without_its_array():
    one = array("F32", (3, 5, 7))
    old, new = one.__dlpack__(), one.__dlpack__(max_version=(1, 0))
    address = one.address
    del one
    gc.collect()
    for _ in range(50):
        array("F32", (9, 9, 9))
    tensors = [Tensor.from_address(pointer(old, b"dltensor")),
               Versioned.from_address(pointer(new, b"dltensor_versioned")).tensor]
    for tensor in tensors:
        assert tensor.data == address and tensor.ndim == 3
        assert tensor.shape[:3] == [3, 5, 7] and tensor.strides[:3] == [35, 7, 1]


def test_the_deleter_needs_no_interpreter():
    """A thread that Python never saw frees the memory while the GIL is held elsewhere."""
    python("""
        import ctypes
        from penstock import _penstock as engine

        memory = engine.Memory(engine.Device("host"), 64 << 20)
        address = memory.address
        capsule = memory.array(0, 4, (64 << 20,)).__dlpack__()
        del memory
        held = ctypes.PyDLL(None)   # its calls keep the GIL
        held.PyCapsule_GetPointer.restype = ctypes.c_void_p
        held.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        held.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
        managed = held.PyCapsule_GetPointer(capsule, b"dltensor")
        used = b"used_dltensor"
        assert not held.PyCapsule_SetName(capsule, used)
        deleter = ctypes.c_void_p.from_address(managed + 56).value

        def mapped():
            with open("/proc/self/maps") as file:
                return any(int(line.split("-")[0], 16) <= address < int(
                    line.split("-")[1].split()[0], 16) for line in file)

        assert mapped()
        thread = ctypes.c_ulong()
        held.pthread_create.argtypes = [ctypes.c_void_p] * 4
        held.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
        assert not held.pthread_create(ctypes.byref(thread), None, deleter, managed)
        assert not held.pthread_join(thread, None)
        assert not mapped()
        """, timeout=30)


def test_a_memory_is_kept_by_each_of_its_holders():
    size = 32 << 20
    memory = engine.Memory(engine.Device("host"), size)
    last = memory.address + size - 1
    one = memory.array(0, DTYPE["U8"], (size,))
    taken, capsule = numpy.from_dlpack(one), one.__dlpack__()
    del memory, one
    gc.collect()
    taken[-1] = 7
    del taken
    gc.collect()
    assert ctypes.c_ubyte.from_address(last).value == 7
    del capsule


@pytest.mark.parametrize("version", [(1, 0), [1, 0], (1, 7), range(1, 3)])
def test_the_version_may_be_any_sequence(version):
    assert "dltensor_versioned" in repr(array("F32", (2,)).__dlpack__(max_version=version))


@pytest.mark.parametrize("words", [
    {"max_version": 1}, {"max_version": (1,)}, {"max_version": "10"}, {"max_version": (1, 0, 0)},
    {"dl_device": 1}, {"dl_device": ["cpu", 0]}])
def test_what_is_no_pair_is_a_type_error(words):
    with pytest.raises(TypeError):
        array("F32", (2,)).__dlpack__(**words)


def test_a_device_may_be_a_list():
    array("F32", (2,)).__dlpack__(dl_device=[1, 0])
    with pytest.raises(BufferError):
        array("F32", (2,)).__dlpack__(dl_device=[2, 0])


@pytest.mark.parametrize("dtype, minor", [
    ("F32", 0), ("BF16", 0), ("BOOL", 0), ("C64", 0), ("F8_E4M3", 1), ("F8_E5M2", 1),
    ("F4", 1), ("F6_E2M3", 1)])
def test_small_floats_are_of_dlpack_1_1(dtype, minor):
    capsule = array(dtype, (8,)).__dlpack__(max_version=(1, 1))
    tensor = Versioned.from_address(pointer(capsule, b"dltensor_versioned"))
    assert (tensor.major, tensor.minor) == (1, minor)


@pytest.mark.parametrize("dtype, shape, size", [
    ("F4", (3,), 2), ("F4", (4,), 2), ("F6_E2M3", (5,), 4), ("F6_E2M3", (3, 3), 7),
    ("F32", (3, 3), 36), ("F32", (0, 3), 0), ("F32", (), 4)])
def test_part_of_a_byte_is_a_byte(dtype, shape, size):
    assert array(dtype, shape).nbytes == size
    view = engine.view_of_dlpack(array(dtype, shape).__dlpack__())
    assert view[2] == size


def test_shapes_without_elements_may_be_of_any_size():
    for shape in ((0, 2**62), (2**62, 0), (0, 2**40, 2**40), (2**62, 2**62, 0)):
        empty = array("F64", shape)
        assert empty.shape == shape and empty.nbytes == 0
        assert engine.view_of_dlpack(empty.__dlpack__())[2] == 0
    for shape in ((2**62, 2), (2**40, 2**40), (2**60, 1)):
        with pytest.raises((OverflowError, ValueError)):
            array("F64", shape)


def ask(one: penstock.Array, flags: int) -> None:
    """Ask for a buffer and give it back; raises what the array says."""
    buffer = Buffer()
    get, release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
    get.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
    release.argtypes = [ctypes.c_void_p]
    if get(one, ctypes.byref(buffer), flags) == 0:
        release(ctypes.byref(buffer))


def test_an_order_that_the_array_has_not_is_refused():
    with pytest.raises(BufferError):
        ask(array("F32", (2, 3)), F_CONTIGUOUS | FORMAT)
    ask(array("F32", (2, 3)), C_CONTIGUOUS | FORMAT)
    # In both orders.
    for shape in ((6,), (1, 6), (6, 1, 1), (), (0, 3)):
        ask(array("F32", shape), F_CONTIGUOUS | FORMAT)
    # As plain bytes.
    ask(array("F32", (2, 3)), F_CONTIGUOUS)
    ask(array("BF16", (2, 3)), F_CONTIGUOUS | FORMAT)
