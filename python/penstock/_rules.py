# SPDX-License-Identifier: MIT
"""What holds for which tensor: a mapping of names and globs to values, or a function.

slices=, dtype= and device= are given in this way. A name counts before all globs, and of the globs
that match the first. Where a part of a model may be meant, as in the device maps of accelerate, a
name also speaks for all tensors below it: "model.layers.1" for "model.layers.1.mlp.weight" and not
for "model.layers.10.mlp.weight"; the longest such name counts, and "" after everything else.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import _penstock
from ._error import refuse
from ._globs import Globs, is_glob


class TensorInfo(NamedTuple):
    """What a function for slices= or dtype= is told of a tensor beside its name: its dtype by
    safetensors' name ("BF16"), its shape, and its size in the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Tensor:
    """A tensor of a model as its file has it."""

    __slots__ = ("index", "name", "dtype", "shape", "nbytes", "file", "offset")

    def __init__(self, index: int, fields: tuple):
        """From what the engine tells."""
        self.index = index
        self.name, self.dtype, self.shape, self.nbytes, self.file, self.offset = fields

    def named(self, name: str) -> Tensor:
        """The same by another name."""
        return Tensor(self.index, (name, self.dtype, self.shape, self.nbytes, self.file,
                                   self.offset))

    def info(self) -> TensorInfo:
        """For functions of the caller's."""
        return TensorInfo(_penstock.DTYPES[self.dtype][0], tuple(self.shape), self.nbytes)


def is_function(thing: Any) -> bool:
    """Can it be asked? Types are dtypes to numpy."""
    return callable(thing) and not isinstance(thing, type)


class Rules:
    """What a caller has said of the tensors of a model."""

    def __init__(self, argument: str, given: Any, value: str, parts: bool = False):
        """`value` is what a value is called; `parts`: names may be those of parts of the model."""
        self.function: Callable | None = given if is_function(given) else None
        self.parts = parts
        try:
            said = {} if self.function else dict(given)
        except (TypeError, ValueError):
            said = None
        if said is None or not all(isinstance(name, str) for name in said):
            raise refuse("use", argument, f"{given!r} is no mapping of names to {value}, nor a "
                         "function that gives one")
        self.names = {name: value for name, value in said.items() if not is_glob(name)}
        globs = [name for name in said if is_glob(name)]
        #: A name that has such characters itself counts as a name too.
        self.odd = {name: said[name] for name in globs}
        self.values = [said[name] for name in globs]
        self.globs = Globs(globs)
        self.used: set[str] = set()

    def of(self, tensor: Tensor, default: Any = None) -> Any:
        """What is said of a tensor."""
        if self.function is not None:
            found = self.function(tensor.name, tensor.info())
            return default if found is None else found
        name = tensor.name
        for each in self._names_of(name):
            if each in self.names:
                self.used.add(each)
                return self.names[each]
        if name in self.odd:
            self.used.add(name)
            return self.odd[name]
        number = self.globs.first(name) if self.values else None
        if number is not None:
            return self.values[number]
        return self.names.get("", default) if self.parts else default

    def _names_of(self, name: str) -> Iterator[str]:
        """Its own, and those of the parts that it is in, but for the whole."""
        yield name
        while self.parts and "." in name:
            name = name.rpartition(".")[0]
            yield name

    def unused(self) -> list[str]:
        """Names and globs that have spoken for nothing."""
        if self.function is not None:
            return []
        return [name for name in (*self.names, *self.globs.unused()) if name not in self.used]
