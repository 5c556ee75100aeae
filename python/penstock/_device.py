# SPDX-License-Identifier: MIT
"""Names of devices, and the engine's devices behind them, one for each name."""
from __future__ import annotations

from . import _penstock
from ._error import misuse

#: The largest number of a GPU that frameworks have room for.
_LAST = 127
_devices: dict[str, _penstock.Device] = {}


def device_name(device) -> str:
    """The engine's name ("host", "cuda:N") for what people write.

    "cpu", "host", "cuda", "cuda:1", 1, torch.device("cuda", 1) and things with such a text are
    known. "cuda" alone is torch's current device where torch is in use, else the first. None is
    the host, as with safetensors.
    """
    if device is None:
        return "host"
    number = hasattr(device, "__index__") and not isinstance(device, bool)
    text = f"cuda:{device.__index__()}" if number else str(device)
    if text in ("cpu", "host", "host:", "cpu:0"):
        return "host"
    if text == "cuda":
        return f"cuda:{_current_cuda()}"
    kind, _, number = text.partition(":")
    # torch takes cuda:300 for another.
    if kind != "cuda" or not (number.isascii() and number.isdigit()) or len(number) > 9 \
            or int(number) > _LAST:
        raise misuse("open device", text, "there is no device of this name",
                     "Devices are cpu, cuda and cuda:N, N from 0 on")
    return f"cuda:{int(number)}"


def _current_cuda() -> int:
    import sys

    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch and torch.cuda.is_initialized() else 0


def open_device(name: str) -> _penstock.Device:
    """The engine's device; opened once and kept, so that its pools stay warm."""
    device = _devices.get(name)
    if device is None:
        device = _devices.setdefault(name, _penstock.Device(name))
    return device
