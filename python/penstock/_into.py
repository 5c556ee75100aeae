# SPDX-License-Identifier: MIT
"""Tensors that exist already and are to be filled: those of a mapping, or of a torch module.

A module is filled as load_state_dict() fills it: parameters and persistent buffers by name,
straight into their memory. Names that share memory - tied weights - are filled once; the last of
them in the module's order counts, as it does there. What is on the device meta has no memory: the
loaded tensor takes its place, for all of its names. Hooks of load_state_dict() are not called.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._choose import no_tensor, wanted
from ._error import refuse
from ._frameworks import is_of
from ._rules import Tensor

#: So many names are told in an error.
_TOLD = 5


class _Place:
    """A parameter or a buffer of a module."""

    def __init__(self, owner: Any, own: str, tensor: Any, is_parameter: bool):
        """`own` is its name in the submodule that has it."""
        self.owner, self.own, self.tensor = owner, own, tensor
        self.is_parameter = is_parameter

    def memory(self) -> tuple:
        """The same for names that are tied."""
        tensor = self.tensor
        address = 0 if tensor.is_meta or not tensor.numel() else tensor.data_ptr()
        return (tensor.device, address, tensor.dtype, tensor.shape) if address else (id(tensor),)


def _places(module: Any) -> dict[str, _Place]:
    """What a module would have in its state_dict(), by name and in its order."""
    found = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        buffers = {own: tensor for own, tensor in owner._buffers.items()
                   if own not in owner._non_persistent_buffers_set}
        for kind in owner._parameters, buffers:
            for own, tensor in kind.items():
                if tensor is not None:
                    name = f"{prefix}.{own}" if prefix else own
                    found[name] = _Place(owner, own, tensor, kind is owner._parameters)
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return ", ".join(names[:_TOLD]) + more


class Into:
    """What to load, and into what."""

    def __init__(self, names: list[str], tensors: dict[str, Any] | None = None,
                 module: Any = None):
        """`names` are those of the files; `tensors` of these are filled."""
        self.names, self.tensors, self.module = names, tensors or {}, module
        #: What the loaded tensors of these names take the place of, in a module.
        self.replaced: dict[str, list[_Place]] = {}
        #: Further names of what is loaded by one.
        self.also: dict[str, list[str]] = {}

    def land(self, name: str, tensor: Any) -> list[tuple[str, Any]]:
        """A tensor is complete: it goes to its place in a module. All its names, and what it is."""
        places = self.replaced.get(name, [])
        if any(place.is_parameter for place in places):
            from torch.nn import Parameter

            tensor = Parameter(tensor, places[0].tensor.requires_grad)
        for place in places:
            setattr(place.owner, place.own, tensor)
        return [(each, tensor) for each in (name, *self.also.get(name, ()))]


def _into_module(module: Any, tensors: dict[str, Tensor], keys, strict: bool) -> Into:
    names, places = wanted(tensors, keys), _places(module)
    asked = set(names)
    tied: dict[tuple, list[str]] = {}
    for name, place in places.items():
        tied.setdefault(place.memory(), []).append(name)
    into = Into([], {}, module)
    missing = []
    for group in tied.values():
        there = [name for name in group if name in asked]
        if not there:
            missing += group
            continue
        name = there[-1]
        into.names.append(name)
        into.also[name] = [each for each in group if each != name]
        if places[name].tensor.is_meta:
            into.replaced[name] = [places[each] for each in group]
        else:
            into.tensors[name] = places[name].tensor
    extra = [name for name in names if name not in places]
    wrong = []
    if missing and keys is None:
        wrong.append(f"the files do not have {_some(missing)}")
    if extra:
        wrong.append(f"the module has no place for {_some(extra)}")
    if wrong and strict:
        raise refuse("load into", type(module).__name__, "; ".join(wrong),
                     "strict=False fills what both have, rename= changes the names of the files")
    chosen = set(into.names)
    into.names = [name for name in names if name in chosen]
    return into


def _into_mapping(into: Mapping[str, Any], tensors: dict[str, Tensor], keys) -> Into:
    if keys is None:
        keys = list(into)
        for name in keys:
            if name not in tensors:
                raise no_tensor(tensors, name)
    names = wanted(tensors, keys)
    for name in names:
        if name not in into:
            raise refuse("load into", name, "into= has no tensor for it")
    # Looked up once: the caller's mapping may change, or make them anew.
    return Into(names, {name: into[name] for name in names})


def resolve(into: Any, tensors: dict[str, Tensor], keys, strict: bool) -> Into:
    """What into= and keys= ask for together."""
    if into is None:
        return Into(wanted(tensors, keys))
    if is_of("torch.nn", "Module", into):
        return _into_module(into, tensors, keys, strict)
    if not isinstance(into, Mapping):
        raise refuse("use", "into", f"a {type(into).__name__} is neither a mapping of names to "
                     "tensors nor a torch module")
    return _into_mapping(into, tensors, keys)
