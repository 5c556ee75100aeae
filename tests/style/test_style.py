# SPDX-License-Identifier: MIT
"""What the compiler does not check: layers, the public header, and how the text looks.

Each rule is a small search over the source. Comments and strings are taken out first where a
rule is about code, so that nobody has to write around it.
"""
import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build"
HEADER = ROOT / "include/penstock.h"
FOLDERS = ("src", "include", "cli", "tests", "bench", "examples", "tools", "man", "python")
LAYERS = {"base": 0, "sys": 1, "kernels": 1, "mem": 2, "io": 3, "s3": 3, "engine": 4, "format": 5}
TOP = 6


def files(*suffixes, folders=FOLDERS):
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))
             if path.is_file() and "__pycache__" not in path.parts]
    return [path for path in found if path.suffix in suffixes or path.name in suffixes]


def code(path):
    """The text with comments and the insides of strings blanked; lines stay where they are."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match.group()) if match.group()[0] == "/" else '""'
    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.sub(pattern, blank, path.read_text(), flags=re.S)


def show(path):
    return path.relative_to(ROOT)


def check(breaches):
    assert not breaches, "\n" + "\n".join(breaches)


# ------------------------------------------------------------------------------- the layers --

def layer(name):
    """The number of a file under src/, by its folder; what lies in src/ itself is on top."""
    parts = Path(name).parts
    return LAYERS[parts[0]] if len(parts) > 1 else TOP


def test_a_file_includes_its_own_folder_and_lower_ones_only():
    breaches = []
    for path in files(".c", ".h", folders=("src",)):
        own = path.relative_to(ROOT / "src")
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), flags=re.M):
            if name == "penstock.h":
                continue
            if not (ROOT / "src" / name).exists():
                breaches.append(f"{show(path)}: {name} is not named from src/")
            elif layer(name) > layer(own) or (
                    layer(name) == layer(own) and Path(name).parts[0] != own.parts[0]):
                breaches.append(f"{show(path)} includes {name} from above or beside")
    check(breaches)


def test_the_command_line_uses_the_public_header_and_base_only():
    breaches = []
    for path in files(".c", ".h", folders=("cli",)):
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), flags=re.M):
            if name != "penstock.h" and not name.startswith("base/") \
                    and not (ROOT / "cli" / name).exists() and not (ROOT / name).exists():
                breaches.append(f"{show(path)} includes {name}")
    check(breaches)


def test_the_public_header_includes_no_header_of_ours():
    assert not re.findall(r'#\s*include\s+"', HEADER.read_text())


# What leaves the program asks the fault hook first, and src/sys is where that happens.
CALLS = """open openat creat close read write pread pwrite preadv pwritev readv writev lseek
    stat fstat lstat statx access faccessat fallocate posix_fallocate ftruncate truncate fsync
    fdatasync sync_file_range fchmod chmod fchown chown link linkat rename renameat renameat2
    unlink unlinkat readlink realpath mkdir opendir readdir mkstemp mkostemp tmpfile fopen fdopen
    mmap munmap mremap madvise mlock mbind mincore posix_fadvise ioctl fcntl dup pipe poll
    epoll_wait eventfd eventfd_write syscall prctl sched_setaffinity sched_getaffinity sysconf
    pthread_create nanosleep usleep sleep clock_gettime gettimeofday getrusage fork vfork execve
    system popen kill signal sigaction malloc calloc realloc aligned_alloc posix_memalign strdup
    strndup asprintf vasprintf
    io_uring_setup io_uring_enter io_uring_register""".split()
# No exceptions are needed today. liburing's own functions, in src/io/queue_uring.c alone, are the
# library's and each asks the hook where it is called; getpid() cannot fail; free(), pthread
# locks and joins do not leave the program.
ALLOWED = set()


def test_system_calls_are_made_in_sys_only():
    pattern = re.compile(r"(?<![\w.>])(%s)\s*\(" % "|".join(CALLS))
    breaches = []
    for path in files(".c", ".h", folders=("src",)):
        if path.parent.name == "sys":
            continue
        for number, line in enumerate(code(path).split("\n"), 1):
            for call in pattern.findall(line):
                if (str(show(path)), call) not in ALLOWED:
                    breaches.append(f"{show(path)}:{number}: {call}()")
    check(breaches)


def test_io_uring_is_called_in_one_file_only():
    users = {str(show(path)) for path in files(".c", ".h", folders=("src",))
             if re.search(r"\bio_uring_\w+\s*\(|liburing\.h", code(path))}
    assert users <= {"src/io/queue_uring.c", "src/sys/uring.c", "src/sys/uring.h"}


def test_no_code_compares_addresses_of_tables():
    check([f"{show(path)}:{number}: {line.strip()}"
           for path in files(".c", ".h", folders=("src",))
           for number, line in enumerate(code(path).splitlines(), 1)
           if re.search(r"[!=]= *&?\w+_ops\b|\b(ops|queue|inner|kind) *[!=]= *&", line)])


def test_libraries_are_opened_at_run_time_in_sys_only():
    breaches = [f"{show(path)}: {name}" for path in files(".c", ".h", folders=("src", "cli"))
                for name in re.findall(r"\b(dlopen|dlsym|dlfcn)\b", code(path))
                if path.parent != ROOT / "src/sys"]
    check(breaches)


# ------------------------------------------------------------------------ the public header --

def declared():
    """Functions that the header declares."""
    names = re.findall(r"\b(pen_\w+)\s*\(", code(HEADER))
    assert len(names) == len(set(names)) and len(names) > 20
    return set(names)


# Every macro in a place where it is meant to be, for every compiler.
USE = """#include <penstock.h>
#include <penstock.h>
#if PEN_VERSION_NUMBER < 200 || PEN_VERSION_MAJOR * 10000 + PEN_VERSION_MINOR * 100 + \\
	PEN_VERSION_PATCH != PEN_VERSION_NUMBER
