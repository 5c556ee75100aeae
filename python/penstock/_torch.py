# SPDX-License-Identifier: MIT
"""What save() and load() of torch files share: what goes to torch itself, and in which order
bytes move behind the work that is queued on GPUs."""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from . import _report
from ._device import open_device
from ._error import refuse
from ._frameworks import STREAM_LEGACY
from ._options import AUTO


class _Asked(threading.local):
    """Is torch at work for us in this thread?"""

    by_us = False


_asked = _Asked()


def why_not(f: Any) -> str:
    """Why a file cannot be served, as far as its name tells; "" if it can."""
    if _asked.by_us:
        return "Penstock has handed the call on"
    if not isinstance(f, (str, os.PathLike)):
        return f"a {type(f).__name__} is not the name of a file"
    if os.path.exists(f) and not os.path.isfile(f) and not os.path.isdir(f):
        return "it is not a regular file"
    return ""


def by_torch(call: Callable, f: Any, reason: str, transfer: int, memory_limit: int | None) -> Any:
    """Have torch do it, and say so in the report. Whoever asked for a way that only Penstock has
    is told instead."""
    name = os.fspath(f) if isinstance(f, (str, os.PathLike)) else type(f).__name__
    if transfer != AUTO or memory_limit is not None:
        raise refuse("move", str(name), f"only torch itself can, and without transfer= and "
                     f"memory_limit=: {reason}", "Leave these out")
    started = time.perf_counter()
    before, _asked.by_us = _asked.by_us, True
    try:
        result = call()
    finally:
        _asked.by_us = before
    size = os.path.getsize(f) if isinstance(f, (str, os.PathLike)) and os.path.isfile(f) else 0
    _report.keep(_report.by_torch(size, time.perf_counter() - started, reason))
    return result


def streams(torch: Any, devices: Iterable[str]) -> list[tuple[Any, int]]:
    """The current stream of every GPU among these: what it holds comes first."""
    return [(open_device(name), torch.cuda.current_stream(torch.device(name)).cuda_stream
             or STREAM_LEGACY) for name in devices if name != "host"]
