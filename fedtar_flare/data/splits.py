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

__all__ = ["SPLITS", "Split", "identity_hash", "key_check", "patient_digest", "read_key", "split_of", "synthetic_key"]

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
    """Draw a patient's split with the probabilities :data:`FRACTIONS`, by keyed hash.

    Parameters
    ----------
    patient_id, key : str, bytes
        The site's id of the patient; the site's secret key, at least 16 bytes.

    Returns
    -------
    Split
    """
    drawn = keyed_unit(f"split:{patient_id}", key)
    if drawn < FRACTIONS[0]:
        return "train"
    return "validation" if drawn < FRACTIONS[0] + FRACTIONS[1] else "test"


def identity_hash(patient_id: str, key: bytes) -> float:
    """The first coordinate of the demographic profile, ``hash(id)`` (FedTAR, Eq. 2).

    Parameters
    ----------
    patient_id, key : str, bytes
        The site's id of the patient; the site's secret key, at least 16 bytes.

    Returns
    -------
    float
        In [0, 1).
    """
    return keyed_unit(f"profile:{patient_id}", key)


def patient_digest(patient_id: str, key: bytes) -> str:
    """Name a patient in the record of a warm start's training data; nobody without the key knows who it is.

    Parameters
    ----------
    patient_id, key : str, bytes
        The site's id of the patient; the site's secret key, at least 16 bytes.

    Returns
    -------
    str
        16 hexadecimal digits.
    """
    return hmac.digest(key, f"trained on:{patient_id}".encode(), "sha256")[:8].hex()


def synthetic_key(seed: int, site: str) -> bytes:
    """Key of a synthetic site; no secret, unlike a real site's.

    Parameters
    ----------
    seed, site : int, str
        Seed of the synthetic data; name of the site.

    Returns
    -------
    bytes
        32 bytes.
    """
    return hashlib.sha256(f"fedtar synthetic site\x1f{seed}\x1f{site}".encode()).digest()


def read_key(file: Path) -> bytes:
    """Read a site's key.

    Parameters
    ----------
    file : Path
        Text file with the key in hexadecimal.

    Returns
    -------
    bytes

    Raises
    ------
    DataError
        ``bad-key``: the file cannot be read, or holds no key of at least 16 bytes.
    """
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
    """A short value to compare keys by, which reveals nothing of the key.

    Parameters
    ----------
    key : bytes
        The site's secret key.

    Returns
    -------
    str
        16 hexadecimal digits.
    """
    return hmac.digest(key, b"fedtar key check", "sha256")[:8].hex()
