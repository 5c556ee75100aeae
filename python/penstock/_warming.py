# SPDX-License-Identifier: MIT
"""What happens to the page cache after a load that went around it.

The engine has one background thread for it, which ends with its work and with the process. Here it
can be looked at, waited for and stopped.
"""
from __future__ import annotations

import time
from typing import NamedTuple

from . import _penstock

#: How often a waiting call looks for signals.
_SIGNALS_EVERY = 0.1


class Warming(NamedTuple):
    """What the background thread is at: bytes that are ``left`` to be looked at, that it has
    ``brought`` into the page cache so far, that were ``given_up``, and the ``reason`` for that."""

    left: int
    brought: int
    given_up: int
    reason: str

    def wait(self, timeout: float | None = None) -> bool:
        """Until nothing is left, or `timeout` seconds are over; is nothing left?"""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _SIGNALS_EVERY if end is None else min(_SIGNALS_EVERY, end - time.monotonic())
            if _penstock.warming_wait(max(left, 0.0)):
                return True
            if end is not None and time.monotonic() >= end:
                return False

    def stop(self) -> None:
        """Give up what is left, of all loads; that stays cold."""
        _penstock.warming_stop()


def warming() -> Warming:
    """What of earlier loads is still being brought into the page cache, in the background."""
    return Warming(*_penstock.warming())
