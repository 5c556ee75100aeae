# SPDX-License-Identifier: MIT
"""Which tensors of a model are wanted, and which box of each."""
from __future__ import annotations

import errno
import re
import sys
from collections.abc import Mapping

from . import _penstock
from ._error import refuse, shown
from ._names import file_name

_GLOB = re.compile(r"[*?\[]")


def _parts(glob: str) -> list[str]:
    """The letters of a glob, its classes whole; stars side by side are one."""
    parts, at = [], 0
    while at < len(glob):
        end = at + 1
        if glob[at] == "[":
            # As fnmatch has it: a bracket after [ or [! is none yet, and one never closed a letter.
            first = at + 1 + glob.startswith("!", at + 1)
            close = glob.find("]", first + glob.startswith("]", first))
            end = close + 1 if close >= 0 else end
        if glob[at] != "*" or parts[-1:] != ["*"]:
            parts.append(glob[at:end])
        at = end
    return parts


class _State(dict):
    """Where all globs stand after the beginning of a name; what comes after each next letter."""

    __slots__ = ("machine", "bits", "hit")

    def __init__(self, machine: _Globs, bits: int, hit: int):
        self.machine, self.bits, self.hit = machine, bits, hit

    def __missing__(self, letter: str) -> _State:
        machine = self.machine
        bits = (self.bits & machine.movers(letter)) << 1 | self.bits & machine.stars
        state = self[letter] = machine.state(bits)
        return state


class _Globs:
    """Any number of globs that look at a name together, letter by letter.

    Each part of each glob is a bit: it is set where all parts before it have matched the beginning
    of the name. A letter moves bits up by one, stars keep theirs. Names begin alike, so states are
    kept: most letters cost one lookup, however many globs there are. A glob that has come to a star
    at its end has matched and is forgotten by the states that follow, which makes them few.
    """

    STATES = 4096

    def __init__(self, globs: list[str]):
        self.globs = globs
        self.stars = self.ends = self.any = self.begins = self.last_stars = 0
        self.letters: dict[str, int] = {}
        self.classes: dict[str, int] = {}
        bit = 1
        for glob in globs:
            self.begins |= bit
            for part in _parts(glob):
                self._add(part, bit)
                bit <<= 1
            self.ends |= bit
            if glob.endswith("*"):
                self.last_stars |= bit >> 1
            bit <<= 1
        self.moves: dict[str, int] = {}
        self.states: dict[tuple[int, int], _State] = {}
        self.start = self.state(self.begins)
        self.matched = 0

    def _add(self, part: str, bit: int) -> None:
        if part == "*":
            self.stars |= bit
        elif part == "?":
            self.any |= bit
        else:
            kind = self.classes if len(part) > 1 else self.letters
            kind[part] = kind.get(part, 0) | bit

    def movers(self, letter: str) -> int:
        """The parts that match this letter."""
        if letter not in self.moves:
            from fnmatch import fnmatchcase

            bits = self.any | self.letters.get(letter, 0)
            for part, wanting in self.classes.items():
                if fnmatchcase(letter, part):
                    bits |= wanting
            self.moves[letter] = bits
        return self.moves[letter]

    def state(self, bits: int) -> _State:
        """The state with these bits, and those after stars, which match nothing as well."""
        bits |= (bits & self.stars) << 1
        last = bits & self.last_stars
        bits &= ~(last | last << 1)
        if (bits, last) not in self.states:
            self.states[bits, last] = _State(self, bits, last << 1)
        return self.states[bits, last]

    def match(self, name: str) -> bool:
        """Whether some glob matches; which ones do is remembered."""
        if len(self.states) > self.STATES:
            self.states.clear()
            self.start = self.state(self.begins)
        state = self.start
        matched = state.hit
        for letter in name:
            state = state[letter]
            if state.hit:
                matched |= state.hit
        matched |= state.bits & self.ends
        self.matched |= matched
        return matched != 0

    def unused(self) -> list[str]:
        """Globs that have matched nothing, in their order."""
        ends, unused = self.ends, []
        for glob in self.globs:
            last = ends & -ends
            if not self.matched & last:
                unused.append(glob)
            ends ^= last
        return unused


class Tensor:
    """A tensor of a model as its file has it."""

    __slots__ = ("index", "name", "dtype", "shape", "nbytes", "file", "offset")

    def __init__(self, index: int, fields: tuple):
        """From what the engine tells."""
        self.index = index
        self.name, self.dtype, self.shape, self.nbytes, self.file, self.offset = fields


class Choice:
    """A tensor, or a box of it, that is to be loaded; ``shape`` is that of the result."""

    __slots__ = ("tensor", "start", "stop", "shape")

    def __init__(self, tensor: Tensor, start=None, stop=None, shape=None):
        """The whole tensor, unless a box is given."""
        self.tensor, self.start, self.stop = tensor, start, stop
        self.shape = tensor.shape if shape is None else shape

    def as_tuple(self) -> tuple:
        """For Model.select()."""
        return self.tensor.index, self.start, self.stop


def open_model(path) -> _penstock.Model:
    """The model; what is odd about it, but no error, becomes a warning."""
    model = _penstock.Model(file_name(path))
    for text in model.warnings():
        import warnings

        warnings.warn(shown(text), stacklevel=_level_of_caller())
    return model


