# SPDX-License-Identifier: MIT
"""Names of files: what a caller writes, and what the engine is told."""
from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: What the engine takes for a store that makes its bytes up.
_SYNTHETIC = ("null:", "pattern:")
#: What the kernel takes of a path; and of a name in a folder, which the engine appends.
_PATH_MAX, _NAME_MAX = 4096, 255


def is_synthetic(name: Any) -> bool:
    """Does a text name a synthetic store? A Path, or bytes, is a file whatever it is called."""
    return isinstance(name, str) and name.startswith(_SYNTHETIC)


def file_name(path: str | bytes | os.PathLike) -> str:
    """The name of a file for the engine: the same file wherever the process goes later, and never
    a synthetic store. Where the process is so deep that only a relative name leads there, it is
    that: the engine opens it before it returns."""
    name = os.fsdecode(path)
    if not name or os.path.isabs(name):
        return name
    relative = os.path.join(".", name)
    try:
        here = os.getcwd()
        os.stat(here)
    except OSError:
        return relative     # it was removed, or cannot be reached from the root
    whole = os.path.join(here, name)    # not normalised: behind a link, .. is another folder
    return relative if _is_too_long(whole, relative) else whole


def model_name(path: Any) -> str | tuple[str, ...]:
    """The name of a model for the engine: that of a file or a folder, or those of listed files."""
    if isinstance(path, (str, bytes, os.PathLike)) or not hasattr(path, "__iter__"):
        return file_name(path)
    return tuple(file_name(each) for each in path)


def _is_too_long(whole: str, relative: str) -> bool:
    """Is an absolute name too long for the kernel, or for that of a file in the folder it names?"""
    length = len(whole.encode(errors="replace")) + 1    # a surrogate is one byte that is no text
    return length > _PATH_MAX or length + 1 + _NAME_MAX > _PATH_MAX and os.path.isdir(relative)