#error the version cannot be compared
#endif
static struct pen_options kept = PEN_SIZED_INIT(pen_options);
int use(struct pen_device *device, struct pen_extent *extent, const char **version);
int use(struct pen_device *device, struct pen_extent *extent, const char **version)
{
	char path[sizeof(struct pen_path) * PEN_PATHS_MAX], reason[PEN_REASON_MAX];
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_warming warming = PEN_WARMING_INIT;
	struct pen_torch_checked checked = PEN_TORCH_CHECKED_INIT;
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	struct pen_save_options saving = PEN_SAVE_OPTIONS_INIT;
	struct pen_checkpoint_checked step = PEN_CHECKPOINT_CHECKED_INIT;
	struct pen_pack_options packing = PEN_PACK_OPTIONS_INIT;
	struct pen_packed packed = PEN_PACKED_INIT;
	struct pen_error err;

	step.files = PEN_CHECKPOINT_OVERWRITE + PEN_CHECKPOINT_DRY_RUN;
	kept.gap = step.files;
	options.memory_limit = PEN_MEMORY_AUTO;
	pen_warming_poll(&warming);
	saving.align = content.size + checked.size + PEN_TORCH_PACKED + PEN_TORCH_RAW;
	packing.threads = PEN_PACKED_KINDS + (uint32_t)packed.size;
	kept.memory_limit = saving.align + packing.threads;
	extent->flags = PEN_FILL;
	options.lanes = (uint32_t)(sizeof(path) + sizeof(reason)) + kept.lanes;
	options.stream = extent->fill ? PEN_STREAM_LEGACY : PEN_STREAM_PER_THREAD;
	options = kept;
	*version = PEN_VERSION;
	return pen_transfer(PEN_READ, device, extent, 1, &options, &report, &err);
}
"""


def test_every_macro_of_the_header_is_compiled():
    macros = set(re.findall(r"#\s*define (PEN_\w+)", HEADER.read_text()))
    assert len(macros) > 10 and not [name for name in macros if not re.search(rf"\b{name}\b", USE)]


@pytest.mark.parametrize("compiler,standard", [
    *((compiler, standard) for compiler in ("gcc", "clang-19") for standard in ("c99", "gnu17")),
    *((compiler, standard) for compiler in ("g++", "clang++-19")
      for standard in ("c++11", "c++14", "c++17", "c++20")),
])
def test_the_header_stands_alone(compiler, standard):
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    done = subprocess.run(
        [compiler, "-x", "c++" if "+" in compiler else "c", f"-std={standard}", "-fsyntax-only",
         "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", "-I", ROOT / "include", "-"],
        input=USE, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_header_has_no_inline_functions_and_no_typedefs():
    text = code(HEADER)
    assert "inline" not in text and "typedef" not in text


def test_the_library_exports_the_header_and_nothing_else():
    library = BUILD / "libpenstock.so"
    if not library.exists():
        pytest.skip("build/libpenstock.so is not built")
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], text=True, check=True,
                             capture_output=True).stdout
    exported = {line.split()[-1].split("@")[0] for line in symbols.splitlines()}
    assert exported == declared()


def test_every_public_function_is_used_by_a_test_or_an_example():
    text = "".join(code(path) for path in files(".c", ".h", folders=("tests", "examples")))
    unused = sorted(name for name in declared() if not re.search(rf"\b{name}\s*\(", text))
    assert not unused


def test_the_versions_agree():
    version = re.search(r'PEN_VERSION "([^"]+)"', HEADER.read_text()).group(1)
    assert f"version: '{version}'" in (ROOT / "meson.build").read_text()
    parts = dict(re.findall(r"PEN_VERSION_(MAJOR|MINOR|PATCH) (\d+)", HEADER.read_text()))
    assert version == f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}"
    library = ctypes.CDLL(str(BUILD / "libpenstock.so"))
    number = int(parts["MAJOR"]) * 10000 + int(parts["MINOR"]) * 100 + int(parts["PATCH"])
    assert library.pen_version_number() == number


# --------------------------------------------------------------------------------- the text --

SOURCE = (".c", ".h", ".py", ".sh", ".cu", "meson.build", "Makefile")


def source():
    return files(*SOURCE) + [ROOT / "Makefile", ROOT / "meson.build"]


def test_every_file_opens_with_its_licence():
    breaches = []
    for path in source() + files(".1", folders=("man",)):
        lines = path.read_text().split("\n")
        first = lines[1] if lines[0].startswith("#!") else lines[0]
        if "SPDX-License-Identifier: MIT" not in first:
            breaches.append(f"{show(path)}: {first[:60]}")
    check(breaches)


def test_every_c_file_says_its_idea():
    breaches = []
    for path in files(".c", ".h", folders=("src", "include", "cli", "tests", "bench", "examples")):
        head = [line for line in path.read_text().split("\n")[1:6] if line.startswith("/*")]
        if not head:
            breaches.append(f"{show(path)}: no comment after the licence")
    check(breaches)


def test_lines_fit_into_100_columns():
    check([f"{show(path)}:{number}: {len(line.expandtabs(8))} columns" for path in source()
           for number, line in enumerate(path.read_text().split("\n"), 1)
           if len(line.expandtabs(8)) > 100])


def test_no_white_space_is_left_at_the_end():
    breaches = []
    for path in source() + files(".1", ".md", folders=("man",)):
        text = path.read_text()
        breaches += [f"{show(path)}:{number}" for number, line in enumerate(text.split("\n"), 1)
                     if line != line.rstrip()]
        if text and (not text.endswith("\n") or text.endswith("\n\n")):
            breaches.append(f"{show(path)}: does not end with one newline")
    check(breaches)


def test_c_is_indented_with_tabs():
    check([f"{show(path)}:{number}" for path in files(".c", ".h")
           for number, line in enumerate(path.read_text().split("\n"), 1)
           if re.match(r" {8}", line)])


def test_nothing_is_left_to_do():
    marks = re.compile(r"\b(%s)\b" % "|".join(("TO" "DO", "FIX" "ME", "X" "XX", "HA" "CK")))
    check([f"{show(path)}:{number}: {line.strip()}" for path in source()
           for number, line in enumerate(path.read_text().split("\n"), 1) if marks.search(line)])


def paths():
    """The engine's own list: (name, what it is), in its order."""
    library = ctypes.CDLL(str(BUILD / "libpenstock.so"))
    library.pen_path_name.restype = ctypes.c_char_p
    what, found = ctypes.c_char_p(), []
    while name := library.pen_path_name(len(found), ctypes.byref(what)):
        found.append((name.decode(), what.value.decode()))
    return found


