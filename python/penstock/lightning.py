# SPDX-License-Identifier: MIT
"""Checkpoints of Lightning through Penstock: ``Trainer(plugins=[CheckpointIO()])``.

Lightning makes the dict and says where it goes; the file is one of torch.save, whichever way it was
written, and a checkpoint that exists stays whole until the new one is.
"""
from __future__ import annotations

import os
import shutil
from importlib import import_module
from typing import Any

from ._torch_load import load
from ._torch_save import save

__all__ = ["CheckpointIO"]


def _base() -> Any:
    """Lightning's class, by whichever of its names is installed."""
    for name in ("lightning.pytorch.plugins.io", "pytorch_lightning.plugins.io",
                 "lightning.fabric.plugins.io"):
        try:
            return import_module(name).CheckpointIO
        except ImportError:
            continue
    raise ModuleNotFoundError("penstock.lightning needs the package lightning: pip install "
                              "lightning", name="lightning")


class CheckpointIO(_base()):    # type: ignore[misc]
    """Saves and loads the trainer's checkpoints with ``penstock.save`` and ``penstock.load``.

    ``transfer`` and ``memory_limit`` are as there; ``verify=False`` compares no digests.
    """

    def __init__(self, *, transfer: str | int = "auto", memory_limit: int | None = None,
                 verify: bool = True) -> None:
        """For ``Trainer(plugins=[...])``."""
        self._how: dict[str, Any] = {"transfer": transfer, "memory_limit": memory_limit}
        self._verify = verify

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike,
                        storage_options: Any = None) -> None:
        """Write it; afterwards it is durable."""
        if storage_options is not None:
            raise TypeError("storage_options are not known here: give transfer= and memory_limit= "
                            "to CheckpointIO()")
        path = os.path.abspath(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        save(checkpoint, path, **self._how)

    def load_checkpoint(self, path: str | os.PathLike, map_location: Any = None,
                        weights_only: bool | None = None) -> dict[str, Any]:
        """What was saved; in host memory where Lightning names no other place."""
        state: dict[str, Any] = load(path, "cpu" if map_location is None else map_location,
                                     weights_only=weights_only, verify=self._verify, **self._how)
        return state

    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        """The file, or the folder."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
