# SPDX-License-Identifier: MIT
"""python -m penstock run: a program notices nothing but that Penstock serves it."""
import re
import signal
import subprocess
import sys
import time
import zipfile

import pytest

import penstock
from penstock.__main__ import USAGE
from penstock._patch import TABLE
from support import environment

pytest.importorskip("safetensors", reason="safetensors is not installed")
pytest.importorskip("torch", reason="torch is not installed")

# What a program can see of how it was started.
LOOK = """\
import sys
shown = {name: value for name, value in globals().items() if name not in ("sys", "__builtins__")}
shown["__loader__"] = type(__loader__).__name__
print(sys.argv, sys.path, shown, type(__builtins__), sys.modules["__main__"].__dict__ is globals())
"""
LOAD = """\
import sys
from safetensors.torch import load_file
print(len(load_file(sys.argv[1])))
"""


def run(folder, *arguments, plain=False, options=(), **more):
    start = [] if plain else ["-m", "penstock", "run"]
    return subprocess.run([sys.executable, *options, *start, *map(str, arguments)], cwd=folder,
                          env=environment(), text=True, capture_output=True, timeout=60, **more)


def outcome(done):
    """Without the addresses of objects."""
    return done.returncode, *(re.sub(r"0x[0-9a-f]+", "0x", text)
                              for text in (done.stdout, done.stderr))


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "sub"
    package.mkdir()
    for name in ("script.py", "__init__.py", "__main__.py"):
        (package / name).write_text(LOOK if name != "__init__.py" else "")
    (tmp_path / "link.py").symlink_to("sub/script.py")
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    programs = {
        "fails.py": "def deep():\n    raise KeyError('why')\n\ndeep()\n",
        "wrong.py": "x = 1\nif x\n",
        "leaves.py": "import sys\nsys.exit(7)\n",
        "says.py": "import sys\nsys.exit('words')\n",
        "hooked.py": "import sys\nsys.excepthook = lambda *e: print('mine', e[0])\n1 / 0\n",
        "late.py": "import atexit\nword = 'still here'\natexit.register(lambda: print(word))\n",
        "input.py": "print(input())\n",
        "pickles.py": "import pickle\nclass Mine: pass\n"
                      "print(type(pickle.loads(pickle.dumps(Mine()))) is Mine)\n",
        "spawns.py": "import multiprocessing\ndef work(x):\n    return x + 1\n"
                     "if __name__ == '__main__':\n"
                     "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
                     "        print(pool.map(work, [1, 2]))\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("arguments", [
    ["sub/script.py", "a", "--flag", "-m", "b c"], ["./sub/../link.py"], ["-m", "sub.script", "x"],
    ["-m", "sub", "--report"], ["sub", "y"], ["archive.zip"], ["nothing.py"], ["-m", "nothing"],
    ["-m", "sub.nothing"], ["empty"], ["fails.py"], ["-m", "fails"], ["wrong.py"], ["leaves.py"],
    ["-m", "leaves"], ["says.py"], ["hooked.py"], ["late.py"], ["-m", "late"], ["pickles.py"],
    ["-m", "pickles"], ["spawns.py"],
], ids=" ".join)
def test_a_program_sees_what_it_would_see_under_python(folder, arguments):
    assert outcome(run(folder, *arguments)) == outcome(run(folder, *arguments, plain=True))


def test_an_absolute_name(folder):
    script = folder / "sub" / "script.py"
    assert outcome(run("/", script)) == outcome(run("/", script, plain=True))


def test_without_the_folder_of_the_script(folder):
    """python -P has no such entry in sys.path."""
    options = ["-P"]
    assert outcome(run(folder, "sub/script.py", options=options)) \
        == outcome(run(folder, "sub/script.py", plain=True, options=options))


def test_standard_input_is_the_programs(folder):
    assert run(folder, "input.py", input="a line\n").stdout == "a line\n"


def test_ctrl_c_ends_it_as_it_ends_python(folder):
    (folder / "sleeps.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "run", "sleeps.py"], cwd=folder, env=environment(),
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert process.stdout.readline() == "up\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT and said.endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize("start", [["load.py"], ["-m", "load"]], ids=" ".join)
def test_penstock_serves_the_program(folder, few, start):
    (folder / "load.py").write_text(LOAD)
    done = run(folder, "--report", *start, few[0])
    assert (done.returncode, done.stdout) == (0, f"{len(few[1])}\n")
    assert done.stderr == "penstock: safetensors.torch.load_file: 1 served\n"
    assert run(folder, *start, few[0]).stderr == ""


def test_the_report_tells_what_was_handed_on(folder, few):
    (folder / "load.py").write_text(LOAD.replace("argv[1]", "argv[1], device='mps'"))
    done = run(folder, "--report", "load.py", few[0])
    assert done.returncode == 1 and "1 handed on (cannot open device mps" in done.stderr
    assert run(folder, "--report", "late.py").stderr == (
        "penstock: no call of safetensors, torch.load, torch.save or "
        "torch.distributed.checkpoint\n")


@pytest.mark.parametrize("arguments, words", [
    (["run"], "run what?"), (["run", "-m"], "run what?"), (["run", "--report"], "run what?"),
    (["run", "--wrong", "x.py"], "no option '--wrong'"), (["walk"], "no command 'walk'"),
    (["compare"], "python -m penstock.compare")])
def test_wrong_use_is_told_the_right_one(arguments, words):
    done = subprocess.run([sys.executable, "-m", "penstock", *arguments], env=environment(),
                          text=True, capture_output=True)
    assert done.returncode == 2 and words in done.stderr and "usage:" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "-h"]])
def test_help(arguments):
    done = subprocess.run([sys.executable, "-m", "penstock", *arguments], env=environment(),
                          text=True, capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m penstock run")
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_what_is_said_of_a_patch_names_all_that_it_serves():
    """The help, the doc string, and a patch that has served nothing yet."""
    with penstock.patch() as patched:
        texts = [USAGE, penstock.patch.__doc__, str(patched)]
    served = {str(row) if row.module == "torch" else
              "torch.distributed.checkpoint" if row.module.startswith("torch.distributed") else
              row.module.partition(".")[0]
              for row in TABLE if row.module != "transformers.modeling_utils"}
    assert served == {"safetensors", "torch.load", "torch.save", "torch.distributed.checkpoint"}
    for text in texts:
        assert not [name for name in served if name not in text], text
