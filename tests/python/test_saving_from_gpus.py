# SPDX-License-Identifier: MIT
"""Saves of GPU memory over the fake driver, which runs queued work as late as is lawful: what fails
in the middle leaves the old file, and what is queued before is saved as it will be.

Each runs in a process of its own, which finds that driver. A torch without CUDA has no such memory,
so it is the engine's; penstock.save and save_file say the same to the engine of torch's.
"""
import os

import pytest

from support import PACKAGE, environment, python

FAKES = PACKAGE.parent / "tests/fakes"
SIZE = 8 << 20

# save(path, memory, streams, inject=None) writes the memory of a GPU as one file of a kind, and
# content(path) are the bytes that are in such a file.
BEGIN = """
    import ctypes, os, sys, zipfile
    import penstock
    from penstock import _penstock as engine

    path, kind, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    host, gpu = engine.Device("host"), engine.Device("cuda:0")

    def save(path, memory, streams, inject=None):
        if kind == "torch":
            return engine.torch_save(path, host, [("data.pkl", b"\\x80\\x02N.")],
                                     [(memory.address, size, gpu)], memory, 0, 4 << 20, streams,
                                     False, inject).wait()
        return engine.save_safetensors(path, [("a", 4, (size,), memory.address, gpu)], None, 0, 0,
                                       streams, memory, 0, 4 << 20, inject).wait()

    def content(path):
        if kind == "torch":
            with zipfile.ZipFile(path) as file:
                assert file.testzip() is None
                return next(file.read(name) for name in file.namelist() if "/data/0" in name)
        return bytes(penstock.load_file(path, framework="dlpack")["a"])

    def filled(byte):
        memory = engine.Memory(gpu, size)
        with open(path + ".source", "wb") as file:
            file.write(bytes([byte]) * size)
        with penstock.File(path + ".source") as file:
            file.read(memory.array(0, 4, (size,)))
        os.remove(path + ".source")
        return memory
"""


def over_the_fake(code: str, *arguments) -> str:
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip(f"there is no fake libcuda.so.1 in {FAKES}")
    return python(BEGIN + code, *arguments, SIZE, env=environment(
        LD_LIBRARY_PATH=str(FAKES), FAKE_CUDA_STRICT="1", FAKE_CUDA_ABORT_ON_LEAK="1")).stdout


@pytest.fixture(params=["torch", "safetensors"])
def kind(request):
    return request.param


def test_a_write_that_fails_in_the_middle_leaves_the_old_file_and_one_error(tmp_path, kind):
    said = over_the_fake("""
    save(path, filled(1), [(gpu, 1)])
    new = filled(2)
    for nth in 1, 2, 3:
        try:
            save(path, new, [(gpu, 1)], f"fail:{nth}+:EIO")
            print("no error")
        except penstock.Error as error:
            print(error.errno, error.operation, error.object == path, error.__context__)
        assert content(path) == bytes([1]) * size
        assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
    save(path, new, [(gpu, 1)])
    assert content(path) == bytes([2]) * size
    """, tmp_path / "file", kind)
    assert said.splitlines() == ["5 write True None"] * 3
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_queued_on_the_stream_is_saved_as_it_will_be(tmp_path, kind):
    """And without a word about the stream it is not: the driver has not done it yet."""
    said = over_the_fake("""
    memory = filled(1)
    cuda = ctypes.CDLL("libcuda.so.1")
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    assert not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    assert not cuda.cuCtxSetCurrent(context)
    assert not cuda.cuStreamCreate(ctypes.byref(stream), 1)

    def queue(byte):
        assert not cuda.cuMemsetD8Async(ctypes.c_ulonglong(memory.address), ctypes.c_ubyte(byte),
                                        ctypes.c_size_t(size), stream)

    queue(2)
    save(path, memory, [])
    print(set(content(path)))
    save(path, memory, [(gpu, stream.value)])
    print(set(content(path)))
    queue(3)
    save(path, memory, [(gpu, stream.value)])
    print(set(content(path)))
    assert not cuda.cuStreamSynchronize(stream) and not cuda.cuStreamDestroy_v2(stream)
    assert not cuda.cuDevicePrimaryCtxRelease_v2(0)
    """, tmp_path / "file", kind)
    assert said.splitlines() == ["{1}", "{2}", "{3}"]
