"""Chest radiographs (PNG, JPEG, DICOM CR and DX) as 8-bit greyscale, dense tissue bright. Needs no MONAI.

8-bit pictures stay as they are. Deeper ones are mapped to 8 bits by their own window (DICOM) or else between their 0.1
and 99.9 percentiles, so that a marker or a dead pixel does not darken the radiograph.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtar_flare.data.sources.fields import PICTURES
from fedtar_flare.errors import DataError, decoding
from fedtar_flare.imaging.limits import check_size
from fedtar_flare.imaging.readers.pictures import DEEP, check_side, opened_picture

if TYPE_CHECKING:
    from fedtar_flare.imaging.readers.dicom_files import Header

LATERAL = {"LL", "RL", "LATERAL", "LLD", "RLD"}
GREY = ("MONOCHROME1", "MONOCHROME2")
KEYWORDS = """
    Modality ViewPosition ModalityLUTSequence RescaleIntercept RescaleSlope RescaleType VOILUTSequence VOILUTFunction
    WindowCenter WindowWidth
"""


def read_radiograph(path: Path | str) -> np.ndarray:
    """Read one radiograph (PNG, JPEG, BMP, TIFF, or DICOM CR/DX) as uint8 (height, width).

    Raises:
        DataError: ``no-image``, ``unreadable``, ``not-a-radiograph`` (another modality, palette colours, several frames
            or pages, pure black and white), ``lateral-view``, ``no-pixel-data``, ``wrong-pixel-count``,
            ``unsupported-transfer-syntax``, ``bad-header``, ``not-finite``, ``blank``, ``too-small``, ``truncated``,
            ``too-large``.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file", reason="no-image")
    radiograph = _read_picture(path) if path.suffix.lower() in PICTURES else _read_dicom(path)
    if radiograph.min() == radiograph.max():
        raise DataError(f"{path}: every pixel has the same value", reason="blank")
    check_side(path, radiograph.shape, "radiograph")
    return radiograph


def _read_picture(path: Path) -> np.ndarray:
    with opened_picture(path, "not-a-radiograph") as picture:
        if picture.mode in DEEP:
            return stretch(_finite(np.array(picture, np.float32), path))
        return np.array(picture.convert("L"))


def _read_dicom(path: Path) -> np.ndarray:
    from pydicom.filereader import read_partial
    from pydicom.pixels import apply_modality_lut, apply_voi_lut
    from pydicom.tag import BaseTag, Tag

    from fedtar_flare.imaging.readers.decoders import decoded, is_readable
    from fedtar_flare.imaging.readers.dicom_files import PIXEL_TAGS, Source, after_pixels, read_header

    tags: list[BaseTag | int] = [*PIXEL_TAGS, *map(Tag, KEYWORDS.split())]
    header = read_header(Source(path), tags)
    if header is None:
        raise DataError(f"{path}: neither a picture nor DICOM", reason="unreadable")
    dataset: Any = header.dataset
    if dataset.get("Modality") not in ("CR", "DX"):
        raise DataError(f"{path}: modality '{dataset.get('Modality')}' is not CR or DX", reason="not-a-radiograph")
    if str(dataset.get("ViewPosition", "")).upper() in LATERAL:
        raise DataError(f"{path}: a lateral view", reason="lateral-view")
    if not header.has_pixels:
        raise DataError(f"{path}: no pixel data", reason="no-pixel-data")
    if (meaning := str(dataset.get("PhotometricInterpretation", ""))) not in GREY:
        raise DataError(f"{path}: photometric interpretation '{meaning}' is not grey", reason="not-a-radiograph")
    _check_size(header, path)
    if not is_readable(header.syntax):
        text = f"{path}: no decoder for transfer syntax {header.syntax} ({header.syntax.name})"
        raise DataError(text, reason="unsupported-transfer-syntax")
    with decoding(f"{path}: the pixels cannot be read"), path.open("rb") as file:
        dataset = read_partial(file, stop_when=after_pixels, specific_tags=tags)
    size = int(dataset.Rows), int(dataset.Columns)
    stored = next(decoded(dataset, header.syntax, [0], size, str(path), masked=True))
    if dataset.get("PixelRepresentation") == 1 and not header.syntax.is_encapsulated:
        as_written = next(decoded(dataset, header.syntax, [0], size, str(path), masked=False))
        if not np.array_equal(as_written, stored):
            text = f"{path}: its values are not signed as PixelRepresentation says, or longer than BitsStored"
            raise DataError(text, reason="bad-header")
    with decoding(f"{path}: its window or rescale cannot be applied", "bad-header"):
        values = apply_modality_lut(stored, dataset)
        windowed = dataset.get("WindowCenter") not in (None, "") or "VOILUTSequence" in dataset
        values = _finite(np.asarray(apply_voi_lut(values, dataset) if windowed else values, np.float32), path)
    grey = _to_bytes(values, float(values.min()), float(values.max())) if windowed else stretch(values)
    return 255 - grey if meaning == "MONOCHROME1" else grey


def _finite(values: np.ndarray, path: Path) -> np.ndarray:
    if not np.isfinite(values).all():
        raise DataError(f"{path}: values that are no number", reason="not-finite")
    return values


def _check_size(header: Header, path: Path) -> None:
    """Refuse sizes beyond the limits, and another number of pixels than rows times columns: they would be garbled."""
    from fedtar_flare.imaging.readers.dicom_tags import integer, positive

    dataset, name, syntax = header.dataset, str(path), header.syntax
    rows, columns = positive(dataset, "Rows", name), positive(dataset, "Columns", name)
    check_size(name, "pixels", rows * columns)
    frames = integer(dataset, "NumberOfFrames", name, 1)
    if frames > 1:
        raise DataError(f"{path}: {frames} frames are no radiograph", reason="not-a-radiograph")
    if not syntax.is_transfer_syntax or syntax.is_private:
        raise DataError(f"{path}: transfer syntax '{syntax}' is not known", reason="unsupported-transfer-syntax")
    allocated = positive(dataset, "BitsAllocated", name)
    stored = integer(dataset, "BitsStored", name, allocated)
    highest = integer(dataset, "HighBit", name, stored - 1)
    if not 1 <= stored <= allocated or highest != stored - 1:
        text = f"{path}: {stored} bits stored in {allocated} allocated, the highest bit {highest}"
        raise DataError(text, reason="bad-header")
    header.check_pixels((rows * columns * allocated + 7) // 8)


def stretch(values: np.ndarray) -> np.ndarray:
    """Map the 0.1 to 99.9 percentiles to 0..255, uint8."""
    low, high = np.percentile(values[::4, ::4] if values.size > 1_000_000 else values, (0.1, 99.9))
    if high <= low:
        low, high = float(values.min()), float(values.max())
    return _to_bytes(values, float(low), float(high))


def _to_bytes(values: np.ndarray, low: float, high: float) -> np.ndarray:
    scaled = values - low
    scaled *= 255.0 / max(high - low, 1e-6)
    np.clip(scaled, 0, 255, out=scaled)
    return np.rint(scaled, out=scaled).astype(np.uint8)
