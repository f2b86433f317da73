"""Keyed hashes of a patient's identifier: its split, and its coordinate in the demographic profile.

Plain hashes can be inverted by trying identifiers; HMAC-SHA-256 with a key that stays at the site cannot. A split
depends on identifier and key alone, so a new visit never moves a patient, unless its picture is another patient's too
(:class:`.cohort.Cohort`), or the source states a split of its own.
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
    """HMAC-SHA-256 of a text as a uniform number in [0, 1) with 53 bits; refuses a key shorter than 16 bytes."""
    if len(key) < 16:
        raise ConfigError("the site's hash key must have at least 16 bytes")
    return (int.from_bytes(hmac.digest(key, text.encode(), "sha256")[:8], "big") >> 11) / 2**53


def split_of(patient_id: str, key: bytes) -> Split:
    """The split of a patient, by :data:`FRACTIONS`."""
    place = keyed_unit(f"split:{patient_id}", key)
    if place < FRACTIONS[0]:
        return "train"
    return "validation" if place < FRACTIONS[0] + FRACTIONS[1] else "test"


def identity_hash(patient_id: str, key: bytes) -> float:
    """The first coordinate of the profile, ``hash(id)`` in [0, 1) (FedTAR, Eq. 2)."""
    return keyed_unit(f"profile:{patient_id}", key)


def patient_digest(patient_id: str, key: bytes) -> str:
    """What a warm start's weights say of a patient it was trained on: it tells nobody without the key who that is."""
    return hmac.digest(key, f"trained on:{patient_id}".encode(), "sha256")[:8].hex()


def synthetic_key(seed: int, site: str) -> bytes:
    """Key of a synthetic site's keyed hashes; no secret, unlike a real site's."""
    return hashlib.sha256(f"fedtar synthetic site\x1f{seed}\x1f{site}".encode()).digest()


def read_key(file: Path) -> bytes:
    """A site's key from its file. Raises DataError if it cannot be read or is not a key."""
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
    """A short value that tells whether a key is the right one and reveals nothing of it."""
    return hmac.digest(key, b"fedtar key check", "sha256")[:8].hex()
