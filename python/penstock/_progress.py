# SPDX-License-Identifier: MIT
"""A bar on standard error while bytes move."""
from __future__ import annotations

import sys
from contextlib import suppress

from ._error import Error, shown

_WIDTH = 24


def _size(count: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000 or unit == "T":
            return f"{count:.3g}{unit}B" if count < 1000 else f"{count:.0f}{unit}B"
        count /= 1000
    return ""


class Bar:
    """``bar.show(done, total, seconds)`` as often as one likes, then ``bar.end()``."""

    def __init__(self, label: str):
        """The label stands in front."""
        self.label = shown(label)
        self.shown = 0

    def show(self, done: int, total: int, seconds: float) -> None:
        """Draw the state of things over the last one."""
        share = min(done / total, 1.0) if total else 1.0
        filled = int(share * _WIDTH)
        rate = done / seconds if seconds > 0 else 0
        line = (f"{self.label}: {share:4.0%}|{'#' * filled}{'.' * (_WIDTH - filled)}| "
                f"{_size(done)}/{_size(total)} [{seconds:.1f}s, {_size(rate)}/s]")
        self._write("\r" + line.ljust(self.shown))
        self.shown = len(line)

    def end(self) -> None:
        """Leave the last state standing."""
        if self.shown:
            self._write("\n")

    @staticmethod
    def _write(text: str) -> None:
        """A closed or broken standard error is no reason to stop moving bytes."""
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (AttributeError, OSError, ValueError):
            pass


def wait(job, label: str, progress: bool) -> dict:
    """Wait for a job, with a bar if wanted; its report."""
    if not progress:
        return job.wait()
    bar = Bar(label)
    try:
        while not job.wait_for(0.1):
            bar.show(*job.progress())
        bar.show(*job.progress())
    finally:
        bar.end()
    return job.wait()


def wait_or_stop(job, label: str, progress: bool) -> dict:
    """The same; and after any exception the job is over. Who keeps the exception keeps what is in
    its frames, but not the space that was reserved, nor a file that is open."""
    try:
        return wait(job, label, progress)
    except BaseException:
        job.cancel()
        with suppress(Error, ValueError):
            job.wait()
        raise
