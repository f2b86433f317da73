"""A packed data set of small labelled pictures (MedMNIST's ``.npz``) as pictures and a manifest with labels."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.errors import ConfigError
from fedtar_flare.files import replacing

PARTS = ("train", "val", "test")
NO_DATE = "2000-01-01"
"""Stands where a manifest needs a date and the data set has none."""


@dataclass(frozen=True)
class Unpacked:
    """What was written; ``labels``: how many pictures have each; ``colour``: whether any picture is in colour."""

    manifest: Path
    pictures: int
    labels: dict[str, int]
    colour: bool


def unpack(file: Path, out: Path, names: Sequence[str] = (), most: int | None = None) -> Unpacked:
    """Write ``out/pictures/<part>-<n>.png`` and ``out/manifest.csv``, each picture a patient of its own.

    The file's division into train, val and test is lost: a site splits its patients itself. Labels are one class a
    picture, or a row of 0 and 1 (0 everywhere: no label).

    Args:
        file: with ``train_images`` (n, H, W) or (n, H, W, 3) of uint8 and ``train_labels`` (n, 1) or (n, C); the same
            for ``val`` and ``test``, as far as there are any.
        out: a folder that must not have a manifest yet.
        names: of the classes 0, 1, ...; by default ``class-0``, ``class-1``, ...
        most: pictures of each part at most, the first ones; None: all.

    Raises:
        ConfigError: the file is no such data set, or a class has no name; or ``out`` has a manifest.
    """
    from PIL import Image

    table = out / "manifest.csv"
    if table.exists():
        raise ConfigError(f"{table} is there already; name another folder, or delete it first")
    rows: list[dict[str, object]] = []
    counts: dict[str, int] = {}
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    colour = False
    for part, images, labels in _parts(file):
        colour |= images.ndim == 4
        for i, (image, label) in enumerate(zip(images[:most], labels[:most], strict=True)):
            classes = np.flatnonzero(label) if labels.shape[1] > 1 else label
            said = [_name(int(c), names, file) for c in classes]
            place = out / "pictures" / f"{part}-{i:06d}.png"
            with replacing(place) as temporary:
                Image.fromarray(image).save(temporary, format="png")
            rows.append(
                {
                    "patient_id": place.stem,
                    "study_datetime": NO_DATE,
                    "image": f"pictures/{place.name}",
                    "labels": ";".join(said),
                }
            )
            for name in said:
                counts[name] = counts.get(name, 0) + 1
    write_rows(table, rows)
    return Unpacked(table, len(rows), dict(sorted(counts.items())), colour)


def _parts(file: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Part, pictures and labels (n, C). Nothing is unpickled."""
    try:
        with np.load(file, allow_pickle=False) as packed:
            found = [
                (part, packed[f"{part}_images"], np.atleast_2d(packed[f"{part}_labels"]))
                for part in PARTS
                if f"{part}_images" in packed and f"{part}_labels" in packed
            ]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{file} cannot be read as a .npz file of pictures ({error})") from error
    for part, images, labels in found:
        picture = images.dtype == np.uint8 and (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3))
        if not picture or len(images) != len(labels) or labels.ndim != 2 or not np.issubdtype(labels.dtype, np.integer):
            raise ConfigError(
                f"{file}: {part}_images of shape {images.shape} ({images.dtype}) with {part}_labels of shape "
                f"{labels.shape} ({labels.dtype}) are no pictures (n, H, W) or (n, H, W, 3) of uint8 with their classes"
            )
    if not sum(len(images) for _, images, _ in found):
        raise ConfigError(f"{file} has no arrays train_images and train_labels (or val, test)")
    return found


def _name(number: int, names: Sequence[str], file: Path) -> str:
    if names and not 0 <= number < len(names):
        raise ConfigError(f"{file}: class {number} has no name; {len(names)} are given")
    return names[number] if names else f"class-{number}"
