# SPDX-License-Identifier: MIT
"""The command line of the comparison."""
from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
from pathlib import Path

from .._error import shown
from . import report
from .loaders import BY_NAME, LOADERS
from .model import ModelError, model_open
from .runner import Runner
from .schedule import Options, Schedule
from .states import BY_STATE, USUAL

DESCRIPTION = """Load a model with Penstock and with the other loaders there are, each in its own
process, in turns, and show how long each takes, how much memory, and what the machine could do."""


def names(text: str) -> list[str]:
    """Loaders by name or by a pattern such as instanttensor*."""
    found = []
    for word in text.split(","):
        hits = fnmatch.filter(BY_NAME, word)
        if not hits:
            raise argparse.ArgumentTypeError(f"no loader is called {word}; there are "
                                             f"{', '.join(BY_NAME)}")
        found += hits
    return [name for name in BY_NAME if name in found]


def rounds(text: str) -> tuple[int, dict[str, int]]:
    """"3" or "3,transformers=1,cold:torch=0"; later words win."""
    count, special = 3, {}
    for word in text.split(","):
        name, equals, number = word.rpartition("=")
        if not number.isdigit():
            raise argparse.ArgumentTypeError(f"{number!r} is no number of rounds")
        if not equals:
            count = int(number)
            continue
        state, colon, name = name.rpartition(":")
        if colon and state not in BY_STATE:
            raise argparse.ArgumentTypeError(f"{state!r} is no state; there are "
                                             f"{', '.join(BY_STATE)}")
        special.update({state + colon + each: int(number) for each in names(name)})
    return count, special


def folder(text: str) -> tuple[str, str]:
    """"FOLDER" or "LOADER=FOLDER"."""
    name, _, path = text.rpartition("=")
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path}")
    if name and not any(loader == name or loader.startswith(name + "-") for loader in BY_NAME):
        raise argparse.ArgumentTypeError(f"no loader is called {name}")
    return name, str(Path(path).resolve())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m penstock.compare", description=DESCRIPTION)
    add = made.add_argument
    add("model", nargs="?", help="a .safetensors file, or a folder with shards")
    add("--device", default=None, help="cuda:N or cpu (default: cuda:0 if there is one)")
    add("--loaders", type=names, metavar="A,B", help="only these (patterns too); --list names them")
    add("--list", action="store_true", help="name the loaders and end")
    add("--rounds", type=rounds, default=(3, {}), metavar="N[,[STATE:]NAME=N]",
        help="runs of each loader in each state (default 3), and of some loaders")
    add("--warm", action="store_true", help="only with the files in the page cache")
    add("--cold", action="store_true", help="only with the files out of it (default: both)")
    add("--mixed", action="store_true", help="also with half of the shards in it")
    add("--busy", action="store_true",
        help="also while another thread of the process asks the driver for its free memory")
    add("--cpu", action="store_true", help="also to the host")
    add("--second", action="store_true",
        help="also the next load after a cold one, in another process")
    add("--pause", type=float, default=20.0, metavar="S",
        help="how long the process before the second load stays (default 20)")
    add("--path", type=folder, action="append", default=[], metavar="[LOADER=]FOLDER",
        help="put FOLDER first in sys.path, for one loader or for all")
    add("--torch-files", metavar="DIR",
        help="where .pt files for torch.load are, or are made once and kept")
    add("--coded-files", metavar="DIR",
        help="where the model's files are coded, or are made so once and kept: a row beside the "
             "plain ones")
    add("--startup", action="store_true", help="also time whole processes, from their start")
    add("--tp", type=int, choices=[2], metavar="2",
        help="also load one rank's half of each tensor and count the bytes read")
    add("--timeout", type=float, default=300.0, metavar="S", help="for one run (default 300)")
    add("--limit", type=float, metavar="S", help="leave out runs so as to end after about S")
    add("--fork", action="store_true",
        help="fork workers from a process that has imported torch: saves seconds per run")
    add("--no-memory", action="store_true", help="leave out the extra run that watches memory")
    add("--no-ceilings", action="store_true", help="leave out the ceilings")
    add("--json", nargs="?", const="-", metavar="FILE",
        help="all values as JSON into FILE, or instead of the table")
    add("--plot", metavar="FILE.png", help="a picture (needs matplotlib)")
    add("--log", metavar="FILE", help="keep what the loaders print")
    add("--quiet", action="store_true", help="no line for each run on standard error")
    return made


def device_default() -> str:
    return "cuda:0" if Path("/dev/nvidiactl").exists() else "cpu"


def states_of(arguments: argparse.Namespace) -> list[str]:
    asked = {state for state in BY_STATE if getattr(arguments, state)}
    if not asked & set(USUAL):
        asked |= set(USUAL)
    return [state for state in BY_STATE if state in asked]


def list_loaders() -> None:
    for loader in LOADERS:
        where = "CUDA only" if loader.cuda_only else ""
        print(f"{loader.name:24} {loader.label}, {loader.setting:24} {where}".rstrip())


def main(words: list[str] | None = None) -> int:
    made = parser()
    arguments = made.parse_args(words)
    if arguments.list:
        list_loaders()
        return 0
    if not arguments.model:
        made.error("name a model; `penstock make-model 0.6b FOLDER` makes one")
    device = arguments.device or device_default()
    if device == "cuda":
        device = "cuda:0"
    if device != "cpu" and not (device.startswith("cuda:") and device[5:].isdigit()):
        made.error(f"{device} is no device; name cuda:N or cpu")
    if arguments.plot and (trouble := report.plot_check()):
        made.error(trouble)

    paths: dict[str, list[str]] = {}
    for name, path in arguments.path:
        paths.setdefault(name, []).append(path)
    options = Options(
        device=device, states=states_of(arguments), rounds=arguments.rounds[0],
        rounds_of=arguments.rounds[1], loaders=arguments.loaders or list(BY_NAME),
        timeout=arguments.timeout, limit=arguments.limit, torch_files=arguments.torch_files,
        coded_files=arguments.coded_files,
        startup=arguments.startup, tensor_parallel=bool(arguments.tp),
        memory=not arguments.no_memory, ceilings=not arguments.no_ceilings,
        pause=arguments.pause)
    if not arguments.quiet:
        options.say = lambda text: print(text, file=sys.stderr, flush=True)
    try:
        model = model_open(arguments.model)
        log = Path(arguments.log) if arguments.log else None
        with Runner(paths, arguments.fork, log) as runner:
            schedule = Schedule(model, options, runner)
            schedule.run()
            found = report.result(schedule)
    except (ModelError, RuntimeError) as error:
        print(f"penstock.compare: {shown(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("penstock.compare: stopped", file=sys.stderr)
        return 130

    if arguments.json == "-":
        print(json.dumps(found, indent=1))
    else:
        print(report.text(found))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        report.plot(found, arguments.plot)
    ours = report.find(found, report.US)
    return 0 if ours is None or ours["status"] == "ok" else 1


def fill_standard_descriptors() -> None:
    """Where one is closed, a file would take its number, and print() its place."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)


if __name__ == "__main__":
    fill_standard_descriptors()
    sys.exit(main())
