# SPDX-License-Identifier: MIT
"""safe_open for transformers: tensors are read to where they shall be.

transformers opens every file for the host, whatever device_map says, and asks each tensor for
get_slice(name)[...] and then .to(device, dtype), on some threads at once. A mapped tensor would
have the driver copy from pages that it does not know, which is slow. So what [...] gives here is
not read yet: asked .to() a GPU, it comes straight from the file to memory of its own there; asked
anything else, it is the tensor on the host.
"""
from __future__ import annotations

from typing import Any

from ._device import device_name, open_device
from ._error import Error
from ._fork import Lock
from ._safe_open import safe_open as _safe_open


class _Later:
    """A tensor of a file, whose place is not known yet."""

    __slots__ = ("_file", "_name", "_slice")

    def __init__(self, file: safe_open, name: str, slice: Any) -> None:
        self._file, self._name, self._slice = file, name, slice

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As torch.Tensor.to."""
        import torch

        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or not self._file.can_read_to(device):
            return self._tensor().to(*args, **kwargs)
        tensor = self._file.on(device).get_slice(self._name)[...]
        return tensor if dtype is None else tensor.to(dtype)

    def _tensor(self) -> Any:
        return self._slice[...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        """Any function of torch takes it for the tensor on the host."""
        from torch.utils._pytree import tree_map

        args, kwargs = tree_map(lambda each: each._tensor() if isinstance(each, cls) else each,
                                (args, kwargs or {}))
        return function(*args, **kwargs)


class _Slice:
    """What get_slice() gives: read at once in parts, later as a whole."""

    __slots__ = ("_file", "_name", "_slice")

    def __init__(self, file: safe_open, name: str, slice: Any) -> None:
        self._file, self._name, self._slice = file, name, slice

    def __getitem__(self, index: Any) -> Any:
        if index is Ellipsis:
            return _Later(self._file, self._name, self._slice)
        return self._slice[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slice, name)


class safe_open(_safe_open):  # noqa: N801 - the name that people know
    """A file opened for the host, whose tensors can go elsewhere on their way."""

    def __init__(self, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> None:
        """As the other's."""
        super().__init__(filename, framework, device, **options)
        self._again = lambda place: _safe_open(filename, framework, place, **options)
        self._delays = self._target.name == "pt" and self._target.device == "host"
        self._elsewhere: dict[str, _safe_open] = {}
        self._lock = Lock()

    def can_read_to(self, device: Any) -> bool:
        """Is it a GPU, and one that the engine knows?"""
        try:
            return device.type == "cuda" and bool(open_device(device_name(device)))
        except Error:
            return False

    def on(self, device: Any) -> _safe_open:
        """The same file, opened for another device."""
        with self._lock:
            found = self._elsewhere.get(str(device))
            if found is None:
                found = self._elsewhere[str(device)] = self._again(device)
        return found

    def get_slice(self, name: str) -> Any:
        """A tensor to read parts of, or to send somewhere."""
        found = super().get_slice(name)
        return _Slice(self, name, found) if self._delays else found

    def __exit__(self, *exception: object) -> None:
        """Close. Tensors stay."""
        super().__exit__(*exception)
        self._elsewhere.clear()
