# SPDX-License-Identifier: MIT
"""python -m penstock run: a program, unchanged, that loads and saves through Penstock.

The program sees what it would see under plain python: its own sys.argv and sys.path[0], a module
__main__ of its own that stays until the interpreter ends, and, where it fails, a traceback that
begins with its own first line.
"""
from __future__ import annotations

import builtins
import io
import os
import sys
from types import ModuleType
from typing import NoReturn

USAGE = """\
usage: python -m penstock run [--report] script.py [argument ...]
       python -m penstock run [--report] -m module [argument ...]

Runs a Python program whose calls of safetensors, torch.load, torch.save and the files of
torch.distributed.checkpoint, its own or those of packages such as transformers, diffusers,
accelerate and peft, are served by Penstock. The program is not changed.

  --report   at the end, say on standard error how many calls were served, and which were not
"""


def _refuse(words: str) -> NoReturn:
    sys.stderr.write(f"python -m penstock: {words}\n{USAGE}")
    sys.exit(2)


def _new_main() -> ModuleType:
    """An empty __main__, in the place of this module."""
    main = ModuleType("__main__")
    main.__builtins__ = builtins
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main


def _set_first_folder(folder: str) -> None:
    """sys.path[0], which `python -m` made the working folder; under -P there is no such entry."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _run_script(script: str) -> None:
    """A file of Python code."""
    from importlib.machinery import SourceFileLoader

    where = os.path.join(os.getcwd(), script)
    try:
        with io.open_code(where) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {where!r}: "
                         f"[Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)
    main = _new_main()
    main.__file__, main.__cached__ = where, None
    main.__loader__ = SourceFileLoader("__main__", where)
    _set_first_folder(os.path.dirname(os.path.realpath(where)))
    exec(compile(source, where, "exec", dont_inherit=True), vars(main))


def _run_module(name: str, change_argv: bool) -> None:
    # What `python -m` itself calls: it knows packages, and what to say where there is no module.
    from runpy import _run_module_as_main

    _new_main()
    _run_module_as_main(name, change_argv)


def _run(arguments: list[str]) -> None:
    from pkgutil import get_importer

    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        _run_module(arguments[1], True)
        return
    sys.argv = arguments
    if get_importer(arguments[0]) is None:
        _run_script(arguments[0])
    else:                                   # a folder or an archive with a __main__.py
        _set_first_folder(os.path.join(os.getcwd(), arguments[0]))
        _run_module("__main__", False)


def _show(error: Exception) -> None:
    """A traceback that begins where the program does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)


def main(arguments: list[str]) -> None:
    """The command line."""
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help") or command == "run" and rest[:1] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return
    if command == "compare":
        _refuse("the comparison is python -m penstock.compare")
    if command != "run":
        _refuse(f"there is no command {command!r}")
    report = rest[:1] == ["--report"]
    rest = rest[1:] if report else rest
    if not rest or rest == ["-m"]:
        _refuse("run what? Name a script, or a module after -m")
    if rest[0].startswith("-") and rest[0] != "-m":
        _refuse(f"there is no option {rest[0]!r}; those of python come before -m penstock")

    from penstock import patch

    held = patch()
    if report:
        import atexit

        atexit.register(lambda: print(*(f"penstock: {line}" for line in str(held).splitlines()),
                                      sep="\n", file=sys.stderr))
    try:
        _run(rest)
    except Exception as error:
        _show(error)
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
