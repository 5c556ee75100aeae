# SPDX-License-Identifier: MIT
"""Loading: choose tensors, lay them out, start a job, look at the memory.

One load is one job of the engine, whatever devices its tensors go to, with two exceptions.
``stream`` cuts a model into groups, so that tensors that were used can go while others come; and
tensors that are converted to or from a dtype that the engine does not know pass through a small
buffer in the file's dtype, group by group, for the framework to convert.

On the host nothing has to move: unless a copy is asked for, tensors look into the mapped file
(``_mapped.py``), and the engine loads the few that cannot.
"""
from __future__ import annotations

import errno
import os
import sys
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from . import _penstock, _prefetch, _report
from ._choose import Choice, choose, open_model, renamed, tensors_of, wanted
from ._dtypes import Dtypes
from ._error import Error, refuse
from ._frameworks import BITS, Adapters, Dlpack, is_floating
from ._into import Into, resolve
from ._mapped import Maps, Opened, Unread, fits, open_mapped, span
from ._modules import or_module
from ._names import model_name
from ._options import AUTO, DROP, MEMORY_LIMIT_LEAST, copies, options
from ._progress import Bar, wait
from ._rules import TensorInfo

#: Bytes of one group of tensors that the framework converts.
_CONVERT_GROUP = 128 << 20
_ALIGN = 256
#: Why some tensors of a mapped file are copies.
NOT_AS_THEY_LIE = ("in the file their bytes are not in one stretch, not aligned as the framework "
                   "wants them, or of another dtype")


class _Moves:
    """How the jobs of one call move, and what they report."""

    def __init__(self, transfer, memory_limit: int | None, progress: bool,
                 cache: str | None = None):
        """Refuses what makes no sense."""
        self.transfer, self.memory_limit, self.cache = options(transfer, memory_limit, cache)
        #: How many jobs may run at the same time and share the limit.
        self.together = 2 if self.memory_limit >= 2 * MEMORY_LIMIT_LEAST else 1
        self.progress = progress
        #: Has the caller left the way to us? Pages that are mapped cannot be dropped.
        self.plain = self.transfer == AUTO and memory_limit is None and self.cache != DROP
        self.reports: list[dict] = []
        self.refused: list[tuple] = []
        self.begin()

    def begin(self) -> None:
        """The clock starts when the framework, which may have to be imported, is there."""
        self.started = time.perf_counter()

    def wait(self, job, label: str) -> None:
        """Until it has ended well."""
        self.reports.append(wait(job, label, self.progress))

    def mapped(self, choices: list[Choice]) -> None:
        """Tensors look into their file."""
        count = sum(span(choice)[1] for choice in choices)
        self.reports.append(_report.mapped(count, time.perf_counter() - self.started))

    def not_mapped(self, choices: list[Choice], reason: str) -> None:
        """The engine has to load them, for this reason; "": they were not to be mapped."""
        count = sum(_bytes(choice, choice.tensor.dtype) for choice in choices) if reason else 0
        if count:
            self.refused.append((_report.MAPPED, count, reason))

    def keep_report(self, device: str) -> None:
        """For last_report()."""
        for report in self.reports[:1]:
            report["refused"] = self.refused + report["refused"]
        if len(self.reports) == 1:
            _report.keep(self.reports[0])
        else:
            seconds = time.perf_counter() - self.started
            _report.keep(_report.merge(self.reports, seconds, device))


