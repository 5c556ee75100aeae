# SPDX-License-Identifier: MIT
"""Which tensors of a model are wanted, and which box of each."""
from __future__ import annotations

import errno
import sys
from bisect import bisect
from collections.abc import Callable, Mapping
from typing import Any

from . import _penstock
from ._error import refuse, shown
from ._globs import Globs, is_glob
from ._names import model_name
from ._rules import Rules, Tensor


class Choice:
    """A tensor, or a box of it, that is to be loaded; ``shape`` is that of the result, and
    ``dtype`` the one that it arrives in: the engine converts some on their way."""

    __slots__ = ("tensor", "start", "stop", "shape", "dtype")

    def __init__(self, tensor: Tensor, start=None, stop=None, shape=None):
        """The whole tensor, unless a box is given."""
        self.tensor, self.start, self.stop = tensor, start, stop
        self.shape = tensor.shape if shape is None else shape
        self.dtype = tensor.dtype

    def as_tuple(self) -> tuple:
        """For Model.select()."""
        return self.tensor.index, self.start, self.stop, self.dtype


def open_model(path) -> _penstock.Model:
    """The model; what is odd about it, but no error, becomes a warning."""
    model = _penstock.Model(model_name(path))
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
        elif is_glob(pattern):
            globs.append(pattern)
        else:
            raise no_tensor(names, pattern)
    if globs:
        found.update(_matching(names, globs))
    return [name for name in names if name in found]


def _matching(names, globs: list[str]) -> set[str]:
    """The names that some glob matches; each glob must match one."""
    machine = Globs(globs)
    found = {name for name in names if machine.match(name)}
    for glob in machine.unused():
        raise no_tensor(names, glob)
    return found


#: More names than twice this are not compared with a wrong one, which takes 0.1 ms for each.
_COMPARED = 256


def _near(names, name: str) -> list[str]:
    """Names that may have been meant: all, or of very many those that begin or end most alike."""
    if len(names) <= 2 * _COMPARED:
        return list(names)
    near = []
    for turn in (1, -1):
        ordered = sorted(each[::turn] for each in names)
        at = bisect(ordered, name[::turn])
        near += [each[::turn] for each in ordered[max(at - _COMPARED // 2, 0):][:_COMPARED]]
    return list(dict.fromkeys(near))


def no_tensor(names, name: str):
    """The error for a name that is not there, with some that are."""
    from difflib import get_close_matches

    if not isinstance(name, str):
        return TypeError(f"a tensor's name is a text, not {name!r}")
    some = get_close_matches(name, _near(names, name), 3, 0.5) or list(names)[:3]
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


#: No slice at all; None is an index that is refused.
_WHOLE = object()


def _unused(rules: Rules, tensors: dict[str, Tensor]):
    """The error for what slices= says and nobody asked for; None where there is nothing."""
    for name in rules.unused():
        if name in tensors:
            return refuse("slice", name, "keys= does not ask for this tensor")
        if is_glob(name) and any(map(Globs([name]).match, tensors)):
            return refuse("slice", name, "keys= does not ask for such tensors")
        return no_tensor(tensors, name)
    return None


def choose(tensors: dict[str, Tensor], names: list[str], slices) -> list[Choice]:
    """What a load is asked for, in the order of `names`."""
    if slices is None:
        return [Choice(tensors[name]) for name in names]
    rules = Rules("slices", slices, "an index")
    choices = []
    for name in names:
        index = rules.of(tensors[name], _WHOLE)
        choices.append(Choice(tensors[name]) if index is _WHOLE else box(tensors[name], index))
    error = _unused(rules, tensors)
    if error is not None:
        raise error
    return choices


def _new_name(tensors: dict[str, Tensor], rename) -> Callable[[str], Any]:
    """What rename= means, as a function."""
    if callable(rename):
        return rename
    if isinstance(rename, Mapping):
        for name in rename:
            if name not in tensors:
                raise no_tensor(tensors, name)
        return lambda name: rename.get(name, name)
    if not (isinstance(rename, (tuple, list)) and len(rename) == 2
            and all(isinstance(part, str) for part in rename)):
        raise refuse("use", "rename", f"{rename!r} is neither a mapping of names nor a function",
                     "To change what names begin with, give two texts: ('model.', '')")
    old, new = rename
    if not any(name.startswith(old) for name in tensors):
        raise refuse("rename", old, "the name of no tensor begins with it",
                     f"There are for instance {', '.join(list(tensors)[:3])}")
    return lambda name: new + name[len(old):] if name.startswith(old) else name


def renamed(tensors: dict[str, Tensor], rename) -> dict[str, Tensor]:
    """The tensors by their new names; all that comes later knows these alone."""
    if rename is None:
        return tensors
    new_name = _new_name(tensors, rename)
    found: dict[str, Tensor] = {}
    old: dict[str, str] = {}
    for name, tensor in tensors.items():
        new = new_name(name)
        if not isinstance(new, str):
            raise refuse("rename", name, f"{new!r} is no name")
        if new in found:
            raise refuse("rename", name, f"it would be {new}, and so would {old[new]}",
                         "Names must differ; give one of them another")
        found[new], old[new] = tensor.named(new), name
    return found
