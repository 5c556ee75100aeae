# SPDX-License-Identifier: MIT
"""The state of a training: what of it is saved, and how what was saved gets back into it.

A state is made of dicts, lists and tuples. In these are tensors; objects that have state_dict() and
load_state_dict(), such as modules, optimizers and schedulers; generators of random numbers; and
plain values. What is saved is the same with each object's state_dict() in its place, and of a
generator the tensor of its get_state().

On the way back each tensor that exists, also within the state_dict() of an object, takes its bytes
where it lies, if the file has them as it has them. All others come into memory of their own. Then
objects are given their states: what exists in place is its own there, so nothing is held twice.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._error import Error, refuse

#: So many names are told in an error.
_TOLD = 8

_Steps = tuple[Any, ...]


#: Types of most things in a state; none of them has a state_dict(), and to ask takes its time.
_PLAIN = {int, float, bool, str, bytes, type(None)}


def _is_object(thing: Any) -> bool:
    return not isinstance(thing, type) and callable(getattr(thing, "state_dict", None))


def _tuple_like(old: tuple, items: list) -> tuple:
    return type(old)._make(items) if hasattr(old, "_make") else tuple(items)


def plain(torch: Any, state: Any, within: tuple[int, ...] = ()) -> Any:
    """The state with the state_dict() of each object in its place. What holds no objects is itself,
    whatever it is."""
    if type(state) in _PLAIN or isinstance(state, torch.Tensor):
        return state
    if _is_object(state):
        return state.state_dict()
    # Pickled as itself a generator would need trust, and could not be filled.
    if isinstance(state, torch.Generator):
        return state.get_state()
    if not isinstance(state, (dict, list, tuple)) or id(state) in within:
        return state
    within = (*within, id(state))
    if isinstance(state, dict):
        items = {key: plain(torch, value, within) for key, value in state.items()}
        return state if all(items[key] is state[key] for key in items) else items
    listed = [plain(torch, value, within) for value in state]
    if all(new is old for new, old in zip(listed, state)):
        return state
    return _tuple_like(state, listed) if isinstance(state, tuple) else listed


def _items(thing: Any) -> Iterator[tuple[Any, Any]]:
    """What is in a container, by key or number; nothing is in anything else."""
    if isinstance(thing, dict):
        yield from thing.items()
    elif isinstance(thing, (list, tuple)):
        yield from enumerate(thing)


def _pairs(one: Any, other: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What two containers of a kind have both."""
    if isinstance(one, dict) and isinstance(other, dict):
        yield from ((key, one[key], other[key]) for key in one if key in other)
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        yield from ((number, *pair) for number, pair in enumerate(zip(one, other)))


def _name(steps: _Steps) -> str:
    return ".".join(map(str, steps)) or "the state"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return ", ".join(names[:_TOLD]) + more


