"""Errors for the person who reads them: what happened, where, and what to do about it.

Two readers, two texts. ``str(error)`` is read where the error happened (at a hospital it may name a file or a
patient's folder). ``error.public`` is what may leave the site: it never carries an identity.
"""

from __future__ import annotations


class FedTARError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        message: full text for the reader on the spot: what, where, what to do.
        public: text that may leave a hospital; without one, the class's own general text is used.
    """

    default_public = "an error that the site keeps to itself (see the site's own log)"

    def __init__(self, message: str, *, public: str | None = None):
        super().__init__(message)
        self.public = public if public is not None else self.default_public


class ConfigError(FedTARError, ValueError):
    """A setting is wrong: names the field, its value and what is allowed."""

    default_public = "a setting is wrong at the site"


class DataError(FedTARError):
    """Data cannot be used. ``reason`` is a short, stable slug that can be counted (``no-pixel-data``).

    Args:
        message: full text for the reader on the spot.
        reason: stable slug, lower case with hyphens, free of identity.
    """

    default_public = "data at the site cannot be used"

    def __init__(self, message: str, *, reason: str = "unusable", public: str | None = None):
        super().__init__(message, public=public if public is not None else f"{self.default_public} ({reason})")
        self.reason = reason


class ExchangeError(FedTARError):
    """What is about to leave or enter does not fit the agreed exchange; names the tensor and never its values."""

    default_public = "the exchange does not fit the agreed schema"

    def __init__(self, message: str):
        super().__init__(message, public=message)
