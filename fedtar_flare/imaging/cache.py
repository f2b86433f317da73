"""Prepared images on disk: computed once, memory-mapped afterwards.

One file per study holds the picture, the positions and a checksum of both. It is written aside and renamed, so that no
process sees half of one; a damaged file is found by its checksum and computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtar_flare.errors import DataError
from fedtar_flare.files import PRIVATE, replacing, write_text

PREPARATION_VERSION = 3
"""Raised whenever the same files and settings come to give other numbers."""

_SOUND: dict[Path, tuple[int, int, int]] = {}  # files whose checksum was right: inode, size, time


@dataclass(frozen=True, eq=False)
class Prepared:
    """Model input of one visit; both arrays are memory-mapped and read-only."""

    image: np.ndarray  # uint8 (S, 3, H, W)
    position_mm: np.ndarray  # float32 (S,)


def file_identity(path: Path) -> list[tuple[str, int, int]]:
    """Path, size and modification time (ns) of a file, or of every regular file below a folder.

    Raises:
        DataError: ``no-image`` when there is none.
    """
    path = path.absolute()
    if path.is_dir():
        identity = sorted(_files_below(str(path)))
    else:
        identity = []
        with suppress(OSError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                identity = [(str(path), status.st_size, status.st_mtime_ns)]
    if not identity:
        raise DataError(f"{path}: there is no such file, or the folder is empty", reason="no-image")
    return identity


def _files_below(folder: str) -> Iterator[tuple[str, int, int]]:
    """Plain strings, no Path objects: a second epoch does little else than look at every file of every study."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # a link that leads nowhere, a file that went away
                if entry.is_dir(follow_symlinks=False):
                    yield from _files_below(entry.path)
                elif stat.S_ISREG((status := entry.stat()).st_mode):
                    yield entry.path, status.st_size, status.st_mtime_ns


def entry_path(folder: Path, identity: list[tuple[str, int, int]], settings: dict[str, Any]) -> Path:
    """The cache entry for these files, these settings and this version of the preparation."""
    text = json.dumps([PREPARATION_VERSION, settings, identity], sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:40]
    return folder / key[:2] / f"{key}.npy"


def load(entry: Path) -> Prepared | None:
    """The prepared image; None when it is missing or damaged. Each process checks a file once."""
    try:
        status = entry.stat()
        record = np.load(entry, mmap_mode="r")
        image, position = record["image"][0], record["position_mm"][0]
        this = status.st_ino, status.st_size, status.st_mtime_ns
        if _SOUND.get(entry) == this or _checksum(image, position) == record["checksum"][0]:
            _SOUND[entry] = this
            return Prepared(image, position)
    except (OSError, ValueError, KeyError, IndexError, EOFError):
        pass
    return None


def store(entry: Path, image: np.ndarray, position_mm: np.ndarray) -> None:
    """Write a prepared image, whole or not at all."""
    record = np.empty(
        1,
        [("image", np.uint8, image.shape), ("position_mm", np.float32, position_mm.shape), ("checksum", np.uint32)],
    )
    record["image"][0], record["position_mm"][0] = image, position_mm
    record["checksum"][0] = _checksum(record["image"][0], record["position_mm"][0])
    entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # pictures of patients: for this user alone
    with replacing(entry) as temporary, temporary.open("wb") as file:
        np.save(file, record)


def beside(entry: Path, kind: str) -> Path:
    """The file beside an entry for something that is computed from its image; ``kind`` says what and by what."""
    return entry.with_name(f"{entry.stem}.{kind}.computed")


def all_beside(entry: Path) -> list[Path]:
    """Every file of :func:`beside`, of whatever kind."""
    return sorted(entry.parent.glob(f"{entry.stem}.*.computed"))


def load_computed(file: Path) -> np.ndarray | None:
    """What :func:`store_computed` wrote; None when it is missing or damaged."""
    try:
        with file.open("rb") as opened:
            record = np.load(opened)
        values: np.ndarray = record["values"][0]
        return values if zlib.crc32(values.data) == record["checksum"][0] else None
    except (OSError, ValueError, KeyError, IndexError, EOFError):
        return None


def store_computed(file: Path, values: np.ndarray) -> None:
    """Write an array, whole or not at all; a full disk leaves none, as it can be computed again."""
    record = np.empty(1, [("values", values.dtype, values.shape), ("checksum", np.uint32)])
    record["values"][0] = values
    record["checksum"][0] = zlib.crc32(record["values"][0].data)
    with suppress(OSError), replacing(file) as temporary, temporary.open("wb") as opened:
        np.save(opened, record)


def load_refusal(entry: Path) -> DataError | None:
    """Why this study was refused last time; None when it was not."""
    try:
        text, reason = json.loads(entry.with_suffix(".refused.json").read_text())
        return DataError(text, reason=reason)
    except (OSError, ValueError):
        return None


def store_refusal(entry: Path, error: DataError) -> None:
    """Remember a refusal, so that the next process need not read the study again."""
    entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(entry.with_suffix(".refused.json"), json.dumps([str(error), error.reason]), PRIVATE)


def _checksum(image: np.ndarray, position_mm: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(position_mm).data, zlib.crc32(np.ascontiguousarray(image).data))