def test_the_manual_lists_the_paths_of_the_engine():
    page = (ROOT / "man/penstock-explain.1").read_text()
    section = page.split(".Sh PATHS\n")[1].split(".Sh ")[0]
    assert re.findall(r"\.It Cm (\S+)\n([^\n]+)\n", section) == paths()


def test_the_design_names_the_paths_of_the_engine():
    table = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs/design.md").read_text(), flags=re.M)
    assert table == [name for name, _ in paths()]


@pytest.mark.parametrize("page", [path.name for path in files(".1", folders=("man",))])
def test_man_pages_are_clean(page):
    if not shutil.which("mandoc"):
        pytest.skip("mandoc is not installed")
    done = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", ROOT / "man" / page],
                          text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------------------ the kernels --

def test_the_committed_kernels_were_made_of_the_committed_sources():
    spec = importlib.util.spec_from_file_location("build_kernels", ROOT / "tools/build_kernels.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    sources = {str(show(path)) for path in files(".cu", folders=("src",))}
    included = {f"src/{name}" for source in sources for name in
                re.findall(r'#\s*include\s+"([^"]+)"', (ROOT / source).read_text())}
    assert sources | included == set(tool.SOURCES)
    assert (ROOT / tool.SUMS).read_text() == tool.sums(), "run tools/build-kernels.sh"


def test_the_library_holds_the_committed_kernels():
    image = (ROOT / "src/kernels/image.fatbin").read_bytes()
    assert image in (BUILD / "libpenstock.so").read_bytes(), "build the library anew"


def test_every_form_names_a_kernel_that_there_is():
    named = set(re.findall(r"FORM\(.*, (\w+)\),", (ROOT / "src/base/form.c").read_text()))
    made = set(re.findall(r"^CONVERT\((\w+),", (ROOT / "src/kernels/convert.cu").read_text(),
                          flags=re.M))
    assert named == made and len(made) == 6


def test_every_coding_names_a_kernel_that_there_is():
    text = (ROOT / "src/base/coding.c").read_text()
    named = re.findall(r"KERNEL(?:_TO)?\(.*, (\w+)\),", text)
    made = re.findall(r"^DECODE(?:_TO)?\((\w+),", (ROOT / "src/kernels/decode.cu").read_text(),
                      flags=re.M)
    assert named == made and len(set(made)) == 11
