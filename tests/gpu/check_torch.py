# SPDX-License-Identifier: MIT
"""Penstock and torch in one process: one context, one memory, the caller's stream honoured.

A plain program for tools/gpu-test.sh, since a GPU server may have no pytest: it ends with 0, 1, or
77 with the reason where something is missing. PENSTOCK_LIBRARY names the library.
"""
import ctypes
import os
import sys
import tempfile

SIZE = (64 << 20) + 123
READ, WRITE, AUTO = 1, 2, 0


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("domain", ctypes.c_int), ("raw", ctypes.c_int),
                ("offset", ctypes.c_int64), ("operation", ctypes.c_char * 32),
                ("object", ctypes.c_char * 256), ("message", ctypes.c_char * 256),
                ("hint", ctypes.c_char * 256)]


class Extent(ctypes.Structure):
    _fields_ = [("object", ctypes.c_void_p), ("offset", ctypes.c_uint64),
                ("memory", ctypes.c_void_p), ("length", ctypes.c_uint64),
                ("rows", ctypes.c_uint64), ("object_pitch", ctypes.c_uint64),
                ("memory_pitch", ctypes.c_uint64), ("group", ctypes.c_uint64),
                ("device", ctypes.c_void_p), ("flags", ctypes.c_uint32),
                ("fill", ctypes.c_uint32), ("reserved", ctypes.c_uint64 * 4)]


class Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("transfer", ctypes.c_int), ("cache", ctypes.c_int),
                ("memory_limit", ctypes.c_uint64), ("request_size", ctypes.c_uint64),
                ("lanes", ctypes.c_uint32), ("depth", ctypes.c_uint32), ("gap", ctypes.c_uint64),
                ("stream", ctypes.c_void_p), ("inject", ctypes.c_char_p)]


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(77)


class Penstock:
    """Just enough of the library to move a tensor."""

    def __init__(self):
        self.lib = ctypes.CDLL(os.environ.get("PENSTOCK_LIBRARY", "libpenstock.so.1"))
        self.lib.pen_object_size.restype = ctypes.c_uint64
        self.lib.pen_object_close.restype = None
        self.lib.pen_object_close.argtypes = [ctypes.c_void_p]
        self.device = ctypes.c_void_p()
        self.call("pen_device_open", b"cuda:0", ctypes.byref(self.device))

    def call(self, name, *args):
        err = Error()
        if getattr(self.lib, name)(*args, ctypes.byref(err)):
            raise OSError(-err.code, f"{name}: {err.message.decode()} {err.hint.decode()}")

    def move(self, path, tensor, direction, stream=None):
        handle = ctypes.c_void_p()
        size = tensor.numel() * tensor.element_size()
        self.call("pen_object_open", os.fsencode(path), direction,
                  ctypes.c_uint64(size if direction == WRITE else 0), ctypes.byref(handle))
        extent = Extent(object=handle, memory=tensor.data_ptr(), length=size)
        options = Options(size=ctypes.sizeof(Options), transfer=AUTO, stream=stream)
        try:
            self.call("pen_transfer", direction, self.device, ctypes.byref(extent),
                      ctypes.c_size_t(1), ctypes.byref(options), None)
            if direction == WRITE:
                self.call("pen_object_commit", handle)
        finally:
            self.lib.pen_object_close(handle)


def main():
    try:
        import torch
    except ImportError:
        skip("there is no torch")
    if not torch.cuda.is_available():
        skip("torch sees no GPU")

    penstock = Penstock()
    made = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = os.path.join(folder, "tensor.bin")
        made.numpy().tofile(path)

        # Memory that torch allocated, in the context that torch made.
        tensor = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        penstock.move(path, tensor, READ)
        assert torch.equal(tensor.cpu(), made), "a file read into a tensor"

        # A slice that starts at an odd byte leaves its surroundings alone.
        tensor = torch.full((SIZE + 200,), 7, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        penstock.move(path, tensor[77:77 + SIZE], READ)
        assert torch.equal(tensor[77:77 + SIZE].cpu(), made), "a file read into a slice"
        assert bool((tensor[:77] == 7).all() and (tensor[77 + SIZE:] == 7).all()), "around it"

        # What a stream still has to do comes before the bytes; what comes after sees them.
        stream = torch.cuda.Stream()
        target = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
        busy = torch.ones(64 << 20, dtype=torch.float32, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(2000):
                busy.mul_(1.0)
            target.fill_(7)
        penstock.move(path, target, READ, stream.cuda_stream)
        with torch.cuda.stream(stream):
            copy = target.clone()
        stream.synchronize()
        assert torch.equal(copy.cpu(), made), "a read behind a busy stream"

        # And the other way: bytes that a stream is still making are what is written.
        with torch.cuda.stream(stream):
            for _ in range(2000):
                busy.mul_(1.0)
            target.fill_(9)
        out = os.path.join(folder, "out.bin")
        penstock.move(out, target, WRITE, stream.cuda_stream)
        with open(out, "rb") as file:
            assert file.read() == bytes([9]) * SIZE, "a write behind a busy stream"
    print("torch and penstock share the GPU")


if __name__ == "__main__":
    main()
