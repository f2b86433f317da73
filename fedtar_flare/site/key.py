"""The site's hash key: the secret that decides its splits and hides its patients' identities."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from fedtar_flare.errors import DataError

KEY_FILE = "fedtar.key"


def site_key(folder: Path) -> bytes:
    """The site's secret for keyed hashes, made once and readable by its owner alone. Back it up: splits depend on it.

    Raises DataError if the file is not a key.
    """
    file = folder / KEY_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{KEY_FILE}.{os.getpid()}")
        with os.fdopen(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as handle:
            handle.write(secrets.token_hex(32) + "\n")
        try:
            os.link(temporary, file)  # fails when another process was first: its key counts
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return read_key(file)


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


def derived_key(seed: int, site: str) -> bytes:
    """Key of a simulated site with real data, from the job's seed and the site's name."""
    return hashlib.sha256(f"fedtar simulated site\x1f{seed}\x1f{site}".encode()).digest()
