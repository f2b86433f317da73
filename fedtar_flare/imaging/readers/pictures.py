"""PNG, JPEG, BMP and TIFF files, upright and checked, for readers of radiographs and of photographs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedtar_flare.errors import DataError, decoding
from fedtar_flare.imaging.limits import check_size

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_SIDE = 16
"""Fewest rows or columns of a picture that anything can be seen in."""
DEEP = ("I;16", "I;16B", "I;16L", "I", "F")
"""Modes of one channel and more than 8 bits."""


@contextmanager
def opened_picture(path: Path, refusal: str) -> Iterator[Image]:
    """The picture of a file, turned as its camera says; a mode with transparency or a palette becomes RGB.

    Raises:
        DataError: ``unreadable``, ``too-large``, or ``refusal`` for several pictures in one file or pure black and
            white.
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


def check_side(path: Path, size: tuple[int, ...], what: str) -> None:
    """Refuse (:class:`DataError` ``too-small``) fewer rows or columns than :data:`MIN_SIDE`."""
    height, width = size
    if min(height, width) < MIN_SIDE:
        raise DataError(f"{path}: {width} x {height} pixels are no {what}", reason="too-small")
