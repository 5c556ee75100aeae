# SPDX-License-Identifier: MIT
"""The random number generators of a process, as one object of a checkpoint."""
from __future__ import annotations

import random
import sys
from typing import Any


class RandomState:
    """All generators that a training draws from by default: those of Python, numpy (where it is
    imported) and torch, on the host and on every GPU of the process.

    It has no state of its own: ``state_dict()`` asks the generators, ``load_state_dict()`` sets
    them. Generators that were made by hand are not among them.
    """

    def state_dict(self) -> dict[str, Any]:
        """What the generators would draw next; plain values and tensors."""
        import torch

        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            kind, keys, *rest = sys.modules["numpy"].random.get_state()
            # torch opens a file with an array of numpy only for those who trust it.
            state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the generators draw what they would have drawn. GPUs that are not there, or were
        not then, are left out."""
        import torch

        random.setstate(state["python"])
        torch.set_rng_state(state["torch"].cpu())
        if "numpy" in state:
            import numpy

            kind, keys, *rest = state["numpy"]
            numpy.random.set_state((kind, keys.cpu().numpy().astype("uint32"), *rest))
        if "cuda" in state and torch.cuda.is_available():
            for number, each in enumerate(state["cuda"][:torch.cuda.device_count()]):
                torch.cuda.set_rng_state(each.cpu(), number)
