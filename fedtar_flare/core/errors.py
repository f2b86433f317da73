"""Errors of this package: ``str(error)`` is for the reader on the spot, ``error.public`` is what may leave the site."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from fedtar_flare.core.text import plain

__all__ = ["ConfigError", "DataError", "ExchangeError", "FedTARError"]

DISK_FULL = "the site's disk is full"
"""Public text where a site cannot write what it must keep."""
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The system's errors of a full disk, a used-up quota, and a file larger than the account may write."""


class FedTARError(Exception):
    """Base of every error that this package raises on purpose.

    Parameters
    ----------
    message : str
        For the site's own log; it may name a file or a patient's folder.
    public : str, optional
        What the server may be told; by default ``default_public`` of the class.
    """

    default_public = "an error that the site keeps to itself (see the site's own log)"

    def __init__(self, message: str, *, public: str | None = None):
        super().__init__(message)
        self.public = self.default_public if public is None else public


class ConfigError(FedTARError, ValueError):
    """A setting is wrong; the message names the field, its value and what is allowed."""

    default_public = "a setting is wrong at the site"


class DataError(FedTARError):
    """Data cannot be used.

    Parameters
    ----------
    message : str
        For the site's own log.
    reason : str
        A stable slug to count by, free of identity, such as ``no-pixel-data``.
    public : str, optional
        What the server may be told; by default a general text with the reason.
    """

    default_public = "data at the site cannot be used"

    def __init__(self, message: str, *, reason: str = "unusable", public: str | None = None):
        super().__init__(message, public=f"{self.default_public} ({reason})" if public is None else public)
        self.reason = reason


class ExchangeError(FedTARError):
    """A message that is about to leave or enter breaks the agreed exchange.

    Parameters
    ----------
    message : str
        Names tensors, never their values. It is public, and made one line (:func:`plain`): as it may quote what
        another machine sent, it could otherwise forge lines of a log.
    """

    default_public = "the exchange does not fit the agreed schema"

    def __init__(self, message: str):
        super().__init__(plain(message), public=plain(message))


@contextmanager
def within(where: str) -> Iterator[None]:
    """Put a place, such as a file and a row, before the message of a :class:`DataError` of this block."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}", reason=error.reason) from error


@contextmanager
def decoding(failed: str, reason: str = "unreadable") -> Iterator[None]:
    """Turn whatever a library raises on broken bytes in this block into a :class:`DataError`."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"{failed} ({error})", reason=reason) from error


@contextmanager
def collecting(problems: list[DataError]) -> Iterator[None]:
    """Append a :class:`DataError` of this block to a list instead of raising it."""
    try:
        yield
    except DataError as error:
        problems.append(error)
