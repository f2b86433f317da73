"""Prepared images on disk: made once, memory-mapped afterwards.

An entry is found by a key that holds everything that matters (which files, their sizes and times, the settings, the
version of the code), so a changed file or setting never meets an old entry. Entries are written beside and renamed:
a killed process or two sites at work leave whole entries only. Names are hashes: no patient's identity is in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedtar_flare.errors import DataError


class Prepared(NamedTuple):
    """Model input of one visit: ``image`` uint8 (S, 3, H, W), memory-mapped; ``position_mm`` float32 (S,)."""

    image: np.ndarray
    position_mm: np.ndarray


def entry_key(image: Path, settings: Mapping[str, Any]) -> str:
    """Key of an entry.

    Args:
        image: file or folder (all files below it count).
        settings: JSON-able; everything that the result depends on besides the files.

    Raises:
        DataError: ``no-image`` when there is nothing at that path.
    """
    if image.is_dir():
        files = sorted(Path(top) / name for top, _, names in os.walk(image) for name in names)
    else:
        files = [image]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    try:
        for file in files:
            status = file.stat()
            digest.update(f"{file.absolute()}|{status.st_size}|{status.st_mtime_ns}\n".encode())
    except OSError as error:
        raise DataError(f"{image}: there is no such image ({error.strerror})", reason="no-image") from error
    return digest.hexdigest()[:40]


def load_entry(folder: Path, key: str) -> Prepared | None:
    """The entry, or None when it is not there or is damaged."""
    try:
        image = np.load(folder / key[:2] / f"{key}.npy", mmap_mode="r")
        position = np.load(folder / key[:2] / f"{key}.mm.npy")
    except (OSError, ValueError, EOFError):
        return None
    whole = image.ndim == 4 and image.dtype == np.uint8 and position.shape == image.shape[:1]
    return Prepared(image, position) if whole else None


def store_entry(folder: Path, key: str, image: np.ndarray, position_mm: np.ndarray) -> None:
    """Write an entry; the image comes last, so that it is there only when the entry is whole."""
    place = folder / key[:2]
    place.mkdir(parents=True, exist_ok=True)
    for name, array in ((f"{key}.mm.npy", position_mm.astype(np.float32)), (f"{key}.npy", image.astype(np.uint8))):
        handle, temporary = tempfile.mkstemp(dir=place, prefix=".part-")
        try:
            with os.fdopen(handle, "wb") as file:
                np.save(file, array)
            os.replace(temporary, place / name)  # noqa: PTH105
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
