"""Photographs in colour (dermatoscope, fundus camera, endoscope; PNG, JPEG, BMP, TIFF). Needs no MONAI.

Colours stay as they are, without window or stretch. A picture in shades of grey gets three equal channels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtar_flare.data.sources.fields import PICTURES
from fedtar_flare.errors import DataError
from fedtar_flare.imaging.readers.pictures import DEEP, check_side, opened_picture


def read_photograph(path: Path | str) -> np.ndarray:
    """Read one photograph as uint8 (3, height, width): red, green, blue.

    Raises:
        DataError: ``no-image``, ``unreadable``, ``not-a-photograph`` (DICOM and other files, several pictures, pure
            black and white, or a single channel of more than 8 bits), ``blank``, ``too-small``, ``too-large``.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file", reason="no-image")
    if path.suffix.lower() not in PICTURES:
        raise DataError(f"{path}: a photograph is one of {', '.join(PICTURES)}", reason="not-a-photograph")
    with opened_picture(path, "not-a-photograph") as picture:
        if picture.mode in DEEP:
            raise DataError(f"{path}: one channel of more than 8 bits ({picture.mode})", reason="not-a-photograph")
        pixels = np.array(picture.convert("RGB"))
    if pixels.min() == pixels.max():
        raise DataError(f"{path}: every pixel has the same value", reason="blank")
    check_side(path, pixels.shape[:2], "photograph")
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
