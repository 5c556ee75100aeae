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

from . import _penstock
from ._error import Error
from ._load import load_file, load_model, stream
from ._penstock import Array
from ._prefetch import Prefetch, prefetch
from ._report import Path, Report, last_report
from ._safe_open import safe_open

__version__: str = _penstock.version

__all__ = ["Array", "Error", "File", "Path", "Prefetch", "Report", "from_pretrained", "fromfile",
           "last_report", "load", "load_file", "load_model", "prefetch", "safe_open", "save",
           "save_file", "save_model", "stream", "tofile", "trim"]

# What is seldom the first thing that a program wants is found when it is asked for.
_later = {"File": "_file", "fromfile": "_file", "tofile": "_file", "save_file": "_save",
          "save_model": "_save", "save": "_torch_save", "load": "_torch_load",
          "from_pretrained": "_transformers"}

# Bytes must not move any more when the interpreter takes its memory down.
_atexit.register(_penstock.stop_all)


def trim() -> None:
    """Give pooled staging memory back to the system."""
    _penstock.trim()


def __getattr__(name: str):
    if name not in _later:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"penstock.{_later[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_later))
