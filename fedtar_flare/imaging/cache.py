"""Prepared images on disk: computed once, memory-mapped afterwards.

::

    <study>.<settings>.npy                 the picture, its positions and a checksum of both
    <study>.<settings>.refused.json        why the study cannot be prepared
    <study>.<settings>.<kind>.computed     an array computed from the picture, such as what a frozen encoder gives

Files are written under another name and renamed, so that no process sees half of one; a damaged file is found by its
checksum and computed again.
"""

import hashlib
import io
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtar_flare.core.errors import DISK_FULL, DISK_FULL_ERRNOS, DataError
from fedtar_flare.core.files import PRIVATE, write_bytes, write_text

PREPARATION_VERSION = 4
"""Raised whenever the same files and settings come to give other numbers."""
Identity = list[tuple[str, int, int]]
"""Path, size and time of change of every file of a study."""
NOT_WRITTEN = ("disk-full", "not-writable")
"""Reasons why no study can be prepared, whichever it is."""
_DAMAGED = (OSError, ValueError, KeyError, IndexError, EOFError)
_SOUND: dict[Path, tuple[int, int, int]] = {}  # files whose checksum was right: inode, size, time


@dataclass(frozen=True, eq=False)
class Prepared:
    """Model input of one visit; both arrays are memory-mapped and read-only."""

    image: np.ndarray  # uint8 (S, 3, H, W)
    position_mm: np.ndarray  # float32 (S,)


def file_identity(path: Path) -> Identity:
    """Path, size and modification time (ns) of a file, or of every file below a folder; ``no-image`` without any."""
    path, identity = path.absolute(), []
    if path.is_dir():
        identity = sorted(_files_below(str(path)))
    elif path.is_file():
        identity = [(str(path), (status := path.stat()).st_size, status.st_mtime_ns)]
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


def entry_path(folder: Path, files: Identity, settings: Mapping[str, Any]) -> Path:
    """The cache entry of these files, these settings and this version of the preparation: a digest of each."""
    study = _digest(files)[:40]
    return folder / study[:2] / f"{study}.{_digest([PREPARATION_VERSION, settings])[:16]}.npy"


def files_of(folder: Path, files: Identity) -> list[Path]:
    """Every file of the cache that was made from these files, by whatever settings: images, refusals, tensors."""
    study = _digest(files)[:40]
    return sorted((folder / study[:2]).glob(f"{study}.*"))


def load(entry: Path) -> Prepared | None:
    """The prepared image; None when it is missing or damaged. Each process checks a file once."""
    with suppress(*_DAMAGED):
        status = entry.stat()
        image, position_mm, checksum = _fields(np.load(entry, mmap_mode="r"), "image", "position_mm")
        this = status.st_ino, status.st_size, status.st_mtime_ns
        if _SOUND.get(entry) == this or _checksum(image, position_mm) == checksum:
            _SOUND[entry] = this
            return Prepared(image, position_mm)
    return None


def store(entry: Path, image: np.ndarray, position_mm: np.ndarray) -> None:
    """Write a prepared image, whole or not at all; raises :class:`DataError` of :data:`NOT_WRITTEN`."""
    with _place_of(entry):
        _write(entry, image=np.asarray(image, np.uint8), position_mm=np.asarray(position_mm, np.float32))


def load_refusal(entry: Path) -> DataError | None:
    """Why this study was refused last time; None when it was not."""
    with suppress(OSError, ValueError):
        text, reason = json.loads(entry.with_suffix(".refused.json").read_text())
        return DataError(text, reason=reason)
    return None


def store_refusal(entry: Path, error: DataError) -> None:
    """Remember a refusal, so that the next process need not read the study again; raises as :func:`store`."""
    with _place_of(entry):
        write_text(entry.with_suffix(".refused.json"), json.dumps([str(error), error.reason]), PRIVATE)


def computed_path(entry: Path, kind: str) -> Path:
    """The file for something computed from an entry's image; ``kind`` says what, and by what."""
    return entry.with_name(f"{entry.stem}.{kind}.computed")


def load_computed(file: Path) -> np.ndarray | None:
    """What :func:`store_computed` wrote; None when it is missing or damaged."""
    with suppress(*_DAMAGED), file.open("rb") as opened:
        values, checksum = _fields(np.load(opened), "values")
        return values if _checksum(values) == checksum else None
    return None


def store_computed(file: Path, values: np.ndarray) -> None:
    """Write an array, whole or not at all; a full disk leaves none, as it can be computed again."""
    with suppress(OSError):
        _write(file, values=values)


def _write(file: Path, **arrays: np.ndarray) -> None:
    """One record of the arrays and their checksum."""
    fields: list[Any] = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    record = np.empty(1, [*fields, ("checksum", np.uint32)])
    for name, array in arrays.items():
        record[name][0] = array
    record["checksum"][0] = _checksum(*(record[name][0] for name in arrays))
    content = io.BytesIO()  # of a short write to a file, NumPy does not say why
    np.save(content, record)
    write_bytes(file, content.getvalue(), PRIVATE)


@contextmanager
def _place_of(entry: Path) -> Iterator[None]:
    """The folder of an entry, to be written to. If that fails it is no fault of the study."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # pictures of patients: for this user alone
        yield
    except OSError as error:
        full = error.errno in DISK_FULL_ERRNOS
        raise DataError(
            f"{entry.parent}: prepared images cannot be written ({error.strerror or error}). Free the disk, for which "
            "'fedtar site purge --cache' deletes all prepared images, or write another cache_dir into the site file",
            reason=NOT_WRITTEN[not full],
            public=DISK_FULL if full else "the site's folder of prepared images cannot be written",
        ) from error


def _fields(record: np.ndarray, *names: str) -> list[Any]:
    return [record[name][0] for name in (*names, "checksum")]


def _checksum(*arrays: np.ndarray) -> int:
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return found


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