class Filling:
    """A state that exists, and what a file has for it.

    choose() is told what the file holds before any byte is read, refuses what does not fit, and
    says which tensors take which records; apply() puts the rest in place when the bytes are there.
    """

    def __init__(self, torch: Any, state: Any, strict: bool, before: Filling | None = None):
        """Nothing is changed yet. With `strict`, both must have the same names. `before` is one of
        the same state that has failed: what it has begun to fill, this one must fill."""
        self._torch, self._state, self._strict = torch, state, strict
        self._begun: set[_Steps] = set() if before is None else {*before._begun, *before._filled}
        #: The states that objects have now, by their places: with tensors that are their own.
        self._own: dict[_Steps, Any] = {}
        #: Tensors that take the bytes themselves.
        self._filled: dict[_Steps, Any] = {}
        self._candidates: dict[str, list[tuple[_Steps, Any, int]]] = {}
        self._records: dict[int, tuple[str, int]] = {}
        self._missing: list[_Steps] = []
        self._unexpected: list[str] = []
        self._on_meta: list[str] = []
        self._wrong: list[str] = []

    # ------------------------------------------------------------------ before bytes are read --

    def choose(self, saved: Any, records: dict[int, tuple[str, int]]) -> dict[str, Any]:
        """`saved` has its tensors on meta; `records` are (name, users) by the address of a storage.
        Which record goes into which tensor?"""
        self._records = records
        self._compare(self._state, saved, ())
        problem = self._problem()
        if problem is not None:
            raise problem
        uses = dict(records.values())
        chosen: dict[str, Any] = {}
        taken: set[tuple] = set()
        for record, users in self._candidates.items():
            tensor = users[0][1]
            place = tensor.device, tensor.data_ptr()
            # One that is not among them would miss the bytes, and two records want two places.
            if any((user.device, user.data_ptr()) != place for _, user, _ in users) \
                    or len({seen for *_, seen in users}) != uses[record] or place in taken:
                continue
            if tensor.numel():
                taken.add(place)
            chosen[record] = tensor
            self._filled.update((steps, user) for steps, user, _ in users)
        return chosen

    def _problem(self) -> Error | None:
        words = list(self._wrong)
        if self._on_meta:
            words.append(f"no memory to fill on meta: {_some(self._on_meta)} "
                         "(to_empty() of a module makes some)")
        if self._strict and self._missing:
            words.append(f"the checkpoint does not have {_some(list(map(_name, self._missing)))}")
        if self._strict and self._unexpected:
            words.append(f"the state has no place for {_some(self._unexpected)}")
        if not words:
            return self._half_filled()
        hint = "" if self._wrong or self._on_meta else "strict=False fills what both have"
        return refuse("restore into", "the state", "; ".join(words), hint)

    def _half_filled(self) -> Error | None:
        """Bytes of a damaged file would stay beside those of this one."""
        left = [_name(steps) for steps in sorted(self._begun, key=_name)
                if any(steps[:len(missing)] == missing for missing in self._missing)]
        if not left:
            return None
        return refuse("restore into", "the state", "the checkpoint does not have "
                      f"{_some(left)}, and the damaged one after it has begun to fill that",
                      "Make the state anew, and restore the earlier step by its number")

    def _compare(self, target: Any, saved: Any, steps: _Steps) -> None:
        """Collect what fits and what does not."""
        torch = self._torch
        if isinstance(target, torch.Tensor):
            self._check_memory(target, steps)
            self._compare_tensors(target, saved, steps)
        elif isinstance(target, torch.Generator):
            if not isinstance(saved, torch.Tensor):
                self._wrong.append(f"{_name(steps)} was saved as a {type(saved).__name__}, and is "
                                   "a generator")
        elif _is_object(target):
            self._own[steps] = own = target.state_dict()
            if isinstance(target, torch.nn.Module):
                for key, mine, _ in _pairs(own, saved):
                    self._check_memory(mine, (*steps, key))
            if self._is_checked(target):
                self._compare_keys(own, saved, steps)
                for key, mine, theirs in _pairs(own, saved):
                    if isinstance(mine, torch.Tensor) and not torch.nn.parameter.is_lazy(mine):
                        self._compare_tensors(mine, theirs, (*steps, key))
            else:
                self._offer_all(own, saved, steps)
        elif self._is_filled(target, steps):
            if type(target) is not type(saved) and not (
                    isinstance(target, dict) and isinstance(saved, dict)):
                self._wrong.append(f"{_name(steps)} was saved as a {type(saved).__name__}, and is "
                                   f"a {type(target).__name__}")
                return
            self._compare_keys(dict(_items(target)), dict(_items(saved)), steps)
            for key, mine, theirs in _pairs(target, saved):
                self._compare(mine, theirs, (*steps, key))

    def _check_memory(self, target: Any, steps: _Steps) -> None:
        """torch copies into a tensor on meta without a word, and nothing is there."""
        if isinstance(target, self._torch.Tensor) and target.is_meta:
            self._on_meta.append(_name(steps))

    def _is_checked(self, thing: Any) -> bool:
        """Are its names known? Hooks of modules may give others to what is loaded."""
        return isinstance(thing, self._torch.nn.Module) and not any(
            module._load_state_dict_pre_hooks for module in thing.modules())

    def _is_filled(self, target: Any, steps: _Steps) -> bool:
        """Is it a container whose places are filled one by one? One below the first that holds
        neither tensors nor objects is a value like a number: it becomes what was saved."""
        return isinstance(target, (dict, list, tuple)) and (not steps or self._holds(target, ()))

    def _holds(self, thing: Any, within: tuple[int, ...]) -> bool:
        if isinstance(thing, (self._torch.Tensor, self._torch.Generator)) or _is_object(thing):
            return True
        return id(thing) not in within and any(
            self._holds(value, (*within, id(thing))) for _, value in _items(thing))

    def _compare_keys(self, own: Any, saved: Any, steps: _Steps) -> None:
        if not isinstance(saved, dict):
            self._wrong.append(f"{_name(steps)} was saved as a {type(saved).__name__}")
            return
        self._missing += [(*steps, key) for key in own if key not in saved]
        self._unexpected += [_name((*steps, key)) for key in saved if key not in own]

    def _compare_tensors(self, target: Any, saved: Any, steps: _Steps) -> None:
        if not isinstance(saved, self._torch.Tensor):
            self._wrong.append(f"{_name(steps)} was saved as a {type(saved).__name__}, and is a "
                               "tensor")
        elif saved.shape != target.shape:
            self._wrong.append(f"{_name(steps)} was saved with the shape {tuple(saved.shape)}, and "
                               f"has {tuple(target.shape)}")
        else:
            self._offer(target, saved, steps)

    def _offer_all(self, own: Any, saved: Any, steps: _Steps) -> None:
        """Within the state of an object, which judges by itself what does not fit."""
        if isinstance(own, self._torch.Tensor) and isinstance(saved, self._torch.Tensor):
            self._offer(own, saved, steps)
        for key, mine, theirs in _pairs(own, saved):
            self._offer_all(mine, theirs, (*steps, key))

    def _offer(self, target: Any, saved: Any, steps: _Steps) -> None:
        """Can the bytes of a record be those of a tensor, as they are?"""
        torch = self._torch
        if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter)
               or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg()
               for tensor in (target, saved)):
            return
        record = self._records.get(saved.untyped_storage()._cdata)
        if record is not None and target.device.type in ("cpu", "cuda") \
                and (target.dtype, target.shape, target.stride()) \
                == (saved.dtype, saved.shape, saved.stride()) and saved.storage_offset() == 0 \
                and saved.untyped_storage().nbytes() == saved.nbytes \
                and torch.ops.aten.is_non_overlapping_and_dense(target):
            self._candidates.setdefault(record[0], []).append((steps, target, id(saved)))

    # ------------------------------------------------------------------ when bytes are there --

    def apply(self, loaded: Any) -> Any:
        """Put what was loaded in place; the state."""
        loaded = self._with_filled(loaded, (), set())
        with self._torch.no_grad():
            return self._put(self._state, loaded, ())

    def _with_filled(self, loaded: Any, steps: _Steps, seen: set[int]) -> Any:
        """What was loaded, with tensors that were filled in their places."""
        if steps in self._filled:
            return self._filled[steps]
        if not isinstance(loaded, (dict, list, tuple)) or id(loaded) in seen:
            return loaded
        seen = {*seen, id(loaded)}
        if isinstance(loaded, tuple):
            items = [self._with_filled(value, (*steps, at), seen)
                     for at, value in enumerate(loaded)]
            return loaded if all(new is old for new, old in zip(items, loaded)) \
                else _tuple_like(loaded, items)
        for key, value in list(_items(loaded)):
            loaded[key] = self._with_filled(value, (*steps, key), seen)
        return loaded

    def _put(self, target: Any, loaded: Any, steps: _Steps) -> Any:
        """What stands in a place from now on."""
        if isinstance(target, self._torch.Tensor):
            return target if loaded is target else target.copy_(loaded)
        if isinstance(target, self._torch.Generator):
            target.set_state(loaded.cpu())
            return target
        if steps in self._own:
            if isinstance(target, self._torch.nn.Module):
                target.load_state_dict(loaded, strict=self._strict)
            else:
                target.load_state_dict(loaded)
            return target
        if self._is_filled(target, steps):
            return self._put_each(target, loaded, steps)
        # Whoever else has the list or the dict sees what was saved, too.
        if type(target) is type(loaded) is list:
            target[:] = loaded
        elif type(target) is type(loaded) is dict:
            target.clear()
            target.update(loaded)
        else:
            return loaded
        return target

    def _put_each(self, target: Any, loaded: Any, steps: _Steps) -> Any:
        found = {key: self._put(mine, theirs, (*steps, key))
                 for key, mine, theirs in _pairs(target, loaded)}
        if isinstance(target, tuple):
            return _tuple_like(target, [found.get(at, old) for at, old in enumerate(target)])
        for key, value in found.items():
            target[key] = value
        return target
