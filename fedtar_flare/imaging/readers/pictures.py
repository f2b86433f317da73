"""PNG, JPEG, BMP and TIFF files, upright and checked; photographs (dermatoscope, fundus camera, endoscope) in colour.

Needs no MONAI. Colours stay as they are, without window or stretch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedtar_flare.data.sources.fields import PICTURES
from fedtar_flare.errors import DataError, decoding
from fedtar_flare.imaging.limits import check_size

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_SIDE = 16
"""Fewest rows or columns of a picture that anything can be seen in."""
DEEP = ("I;16", "I;16B", "I;16L", "I", "F")
"""Modes of one channel and more than 8 bits."""


def read_photograph(path: Path | str) -> np.ndarray:
    """Read one photograph as uint8 (3, height, width): red, green, blue; three equal channels for shades of grey.

    Raises :class:`DataError` ``no-image``, ``unreadable``, ``not-a-photograph`` (DICOM and other files, several
    pictures, pure black and white, one channel of more than 8 bits), ``blank``, ``too-small`` or ``too-large``.
    """
    path = Path(path)
    check_there(path)
    if path.suffix.lower() not in PICTURES:
        raise DataError(f"{path}: a photograph is one of {', '.join(PICTURES)}", reason="not-a-photograph")
    with opened_picture(path, "not-a-photograph") as picture:
        if picture.mode in DEEP:
            raise DataError(f"{path}: one channel of more than 8 bits ({picture.mode})", reason="not-a-photograph")
        pixels = np.array(picture.convert("RGB"))
    check_content(path, pixels, "photograph")
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


@contextmanager
def opened_picture(path: Path, refusal: str) -> Iterator[Image]:
    """The picture of a file, turned as its camera says; a mode with transparency or a palette becomes RGB.

    Raises :class:`DataError` ``unreadable``, ``too-large``, or ``refusal`` for several pictures in one file or pure
    black and white.
    """
    from PIL import Image, ImageOps

    check_size(str(path), "file_bytes", path.stat().st_size)
    with decoding(f"{path}: not readable as a picture"), Image.open(path) as image:
        if image.format == "PNG":  # its checksums are looked at by this alone
            image.verify()
    with decoding(f"{path}: not readable as a picture"), Image.open(path) as image:
        check_size(str(path), "pixels", image.width * image.height)
        if getattr(image, "n_frames", 1) > 1 or image.mode == "1":
            what = "a bitmap without greys" if image.mode == "1" else "several pictures in one file"
            raise DataError(f"{path}: {what}", reason=refusal)
        upright = ImageOps.exif_transpose(image)
        if upright.mode in ("RGBA", "LA", "PA", "P"):
            upright = upright.convert("RGBA").convert("RGB")  # keeps the colours below a transparent layer
        yield upright


def check_there(path: Path) -> None:
    """Refuse (:class:`DataError` ``no-image``) what is no file."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file", reason="no-image")


def check_content(path: Path, pixels: np.ndarray, what: str) -> None:
    """Refuse (:class:`DataError` ``blank``, ``too-small``) pixels (height, width, ...) that show nothing."""
    if pixels.min() == pixels.max():
        raise DataError(f"{path}: every pixel has the same value", reason="blank")
    height, width = pixels.shape[:2]
    if min(height, width) < MIN_SIDE:
        raise DataError(f"{path}: {width} x {height} pixels are no {what}", reason="too-small")
