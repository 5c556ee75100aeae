# SPDX-License-Identifier: MIT
"""Work during which Python looks for no garbage.

Who pickles a state or puts a model together keeps all that he makes, so that looking for garbage
finds none, again and again, in all that a program holds.
"""
from __future__ import annotations

import gc

from ._fork import Lock


class without_collections:
    """A block for that, of several threads at once maybe: the last one turns it on again."""

    _lock = Lock()
    _inside = 0
    _enabled = False

    def __enter__(self) -> None:
        kind = type(self)
        with kind._lock:
            if not kind._inside:
                kind._enabled = gc.isenabled()
                gc.disable()
            kind._inside += 1

    def __exit__(self, *exception: object) -> None:
        kind = type(self)
        with kind._lock:
            kind._inside -= 1
            if not kind._inside and kind._enabled:
                gc.enable()
