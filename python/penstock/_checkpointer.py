# SPDX-License-Identifier: MIT
"""Checkpointer: checkpoints of a training that goes on while they are written.

save() pickles the state and has the engine take its bytes from where they lie, into host memory
or, with snapshot="device", into a copy on the device. When that is done the state may change, and
save() returns. A thread sees to the rest: the file is written, durable, read back and compared;
then rank 0 commits the step by its manifest, and older steps go.

Invariants
  1. One save is under way at a time: from begin() of its step to commit() or abandon().
  2. The ranks' group is used by one thread at a time: by that of a save under way, or, when there
     is none, by the caller.
  3. Who stays away is waited for: so every rank takes part in each gathering of outcomes, however
     its own part went. What stops the caller, Ctrl-C too, does not stop the thread, which tells the
     others. A rank whose save() raises what failed before takes part in the next agreement first:
     others may have raised that already, and wait there.
  4. The thread is no daemon: the interpreter waits for it before it ends. What ends the process
     otherwise leaves a step without a manifest, which does not exist.
"""
from __future__ import annotations

import atexit
import errno
import json
import os
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from . import _penstock, _report
from ._error import Error, refuse
from ._garbage import without_collections
from ._names import file_name
from ._options import MEMORY_LIMIT, options
from ._ranks import Alone, Ranks, ask_alike, ranks_of, words
from ._report import Report
from ._state import Filling, plain

_SNAPSHOTS = ("host", "device")
#: Two requests of the smallest piece that has a digest.
_LEAST_MEMORY = 128 << 10
#: Seconds; torch.distributed cannot count for ever.
_LONGEST = 10**9
#: How the folder of a step is called, and what makes it one.
_STEP, _MANIFEST = re.compile("step-([0-9]{8}|[1-9][0-9]{8,})"), "manifest.json"
#: Errors of files that are not what they were.
_DAMAGE = (errno.EBADMSG, errno.EILSEQ, errno.EIO, errno.ENOENT, errno.ENODATA)


