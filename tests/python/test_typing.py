# SPDX-License-Identifier: MIT
"""Type hints that programs can rely on: everything public is typed, and the extension is what its
stub says."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

PACKAGE = Path(penstock.__file__).parent
PROGRAM = Path(__file__).with_name("typed_program.py")
# The package as an installed one is seen: its inside is not the program's affair, and neither is
# that of the frameworks, which would take minutes to look at.
CONFIG = """
[mypy]
follow_imports = silent
[mypy-penstock.*]
ignore_errors = True
[mypy-torch.*,transformers.*,jax.*,cupy.*,safetensors.*,accelerate.*]
follow_imports = skip
ignore_missing_imports = True
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Run a checker of mypy's: its words, and whether it is content."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "mypy.ini").write_text(CONFIG)

    def run(*command):
        done = subprocess.run([sys.executable, "-m", *map(str, command)], text=True, cwd=folder,
                              capture_output=True,
                              env={**os.environ, "MYPYPATH": str(PACKAGE.parent),
                                   "PYTHONPATH": str(PACKAGE.parent)})
        return done.stdout + done.stderr, not done.returncode

    run.folder = folder
    return run


def strict(checked, *files):
    return checked("mypy", "--strict", "--config-file", "mypy.ini", *files)


def test_the_program_uses_every_public_name():
    text = PROGRAM.read_text()
    assert not [name for name in penstock.__all__ if not re.search(rf"penstock\.{name}\b", text)]


def test_strict_checkers_have_nothing_to_say(checked):
    words, content = strict(checked, PROGRAM)
    assert content, words


def test_strict_checkers_notice_mistakes(checked):
    wrong = checked.folder / "wrong.py"
    wrong.write_text("import penstock\n"
                     "penstock.load_fil('x')\n"
                     "penstock.File(1)\n"
                     "number: int = penstock.last_report()\n"
                     "penstock.tofile(b'', 'x', memory_limit='much')\n")
    words, content = strict(checked, wrong)
    assert not content and set(re.findall(r"wrong\.py:(\d):", words)) == {"2", "3", "4", "5"}, words


def test_every_public_name_has_a_type(checked):
    """None is `Any`, as one would be that is found when asked for and that checkers do not see."""
    names = checked.folder / "names.py"
    names.write_text("import penstock\n" + "".join(f"reveal_type(penstock.{name})\n"
                                                   for name in penstock.__all__))
    words, content = strict(checked, names)
    types = dict(re.findall(r'names\.py:(\d+): note: Revealed type is "(.*)"', words))
    assert content and len(types) == len(penstock.__all__), words
    assert not [penstock.__all__[int(line) - 2] for line, kind in types.items()
                if kind in ("Any", "typing.Any", "builtins.object")]


def test_the_stub_is_the_extension(checked):
    # What a buffer is has a name in Python from 3.12 on, and in C always.
    (checked.folder / "allowed").write_text("penstock._penstock.Array.__buffer__\n")
    words, content = checked("mypy.stubtest", "penstock._penstock", "--concise",
                             "--mypy-config-file", "mypy.ini", "--allowlist", "allowed",
                             "--ignore-unused-allowlist")
    assert content, words


def test_the_program_runs(tmp_path):
    done = subprocess.run([sys.executable, PROGRAM, tmp_path], text=True, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)})
    assert done.returncode == 0, done.stderr
    assert "'part': (1, 3)" in done.stdout and "absent.safetensors" in done.stdout