def _round_up(size: int) -> int:
    return max((size + _ALIGN - 1) // _ALIGN * _ALIGN, _ALIGN)


def _label(path) -> str:
    if isinstance(path, tuple):
        return f"{len(path)} files"
    return os.path.basename(os.path.normpath(os.fsdecode(path)))


def _to_convert(choices: list[Choice], target: Dlpack, dtypes: Dtypes | None, into
                ) -> _Conversion:
    """Which tensors are floating ones of another dtype than is wanted. Where the engine can give
    them that on their way, their choices say so; the others are the framework's to convert."""
    found: dict[str, int] = {}
    known: dict[str, int] = {}

    def index(dtype) -> int:
        if str(dtype) not in known:
            kind = known[str(dtype)] = target.dtype_index(dtype)
            if not is_floating(kind):
                raise refuse("convert to", str(dtype),
                             "floating tensors are converted to floating dtypes")
        return known[str(dtype)]

    if dtypes is not None and dtypes.dtype is not None:
        index(dtypes.dtype)     # refused even where no tensor is concerned
    for choice in choices if dtypes is not None else ():
        dtype = dtypes.of(choice.tensor)
        if dtype is not None and is_floating(choice.tensor.dtype) \
                and index(dtype) != choice.tensor.dtype:
            if _on_the_way(choice, index(dtype), target, into):
                choice.dtype = index(dtype)
            else:
                target.check_converts(choice.tensor, index(dtype))
                found[choice.tensor.name] = index(dtype)
    return _Conversion(target, found, choices, into)


def _on_the_way(choice: Choice, dtype: int, target: Dlpack, into) -> bool:
    """Can the engine convert it? Numbers must lie at multiples of their size."""
    tensor = choice.tensor
    if not target.has_bytes or not _penstock.converts(tensor.dtype, dtype) \
            or tensor.offset % (BITS[tensor.dtype] // 8):
        return False
    return into is None or not target.address(
        tensor.name, into[tensor.name], dtype, choice.shape) % (BITS[dtype] // 8)


def _groups(choices: list[Choice], limit: int) -> list[list[Choice]]:
    """Neighbours together, each group up to `limit` bytes; a larger tensor is alone in one."""
    groups: list[list[Choice]] = []
    room = 0
    for choice in choices:
        size = _round_up(_bytes(choice, choice.dtype))
        if not groups or room < size:
            groups.append([])
            room = limit
        groups[-1].append(choice)
        room -= size
    return groups


def _bytes(choice: Choice, dtype: int) -> int:
    count = 1
    for length in choice.shape:
        count *= length
    return (count * BITS[dtype] + 7) // 8


class Group:
    """Tensors that one job loads: where they go, and how they are looked at afterwards."""

    def __init__(self, model, choices: list[Choice], target: Dlpack, arena: bool, into=None):
        """Allocates what is not there yet: one piece for all, or one for each."""
        self.choices, self.target, self.into = choices, target, into
        for choice in choices:
            target.check(choice.tensor.name, choice.dtype)
        self.selection = model.select([choice.as_tuple() for choice in choices])
        offsets = self.selection.offsets()
        if into is not None:
            self.places = None
            found = [target.address(c.tensor.name, into[c.tensor.name], c.dtype, c.shape)
                     for c in choices]
            self.where = [at if size else 0 for at, (_, size) in zip(found, offsets)]
            _check_apart(target, into)
        elif arena:
            owner, first = target.allocate(_round_up(self.selection.total))
            self.places = [(owner, offset) for offset, _ in offsets]
            self.where = [first + offset for offset, _ in offsets]
        else:
            made = [target.allocate(max(size, 1)) for _, size in offsets]
            self.where = [address for _, address in made]
            self.places = [(owner, 0) for owner, _ in made]

    def start(self, moves: _Moves, groups: bool = False, share: int = 1):
        """The job, one of `share` that run at the same time; it keeps the memory."""
        return self.selection.load(self.target.engine_device(), self.where,
                                   self.places or self.into, groups, moves.transfer,
                                   moves.memory_limit // share, self.streams(), moves.cache)

    def streams(self) -> list[tuple[Any, int]]:
        """What the framework has queued on its device comes first."""
        stream = self.target.stream()
        return [] if stream is None else [(self.target.engine_device(), stream)]

    def tensor(self, at: int) -> Any:
        """One of them."""
        choice = self.choices[at]
        if self.places is None:
            return self.into[choice.tensor.name]
        return self.target.view(*self.places[at], choice.dtype, choice.shape)

    def tensors(self) -> dict[str, Any]:
        """All of them, by name."""
        return {choice.tensor.name: self.tensor(at) for at, choice in enumerate(self.choices)}


def _check_apart(target: Dlpack, into: Mapping[str, Any]) -> None:
    """Two tensors that are filled at the same time must not share memory."""
    spans = sorted((*target.span(tensor), name) for name, tensor in into.items())
    spans = [span for span in spans if span[1]]
    for (at, size, name), (next_at, _, other) in zip(spans, spans[1:]):
        if at + size > next_at:
            raise refuse("load into", other, f"its memory is also that of {name}",
                         "Load tied tensors once, with keys= or into= for one of them")


def _start_together(model, groups: list[Group], moves: _Moves):
    """One job for groups of several devices: what lies side by side in the file is read at once,
    wherever it goes."""
    selection = model.select([choice.as_tuple() for group in groups for choice in group.choices])
    devices = [group.target.engine_device() for group in groups]
    where = [(address, device) for group, device in zip(groups, devices) for address in group.where]
    return selection.load(devices[0], where, [group.places or group.into for group in groups],
                          False, moves.transfer, moves.memory_limit,
                          [stream for group in groups for stream in group.streams()], moves.cache)


def load_plain(model, groups: list[Group], moves: _Moves, label: str) -> dict[str, Any]:
    """Everything in one job, straight to its place; tensors are made while it runs."""
    job = groups[0].start(moves) if len(groups) == 1 else _start_together(model, groups, moves)
    made = [None if group.target.copies else group.tensors() for group in groups]
    moves.wait(job, label)
    moves.reports[-1]["device"] = _devices(groups)
    found: dict[str, Any] = {}
    for group, tensors in zip(groups, made):
        if group.into is not None:
            group.target.changed(group.into.values())
        found.update(group.tensors() if tensors is None else tensors)
    return found


class Begun:
    """A model of torch tensors on its way to one device. They are there at once, for those who
    only want to put them somewhere; their bytes are when finish() has returned."""

    def __init__(self, path, device: str, arena: bool, transfer, memory_limit: int | None,
                 cache: str | None, progress: bool):
        """Starts at once."""
        self._moves = _Moves(transfer, memory_limit, progress, cache)
        self._path = path = model_name(path)
        target = Adapters("pt", device).all()[0]
        _prefetch.drop(path, target.device)
        model = open_model(path)
        tensors = tensors_of(model)
        group = Group(model, choose(tensors, list(tensors), None), target, arena)
        self._device = target.device
        self._job = group.start(self._moves)
        self._failure: Error | None = None
        self.tensors = group.tensors()
        self._places = sorted(zip(group.where, (size for _, size in group.selection.offsets())))

    def __contains__(self, address: int) -> bool:
        """Is this an address of one of the tensors?"""
        at = bisect(self._places, (address, sys.maxsize)) - 1
        return at >= 0 and address < sum(self._places[at])

    def finish(self) -> None:
        """Until all bytes have come; raises what went wrong, and the same again."""
        if self._failure is not None:
            raise self._failure
        try:
            self._moves.wait(self._job, _label(self._path))
        except Error as error:
            if error.errno != errno.ESTALE:
                self._failure = error
                raise
            load_model(self._path, self._device, into=self.tensors)
            return
        self._moves.reports[-1]["device"] = self._device
        self._moves.keep_report(self._device)

    def cancel(self) -> None:
        """Nobody wants them any more."""
        self._job.cancel()


class _Conversion:
    """Where tensors go that come in another dtype than they shall have, for the framework to
    convert."""

    def __init__(self, target: Dlpack, dtypes: dict[str, int], choices: list[Choice], into):
        """`dtypes` has those of `choices` that are concerned."""
        self.target, self.names, self.into = target, dtypes, into
        for choice in choices if into is not None and dtypes else ():
            name = choice.tensor.name
            if name in dtypes:
                target.address(name, into[name], dtypes[name], choice.shape)

    def dtype(self, choice: Choice) -> int:
        """What the tensor will have."""
        return self.names.get(choice.tensor.name, choice.dtype)

    def apply(self, choice: Choice, tensor: Any) -> Any:
        """The tensor, converted if it has to be."""
        name = choice.tensor.name
        if name not in self.names:
            return tensor
        if self.into is not None:
            result = self.into[name]
        else:
            dtype = self.names[name]
            owner, _ = self.target.allocate(_round_up(_bytes(choice, dtype)))
            result = self.target.view(owner, 0, dtype, choice.shape)
        self.target.convert(result, tensor)
        return result

    def split(self, choices: list[Choice]) -> tuple[list[Choice], list[Choice]]:
        """Those that stay as they are, and those that are converted."""
        return ([c for c in choices if c.tensor.name not in self.names],
                [c for c in choices if c.tensor.name in self.names])


def _run(model, groups, target: Dlpack, into, arena: bool, moves: _Moves, label: str):
    """Load group after group, some at a time; yields (choice, tensor) as they land."""
    waiting, running = deque(groups), deque()
    bar = Bar(label) if moves.progress else None
    total = sum(_bytes(c, c.tensor.dtype) for group in groups for c in group)
    done = 0
    try:
        while waiting or running:
            while waiting and len(running) < moves.together:
                group = Group(model, waiting.popleft(), target, arena, into)
                running.append((group.start(moves, True, moves.together), group))
            job, group = running[0]
            landed = job.landed()
            while landed:
                for tag in landed:
                    choice = group.choices[tag]
                    done += _bytes(choice, choice.tensor.dtype)
                    tensor = group.tensor(tag)
                    if into is not None:
                        target.changed([tensor])
                    yield choice, tensor
                    del tensor
                if bar:
                    bar.show(done, total, time.perf_counter() - moves.started)
                landed = job.landed()
            moves.reports.append(job.wait())
            running.popleft()
            del job, group
    finally:
        if bar:
            bar.end()
        for job, _ in running:
            job.cancel()


def _run_mapped(maps: Maps | None, groups, target: Dlpack, moves: _Moves):
    """(choice, tensor) in the order of the file, the next two groups being read ahead."""
    for at, group in enumerate(groups):
        maps.read_ahead(group + groups[1] if at == 0 and len(groups) > 1 else
                        groups[at + 1] if at + 1 < len(groups) else [])
        moves.mapped(group if target.has_bytes else [])
        for choice in group:
            yield choice, maps.tensor(choice, target)


def _load_converted(model, choices: list[Choice], target: Dlpack, conversion: _Conversion,
                    moves: _Moves, label: str) -> dict[str, Any]:
    """Group by group through a buffer, converted on the device into the final tensors."""
    groups = _groups(choices, _CONVERT_GROUP)
    return {choice.tensor.name: conversion.apply(choice, tensor)
            for choice, tensor in _run(model, groups, target, None, True, moves, label)}


def maps_files(target: Dlpack, moves: _Moves, copy: bool) -> bool:
    """Shall tensors look into the mapped files? On the host, unless the caller wants a copy, or
    says how the engine is to make one."""
    return target.device == "host" and not copy and moves.plain


def open_files(path, mapped: bool) -> Opened:
    return open_mapped(path) if mapped else Opened(open_model(path), None, "")


def split_mapped(opened: Opened, choices: list[Choice], target: Dlpack, moves: _Moves
                 ) -> tuple[list[Choice], list[Choice]]:
    """Those that can be looked at where they are, and those that the engine has to load."""
    if opened.maps is None:
        moves.not_mapped(choices, opened.reason)
        return [], choices
    mapped: list[Choice] = []
    others: list[Choice] = []
    for choice in choices:
        target.check(choice.tensor.name, choice.dtype)
        (mapped if fits(choice, target) else others).append(choice)
    moves.not_mapped(others, NOT_AS_THEY_LIE)
    return mapped, others


def _load_mapped(maps: Maps, choices: list[Choice], target: Dlpack, conversion: _Conversion,
                 moves: _Moves) -> dict[str, Any]:
    """Tensors that look into the files; what is to be converted is, out of them."""
    maps.read_ahead(choices)
    found = maps.tensors(choices, target)
    moves.mapped(choices if target.has_bytes else [])
    if conversion.names:
        for choice in choices:
            name = choice.tensor.name
            found[name] = conversion.apply(choice, found[name])
    return found


class Part(NamedTuple):
    """Tensors of a load that go to one device, all of them into existing memory or none."""

    opened: Opened
    choices: list[Choice]
    target: Dlpack
    conversion: _Conversion
    into: dict[str, Any] | None


def load_parts(parts: list[Part], arena: bool, moves: _Moves, label: str) -> dict[str, Any]:
    """Each tensor in its way: out of the mapped file, straight to its place, or through a
    conversion. All that goes straight is one job."""
    found: dict[str, Any] = {}
    groups, to_convert = [], []
    for part in parts:
        opened, target = part.opened, part.target
        looked, left = split_mapped(opened, part.choices, target, moves)
        plain, converted = part.conversion.split(left)
        if opened.maps is not None:
            found.update(_load_mapped(opened.maps, looked, target, part.conversion, moves))
        if plain or opened.maps is None and not converted:
            groups.append(Group(opened.model, plain, target, arena, part.into))
        if converted:
            to_convert.append((part, converted))
    if groups:
        found.update(load_plain(parts[0].opened.model, groups, moves, label))
    for part, converted in to_convert:
        found.update(_load_converted(part.opened.model, converted, part.target, part.conversion,
                                     moves, label))
    return {choice.tensor.name: found[choice.tensor.name]
            for part in parts for choice in part.choices}


def _target(choice: Choice, adapters: Adapters, into: Into) -> Dlpack:
    """A module's tensors are filled where they are, unless a GPU was named."""
    target = adapters.of(choice.tensor)
    if into.module is not None and target.name != "pt":
        raise refuse("load into", type(into.module).__name__,
                     f"a torch module cannot be filled with framework {target.name!r}")
    tensor = into.tensors.get(choice.tensor.name)
    if into.module is None or tensor is None or target.device != "host" \
            or tensor.device.type not in ("cpu", "cuda"):
        return target
    return adapters.at(tensor.device)


def _parts(opened: Opened, choices: list[Choice], adapters: Adapters, into: Into, dtypes,
           copied: Callable[[Dlpack], bool]) -> list[Part]:
    """The load, cut by where tensors go. Whatever does not fit is refused here, before anything is
    read."""
    found: dict[tuple[str, bool], list[Choice]] = {}
    if into.module is None and not adapters.mapped or not choices:
        found[adapters.all()[0].device, bool(into.tensors)] = choices   # most loads, and quickly
    else:
        for choice in choices:
            place = _target(choice, adapters, into).device, choice.tensor.name in into.tensors
            found.setdefault(place, []).append(choice)
    parts = []
    for (device, filled), some in found.items():
        target = adapters.at(device)
        fills = {c.tensor.name: into.tensors[c.tensor.name] for c in some} if filled else None
        conversion = _to_convert(some, target, dtypes, fills)
        _check(some, target, conversion, into)
        looks = opened if not filled and not copied(target) else Opened(opened.model, None, "")
        if not target.has_bytes:
            looks = Opened(opened.model, Unread(), "")
        parts.append(Part(looks, some, target, conversion, fills))
    return parts


def _check(choices: list[Choice], target: Dlpack, conversion: _Conversion, into: Into) -> None:
    """Do they fit into what is to be filled, or replaced?"""
    if into.tensors and not target.has_bytes:
        raise refuse("load into", target.device, "tensors there have no bytes to fill")
    for choice in choices if into.tensors or into.replaced else ():
        name, dtype = choice.tensor.name, conversion.dtype(choice)
        if name in into.tensors:
            target.address(name, into.tensors[name], dtype, choice.shape)
        for place in into.replaced.get(name, ()):
            target.compare(name, place.tensor, dtype, choice.shape)


def _dtypes(dtype: Any, tensors: Mapping[str, Any]) -> Dtypes | None:
    return None if dtype is None else Dtypes(dtype, tensors.values())


def _drop_prefetched(path, adapters: Adapters) -> None:
    for target in adapters.all():
        _prefetch.drop(path, target.device)


Model = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Keys = str | Iterable[str] | Callable[[str], bool] | None
Slices = Mapping[str, Any] | Callable[[str, TensorInfo], Any] | None
Rename = Mapping[str, str] | tuple[str, str] | Callable[[str], str] | None


@or_module
def load_model(path: Model, device: Any = "cpu", *, framework: str = "pt", keys: Keys = None,
               slices: Slices = None, rename: Rename = None, dtype: Any = None, into: Any = None,
               strict: bool = True, copy: bool = False, arena: bool | None = None,
               transfer: str | int = "auto", memory_limit: int | None = None,
               cache: str | None = None, progress: bool = False) -> dict[str, Any]:
    """Load the tensors of a model: a safetensors file, a folder of shards, an index file, or a list
    of files.

    ``device`` is "cpu", "cuda", "cuda:N", a number or a torch.device; or a mapping of names, parts
    of the model and globs to these, ``{"model.layers.0": 0, "*.norm.*": 1, "": "cpu"}``. On "meta"
    torch tensors have no bytes, and none is read.
    ``framework`` says what the tensors are: "pt" (torch), "np" (numpy), "cupy", "jax" or "dlpack"
    (penstock.Array).

    ``rename`` gives tensors other names, by which all further arguments and the result know them: a
    mapping of old to new ones, a function of the old, or two texts, what names begin with and what
    they shall begin with instead.

    ``keys`` (a glob, names and globs, or a function of the name) picks tensors. ``slices`` maps
    names and globs to what one would write in brackets, ``{"w": (slice(0, 512),)}``, or is a
    function of the name and its TensorInfo that returns that or None: only those bytes are read.

    ``dtype`` converts floating tensors: a dtype of torch or numpy, or a word such as "bf16". From
    and to bf16, fp16 and fp32 that happens on their way; the framework does the others, on the
    device. 8-bit weights and, in a model that has such or packed ones, their scales stay as they
    are, unless ``dtype`` is a mapping as for ``device``, or a function as for ``slices``.

    ``into`` is what exists already and is to be filled in place: a mapping of names to tensors, and
    only these are loaded; or a torch module, whose parameters and persistent buffers are filled
    where they are, those on the device meta being made on ``device``. ``strict`` is that of
    load_state_dict(): names that only the module or only the files have are an error.

    On the host tensors look into the mapped file, as those of safetensors do: nothing is read
    before it is looked at, and what is written to a tensor never reaches the file. The file must
    not be cut or overwritten in place meanwhile; see docs/python.md. ``copy=True`` reads the bytes
    into memory of their own, as do ``arena``, ``transfer`` and ``memory_limit`` where they are
    given.

    With ``arena``, which is the default where bytes are read, all tensors of the call that go to
    one device lie in one allocation, which is freed when the last of them goes; ``arena=False``
    gives each its own, as have those that the framework converts.

    ``transfer`` names a path (the default takes the best for each range), ``memory_limit`` is the
    most staging memory in bytes (128 MiB), ``progress`` shows a bar. ``cache`` says what is left in
    the page cache for the next load: "auto", "keep", "after", "drop" or "off"; see docs/python.md.
    What happened is in ``last_report()``. Work queued on the current stream afterwards sees the
    bytes.

    With a torch module first this is ``safetensors.torch.load_model(model, filename, strict=True,
    device="cpu")``: the file is loaded into the module, and the names that are missing and those
    that are unexpected are returned.
    """
    moves = _Moves(transfer, memory_limit, progress, cache)
    adapters = Adapters(framework, device)
    moves.begin()
    path = model_name(path)
    label = _label(path)

    def copied(target: Dlpack) -> bool:
        return arena is not None or not maps_files(target, moves, copy)

    opened = None
    if adapters.only is None:
        _drop_prefetched(path, adapters)
    else:
        plain = slices is None and into is None and dtype is None and arena is not False
        ready = _prefetch.take(path, adapters.only.device)
        same = ready is not None and (cache is None or ready.cache == moves.cache)
        if same and ready.maps is None and plain and moves.plain:
            found = _join(ready, adapters, keys, rename, moves, label)
            if found is not None:
                return found
        if ready is not None:
            opened = None if copied(adapters.only) else ready.opened()
            ready.cancel()
    opened = opened or _open(path, adapters, into, copied)
    tensors = renamed(tensors_of(opened.model), rename)
    into = resolve(into, tensors, keys, strict)
    choices = choose(tensors, into.names, slices)
    parts = _parts(opened, choices, adapters, into, _dtypes(dtype, tensors), copied)
    loaded = load_parts(parts, arena is not False, moves, label)
    moves.keep_report(_devices(parts))
    if into.module is None and len(parts) == 1:
        return loaded
    return dict(named for choice in choices
                for named in into.land(choice.tensor.name, loaded[choice.tensor.name]))


def _open(path, adapters: Adapters, into, copied: Callable[[Dlpack], bool]) -> Opened:
    """With the files mapped where some tensors may look into them."""
    return open_files(path, not isinstance(into, Mapping)
                      and not all(copied(target) for target in adapters.all()))


def _devices(parts: list[Part] | list[Group]) -> str:
    """For the report."""
    return ", ".join(dict.fromkeys(part.target.device for part in parts))


def _join(ready, adapters: Adapters, keys, rename, moves: _Moves, label: str
          ) -> dict[str, Any] | None:
    """The rest of what prefetch() began; None where somebody else was quicker."""
    target = adapters.only
    try:
        tensors = renamed(ready.tensors(), rename)
        choices = choose(tensors, wanted(tensors, keys), None)
        for choice in choices:
            adapters.of(choice.tensor)
            target.check(choice.tensor.name, choice.tensor.dtype)
    except BaseException:
        ready.cancel()
        raise
    done = ready.finish(label, moves.progress)
    if done is None:
        return None
    memory, report = done
    owner = target.adopt(memory)
    moves.reports.append(report)
    moves.keep_report(target.device)
    return {c.tensor.name: target.view(owner, ready.offsets[c.tensor.index][0], c.tensor.dtype,
                                       c.shape) for c in choices}


def load_file(filename: Model, device: Any = "cpu", *, framework: str = "pt", keys: Keys = None,
              slices: Slices = None, rename: Rename = None, dtype: Any = None, into: Any = None,
              strict: bool = True, copy: bool = False, arena: bool | None = None,
              transfer: str | int = "auto", memory_limit: int | None = None,
              cache: str | None = None, progress: bool = False,
              backend: str = "mmap") -> dict[str, Any]:
    """Load a safetensors file: a drop-in for ``safetensors.torch.load_file``.

    The tensors are the same bit for bit. All further arguments are those of load_model();
    ``backend`` is safetensors': "pread" is ``copy=True``.
    """
    copy = copies(backend) or copy
    return load_model(filename, device, framework=framework, keys=keys, slices=slices,
                      rename=rename, dtype=dtype, into=into, strict=strict, copy=copy, arena=arena,
                      transfer=transfer, memory_limit=memory_limit, cache=cache,
                      progress=progress)


def stream(path: Model, device: Any = "cpu", *, framework: str = "pt", keys: Keys = None,
           slices: Slices = None, rename: Rename = None, dtype: Any = None, into: Any = None,
           strict: bool = True, window: int = 2 << 30, copy: bool = False,
           transfer: str | int = "auto", memory_limit: int | None = None,
           cache: str | None = None, progress: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) as the tensors of a model land, each once.

    The model is read in groups of neighbours of at most half of ``window`` bytes, two at a time, so
    that device memory holds little more than the window and what the caller keeps. The tensors
    of a group come in the order in which they land, and share an allocation that is freed
    when the last of them goes. Stopping early stops the reading. On the host, where tensors look
    into the mapped file, they come in the order of the file, and groups are what is read ahead.
    Where they go to several devices, those of one come after those of another.

    The other arguments are those of load_model(). That a file was changed while it was copied is
    known, and raised, at the end of its group.
    """
    if not isinstance(window, int) or window <= 0:
        raise ValueError(f"window is a number of bytes above 0, not {window!r}")
    moves = _Moves(transfer, memory_limit, progress, cache)
    adapters = Adapters(framework, device)
    moves.begin()
    path = model_name(path)
    _drop_prefetched(path, adapters)

    def copied(target: Dlpack) -> bool:
        return not maps_files(target, moves, copy)

    opened = _open(path, adapters, into, copied)
    tensors = renamed(tensors_of(opened.model), rename)
    into = resolve(into, tensors, keys, strict)
    choices = choose(tensors, into.names, slices)
    parts = _parts(opened, choices, adapters, into, _dtypes(dtype, tensors), copied)
    split = [split_mapped(part.opened, part.choices, part.target, moves) for part in parts]
    return _stream(parts, split, into, max(window // 2, 1), moves, _label(path))


def _stream(parts: list[Part], split, into: Into, limit: int, moves: _Moves, label: str):
    """The generator behind stream(); what is wrong with the arguments is raised before it."""
    for part, (looked, left) in zip(parts, split):
        for choice, tensor in _stream_part(part, looked, left, limit, moves, label):
            if into.module is None:
                yield choice.tensor.name, tensor
            else:
                yield from into.land(choice.tensor.name, tensor)
            del tensor
    moves.keep_report(_devices(parts))


def _stream_part(part: Part, looked, left, limit: int, moves: _Moves, label: str):
    """(choice, tensor) of those that go to one device."""
    plain, converted = part.conversion.split(left)
    model, target = part.opened.model, part.target
    for choice, tensor in _run_mapped(part.opened.maps, _groups(looked, limit), target, moves):
        yield choice, part.conversion.apply(choice, tensor)
        del tensor
    for choice, tensor in _run(model, _groups(plain, limit), target, part.into, True, moves,
                               label):
        yield choice, tensor
        del tensor
    for choice, tensor in _run(model, _groups(converted, limit), target, None, True, moves, label):
        yield choice, part.conversion.apply(choice, tensor)
        del tensor