class CheckpointReport:
    """What save() or restore() did; ``print(report)`` is for people, ``as_dict()`` for programs.

    save() returns it when the state may change: ``stall_seconds`` is how long that took, of which
    ``waited_seconds`` went by until the save before was done; ``bytes`` are those of this rank's
    tensors. The other fields come until the step is committed, when ``done`` is True:
    ``stall_reason`` says what the stall depended on, ``durable_seconds`` and ``verified_seconds``
    are counted from the call, ``removed`` are the steps that ``keep`` has let go of, ``transfer``
    is the engine's Report. ``error`` has words if it failed, or, where ``done`` is True, if older
    steps could not be removed.

    Of a restore ``step`` is the one that was taken, and ``skipped`` are newer ones that were
    damaged, each with the reason.
    """

    def __init__(self, operation: str, step: int):
        """Nothing has happened yet."""
        self.operation, self.step = operation, step
        self.bytes = 0
        self.snapshot = ""
        self.waited_seconds = 0.0
        self.stall_seconds = 0.0
        self.stall_reason = ""
        self.durable_seconds = 0.0
        self.verified_seconds = 0.0
        self.done = False
        self.error = ""
        self.removed: list[int] = []
        self.skipped: list[tuple[int, str]] = []
        self.transfer: Report | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, texts and lists, ready for JSON."""
        fields = dict(self.__dict__)
        fields["transfer"] = None if self.transfer is None else self.transfer.as_dict()
        return fields

    def __str__(self) -> str:
        """A few lines for people."""
        head = f"{self.operation} of step {self.step}: {self.bytes / 1e9:.3f} GB"
        if self.operation == "restore":
            lines = [head, *(f"  not step {step}: {why}" for step, why in self.skipped)]
        else:
            lines = [f"{head}, the state may change after {self.stall_seconds:.3f} s"
                     + (f" ({self.waited_seconds:.3f} s for the save before)"
                        if self.waited_seconds >= 0.0005 else "")
                     + (f": {self.stall_reason}" if self.stall_reason else "")]
            if self.done:
                verified = f", verified after {self.verified_seconds:.3f} s" \
                    if self.verified_seconds else ""
                lines.append(f"  durable after {self.durable_seconds:.3f} s{verified}")
                if self.error:
                    lines.append(f"  it is saved, but older steps were not removed: {self.error}")
            elif self.error:
                lines.append(f"  failed: {self.error}")
            else:
                lines.append("  being written")
            if self.removed:
                lines.append(f"  removed: {', '.join(map(str, self.removed))}")
        if self.transfer is not None:
            lines.append(str(self.transfer))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<penstock.CheckpointReport {self.operation} of step {self.step}>"


class _Save:
    """A save under way: what its thread needs, and what it comes to."""

    def __init__(self, report: CheckpointReport, started: float):
        """`started` is when save() was called."""
        self.report, self.started = report, started
        self.user: dict[str, Any] = {}
        #: Do all ranks know of it? And the file of this one, once it may be written.
        self.agreed = False
        self.path = ""
        self.job: _penstock.Saving | None = None
        self.device = ""
        #: What went wrong; `told`: the caller knows.
        self.failure: BaseException | None = None
        self.told = False
        #: The ranks have agreed on it, or failed to; the caller has done its part; all is done.
        self.answered, self.ready, self.over = (threading.Event() for _ in range(3))
        self._thread: threading.Thread | None = None

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def fail(self, error: BaseException) -> None:
        """The caller knows of it, and the first reason is the one that counts."""
        self.failure, self.told = self.failure or error, True
        self.report.error = words(self.failure)

    def start(self, run: Any) -> bool:
        """Have a thread see to it; False where none is to be had, as when the interpreter is about
        to end."""
        name = f"penstock-checkpoint-{self.report.step}"
        thread = threading.Thread(target=run, args=(self,), name=name, daemon=False)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def wait(self) -> None:
        """Until all is done; also where Ctrl-C came before the thread could begin."""
        while not self.over.wait(0.2):
            if self._thread is None or not self._thread.is_alive():
                return

    def stop(self) -> None:
        """Nobody wants the bytes any more."""
        if self.job is not None:
            self.job.cancel()
            with suppress(Error, ValueError):
                self.job.wait()
            self.job = None


# ------------------------------------------------------------------------------ a device's copy --

def _room(torch: Any, device: str) -> int:
    """Bytes that torch's allocator can still give there, as far as it is known."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _copies(torch: Any, placed: list[tuple[Any, str]], host_room: int) -> list[tuple[Any, str]]:
    """Copies of storages where they are, made by the current streams: each once, whatever looks
    into it. Refuses what finds no room; on the host `host_room` bytes are allowed."""
    hint = 'Free memory there, or save with snapshot="host"'
    for device in {device for _, device in placed}:
        needed = sum(storage.nbytes() for storage, on in placed if on == device)
        room = host_room if device == "host" else _room(torch, device)
        if needed > room:
            where = "the host's memory_limit" if device == "host" else device
            raise refuse("copy", "the state", f"{where} has room for {room} bytes, and its part "
                         f"of the state has {needed}", hint, errno.ENOMEM)
    try:
        return [(storage.clone(), device) for storage, device in placed]
    except torch.OutOfMemoryError as error:
        raise refuse("copy", "the state", f"a device is full: {error}", hint,
                     errno.ENOMEM) from error


# ------------------------------------------------------------------------------------ the thing --

