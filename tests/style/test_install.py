# SPDX-License-Identifier: MIT
"""What `make install` leaves behind is enough to build and run a program against.

The installation goes from the build that is there into a folder of the test's own, by way of
DESTDIR, so that neither the machine nor the build changes.
"""
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build"

PROGRAM = r"""
#include <penstock.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_device *host;
	struct pen_object *object;
	struct pen_error err;
	void *memory;
	uint64_t word;

	if (strcmp(pen_version(), PEN_VERSION) || pen_version_number() != PEN_VERSION_NUMBER)
		return 1;
	if (pen_device_open("host", &host, &err) ||
	    pen_object_open("pattern:1M", PEN_READ, 0, &object, &err) ||
	    pen_device_alloc(host, pen_object_size(object), &memory, &err))
		return 2;
	struct pen_extent all = { .object = object, .memory = memory, .length = 1 << 20 };
	if (pen_transfer(PEN_READ, host, &all, 1, NULL, &report, &err))
		return 3;
	memcpy(&word, (char *)memory + 4096, sizeof(word));
	printf("%llu bytes, the word at 4096 is %llu\n", (unsigned long long)report.bytes,
	       (unsigned long long)word);
	pen_object_close(object);
	pen_device_free(host, memory, 1 << 20, NULL);
	pen_device_close(host);
	return 0;
}
"""


def run(*command, **more):
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, **more)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    meson = shutil.which("meson")
    if not meson or not (BUILD / "libpenstock.so").exists():
        pytest.skip("there is no build to install from")
    root = tmp_path_factory.mktemp("root")
    # The parts that `make install` installs; the Python package is pip's.
    tags = re.search(r"meson install .*--tags (\S+)", run("make", "-n", "install", cwd=ROOT))[1]
    run(meson, "install", "-C", BUILD, "--no-rebuild", "--quiet", "--tags", tags, "--destdir", root)
    return root


def one(root, name):
    found = list(root.rglob(name))
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def test_everything_is_there(root):
    assert one(root, "penstock.h").read_text() == (ROOT / "include/penstock.h").read_text()
    assert one(root, "libpenstock.so.1").exists()
    assert one(root, "libpenstock.so").exists()
    assert one(root, "libpenstock.a").exists()
    assert "Libs: " in one(root, "penstock.pc").read_text()
    for name, place in (("penstock.bash", "bash-completion/completions"),
                        ("_penstock", "zsh/site-functions"),
                        ("penstock.fish", "fish/vendor_completions.d")):
        assert str(one(root, name).parent).endswith(f"/share/{place}")
    for page in (ROOT / "man").glob("*.1"):
        assert one(root, page.name + "*").parent.name == "man1"


def test_nothing_else_is_there(root):
    wanted = ("penstock", "penstock.h", "penstock.pc", "libpenstock.so", "libpenstock.so.1",
              "libpenstock.a", "penstock.bash", "_penstock", "penstock.fish")
    extra = [path for path in root.rglob("*") if not path.is_dir() and path.name not in wanted
             and not path.name.startswith("libpenstock.so.0.") and path.parent.name != "man1"]
    assert not extra


def test_the_installed_command_runs(root):
    command = next(path for path in root.rglob("penstock") if path.is_file())
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    out = run(command, "copy", "pattern:1M", "null:", "--json", "--quiet", env=env)
    assert '"bytes"' in out


@pytest.mark.parametrize("compiler", ["gcc", "clang-19"])
def test_a_program_builds_and_runs_against_it(root, tmp_path, compiler):
    if not shutil.which("pkg-config") or not shutil.which(compiler):
        pytest.skip(f"pkg-config or {compiler} is not installed")
    env = dict(os.environ, PKG_CONFIG_SYSROOT_DIR=str(root),
               PKG_CONFIG_PATH=str(one(root, "penstock.pc").parent))
    version = run("pkg-config", "--modversion", "penstock", env=env).strip()
    assert f'PEN_VERSION "{version}"' in (ROOT / "include/penstock.h").read_text()
    flags = run("pkg-config", "--cflags", "--libs", "penstock", env=env).split()
    source = tmp_path / "use.c"
    source.write_text(PROGRAM)
    run(compiler, "-Wall", "-Wextra", "-Werror", source, *flags, "-o", tmp_path / "use")
    env["LD_LIBRARY_PATH"] = str(one(root, "libpenstock.so.1").parent)
    assert run(tmp_path / "use", env=env) == "1048576 bytes, the word at 4096 is 4096\n"


# Names that the inside of the library has as well: the program's own must win, and win for itself.
OWN_NAMES = """
int error_set(void);
int error_set(void) { return 1; }
int pattern_fill(void);
int pattern_fill(void) { return 2; }
"""


@pytest.mark.parametrize("only", ["both are there", "the archive alone"])
def test_a_program_can_take_the_library_along(root, tmp_path, only):
    if not shutil.which("pkg-config"):
        pytest.skip("pkg-config is not installed")
    place = tmp_path / "root"
    shutil.copytree(root, place, symlinks=True)
    if only == "the archive alone":
        for shared in place.rglob("libpenstock.so*"):
            shared.unlink()
    env = dict(os.environ, PKG_CONFIG_SYSROOT_DIR=str(place),
               PKG_CONFIG_PATH=str(one(place, "penstock.pc").parent))
    flags = run("pkg-config", "--static", "--cflags", "--libs", "penstock", env=env).split()
    if only == "both are there":
        flags = ["-Wl,-Bstatic", *flags, "-Wl,-Bdynamic"]
    source = tmp_path / "use.c"
    source.write_text(PROGRAM + OWN_NAMES)
    run("gcc", "-Wall", "-Wextra", "-Werror", source, *flags, "-o", tmp_path / "use")
    assert run(tmp_path / "use") == "1048576 bytes, the word at 4096 is 4096\n"
    assert "libpenstock" not in run("readelf", "-d", tmp_path / "use")


def test_the_archive_shows_the_header_and_nothing_else(root):
    shown = re.findall(r" [A-Z] (\w+)$", run("nm", "-g", "--defined-only",
                                            one(root, "libpenstock.a")), re.MULTILINE)
    declared = set(re.findall(r"\b(pen_\w+)\(", (ROOT / "include/penstock.h").read_text()))
    assert set(shown) <= declared and "pen_transfer" in shown


def test_make_install_takes_a_prefix():
    plan = run("make", "-n", "install", "PREFIX=/somewhere/else", cwd=ROOT)
    assert "--prefix /somewhere/else" in plan
    assert "meson install" in plan


def test_make_says_where_things_are_and_its_other_targets_do_not(tmp_path):
    """Played through without doing it: `-n` prints what would be run."""
    def would_run(*targets):
        # Not as a part of the make that may have started these tests.
        env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        return subprocess.run(["make", "-n", f"BUILD={tmp_path}", *targets], cwd=ROOT, env=env,
                              text=True, capture_output=True, check=True).stdout
    for targets in ([], ["all"]):
        assert f'echo "built {tmp_path}/penstock, {tmp_path}/libpenstock.so' in would_run(*targets)
    for target in ("demo", "bench", "install"):
        assert "ninja -C" in would_run(target) and "echo \"built" not in would_run(target)
