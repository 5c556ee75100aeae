# SPDX-License-Identifier: MIT
"""What goes wrong, with all that the engine knows about it."""
from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


def shown(text: str) -> str:
    """Foreign text for people: nothing in it that a terminal obeys or does not show."""
    from . import _penstock

    try:
        plain = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        plain = text.encode("utf-8", "backslashreplace")
    return "\\x00".join(_penstock.escape(part) for part in plain.split(b"\0"))


class Error(OSError):
    """A transfer, a file or a device failed.

    As for every OSError there are ``errno``, ``strerror`` and ``filename``. Beyond that the error
    says what was attempted (``operation``) on what (``object``), at which byte (``offset``, None
    where that means nothing), why (``message``) and what to do about it (``hint``, may be empty).
    ``domain`` is "errno", "cuda", "cufile" or "format", and ``raw`` the code in that domain.

    Where Python has a class of its own for the cause (FileNotFoundError, PermissionError,
    ValueError for an argument that makes no sense, KeyError for a tensor that is not there), the
    error is one of that class too. Where safetensors would raise its SafetensorError, the error is
    one of these: that of penstock.safetensors, and that of safetensors if it is imported. Where
    torch.save or torch.load would raise a RuntimeError, it is one.
    """

    code: int
    domain: str
    raw: int
    operation: str
    object: str
    offset: int | None
    message: str
    hint: str
    #: Classes that it was made one of beyond those of its errno.
    also: tuple[type, ...] = ()
    #: safetensors' own sentence, which is shown then, where programs compare it.
    words: str = ""

    def __str__(self) -> str:
        """The whole story in one line; what a terminal would obey in a name is escaped."""
        if not hasattr(self, "operation"):
            return super().__str__()
        if self.words:
            return shown(self.words)
        text = f"cannot {self.operation} {self.object}".rstrip()
        if self.offset is not None:
            text += f" at byte {self.offset}"
        text += f": {self.message}"
        return shown(f"{text}. {self.hint}" if self.hint else text)

    def __repr__(self) -> str:
        """The same, as Python shows it."""
        return f"penstock.Error({str(self)!r})"

    def __reduce__(self):
        """Errors travel between processes with everything they know."""
        if not hasattr(self, "operation"):
            return super().__reduce__()
        return from_engine, (self.code, self.domain, self.raw, self.operation, self.object,
                             -1 if self.offset is None else self.offset, self.message, self.hint,
                             self.also, self.words)


class SafetensorError(Exception):
    """A file that is no safetensors file, or a use of one that makes no sense."""


class _NotFound(Error, FileNotFoundError):
    pass


class _Permission(Error, PermissionError):
    pass


class _Exists(Error, FileExistsError):
    pass


class _IsADirectory(Error, IsADirectoryError):
    pass


class _NotADirectory(Error, NotADirectoryError):
    pass


class _Invalid(Error, ValueError):
    pass


class _NoTensor(Error, KeyError):
    pass


_classes = {errno.ENOENT: _NotFound, errno.EACCES: _Permission, errno.EPERM: _Permission,
            errno.EEXIST: _Exists, errno.EISDIR: _IsADirectory, errno.ENOTDIR: _NotADirectory,
            errno.EINVAL: _Invalid, errno.ENOKEY: _NoTensor}
for _class in _classes.values():
    _class.__name__ = _class.__qualname__ = "Error"
    _class.__module__ = "penstock"


@cache
def _combined(first: type[Error], *further: type) -> type[Error]:
    """A class that is all of these; like those above it calls itself penstock.Error."""
    bases = [first, *(kind for kind in further if not issubclass(first, kind))]
    return type("Error", tuple(bases), {"__module__": "penstock", "__qualname__": "Error"})


def _with_safetensors(kinds: tuple[type, ...]) -> tuple[type, ...]:
    """Who imported safetensors catches the class that it has there."""
    theirs = getattr(sys.modules.get("safetensors"), "SafetensorError", None)
    if SafetensorError in kinds and isinstance(theirs, type) and theirs not in kinds:
        return *kinds, theirs
    return kinds


def _class_of(code: int, domain: str, also: tuple[type, ...]) -> type[Error]:
    kind = _classes.get(-code, Error) if domain == "errno" else Error
    return _combined(kind, *_with_safetensors(also)) if also else kind


def from_engine(code: int, domain: str, raw: int, operation: str, object: str, offset: int,
                message: str, hint: str, also: tuple[type, ...] | None = None, words: str = ""
                ) -> Error:
    """The exception for an error of the engine; called by the extension module. Unless `also` says
    otherwise, a file that is damaged or has no such tensor is one of safetensors."""
    if also is None:
        also = (SafetensorError,) if domain == "format" or code == -errno.ENOKEY else ()
    error = _class_of(code, domain, also)(-code, message or os.strerror(-code), object)
    error.code, error.domain, error.raw = code, domain, raw
    error.operation, error.object = operation, object
    error.offset = offset if offset >= 0 else None
    error.message, error.hint = message, hint
    error.also, error.words = also, words
    return error


def refuse(operation: str, object: str, message: str, hint: str = "", code: int = errno.EINVAL,
           also: tuple[type, ...] | None = None, words: str = "") -> Error:
    """An error that the package itself finds; `also` are further classes that it is one of."""
    return from_engine(-code, "errno", code, operation, object, -1, message, hint, also, words)


def misuse(operation: str, object: str, message: str, hint: str = "", words: str = "") -> Error:
    """An argument that safetensors refuses with its own error."""
    return refuse(operation, object, message, hint, also=(SafetensorError,), words=words)


@contextmanager
def raising(theirs: type[Exception], damaged: bool = False) -> Iterator[None]:
    """Around, or before, what stands in for a function of another package: whatever goes wrong is
    one of `theirs` too, the class that the package raises there. With `damaged` only what is wrong
    with the content of a file is."""
    try:
        yield
    except Error as error:
        if hasattr(error, "operation") and (error.domain == "format" or not damaged):
            # A damaged file was taken for one of safetensors.
            also = [kind for kind in error.also
                    if kind is not SafetensorError or error.domain != "format"]
            error.also = tuple(dict.fromkeys((*also, theirs)))
            error.__class__ = _class_of(error.code, error.domain, error.also)
        raise


Error.__module__ = "penstock"
SafetensorError.__module__ = "penstock.safetensors"
