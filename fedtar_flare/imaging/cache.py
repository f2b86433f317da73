"""Prepared images on disk: computed once, memory-mapped afterwards.

``<study>.<settings>.npy`` has the picture, its positions and a checksum of both, by which a damaged file is found and
computed again; ``.refused.json`` why there is none; ``.<kind>.computed`` what was computed from it. No process sees a
part of a file.
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

PREPARATION_VERSION = 4  # raised whenever the same files and settings give other numbers than before
Identity = list[tuple[str, int, int]]  # path, size and time of change of every file of a study
NOT_WRITTEN = ("disk-full", "not-writable")  # reasons for which no study at all can be prepared
_DAMAGED = (OSError, ValueError, KeyError, IndexError, EOFError, SystemError)  # the last where Python 3.11.7 and
# before parses two files' headers at once in two threads (python/cpython#106905): then a study is prepared again
_VERIFIED: dict[Path, tuple[int, int, int]] = {}  # inode, size and time of files whose checksum was right


@dataclass(frozen=True, eq=False)
class Prepared:
    """Model input of one visit, memory-mapped; ``position_mm``: of slices, from the middle of the lungs; 0 of a
    picture.
    """

    image: np.ndarray  # uint8 (S, 3, H, W)
    position_mm: np.ndarray  # float32 (S,)


def file_identity(path: Path) -> Identity:
    """Identify the files of a study without reading them."""
    path, identity = path.absolute(), []
    if path.is_dir():
        identity = sorted(_files_below(str(path)))
    elif path.is_file():
        identity = [(str(path), (status := path.stat()).st_size, status.st_mtime_ns)]
    if not identity:
        raise DataError(f"{path}: there is no such file, or the folder is empty", reason="no-image")
    return identity


def _files_below(folder: str) -> Iterator[tuple[str, int, int]]:
    """As strings, which are faster than Path objects: a task looks at every file of every study."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # a link that leads nowhere, a file that went away
                if entry.is_dir(follow_symlinks=False):
                    yield from _files_below(entry.path)
                elif stat.S_ISREG((status := entry.stat()).st_mode):
                    yield entry.path, status.st_size, status.st_mtime_ns


def entry_path(folder: Path, files: Identity, settings: Mapping[str, Any]) -> Path:
    """Name the entry of a study, by digests of its files and of settings and :data:`PREPARATION_VERSION`."""
    digests = []
    for content in (files, [PREPARATION_VERSION, settings]):
        digests.append(hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest())
    return folder / digests[0][:2] / f"{digests[0][:40]}.{digests[1][:16]}.npy"


def files_of(folder: Path, files: Identity) -> list[Path]:
    """List the files of the cache that were made from a study, with any settings, and what ended writers left."""
    entry = entry_path(folder, files, {})
    return sorted(entry.parent.glob(f"*{entry.name[:40]}.*"))


def load(entry: Path) -> Prepared | None:
    """Load a prepared image; a process verifies the checksum of a file once."""
    with suppress(*_DAMAGED):
        status = entry.stat()
        record = np.load(entry, mmap_mode="r")
        image, position_mm = record["image"][0], record["position_mm"][0]
        this = status.st_ino, status.st_size, status.st_mtime_ns
        if _VERIFIED.get(entry) == this or _checksum(image, position_mm) == record["checksum"][0]:
            _VERIFIED[entry] = this
            return Prepared(image, position_mm)
    return None


def store(entry: Path, image: np.ndarray, position_mm: np.ndarray) -> None:
    """Store a prepared image, whole or not at all; raises :class:`DataError` of :data:`NOT_WRITTEN`."""
    with _writing(entry):
        _write(entry, image=np.asarray(image, np.uint8), position_mm=np.asarray(position_mm, np.float32))


def load_refusal(entry: Path) -> DataError | None:
    """The refusal of this study, if it was refused before."""
    with suppress(OSError, ValueError):
        text, reason = json.loads(entry.with_suffix(".refused.json").read_text())
        return DataError(text, reason=reason)
    return None


def store_refusal(entry: Path, error: DataError) -> None:
    """Remember a refusal, so that the next process need not read the study again; raises as :func:`store`."""
    with _writing(entry):
        write_text(entry.with_suffix(".refused.json"), json.dumps([str(error), error.reason]), PRIVATE)


def computed_path(entry: Path, kind: str) -> Path:
    """Name the file of an array that is computed from a prepared image."""
    return entry.with_name(f"{entry.stem}.{kind}.computed")


def load_computed(file: Path) -> np.ndarray | None:
    """Load a computed array."""
    with suppress(*_DAMAGED):
        record = np.load(file)
        return record["values"][0] if _checksum(record["values"][0]) == record["checksum"][0] else None
    return None


def store_computed(file: Path, values: np.ndarray) -> None:
    """Store a computed array, whole or not at all; an error of the disk is ignored, as it can be computed again."""
    with suppress(OSError):
        _write(file, values=values)


def _write(file: Path, **arrays: np.ndarray) -> None:
    """One record of the arrays and their checksum."""
    fields: list[Any] = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    record = np.empty(1, [*fields, ("checksum", np.uint32)])
    for name, array in arrays.items():
        record[name][0] = array
    record["checksum"][0] = _checksum(*(record[name][0] for name in arrays))
    content = io.BytesIO()  # NumPy does not say why a write to a file fails
    np.save(content, record)
    write_bytes(file, content.getvalue(), PRIVATE)


@contextmanager
def _writing(entry: Path) -> Iterator[None]:
    """Make an entry's folder, and turn errors of the disk into refusals that are not the study's fault."""
    try:
        yield
    except OSError as error:
        full = error.errno in DISK_FULL_ERRNOS
        raise DataError(
            f"{entry.parent}: prepared images cannot be written ({error.strerror or error}). Free the disk, for which "
            "'fedtar site purge --cache' deletes all prepared images, or write another cache_dir into the site file",
            reason=NOT_WRITTEN[not full],
            public=DISK_FULL if full else "the site's folder of prepared images cannot be written",
        ) from error


def _checksum(*arrays: np.ndarray) -> int:
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return checksum