def _number(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") \
            or not least <= value.__index__() <= most:
        raise refuse("use", name, f"{value!r} is no whole number from {least} to {most}")
    return value.__index__()


def _step_number(step: Any) -> int:
    """As a manifest can hold it."""
    return _number("step", step, 0, 2**63 - 1)


def _values(user: dict[str, Any] | None) -> dict[str, Any]:
    """What save() was given for the manifest, as it is now."""
    try:
        text = json.dumps({} if user is None else user, allow_nan=False, ensure_ascii=False)
        found = json.loads(text.encode())
    except (TypeError, ValueError) as error:
        raise refuse("use", "user", f"a manifest cannot hold it: {error}",
                     "Give a dict of numbers, texts, lists and dicts") from error
    if not isinstance(found, dict):
        raise refuse("use", "user", f"a {type(user).__name__} is no dict")
    return found


class Checkpointer:
    """Checkpoints of a training, in a folder: one folder for each step, the last ``keep`` of them.

    ::

        ckpt = penstock.Checkpointer("checkpoints", keep=3)
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        if ckpt.latest() is not None:
            ckpt.restore(into=state)
        ...
        ckpt.save(step, state)

    A state is made of dicts, lists and tuples with tensors, plain values, and objects that have
    ``state_dict()`` and ``load_state_dict()``: modules, optimizers, schedulers,
    penstock.RandomState().

    ``keep=None`` keeps all steps. ``memory_limit`` is the most host memory in bytes that a save
    holds; "auto" takes what the state needs where memory is plentiful: up to half of what is
    available. ``snapshot="device"`` copies the state on its device instead. ``verify=False`` does
    not read back what was written. ``transfer`` is as in load_model(). ``read_only=True`` is for
    who looks at a folder that a training writes.

    Where torch.distributed is in use all ranks make one together, and each call of save(),
    restore() and close() is made by all of them; ``process_group`` names some instead of all, and
    ``timeout`` is for how many seconds they wait for each other. Each rank has its own file.
    """

    def __init__(self, dir: str | os.PathLike[str], keep: int | None = 3, *,
                 memory_limit: int | str = "auto", snapshot: str = "host", verify: bool = True,
                 process_group: Any = None, timeout: float = 1800.0, transfer: str | int = "auto",
                 read_only: bool = False):
        """Open or create the folder, take its lock, and sweep what a crash left there."""
        if snapshot not in _SNAPSHOTS:
            raise refuse("use", "snapshot", f"{snapshot!r} is neither 'host' nor 'device'")
        if isinstance(memory_limit, str) and memory_limit != "auto":
            raise refuse("use", "memory_limit", f"{memory_limit!r} is neither a number of bytes "
                         "nor 'auto'")
        self._auto = memory_limit == "auto"
        self._transfer, self._limit, _ = options(
            transfer, None if isinstance(memory_limit, str) else memory_limit)
        if self._limit < _LEAST_MEMORY:
            raise refuse("use", "memory_limit", f"a save does not go through {memory_limit} bytes",
                         f"Allow at least {_LEAST_MEMORY}")
        self._transfer_given = transfer
        if not isinstance(timeout, (int, float)) or not 0 < timeout <= _LONGEST:
            raise refuse("use", "timeout", f"{timeout!r} is no number of seconds above 0",
                         f"Give {_LONGEST} at most")
        self._keep = None if keep is None else _number("keep", keep, 1, 2**32 - 1)
        self._snapshot, self._verify, self._read_only = snapshot, verify, read_only
        self._process = os.getpid()
        self._lock, self._called = threading.RLock(), False
        self._under_way: _Save | None = None
        self._report: CheckpointReport | None = None
        self._granted = 0
        self._ranks: Alone | Ranks = ranks_of(process_group, timeout)
        self._folder = self._open(file_name(dir))
        _all.add(self)

    def _open(self, name: str) -> _penstock.Checkpoints:
        """Rank 0 makes the folder and has the lock; the others come when it has swept."""
        mine: list[_penstock.Checkpoints] = []

        def first() -> None:
            mine.append(_penstock.checkpoints_open(name, not self._read_only, self._ranks.rank))
            if not self._read_only:
                mine[0].sweep()

        self._ranks.by_first(first)
        failure = None
        try:
            if not mine:
                mine.append(_penstock.checkpoints_open(name, not self._read_only,
                                                       self._ranks.rank))
        except Exception as error:
            failure = error
        for rank, (problem, _) in enumerate(self._ranks.gather(_outcome(failure))):
            if problem:
                raise failure or refuse("open", name, f"rank {rank} cannot: {problem}",
                                        code=errno.ECANCELED)
        if mine[0].warning:
            warnings.warn(mine[0].warning, stacklevel=3)
        return mine[0]

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise refuse("use", "the Checkpointer", "it is that of the process which forked this "
                         "one", "Make one in the process that saves", errno.ECHILD)

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """One at a time. A second one of the same thread, from a signal handler or a state_dict(),
        would wait for the first, which waits for it."""
        self._check()
        with self._lock:
            if self._called:
                raise refuse("use", "the Checkpointer", "a call of this thread is not done yet",
                             "Have a signal handler set a flag, and save where the training sees "
                             "it", errno.EDEADLK)
            self._called = True
            try:
                yield
            finally:
                self._called = False

    # --------------------------------------------------------------------------------- saving --

    def save(self, step: int, state: Any, *, overwrite: bool = False,
             user: dict[str, Any] | None = None) -> CheckpointReport:
        """Save a state as a step; returns when the state may change again.

        The step exists when all of it is durable, on all ranks, and not before; wait() waits for
        that. A save that is still under way is waited for first. What went wrong in the background
        since the last call is raised here, and then nothing is saved: call again to go on.

        Work that is queued on the current streams is done first; work that is queued on them
        afterwards may overwrite the state. A step that exists is refused unless
        ``overwrite=True``: then it stays until the new one is whole. ``user`` is a dict of plain
        values for the manifest, see show().
        """
        started = time.perf_counter()
        if self._read_only:
            raise refuse("save", f"step {step}", "this Checkpointer was made with read_only=True")
        with self._one_call():
            self._wait()
            self._raise_failure(to_all=True)
            report = self._report = CheckpointReport("save", step)
            save = _Save(report, started)
            report.waited_seconds = save.seconds()
            with without_collections():
                self._begin(save, state, overwrite, user)
            return report

    def _begin(self, save: _Save, state: Any, overwrite: bool,
               user: dict[str, Any] | None) -> None:
        """From the call to the moment when the state may change. What one rank was given and
        cannot use is for all to hear, too: they wait for it."""
        report, content, placed, in_thread = save.report, b"", [], True

        def agree() -> None:
            self._try_to_agree(save, overwrite)

        def run(save: _Save) -> None:
            agree()
            save.ready.wait()
            self._finish(save)

        try:
            try:
                report.step = _step_number(report.step)
                save.user = _values(user)
                content, placed = self._collect(save, state)
            except BaseException as error:
                save.fail(error)
                raise
            finally:
                self._under_way = save
                in_thread = save.start(run)
                if not in_thread:
                    agree()
            save.answered.wait()
            if save.failure is not None:
                raise save.failure
            self._gather(save, content, placed)
        except BaseException as error:
            # The others hear of it, and nothing of this step stays.
            save.fail(error)
            save.stop()
            raise
        finally:
            save.ready.set()
            report.stall_seconds = save.seconds()
            if not in_thread:
                self._finish(save)

    def _collect(self, save: _Save, state: Any) -> tuple[bytes, list[tuple[Any, str]]]:
        """The pickle, and storages to be saved: those of the state, or copies of them."""
        import torch

        from ._torch_save import collect

        content, storages = collect(torch, plain(torch, state))
        placed = storages.on_devices()
        save.report.bytes = sum(storage.nbytes() for storage, _ in placed)
        save.report.snapshot = self._snapshot
        if self._snapshot == "device":
            placed = _copies(torch, placed,
                             self._share() if self._auto else self._limit - _LEAST_MEMORY)
        return content, placed

    def _try_to_agree(self, save: _Save, overwrite: bool) -> None:
        try:
            self._agree(save, overwrite)
        except Exception as error:
            save.failure = save.failure or error
        finally:
            save.answered.set()

    def _agree(self, save: _Save, overwrite: bool) -> None:
        """All ranks save the same step, and rank 0 begins it before the others do."""
        step, ranks = save.report.step, self._ranks
        ask_alike(ranks, "save", f"step {step}", save.failure,
                  "All ranks save the same steps in the same order")

        def begin() -> None:
            save.path = self._folder.begin(step, ranks.rank, ranks.size, overwrite)
            save.agreed = True

        def begin_first() -> None:
            self._refuse_outdated(step)
            begin()

        ranks.by_first(begin_first)
        if ranks.rank:
            save.agreed = True
            begin()

    def _refuse_outdated(self, step: int) -> None:
        """A new training in an old folder would save, and `keep` would remove what it saved."""
        if self._keep is None:
            return
        later = [each for each in self.steps() if each > step]
        if len(later) >= self._keep:
            raise refuse("save", f"step {step}", f"there are {len(later)} later ones, up to "
                         f"{later[-1]}, and keep={self._keep} would remove this one at once",
                         "Save into another folder, remove the later steps if nobody needs them, "
                         "or give a larger keep")

    def _gather(self, save: _Save, content: bytes, placed: list[tuple[Any, str]]) -> None:
        """Have the engine take the bytes; returns when the state may change."""
        import torch

        from ._torch_save import start

        to_host = self._snapshot == "host"
        # Copies that were made on the host count, too.
        copied = 0 if to_host or self._auto else \
            sum(storage.nbytes() for storage, device in placed if device == "host")
        limit = self._limit_of(save.report.bytes) if to_host else self._limit - copied
        save.job, save.device = start(torch, save.path, content, placed, self._transfer, limit,
                                      to_host)
        if to_host:
            save.job.wait_gathered()

    def _limit_of(self, needed: int) -> int | str:
        """Most bytes of staging memory. The engine knows what is plentiful, but not that others
        here are about to take as much: of several ranks each has its share."""
        if not self._auto:
            return self._limit
        if self._ranks.on_this_host == 1:
            return "auto"
        wished = needed + needed // 8 + MEMORY_LIMIT
        # What an earlier save had is this process's already.
        self._granted = max(self._granted, min(wished, self._share()), MEMORY_LIMIT)
        return self._granted

    def _share(self) -> int:
        """This rank's part of the host memory that is plentiful."""
        return _penstock.memory_available() // 2 // self._ranks.on_this_host

    # ------------------------------------------------------------------------ in the background --

    def _finish(self, save: _Save) -> None:
        """From the moment when the state may change to the commit, or to the clean end of what
        failed. Runs in the thread of the save."""
        try:
            if save.agreed:
                self._complete(save)
        except Exception as error:
            save.failure = save.failure or error
        finally:
            if save.failure is not None:
                save.report.error = words(save.failure)
            save.over.set()

    def _complete(self, save: _Save) -> None:
        described = None
        try:
            if save.failure is None:
                described = self._store(save)
        except FileNotFoundError as error:
            save.failure = self._why_not_found(error)
        except Exception as error:
            save.failure = error
        self._settle(save, described)

    def _store(self, save: _Save) -> dict[str, Any]:
        """Until the file of this rank is durable, and is what it should be."""
        job, save.job = save.job, None
        assert job is not None
        fields = job.wait()
        report = save.report
        fields["device"] = save.device
        report.transfer = Report(fields)
        report.stall_reason = self._why(report.transfer)
        report.durable_seconds = save.seconds()
        if self._verify:
            _penstock.TorchFile(save.path).verify()
            report.verified_seconds = save.seconds()
        return self._folder.describe(report.step)

    def _why_not_found(self, error: OSError) -> OSError:
        """Where the whole folder is gone, that explains more."""
        try:
            self._folder.steps()
        except Error as gone:
            gone.__cause__ = error
            return gone
        return error

    def _why(self, transfer: Report) -> str:
        """What the stall depended on."""
        if self._snapshot == "device":
            return "the state was copied on its device"
        if transfer.gathering == "ahead":
            made = f", {transfer.made_bytes / 1e9:.3f} GB of it new" if transfer.made_bytes else ""
            return f"all of it found room in host memory{made}"
        return "host memory had no room for all of it, and the rest waited for the store"

    def _settle(self, save: _Save, described: dict[str, Any] | None) -> None:
        """All ranks hear how it went; rank 0 commits, or nothing of it stays."""
        step = save.report.step
        problem = "" if save.failure is None else words(save.failure)
        try:
            outcomes = self._ranks.gather((described, problem))
            for rank, (_, theirs) in enumerate(outcomes):
                if theirs and save.failure is None:
                    save.failure = refuse("save", f"step {step}", f"rank {rank} failed: {theirs}",
                                          code=errno.ECANCELED)
            if save.failure is None:
                self._ranks.by_first(lambda: self._commit(save, [file for file, _ in outcomes]))
                save.report.done = True
                # A failure here is for all ranks as well: they stay in step.
                save.report.removed = self._ranks.by_first(self._remove_old)
        except Exception as error:
            # Rank 0 may have removed what was being written here, for the same reason.
            if save.failure is not None:
                error.__cause__ = save.failure
            save.failure = error
        if self._ranks.rank:
            if save.path:
                self._folder.leave(step)
        elif not save.report.done:
            self._folder.abandon(step)

    def _commit(self, save: _Save, files: list[dict[str, Any]]) -> None:
        """By rank 0: from here on the step exists, whoever hears of it."""
        self._folder.commit(save.report.step, files, save.user)
        save.report.done = True

    def _remove_old(self) -> list[int]:
        return [] if self._keep is None else self._folder.gc(self._keep)

    # --------------------------------------------------------------------------------- waiting --

    def _wait(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()

    def _raise_failure(self, to_all: bool = False) -> None:
        """What the caller does not know yet; `to_all`: in the place of _agree(), where others may
        wait for this rank."""
        save, failure = self._under_way, None
        if save is not None and save.failure is not None and not save.told:
            failure = save.failure
            if to_all:
                with suppress(Error):       # they are gone, which explains less
                    self._ranks.gather(("", f"step {save.report.step} has failed, "
                                        f"which is raised there now: {words(failure)}"))
            save.told = True
        self._under_way = None
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Until the last save is durable and committed; raises what went wrong with it."""
        with self._one_call():
            self._wait()
            self._raise_failure()

    def close(self) -> None:
        """wait(), and let go of the folder. What went wrong is raised when that is done."""
        with self._one_call():
            try:
                self._wait()
                self._raise_failure()
            finally:
                self._folder.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """The save under way is finished, also after an exception, which is not hidden then."""
        try:
            self.close()
        except Error as other:
            if error is None:
                raise
            warnings.warn(f"the last checkpoint failed: {other}", stacklevel=2)

    def report(self) -> CheckpointReport | None:
        """What the last save() or restore() did; None if there was none."""
        return self._report

    # --------------------------------------------------------------------------------- looking --

    def steps(self) -> list[int]:
        """All steps that are whole, ascending."""
        self._check()
        return self._folder.steps()

    def latest(self) -> int | None:
        """The last of them; None if there is none."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> str:
        """The folder of a step, be it there or not."""
        return self._folder.path(_step_number(step))

    def show(self, step: int | None = None) -> dict[str, Any]:
        """What the manifest of a step (the last) says: when it was saved, its files, and what
        save() was given as ``user``."""
        return self._folder.show(self._named(step))

    def verify(self, step: int | None = None) -> dict[str, int]:
        """Read all files of a step (the last) and compare every byte with its digest. What is wrong
        is an error that names the file, the tensor and the byte."""
        return self._folder.verify(self._named(step))

    def _named(self, step: int | None) -> int:
        found = self.latest() if step is None else _step_number(step)
        if found is None:
            raise self._none()
        return found

    def _none(self) -> Error:
        return refuse("find a checkpoint in", os.path.dirname(self._folder.path(0)),
                      "there is none yet", "Ask latest() first, which is None then", errno.ENOENT)

    # ------------------------------------------------------------------------------- restoring --

    def restore(self, step: int | None = None, into: Any = None, strict: bool = True,
                fallback: bool = False, *, map_location: Any = None,
                weights_only: bool = True) -> Any:
        """Load a step, the last by default; returns the state.

        ``into`` is a state as it was given to save(), and is filled: tensors where they lie,
        objects by load_state_dict(), a fresh optimizer too; plain values take the places of those
        that are there. With ``strict`` names that only one of the two has are an error, before
        anything is read. Without ``into`` a new state is returned, with the dicts of
        state_dict() in the places of objects.

        Digests are compared as the bytes pass; a difference is an error that names file, tensor
        and byte. With ``fallback=True`` the step before is taken then, with a warning; what was
        taken, and why, is in report(). After an error ``into`` may hold anything.

        ``map_location`` and ``weights_only`` are as in load(), for what has no tensor to go into.
        """
        import torch

        with self._one_call():
            self._wait()
            skipped: list[tuple[int, str]] = []
            filling: Filling | None = None
            self._check_alike(step, fallback)
            left = self._ranks.by_first(lambda: self._candidates(step, fallback))
            while True:
                report = self._report = CheckpointReport("restore", left.pop(0))
                report.skipped = skipped
                filling = None if into is None else Filling(torch, into, strict, filling)
                state, failure, damaged = self._attempt(report, filling, map_location,
                                                        weights_only)
                if failure is None:
                    report.done = True
                    return state
                report.error = words(failure)
                if not damaged or not left:
                    raise failure
                skipped.append((report.step, report.error))
                warnings.warn(f"step {left[0]} is taken, since {report.step} is damaged: "
                              f"{report.error}", stacklevel=2)

    def _check_alike(self, step: int | None, fallback: bool) -> None:
        """All ranks restore the same."""
        failure, asked = None, "the last step"
        try:
            if step is not None:
                asked = f"step {_step_number(step)}"
        except Exception as error:
            failure = error
        if fallback:
            asked += ", or one before it"
        try:
            ask_alike(self._ranks, "restore", asked, failure,
                      "All ranks restore with the same arguments")
        except Error as error:
            raise failure or error

    def _candidates(self, step: int | None, fallback: bool) -> list[int]:
        """The step that is wanted, and those that may stand in for it: not for one that there is
        not. One that has a manifest and is damaged is among them: who takes another shall be
        told."""
        self._folder.steps()        # has words for a folder that is gone
        root = os.path.dirname(self._folder.path(0))
        there = sorted(int(found[1]) for name in os.listdir(root)
                       if (found := _STEP.fullmatch(name))
                       and os.path.exists(os.path.join(root, name, _MANIFEST)))
        if step is None and not there:
            raise self._none()
        first = there[-1] if step is None else _step_number(step)
        stand_in = fallback and first in there
        return [first, *(each for each in reversed(there) if stand_in and each < first)]

    def _attempt(self, report: CheckpointReport, filling: Filling | None, map_location: Any,
                 weights_only: bool) -> tuple[Any, Exception | None, bool]:
        """The state of this rank; why it is of no use, here or on another rank; and whether that is
        the file's fault. Nobody begins to put in place what others could not load."""
        loaded, failure, damaged = self._on_all(
            report, lambda: self._load(report, filling, map_location, weights_only))
        if failure is not None:
            return None, failure, damaged
        state, failure, _ = self._on_all(
            report, lambda: loaded if filling is None else filling.apply(loaded))
        return state, failure, False

    def _on_all(self, report: CheckpointReport, call: Callable[[], Any]
                ) -> tuple[Any, Exception | None, bool]:
        """What a call makes on this rank; what went wrong, here or on another one; and whether
        files are to blame for that."""
        result, failure = None, None
        try:
            result = call()
        except Exception as error:
            failure = error
        except BaseException as error:
            self._tell_others(report, error)
            raise
        outcomes = self._ranks.gather(_outcome(failure))
        failed = [(rank, problem) for rank, (problem, _) in enumerate(outcomes) if problem]
        if failed and failure is None:
            rank, problem = failed[0]
            failure = refuse("restore", f"step {report.step}", f"rank {rank} failed: {problem}",
                             code=errno.ECANCELED)
        return result, failure, all(damage for problem, damage in outcomes if problem)

    def _tell_others(self, report: CheckpointReport, error: BaseException) -> None:
        """They wait for this rank, whose caller is gone, perhaps for long: a thread tells them."""
        if self._ranks.size == 1:
            return
        before, telling = self._under_way, _Save(report, time.perf_counter())
        telling.fail(error)
        # A save that failed before is still to be raised.
        if before is not None and before.failure is not None and not before.told:
            telling.failure, telling.told = before.failure, False
        self._under_way = telling

        def tell(telling: _Save) -> None:
            try:
                with suppress(Error):       # they are gone, too
                    self._ranks.gather(_outcome(error))
            finally:
                telling.over.set()

        if not telling.start(tell):
            tell(telling)

    def _load(self, report: CheckpointReport, filling: Filling | None, map_location: Any,
              weights_only: bool) -> Any:
        """The file of this rank; tensors that `filling` has a place for are there."""
        from ._torch_load import load_into

        step, ranks = report.step, self._ranks
        manifest = self._folder.show(step)
        if manifest["world_size"] != ranks.size:
            raise refuse("restore", f"step {step}", f"it was saved by {manifest['world_size']} "
                         f"ranks, and there are {ranks.size}", "Each rank has a file of its own; "
                         "states that are cut anew go through torch.distributed.checkpoint")
        # Its own digests tell what is in it, not whether it is of this step and rank.
        self._folder.check(step, ranks.rank)
        path = os.path.join(self._folder.path(step), manifest["files"][ranks.rank]["name"])
        loaded = load_into(path, filling and filling.choose, map_location, weights_only,
                           self._transfer_given)
        report.transfer = _report.last_report()
        report.bytes = report.transfer.bytes
        return loaded


def _outcome(error: BaseException | None) -> tuple[str, bool]:
    """What other ranks are told: the words, and whether a file is to blame, so that another one may
    do."""
    return "" if error is None else words(error), \
        isinstance(error, Error) and (error.domain == "format" or error.errno in _DAMAGE)


# ---------------------------------------------------------------------------------- at the end --

_all: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _tell() -> None:
    """What failed in a save that the end of the program has waited for, nobody else is told."""
    for each in list(_all):
        save = each._under_way
        if each._process == os.getpid() and save and save.failure and not save.told:
            what = "was not saved"
            if save.report.done:
                what = "was saved, but older ones were not removed"
            elif each._ranks.rank and each._ranks.lost:     # rank 0 knows
                what = "is saved only if 'penstock ckpt list' names it"
            with suppress(AttributeError, OSError, ValueError):
                sys.stderr.write(f"penstock: step {save.report.step} {what}: "
                                 f"{words(save.failure)}\n")


atexit.register(_tell)
