# SPDX-License-Identifier: MIT
"""Modules of torch to and from one safetensors file, tied weights stored once.

A file of safetensors holds each tensor by itself. Of tensors of a module that share memory one is
written, the one that covers all of it, and the metadata say which name stands for which. A module
that is loaded into knows by itself which of its tensors are tied.
"""
from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from ._error import refuse
from ._frameworks import is_of

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


def storage_ptr(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor looks into; 0 where it has none, or several."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def storage_size(tensor: torch.Tensor) -> int:
    """The bytes of the memory that a tensor looks into."""
    return tensor.untyped_storage().nbytes()


def end_ptr(tensor: torch.Tensor) -> int:
    """The address after a tensor's last byte."""
    if not tensor.numel():
        return tensor.data_ptr()
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def is_complete(tensor: torch.Tensor) -> bool:
    """Is it all that there is in its memory?"""
    return (tensor.data_ptr() == storage_ptr(tensor)
            and tensor.numel() * tensor.element_size() == storage_size(tensor))


def _overlapping(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """Tensors of one memory, those together that have bytes in common."""
    groups: list[set[str]] = []
    reached = 0
    for start, stop, name in sorted((tensors[name].data_ptr(), end_ptr(tensors[name]), name)
                                    for name in names):
        if not groups or start >= reached:
            groups.append(set())
        groups[-1].add(name)
        reached = max(reached, stop)
    return groups


def find_shared_tensors(state_dict: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """The names of tensors that have bytes, those together that share some."""
    by_memory: dict[tuple[Any, int, int], list[str]] = defaultdict(list)
    for name, tensor in state_dict.items():
        if tensor.device.type != "meta" and storage_ptr(tensor) and storage_size(tensor):
            by_memory[tensor.device, storage_ptr(tensor), storage_size(tensor)].append(name)
    return [group for names in by_memory.values() for group in _overlapping(names, state_dict)]


def remove_duplicate_names(state_dict: Mapping[str, torch.Tensor], *,
                           preferred_names: Iterable[str] | None = None,
                           discard_names: Iterable[str] | None = None) -> dict[str, list[str]]:
    """For each tensor to keep that others share the memory of, their names. The one to keep covers
    its memory; of several it is a preferred one, one that is not to be discarded, the first."""
    preferred, discarded = set(preferred_names or ()), set(discard_names or ())
    found: dict[str, list[str]] = {}
    for shared in find_shared_tensors(state_dict):
        complete = sorted(name for name in shared if is_complete(state_dict[name]))
        if not complete:
            raise RuntimeError(
                f"of the tensors {sorted(shared)} none covers the whole memory that they look "
                "into, so none can be saved for all, and loaded into the others. Use .clone() on "
                "one that is a part of a larger tensor, or save_file() with those that you want")
        kept = min(complete, key=lambda name: (name not in preferred, name in discarded, name))
        if len(shared) > 1:
            found[kept] = sorted(shared - {kept})
    return found


def tensors_of(model: torch.nn.Module, discard_names: Iterable[str] | None = None
               ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a module, of those that share memory one; and of the others, which name stands
    for which."""
    tensors = dict(model.state_dict())
    dropped = {}
    for kept, others in remove_duplicate_names(tensors, discard_names=discard_names).items():
        for name in others:
            dropped[name] = kept
            del tensors[name]
    return tensors, dropped


def save_module(model: torch.nn.Module, filename: str | os.PathLike,
                metadata: dict[str, str] | None = None, force_contiguous: bool = True, *,
                coded: bool = False) -> None:
    """Save a module's state as one safetensors file: ``safetensors.torch.save_model``.

    Of tensors that share memory one is saved; ``metadata`` of the file get an entry for each of
    the others, with the name of that one. ``force_contiguous=False`` refuses tensors that are not
    contiguous instead of saving a contiguous copy of them. ``coded`` is that of ``save_file``.
    """
    from ._save import save_file

    tensors, dropped = tensors_of(model)
    if dropped:
        metadata = {**dropped, **(metadata or {})}
    for name, tensor in tensors.items():
        if not force_contiguous and str(tensor.layout) == "torch.strided" \
                and not tensor.is_contiguous():
            raise refuse("save", name, "it is not contiguous", "Call .contiguous() on it, or use "
                         "save_model(..., force_contiguous=True), which saves such a copy")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, filename,
              metadata=metadata, coded=coded)


@overload
def save_model(model: torch.nn.Module, filename: str | os.PathLike,
               metadata: dict[str, str] | None = None, force_contiguous: bool = True, *,
               coded: bool = False) -> None: ...


@overload
def save_model(model: Mapping[str, Any], filename: str | os.PathLike,
               metadata: Mapping[str, str] | None = None, *, align: int = 0,
               transfer: str | int = "auto", memory_limit: int | None = None,
               progress: bool = False, coded: bool = False) -> None: ...


@overload
def save_model(model: Mapping[str, Any] | torch.nn.Module, folder: str | os.PathLike,
               max_shard_size: int | str = "5GB", metadata: Mapping[str, str] | None = None, *,
               align: int = 4096, transfer: str | int = "auto", memory_limit: int | None = None,
               progress: bool = False, coded: bool = False) -> None: ...


def save_model(model: Any, *args: Any, **kwargs: Any) -> None:
    """Save a model: into a folder, in files of at most ``max_shard_size`` and an index; or into one
    file, where the name ends in .safetensors or is given as ``filename=``. That is ``save_file`` of
    a dict, and ``safetensors.torch.save_model`` of a torch module, also where a file of any name is
    there.

    ``model`` is a dict of tensors as for ``save_file``, or a torch module; of tensors that share
    memory one is saved, and the metadata say for which names it stands. Files of a folder are cut
    and named as the Hugging Face libraries do it, and their headers are padded (``align``). The
    folder is made if it is not there. All files are durable before one of them gets its name, the
    index comes last, and then what is left of an older model goes. With ``coded=True`` the files
    are coded without loss, in two thirds of their bytes, as ``save_file`` does it.
    """
    from ._save import save_file, save_folder

    path = args[0] if args else None
    named = isinstance(path, (str, bytes, os.PathLike))
    is_module = is_of("torch.nn", "Module", model)
    of_file = named and (os.fsdecode(path).endswith(".safetensors")
                         or is_module and os.path.isfile(path))
    if not of_file and "filename" not in kwargs:
        save_folder(model, *args, **kwargs)
        return
    if "max_shard_size" in kwargs:
        raise refuse("save", str(path if named else kwargs.get("filename")),
                     "one file is not cut, whatever max_shard_size= says", "Name a folder")
    (save_module if is_module else save_file)(model, *args, **kwargs)


def load_module(model: torch.nn.Module, filename: str | os.PathLike, strict: bool = True,
                device: Any = "cpu", *, backend: str = "mmap") -> tuple[set[str], list[str]]:
    """Load a safetensors file into a module: ``safetensors.torch.load_model``.

    Gives the names of the module that the file does not have, and those of the file that the
    module does not have; with ``strict`` there must be none.
    """
    from ._load import load_file

    tensors = load_file(filename, device=device, backend=backend)
    tied = remove_duplicate_names(model.state_dict(), preferred_names=tensors)
    left, unexpected = model.load_state_dict(tensors, strict=False)
    missing = set(left)
    for others in tied.values():
        for name in others:
            if name in missing:
                missing.remove(name)
            else:
                unexpected.append(name)
    if strict and (missing or unexpected):
        text = f"Error(s) in loading state_dict for {type(model).__name__}:"
        for what, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                listed = ", ".join(f'"{name}"' for name in sorted(names))
                text += f"\n    {what} key(s) in state_dict: {listed}"
        raise RuntimeError(text)
    return missing, unexpected


class _Either(Protocol[P, R]):
    """A function of ours that also takes a module, and then is load_module()."""

    @overload
    def __call__(self, model: torch.nn.Module, filename: str | os.PathLike, strict: bool = True,
                 device: Any = "cpu", *, backend: str = "mmap") -> tuple[set[str], list[str]]: ...

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def or_module(function: Callable[P, R]) -> _Either[P, R]:
    """For load_model(): where the first argument is a module, safetensors' load_model is meant."""
    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("model")
        known = is_of("torch.nn", "Module", first)
        return (load_module if known else function)(*args, **kwargs)

    return either
