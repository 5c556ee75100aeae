# SPDX-License-Identifier: MIT
"""The processes that write one checkpoint together, and how they agree.

They speak over a gloo group of their own, so that nothing mixes with the collectives of the
training, whatever it uses. Every call here is made by all ranks, in the same order. A rank that is
gone, or stays away for longer than the timeout, is an error for all others; the group is of no use
afterwards, and says so.
"""
from __future__ import annotations

import errno
import platform
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ._error import Error, refuse


def words(error: BaseException) -> str:
    """What went wrong, in a line that travels."""
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"


def _machine() -> str:
    """The same for all processes of a machine, also in containers."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read()
    except OSError:
        return platform.node()


class Alone:
    """One process, which agrees with itself."""

    rank, size, on_this_host, lost = 0, 1, 1, ""

    def gather(self, mine: Any) -> list[Any]:
        """What each rank gives, in their order."""
        return [mine]

    def by_first(self, call: Callable[[], Any]) -> Any:
        """What rank 0 finds, for all; what fails there fails everywhere."""
        return call()


def _members(dist: Any, group: Any) -> list[int]:
    """The ranks of a group; None: all there are."""
    def refused(why: str, hint: str) -> Error:
        return refuse("use", "process_group", why, hint + ", or leave it out for all ranks")

    if not dist.is_available() or not dist.is_initialized():
        raise refused("torch.distributed is not in use",
                      "Call torch.distributed.init_process_group() first")
    if group is None:
        group = dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise refused("this rank is not in that group",
                      "Make the Checkpointer on the ranks of the group alone")
    hint = "Give what torch.distributed.new_group() has returned"
    if not isinstance(group, dist.ProcessGroup):
        raise refused(f"{group!r} is no group of torch.distributed", hint)
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError) as error:
        raise refused("torch.distributed does not know the group, or does not any more",
                      hint) from error


class Ranks:
    """Several."""

    def __init__(self, process_group: Any, timeout: float):
        """`process_group` is whose ranks they are; None: all of them."""
        import torch.distributed as dist

        self._dist = dist
        self._members = _members(dist, process_group)
        #: Why the others are lost; "": they are not.
        self.lost = ""
        # Of some ranks, only these are here to make it.
        made: list[Any] = []
        self._speak(lambda: made.append(dist.new_group(
            self._members, timedelta(seconds=timeout), "gloo",
            use_local_synchronization=process_group is not None)),
            "All ranks make the Checkpointer, with the same arguments; process_group= names some")
        self._group = made[0]
        self.rank, self.size = dist.get_rank(self._group), len(self._members)
        here = _machine()
        self.on_this_host = self.gather(here).count(here)

    def _speak(self, call: Callable[[], None], hint: str = "End the training and start it again; "
               "what latest() names is whole") -> None:
        if self.lost:
            raise refuse("agree with", "the other ranks", f"they were lost before: {self.lost}",
                         hint, errno.ENOTCONN)
        try:
            call()
        except (RuntimeError, ValueError) as error:     # torch has no class for it
            # gloo tells the line of its source first, and where to ask last.
            self.lost = re.sub(r"^\[[^]]*\] *", "", str(error)).partition(". ")[0]
            why = f"one of them has ended, or did not come in time: {self.lost}"
            if not self._dist.is_initialized():
                why = self.lost = "torch.distributed was ended before the save was"
                hint = "Call close() before torch.distributed.destroy_process_group()"
            raise refuse("agree with", "the other ranks", why, hint, errno.ECONNRESET) from error

    def gather(self, mine: Any) -> list[Any]:
        """What each rank gives, in their order."""
        found: list[Any] = [None] * self.size
        self._speak(lambda: self._dist.all_gather_object(found, mine, self._group))
        return found

    def by_first(self, call: Callable[[], Any]) -> Any:
        """What rank 0 finds, for all; what fails there fails everywhere."""
        failure: BaseException | None = None
        told: list[Any] = [None, ""]
        if self.rank == 0:
            try:
                told = [call(), ""]
            except BaseException as error:      # of Ctrl-C, too, the others hear
                failure = error
                told = [error if isinstance(error, Error) else None, words(error)]
        self._speak(lambda: self._dist.broadcast_object_list(told, self._members[0], self._group))
        if failure is not None:
            raise failure
        result, problem = told
        if problem:
            raise result if result is not None else refuse("go on", "without rank 0", problem,
                                                           code=errno.ECANCELED)
        return result


def ranks_of(process_group: Any, timeout: float) -> Alone | Ranks:
    """Those of a group; of torch.distributed where it is in use, else the process itself."""
    dist = sys.modules.get("torch.distributed")
    used = dist is not None and dist.is_available() and dist.is_initialized()
    if process_group is None and not used:
        return Alone()
    return Ranks(process_group, timeout)


def ask_alike(ranks: Alone | Ranks, verb: str, asked: str, failure: BaseException | None,
              hint: str) -> None:
    """All ranks have asked for the same, and none has failed; else an error on each of them."""
    told = ranks.gather((asked, "" if failure is None else words(failure)))
    for rank, (theirs, problem) in enumerate(told):
        if problem:
            raise refuse(verb, asked, f"rank {rank} cannot: {problem}", code=errno.ECANCELED)
        if theirs != asked:
            raise refuse(verb, asked, f"rank {rank} {verb}s {theirs}", hint)
