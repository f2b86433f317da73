"""A packed data set of small labelled pictures (MedMNIST's ``.npz``) as pictures and a manifest with labels.

Of MedMNIST's formats (uint8 at every size from 28 to 224): grey pictures (n, H, W) and colour ones (n, H, W, 3), with
one class each (n, 1), ordinal grades among them, or a row of 0 and 1 (n, C) for several findings. Its volumes
(n, D, H, W) are refused: their greys are no Hounsfield units, and their voxels have no size.
"""

from __future__ import annotations

import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.errors import ConfigError
from fedtar_flare.files import replacing

PARTS = ("train", "val", "test")
NO_DATE = "2000-01-01"
"""Stands where a manifest needs a date and the data set has none."""

_UNFIT = re.compile(r"[;|]|^[?]")
"""What a label of a manifest cannot hold."""


@dataclass(frozen=True)
class Unpacked:
    """What was written; ``labels``: how many pictures have each; ``colour``: whether any picture is in colour."""

    manifest: Path
    pictures: int
    labels: dict[str, int]
    colour: bool


@dataclass(frozen=True)
class _Part:
    """One of ``PARTS``: shape of its pictures, how they lie in the file, and their labels (n, C)."""

    name: str
    shape: tuple[int, ...]
    by_column: bool
    labels: np.ndarray


def unpack(file: Path, out: Path, names: Sequence[str] = (), most: int | None = None) -> Unpacked:
    """Write ``out/pictures/<part>-<n>.png`` and ``out/manifest.csv``, each picture a patient of its own.

    The file's division into train, val and test is lost: a site splits its patients itself. Labels are one class a
    picture, or a row of 0 and 1 (0 everywhere: no label). One picture is in memory at a time.

    Parameters
    ----------
    file : Path
        With ``train_images`` (n, H, W) or (n, H, W, 3) of uint8 and ``train_labels`` (n, 1) or (n, C); the same for
        ``val`` and ``test``, as far as there are any.
    out : Path
        A folder that must not have a manifest yet.
    names : sequence of str
        Of the classes 0, 1, ...; by default ``class-0``, ``class-1``, ...
    most : int, optional
        Pictures of each part at most, the first ones; all by default.

    Raises
    ------
    ConfigError
        The file is no such data set, or a class has no name, or one that a manifest cannot hold; or ``out`` has a
        manifest.
    """
    from PIL import Image

    if unfit := [name for name in names if _UNFIT.search(name) or names.count(name) > 1]:
        raise ConfigError(f"class name '{unfit[0]}': it must be there once, without ';' and '|', and no '?' in front")
    table = out / "manifest.csv"
    if table.exists():
        raise ConfigError(f"{table} is there already; name another folder, or delete it first")
    rows: list[dict[str, object]] = []
    counts: dict[str, int] = {}
    colour = False
    with _read(file), zipfile.ZipFile(file) as packed:
        parts = [part for name in PARTS if (part := _part(file, packed, name, names))]
        if not sum(len(part.labels) for part in parts):
            raise ConfigError(f"{file} has no arrays train_images and train_labels (or val, test)")
        said = {part.name: [_said(label, names, file) for label in part.labels[:most]] for part in parts}
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    for part in parts:
        colour |= len(part.shape) == 4
        for i, (labels, image) in enumerate(zip(said[part.name], _pictures(file, part), strict=False)):
            place = out / "pictures" / f"{part.name}-{i:06d}.png"
            with replacing(place) as temporary:
                Image.fromarray(image).save(temporary, format="png")
            rows.append(
                {
                    "patient_id": place.stem,
                    "study_datetime": NO_DATE,
                    "image": f"pictures/{place.name}",
                    "labels": ";".join(labels),
                }
            )
            for name in labels:
                counts[name] = counts.get(name, 0) + 1
    write_rows(table, rows)
    return Unpacked(table, len(rows), dict(sorted(counts.items())), colour)


@contextmanager
def _read(file: Path) -> Iterator[None]:
    """Whatever a broken file raises in this block becomes a :class:`ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{file} cannot be read as a .npz file of pictures ({error})") from error


def _part(file: Path, packed: zipfile.ZipFile, name: str, names: Sequence[str]) -> _Part | None:
    """A part of the file, without its pictures; None where it has no such part. Nothing is unpickled."""
    arrays = [f"{name}_images.npy", f"{name}_labels.npy"]
    there = [array for array in arrays if array in packed.namelist()]
    if not there:
        return None
    if there != arrays:
        raise ConfigError(f"{file} has {there[0][:-4]}, and not the other of {name}_images and {name}_labels")
    with packed.open(arrays[1]) as array:
        labels = np.lib.format.read_array(array, allow_pickle=False)
    labels = labels[:, None] if labels.ndim == 1 else labels
    with packed.open(arrays[0]) as array:
        shape, by_column, dtype = _header(array)
    if dtype == np.uint8 and (len(shape) == 5 or (len(shape) == 4 and shape[3] != 3)):
        raise ConfigError(
            f"{file}: {name}_images of shape {shape} are volumes: their greys are no Hounsfield units, and their "
            "voxels have no size in millimetres. Of MedMNIST, the sets of pictures are read, not those named 3D"
        )
    picture = dtype == np.uint8 and len(shape) in (3, 4) and min(shape[1:]) > 0
    classes = labels.ndim == 2 and labels.shape[1] > 0 and (labels.dtype == bool or labels.dtype.kind in "iu")
    if not picture or not classes or shape[0] != len(labels):
        raise ConfigError(
            f"{file}: {name}_images of shape {shape} ({dtype}) with {name}_labels of shape {labels.shape} "
            f"({labels.dtype}) are no pictures (n, H, W) or (n, H, W, 3) of uint8 with their classes"
        )
    if labels.shape[1] > 1 and not np.isin(labels, (0, 1)).all():
        raise ConfigError(f"{file}: {name}_labels has rows of {labels.shape[1]} labels that are not 0 or 1")
    if names and labels.shape[1] not in (1, len(names)):
        raise ConfigError(
            f"{file}: {name}_labels has rows of {labels.shape[1]} labels, and {len(names)} names are given"
        )
    return _Part(name, shape, by_column, labels)


def _header(array: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether columns lie together, and type; the array's values come next."""
    magic = np.lib.format.read_magic(array)
    read = np.lib.format.read_array_header_1_0 if magic == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_column, dtype = read(array)
    return shape, by_column, dtype


def _pictures(file: Path, part: _Part) -> Iterator[np.ndarray]:
    """One by one, since a file of the largest size holds more than memory does."""
    with _read(file), zipfile.ZipFile(file) as packed, packed.open(f"{part.name}_images.npy") as array:
        if part.by_column:
            yield from np.lib.format.read_array(array, allow_pickle=False)
            return
        _header(array)
        size = math.prod(part.shape[1:])
        for _ in range(part.shape[0]):
            values = array.read(size)
            if len(values) < size:
                raise EOFError(f"{part.name}_images ends too early")
            yield np.frombuffer(values, np.uint8).reshape(part.shape[1:])


def _said(label: np.ndarray, names: Sequence[str], file: Path) -> list[str]:
    """Names of a picture's classes."""
    classes = [int(c) for c in (np.flatnonzero(label) if len(label) > 1 else label)]
    for number in classes:
        if number < 0 or (names and number >= len(names)):
            raise ConfigError(f"{file}: class {number} has no name; {len(names)} are given")
    return [names[number] if names else f"class-{number}" for number in classes]
