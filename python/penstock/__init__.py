# SPDX-License-Identifier: MIT
"""Penstock moves bytes between storage and GPU memory by the fastest path a machine has.

    import penstock

    tensors = penstock.load_model("path/to/model", device="cuda:0")
    print(penstock.last_report())

Importing this imports no framework; torch, numpy and others are imported when the first tensor of
theirs is asked for. docs/python.md is the guide.
"""
from __future__ import annotations

import atexit as _atexit
import typing as _typing

from . import _penstock
from ._error import Error
from ._load import load_file, load_model, stream
from ._penstock import Array
from ._prefetch import Prefetch, prefetch
from ._report import Path, Report, last_report
from ._rules import TensorInfo
from ._safe_open import safe_open
from ._warming import Warming, warming

__version__: str = _penstock.version

__all__ = ["Array", "CheckpointReport", "Checkpointer", "Error", "File", "Patch", "Path",
           "Prefetch", "RandomState", "Report", "TensorInfo", "Warming", "from_pretrained",
           "fromfile", "last_report", "load", "load_file", "load_model", "patch", "prefetch",
           "safe_open", "save", "save_file", "save_model", "stream", "tofile", "trim", "unpatch",
           "warming"]

# What is seldom the first thing that a program wants is found when it is asked for.
_later = {"File": "_file", "fromfile": "_file", "tofile": "_file", "save_file": "_save",
          "save_model": "_modules", "save": "_torch_save", "load": "_torch_load",
          "from_pretrained": "_transformers", "Patch": "_patch", "patch": "_patch",
          "unpatch": "_patch", "Checkpointer": "_checkpointer",
          "CheckpointReport": "_checkpointer", "RandomState": "_random"}

# Bytes must not move any more when the interpreter takes its memory down.
_atexit.register(_penstock.stop_all)


def trim() -> None:
    """Give pooled staging memory back to the system."""
    _penstock.trim()


if _typing.TYPE_CHECKING:   # they know no names that are found by a function
    from ._checkpointer import Checkpointer, CheckpointReport
    from ._file import File, fromfile, tofile
    from ._modules import save_model
    from ._patch import Patch, patch, unpatch
    from ._random import RandomState
    from ._save import save_file
    from ._torch_load import load
    from ._torch_save import save
    from ._transformers import from_pretrained
else:
    def __getattr__(name):
        if name not in _later:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"penstock.{_later[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_later))
