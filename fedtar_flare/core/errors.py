"""Errors of this package: ``str(error)`` is for the reader on the spot, ``error.public`` is what may leave the site."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DISK_FULL = "the site's disk is full"
"""Public text where a site cannot write what it must keep."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The system's errors of a full disk, a used-up quota, and a file larger than the account may write."""


def plain(value: Any) -> str:
    """One printable line of any value: control characters and lone surrogates become a replacement sign."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in str(value))


class FedTARError(Exception):
    """Base of every error that this package raises on purpose.

    ``message`` stays where the error happened and may name a file or a patient's folder; ``public`` never does.
    """

    default_public = "an error that the site keeps to itself (see the site's own log)"

    def __init__(self, message: str, *, public: str | None = None):
        super().__init__(message)
        self.public = self.default_public if public is None else public


class ConfigError(FedTARError, ValueError):
    """A setting is wrong; the message names the field, its value and what is allowed."""

    default_public = "a setting is wrong at the site"


class DataError(FedTARError):
    """Data cannot be used; ``reason`` is a stable slug to count by (``no-pixel-data``), free of identity."""

    default_public = "data at the site cannot be used"

    def __init__(self, message: str, *, reason: str = "unusable", public: str | None = None):
        super().__init__(message, public=f"{self.default_public} ({reason})" if public is None else public)
        self.reason = reason


class ExchangeError(FedTARError):
    """What is about to leave or enter breaks the agreed exchange; the public text names tensors, never their values.

    It is one printable line, since it may quote what another machine sent: no such text writes a line of a log.
    """

    default_public = "the exchange does not fit the agreed schema"

    def __init__(self, message: str):
        super().__init__(plain(message), public=plain(message))


@contextmanager
def within(where: str) -> Iterator[None]:
    """The message of a :class:`DataError` in this block begins with ``where``."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}", reason=error.reason) from error


@contextmanager
def decoding(failed: str, reason: str = "unreadable") -> Iterator[None]:
    """Whatever a library raises on broken bytes becomes a :class:`DataError` of the text ``failed`` and its words."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"{failed} ({error})", reason=reason) from error


@contextmanager
def collecting(problems: list[DataError]) -> Iterator[None]:
    """A :class:`DataError` in this block is added to ``problems`` and goes no further."""
    try:
        yield
    except DataError as error:
        problems.append(error)
