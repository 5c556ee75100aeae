# SPDX-License-Identifier: MIT
"""Names of files: what a caller writes, and what the engine is told."""
from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: What the engine takes for a store that makes its bytes up.
_SYNTHETIC = ("null:", "pattern:")


def is_synthetic(name: Any) -> bool:
    """Does a text name a synthetic store? A Path, or bytes, is a file whatever it is called."""
    return isinstance(name, str) and name.startswith(_SYNTHETIC)


def file_name(path: str | bytes | os.PathLike) -> str:
    """The name of a file for the engine: the same file wherever the process goes later, and never
    a synthetic store."""
    name = os.fsdecode(path)
    if not name or os.path.isabs(name):
        return name
    try:
        here = os.getcwd()
        os.stat(here)
    except OSError:
        here = "."      # it was removed, or cannot be reached from the root
    return os.path.join(here, name)     # not normalised: behind a link, .. is another folder