def _level_of_caller() -> int:
    """What warn(), called by who calls this, has to be told so that it names the line outside of
    the package that began it all."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        frame, level = frame.f_back, level + 1
    return level


def tensors_of(model: _penstock.Model) -> dict[str, Tensor]:
    """All tensors by name, in the order of files and offsets."""
    return {fields[0]: Tensor(i, fields) for i, fields in enumerate(model.tensors())}


def wanted(names, keys) -> list[str]:
    """Those of `names` that `keys` asks for: a glob, names and globs, or a function."""
    if keys is None:
        return list(names)
    if callable(keys):
        return [name for name in names if keys(name)]
    patterns = [keys] if isinstance(keys, str) else keys
    try:
        patterns = list(patterns)
    except TypeError:
        patterns = [patterns]
    found = set()
    globs = []
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise refuse("use", "keys", f"{pattern!r} is no name",
                         "keys= is a glob, names and globs, or a function of the name")
        if pattern in names:
            found.add(pattern)
        elif _GLOB.search(pattern):
            globs.append(pattern)
        else:
            raise no_tensor(names, pattern)
    if globs:
        found.update(_matching(names, globs))
    return [name for name in names if name in found]


def _matching(names, globs: list[str]) -> set[str]:
    """The names that some glob matches; each glob must match one."""
    machine = _Globs(globs)
    found = {name for name in names if machine.match(name)}
    for glob in machine.unused():
        raise no_tensor(names, glob)
    return found


def no_tensor(names, name: str):
    """The error for a name that is not there, with some that are."""
    from difflib import get_close_matches

    if not isinstance(name, str):
        return TypeError(f"a tensor's name is a text, not {name!r}")
    some = get_close_matches(name, names, 3, 0.5) or list(names)[:3]
    hint = f"There are for instance {', '.join(some)}" if some else "The model has no tensors"
    return refuse("find tensor", name, "the model has none of this name", hint, errno.ENOKEY)


def cover(tensor: Tensor, index) -> tuple[Choice, tuple] | None:
    """For any index that a framework knows: the smallest box that holds what it means, and what to
    index that box with. None where the whole tensor has to be looked at."""
    index = index if isinstance(index, tuple) else (index,)
    if any(not (entry is None or entry is Ellipsis or isinstance(entry, slice)
                or hasattr(entry, "__index__") and getattr(entry, "shape", ()) == ()
                and "bool" not in str(getattr(entry, "dtype", type(entry)))) for entry in index):
        return None
    rank, given = len(tensor.shape), sum(e is not None and e is not Ellipsis for e in index)
    if given > rank or sum(entry is Ellipsis for entry in index) > 1:
        raise IndexError(f"too many indices for tensor of dimension {rank}: {tensor.name}")
    if Ellipsis not in index:
        index += (Ellipsis,)
    start, stop, rest, axis = [], [], [], 0
    for entry in index:
        if entry is None:
            rest.append(None)
            continue
        if entry is Ellipsis:
            for length in tensor.shape[axis:axis + rank - given]:
                start.append(0)
                stop.append(length)
                rest.append(slice(None))
            axis += rank - given
            continue
        length = tensor.shape[axis]
        if isinstance(entry, slice):
            first, last, step = entry.indices(length)
            if step < 1:
                raise ValueError("step must be greater than zero")
            count = len(range(first, last, step))
            start.append(first)
            stop.append(first + (count - 1) * step + 1 if count else first)
            rest.append(slice(None, None, step))
        else:
            number = entry.__index__()
            if not -length <= number < length:
                raise IndexError(f"index {number} is out of bounds for dimension {axis} with size "
                                 f"{length}: {tensor.name}")
            start.append(number % length)
            stop.append(number % length + 1)
            rest.append(0)
        axis += 1
    shape = tuple(last - first for first, last in zip(start, stop))
    return Choice(tensor, tuple(start), tuple(stop), shape), tuple(rest)


def box(tensor: Tensor, index) -> Choice:
    """The box that ``tensor[index]`` means: slices without a step, numbers, an ellipsis."""
    def wrong(message: str):
        return refuse("slice", tensor.name, message, "Ranges with step 1, numbers and ... are "
                      "read from the file; index further in memory")

    try:
        found = cover(tensor, index)
    except (IndexError, TypeError, ValueError) as error:
        raise wrong(str(error)) from None
    if found is None:
        raise wrong(f"{index!r} is no such index")
    choice, rest = found
    if None in rest:
        raise wrong("a new axis")
    for entry in rest:
        if isinstance(entry, slice) and entry.step not in (None, 1):
            raise wrong(f"step {entry.step}")
    choice.shape = tuple(length for length, entry in zip(choice.shape, rest)
                         if isinstance(entry, slice))
    return choice


def choose(tensors: dict[str, Tensor], keys, slices, into) -> list[Choice]:
    """What a load is asked for, in the order of files and offsets."""
    if into is not None and not isinstance(into, Mapping):
        raise refuse("use", "into", f"a {type(into).__name__} is no mapping of names to tensors")
    if keys is None and into is not None:
        keys = list(into)
        for name in keys:
            if name not in tensors:
                raise no_tensor(tensors, name)
    names = wanted(tensors, keys) if keys is not None else list(tensors)
    for name in names if into is not None else ():
        if name not in into:
            raise refuse("load into", name, "into= has no tensor for it")
    try:
        slices = dict(slices or {})
    except (TypeError, ValueError):
        raise refuse("use", "slices", f"{slices!r} is no mapping of names to indices") from None
    choices = []
    for name in names:
        tensor = tensors[name]
        choices.append(box(tensor, slices.pop(name)) if name in slices else Choice(tensor))
    for name in slices:
        if name not in tensors:
            raise no_tensor(tensors, name)
        raise refuse("slice", name, "keys= does not ask for this tensor")
    return choices
