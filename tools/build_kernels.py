# SPDX-License-Identifier: MIT
"""The second half of build-kernels.sh: compile src/kernels for each kind of GPU, pack the results
into one fat binary, write that and the SHA-256 of all files concerned:

    build_kernels.py

`sha256sum -c src/kernels/image.sha256` compares them.

Prints what each kernel takes of a GPU, as far as the compiler tells. The same sources and tools
give the same bytes.
"""
import ctypes
import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGE = "src/kernels/image.fatbin"
SUMS = "src/kernels/image.sha256"
#: Everything that the kernels are made of.
SOURCES = ["src/kernels/convert.cu", "src/kernels/decode.cu", "src/base/decode.h",
           "src/base/floats.h"]
#: Machine code of 8.0 also runs on 8.6 and 8.9, that of 10.0 on 10.3, and so on.
MACHINES = [75, 80, 90, 100, 120]
#: The oldest GPU that later ones are like, for PTX.
VIRTUAL = 75


def sums() -> str:
    """Which image was made of which sources, as sha256sum writes it."""
    return "".join(f"{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}  {name}\n"
                   for name in [IMAGE, *SOURCES])


def library(package: str, name: str) -> ctypes.CDLL:
    """A library out of a package that was installed beside this Python."""
    for folder in map(Path, sys.path):
        found = sorted(folder.glob(f"nvidia/{package}/lib/{name}.so.*"))
        if found:
            return ctypes.CDLL(str(found[0]))
    sys.exit(f"{name} is not there: run tools/build-kernels.sh")


def check(result: int, what: str) -> None:
    """CUDA's libraries return 0."""
    if result:
        sys.exit(f"{what}: error {result}")


class Compiler:
    """NVRTC."""

    def __init__(self):
        self.nvrtc = library("cuda_nvrtc", "libnvrtc")

    def text(self, program, what: str) -> bytes:
        """What a program became: its CUBIN, its PTX, its ProgramLog."""
        size = ctypes.c_size_t()
        check(getattr(self.nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        text = ctypes.create_string_buffer(size.value)
        check(getattr(self.nvrtc, f"nvrtcGet{what}")(program, text), what)
        return text.raw

    def compile(self, sources: list[str], architecture: str, what: str) -> bytes:
        """For one kind of GPU: one program, since the driver takes one out of a fat binary."""
        program = ctypes.c_void_p()
        code = "".join(f'#include "{Path(name).relative_to("src")}"\n' for name in sources).encode()
        flags = [f"--gpu-architecture={architecture}", "--std=c++17", f"-I{ROOT}/src",
                 "--ptxas-options=-v", "--no-source-include"]
        array = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
        check(self.nvrtc.nvrtcCreateProgram(ctypes.byref(program), code,
                                            b"kernels.cu", 0, None, None), "kernels")
        failed = self.nvrtc.nvrtcCompileProgram(program, len(flags), array)
        log = self.text(program, "ProgramLog").rstrip(b"\0\n").decode()
        print(f"for {architecture}\n{log}".rstrip())
        if failed:
            sys.exit(f"{architecture}: error {failed}")
        return self.text(program, what)


def pack(parts: list[tuple[str, str, bytes]]) -> bytes:
    """A fat binary of ("Cubin" or "PTX", kind of GPU, bytes)."""
    fatbin = library("nvfatbin", "libnvfatbin")
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()
    flags = (ctypes.c_char_p * 2)(b"-64", b"-compress-all")
    check(fatbin.nvFatbinCreate(ctypes.byref(handle), flags, ctypes.c_size_t(len(flags))),
          "nvFatbinCreate")
    for kind, machine, code in parts:
        more = [b""] if kind == "PTX" else []
        check(getattr(fatbin, f"nvFatbinAdd{kind}")(handle, code, ctypes.c_size_t(len(code)),
                                                   machine.encode(), b"kernels", *more),
              f"nvFatbinAdd{kind}")
    check(fatbin.nvFatbinSize(handle, ctypes.byref(size)), "nvFatbinSize")
    image = ctypes.create_string_buffer(size.value)
    check(fatbin.nvFatbinGet(handle, image), "nvFatbinGet")
    return image.raw


def main() -> None:
    """Write the image and its sums."""
    compiler = Compiler()
    kernels = [source for source in SOURCES if source.endswith(".cu")]
    parts = [("Cubin", str(machine), compiler.compile(kernels, f"sm_{machine}", "CUBIN"))
             for machine in MACHINES]
    parts.append(("PTX", str(VIRTUAL), compiler.compile(kernels, f"compute_{VIRTUAL}", "PTX")))
    image = pack(parts)
    (ROOT / IMAGE).write_bytes(image)
    (ROOT / SUMS).write_text(sums())
    print(f"{IMAGE}: {len(image)} bytes")


if __name__ == "__main__":
    main()
