# SPDX-License-Identifier: MIT
"""The situations in which loaders are compared: where the files are, where the tensors go, and who
else wants something meanwhile."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    name: str
    # Where the files are when the load begins: the states of cache.py.
    cache: str
    # What a reader of the table must know, in a few words.
    what: str
    # How much of a limited time it is worth.
    share: float
    # The tensors go to the host, whatever device is compared.
    host: bool = False
    # Another thread of the process asks the driver for the free memory all the while.
    busy: bool = False
    # The load that is timed is the next after one in another process, which began with the cache
    # as above and stayed for a while after it.
    second: bool = False

    def device(self, compared: str) -> str:
        return "cpu" if self.host else compared

    def refusal(self, compared: str) -> str:
        """Why it means nothing for this device; empty if it does."""
        if self.busy and not compared.startswith("cuda"):
            return "there is no driver to ask"
        if self.host and not compared.startswith("cuda"):
            return "everything goes to the host here"
        return ""


# In the order in which tables show them.
STATES = (
    State("warm", "warm", "the files in the page cache", 4.0),
    State("busy", "warm", "the same while another thread asks the driver every 20 ms", 2.0,
          busy=True),
    State("cpu", "warm", "the same, to the host", 1.0, host=True),
    State("mixed", "mixed", "half of the files in the page cache", 2.0),
    State("cold", "cold", "the files out of it", 5.0),
    State("second", "cold", "the next load after a cold one", 5.0, second=True),
)
BY_STATE = {state.name: state for state in STATES}
# What is measured where nothing is said.
USUAL = ("warm", "cold")
