"""A packed data set of small labelled pictures (MedMNIST's ``.npz``) as pictures and a manifest with labels.

Of MedMNIST's formats (uint8 at every size from 28 to 224): grey pictures (n, H, W) and colour ones (n, H, W, 3), with
one class each (n, 1), ordinal grades among them, or a row of 0 and 1 (n, C) for several findings. Its volumes
(n, D, H, W) are refused: their greys are no Hounsfield units, and their voxels have no size.
"""

import re
import shutil
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import open_regular, replacing
from fedtar_flare.data.cells import Split
from fedtar_flare.data.sources.fields import DAY_ZERO
from fedtar_flare.data.sources.manifest import write_rows

PARTS: dict[str, Split] = {"train": "train", "val": "validation", "test": "test"}
MOST = 1_000_000  # pictures that are written; the largest set of MedMNIST has a quarter of it
_UNFIT = re.compile(r"[;|]|^[?]")  # characters that a label in a manifest cannot hold


@dataclass(frozen=True)
class Unpacked:
    """The manifest, the numbers of its pictures in all and by label, and whether any picture is in colour."""

    manifest: Path
    pictures: int
    labels: dict[str, int]
    colour: bool


def unpack(file: Path, out: Path, names: Sequence[str] = (), most: int | None = None) -> Unpacked:
    """Write ``out/pictures/<part>-<n>.png`` and ``out/manifest.csv``; each picture is a patient."""
    from PIL import Image

    if unfit := [name for name in names if _UNFIT.search(name) or names.count(name) > 1]:
        raise ConfigError(f"class name '{unfit[0]}': it must be there once, without ';' and '|', and no '?' in front")
    table = out / "manifest.csv"
    if table.exists():
        raise ConfigError(f"{table} is there already; name another folder, or delete it first")
    rows: list[dict[str, object]] = []
    counts: Counter[str] = Counter()
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out) as folder, _reading(file):
        parts = {part: arrays for part in PARTS if (arrays := _part(file, Path(folder), part, names))}
        if not sum(len(images) for images, _ in parts.values()):
            raise ConfigError(f"{file} has no arrays train_images and train_labels (or val, test)")
        if sum(len(labels) if most is None else min(most, len(labels)) for _, labels in parts.values()) > MOST:
            raise ConfigError(f"{file} has more than {MOST:,} pictures: say with --most how many of each part to take")
        chosen = {  # all before a picture is written, so that a bad label leaves no picture behind
            part: {int(i): _names_of(labels[i], names, file) for i in _spread(len(labels), most)}
            for part, (_, labels) in parts.items()
        }
        for part, (images, _) in parts.items():
            for i, labels in chosen[part].items():
                picture = out / "pictures" / f"{part}-{i:06d}.png"
                with replacing(picture) as temporary:
                    Image.fromarray(np.asarray(images[i])).save(temporary, format="png")
                named = {"image": f"pictures/{picture.name}", "labels": ";".join(labels), "split": PARTS[part]}
                rows.append({"patient_id": picture.stem, "study_datetime": DAY_ZERO.date(), **named})
                counts.update(labels)
        colour = any(images.ndim == 4 for images, _ in parts.values())
    write_rows(table, rows)
    return Unpacked(table, len(rows), dict(sorted(counts.items())), colour)


def _spread(count: int, most: int | None) -> np.ndarray:
    """Indices of at most so many of ``count`` items, evenly spread."""
    wanted = count if most is None else min(most, count)
    return np.arange(wanted) * count // max(wanted, 1)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Whatever a broken file raises in this block becomes a :class:`ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{file} cannot be read as a .npz file of pictures ({error})") from error


def _part(file: Path, folder: Path, part: str, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
    """Pictures, memory-mapped in ``folder``, and labels (n, C); None without such a part. Nothing is unpickled."""
    arrays = [f"{part}_images.npy", f"{part}_labels.npy"]
    with open_regular(file) as opened, zipfile.ZipFile(opened) as packed:
        present = [array for array in arrays if array in packed.namelist()]
        if not present:
            return None
        if present != arrays:
            raise ConfigError(f"{file} has {present[0][:-4]}, and not the other of {part}_images and {part}_labels")
        size, free = sum(packed.getinfo(array).file_size for array in arrays), shutil.disk_usage(folder).free
        if size > free:  # no more than the archive says is unpacked
            raise ConfigError(f"{file}: {part} unpacks to {size / 1e9:.1f} GB; {free / 1e9:.1f} GB are free there")
        images, labels = (np.load(packed.extract(array, folder), mmap_mode="r") for array in arrays)
    labels = labels[:, None] if labels.ndim == 1 else labels
    shape, dtype = images.shape, images.dtype
    if dtype == np.uint8 and (len(shape) == 5 or (len(shape) == 4 and shape[3] != 3)):
        raise ConfigError(f"{file}: {part}_images of shape {shape} are volumes, not pictures; take no set named 3D")
    picture = dtype == np.uint8 and len(shape) in (3, 4) and min(shape[1:]) > 0
    classes = labels.ndim == 2 and labels.shape[1] > 0 and (labels.dtype == bool or labels.dtype.kind in "iu")
    if not picture or not classes or shape[0] != len(labels):
        are = f"{part}_images {shape} ({dtype}) with {part}_labels {labels.shape} ({labels.dtype}) are"
        raise ConfigError(f"{file}: {are} no pictures (n, H, W) or (n, H, W, 3) of uint8 with their classes")
    if (width := labels.shape[1]) > 1 and not np.isin(labels, (0, 1)).all():
        raise ConfigError(f"{file}: {part}_labels has rows of {width} labels that are not 0 or 1")
    if names and width not in (1, len(names)):
        raise ConfigError(f"{file}: {part}_labels has rows of {width} labels, and {len(names)} names are given")
    return images, labels


def _names_of(label: np.ndarray, names: Sequence[str], file: Path) -> list[str]:
    """Names of a picture's classes."""
    classes = [int(c) for c in (np.flatnonzero(label) if len(label) > 1 else label)]
    for number in classes:
        if number < 0 or (names and number >= len(names)):
            raise ConfigError(f"{file}: class {number} has no name; {len(names)} are given")
    return [names[number] if names else f"class-{number}" for number in classes]
