# SPDX-License-Identifier: MIT
"""Completion in real shells: somebody types at a terminal and presses the tabulator.

The keys are sent all at once; after the tabulator the line is made into one that prints its own
words, so nothing depends on how fast a shell is. What can be completed is read from the option
tables, so a new option is tested with no change here.
"""
import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest

from cli_program import PROGRAM
from test_options import COMMANDS, table

TAB, ALL, HOME = "\t", "\x1b*", "\x01"     # ALL: bash inserts all that it could complete


def needs(shell):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")


def type_into(command, setup, line, folder, keys=TAB):
    """The words of the line after the keys were pressed behind it."""
    pid, master = pty.fork()
    if not pid:
        os.chdir(folder)
        os.environ.update(TERM="dumb", PS1="> ", HOME=str(folder), HISTFILE=str(folder / "history"),
                          PATH=f"{PROGRAM.parent}:{os.environ['PATH']}")
        os.execvp(command[0], command)
    # The shell is asked when it has read the script: what is typed before might not be heard.
    seen = b""

    def until(mark):
        nonlocal seen
        end = time.monotonic() + 60
        while not re.search(mark, seen):
            assert select.select([master], [], [], end - time.monotonic())[0], seen
            seen += os.read(master, 65536)

    try:
        os.write(master, f"{setup}; echo rea''dy\n".encode())
        until(rb"ready\r?\n")
        seen = b""
        os.write(master, f"{line}{keys}{HOME}printf '<%s>' BE''GIN {chr(5)} END\n".encode())
        until(rb"<BEGIN>.*<END>")
    finally:
        os.close(master)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return re.findall(r"<([^>]*)>", seen.decode()[seen.decode().rindex("<BEGIN>"):])[1:-1]


def in_bash(line, folder, keys=TAB):
    needs("bash")
    return type_into(["bash", "--norc", "--noprofile", "-i"],
                     'eval "$(penstock completion bash)"', line, folder, keys)


@pytest.mark.parametrize("line, completed", [
    ("penstock insp", "inspect"), ("penstock make", "make-model"),
    ("penstock help expl", "explain"),
    ("penstock load --drop", "--drop-cache"), ("penstock copy --cache ke", "keep"),
    ("penstock explain -t CPU_CA", "CPU_CACHED_GPU"), ("penstock load -d ho", "host"),
    ("penstock completion fi", "fish"), ("penstock ckpt ver", "verify"),
    ("penstock ckpt list weig", "weights.bin"), ("penstock load weig", "weights.bin"),
    ("penstock copy weights.bin oth", "other"), ("penstock copy --verify weig", "weights.bin"),
])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_one_word_is_completed(penstock, tmp_path, shell, line, completed):
    needs(shell)
    for name in ("weights.bin", "other"):
        (tmp_path / name).touch()
    if shell == "bash":
        assert in_bash(line, tmp_path)[-1] == completed
    elif shell == "zsh":
        words = type_into(["zsh", "-f", "-i"],
                          'PROMPT="> "; bindkey -e; autoload -U compinit; compinit -D; '
                          'eval "$(penstock completion zsh)"', line, tmp_path)
        assert words[-1] == completed
    else:
        assert fish(line, tmp_path) == [completed]


def fish(line, folder):
    """What fish offers for a line, by its own command for that."""
    done = subprocess.run(["fish", "--no-config", "-c",
                           f"penstock completion fish | source; complete -C '{line}'"],
                          cwd=folder, text=True, capture_output=True,
                          env={**os.environ, "HOME": str(folder),
                               "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}"})
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return [entry.split("\t")[0] for entry in done.stdout.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_offered(penstock, tmp_path, command):
    names = {name for name, _, _ in table(penstock, command)}
    assert set(in_bash(f"penstock {command} --", tmp_path, ALL)[2:]) == names
    needs("fish")
    assert set(fish(f"penstock {command} --", tmp_path)) == names


def test_every_command_is_offered(penstock, tmp_path):
    assert set(in_bash("penstock ", tmp_path, ALL)[1:]) == {*COMMANDS, "help", "--help",
                                                            "--version"}
    needs("fish")
    assert set(fish("penstock ", tmp_path)) == {*COMMANDS, "help"}


def test_values_are_offered_after_an_equals_sign_too(penstock, tmp_path):
    values = next(value for name, _, value in table(penstock, "load") if name == "--cache")
    assert set(in_bash("penstock load --cache ", tmp_path, ALL)[3:]) == set(values.split("|"))
    assert in_bash("penstock load --cache=dr", tmp_path)[-1] == "--cache=drop"
    needs("fish")
    assert fish("penstock load --cache=dr", tmp_path) == ["--cache=drop"]


def test_files_are_not_offered_for_a_size(penstock, tmp_path):
    (tmp_path / "weights.bin").touch()
    assert in_bash("penstock copy --size weig", tmp_path)[-1] == "weig"


@pytest.mark.parametrize("shell, check", [("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]),
                                          ("fish", ["fish", "--no-execute"])])
def test_scripts_are_well_formed(penstock, tmp_path, shell, check):
    needs(shell)
    script = tmp_path / "script"
    script.write_text(penstock.ok("completion", shell).out)
    done = subprocess.run([*check, script], text=True, capture_output=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_shell_that_is_not_known(penstock):
    result = penstock("completion", "cmd.exe")
    assert result.status == 2 and result.out == "" and "bash, zsh and fish" in result.err
