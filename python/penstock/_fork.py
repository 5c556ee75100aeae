# SPDX-License-Identifier: MIT
"""What a forked child finds: a lock that some thread of its parent held, and no such thread."""
from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable


class Lock:
    """A lock that is open in a forked child, whoever held it in the parent. There `forget` is
    called first: what was under way is the parent's."""

    def __init__(self, forget: Callable[[], None] | None = None, kind: Callable = threading.Lock):
        """`forget` is a method of the lock's owner, and `kind` threading.Lock or RLock."""
        # A lock must not keep its owner: files are closed when nobody has them any more.
        self._forget = None if forget is None else weakref.WeakMethod(forget)
        self._kind = kind
        self._process = os.getpid()
        self._lock = kind()

    def acquire(self, blocking: bool = True) -> bool:
        """As threading.Lock has it."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._lock = self._kind()
            forget = self._forget and self._forget()
            if forget:
                forget()
        return self._lock.acquire(blocking)

    def release(self) -> None:
        """As threading.Lock has it."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception) -> None:
        self.release()
