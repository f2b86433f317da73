"""Keyed hashes of a patient's identifier: its split, and its coordinate in the demographic profile.

Plain hashes can be inverted by trying identifiers; HMAC-SHA-256 with a key that stays at the site cannot. A split
depends on identifier and key alone, so a new visit never moves a patient, unless its picture is another patient's too
(:class:`.cohort.Cohort`), or the source states a split.
"""

import hashlib
import hmac
from pathlib import Path
from typing import Literal

from fedtar_flare.core.errors import ConfigError, DataError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
FRACTIONS = (0.7, 0.1, 0.2)
"""Train, validation, test."""


def keyed_unit(text: str, key: bytes) -> float:
    """HMAC-SHA-256 of a text as a uniform number in [0, 1) of 53 bits; ConfigError for a key under 16 bytes."""
    if len(key) < 16:
        raise ConfigError("the site's hash key must have at least 16 bytes")
    return (int.from_bytes(hmac.digest(key, text.encode(), "sha256")[:8], "big") >> 11) / 2**53


def split_of(patient_id: str, key: bytes) -> Split:
    """Draw a patient's split with the probabilities :data:`FRACTIONS`, by keyed hash."""
    drawn = keyed_unit(f"split:{patient_id}", key)
    if drawn < FRACTIONS[0]:
        return "train"
    return "validation" if drawn < FRACTIONS[0] + FRACTIONS[1] else "test"


def identity_hash(patient_id: str, key: bytes) -> float:
    """The first coordinate of the demographic profile, ``hash(id)`` (FedTAR, Eq. 2)."""
    return keyed_unit(f"profile:{patient_id}", key)


def patient_digest(patient_id: str, key: bytes) -> str:
    """Name a patient in the record of a warm start's training data; nobody without the key knows who it is."""
    return hmac.digest(key, f"trained on:{patient_id}".encode(), "sha256")[:8].hex()


def synthetic_key(seed: int, site: str) -> bytes:
    """Key of a synthetic site; no secret, unlike a real site's."""
    return hashlib.sha256(f"fedtar synthetic site\x1f{seed}\x1f{site}".encode()).digest()


def read_key(file: Path) -> bytes:
    """Read a site's key."""
    try:
        key = bytes.fromhex(file.read_text(encoding="utf-8").strip())
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror})", reason="bad-key") from error
    except ValueError as error:
        raise DataError(f"{file} is not a key of this package; restore it from its backup", reason="bad-key") from error
    if len(key) < 16:
        raise DataError(f"{file} is too short to be a key; restore it from its backup", reason="bad-key")
    return key


def key_check(key: bytes) -> str:
    """A short value to compare keys by, which reveals nothing of the key."""
    return hmac.digest(key, b"fedtar key check", "sha256")[:8].hex()
