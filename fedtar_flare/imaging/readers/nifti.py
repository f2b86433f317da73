"""NIfTI volumes of a chest CT in Hounsfield units, in any orientation."""

from __future__ import annotations

import gzip
import math
import struct
from contextlib import AbstractContextManager, ExitStack
from io import IOBase
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from fedtar_flare.errors import DataError, decoding
from fedtar_flare.imaging.limits import LONG_ELEMENT, check_size, check_time
from fedtar_flare.imaging.readers.volume import TILT_TOLERANCE_DEG, CTVolume, Note, check_air, check_spacing, to_int16

MOST_NOT_FINITE = 0.5
"""Largest accepted share of NaN and infinite values; a fifth of a slice lies outside the scanner's circle."""
MOST_GZIP = 1032
"""Bytes that one packed byte of gzip can give at most."""
MOST_BEHIND = 1 << 20
"""Bytes behind the voxels of a packed file that are passed over on the way to its checksum."""


def read_nifti(path: Path, min_slices: int) -> CTVolume:
    """Read a NIfTI file and apply its scaling (scl_slope, scl_inter) by slice, so that memory holds one volume.

    Raises :class:`DataError` with a reason for each kind of trouble (``docs/images.md``).
    """
    import nibabel

    if not path.is_file():
        raise DataError(f"{path}: there is no such file", reason="no-image")
    with ExitStack() as stack:
        with _reading(path):
            _check_stated(path)
            file = stack.enter_context(_opened(path))
            image: Any = nibabel.Nifti1Image.from_stream(cast(IOBase, file))  # compressed: unpacked once, front to back
        return _volume(image, file, path, min_slices)


def _volume(image: Any, file: BinaryIO, path: Path, min_slices: int) -> CTVolume:
    header, shape = image.header, tuple(image.shape)
    if header.get_data_dtype().kind not in "iuf":
        raise DataError(f"{path}: values of type {header.get_data_dtype()} are no CT", reason="not-a-volume")
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) != 3:
        raise DataError(f"{path}: shape {shape} is not one volume", reason="not-a-volume")
    affine, lengths = _geometry(image, path)
    if header.get_data_dtype().itemsize == 1 and not np.isfinite(header["scl_slope"]):
        raise DataError(f"{path}: 8-bit values cannot hold Hounsfield units", reason="lossy-8bit")
    if min(shape) < min_slices:
        raise DataError(f"{path}: {shape} voxels, at least {min_slices} slices needed", reason="too-few-slices")
    with _reading(path):
        hu, strange = _values(image, shape, str(path))
        if isinstance(file, gzip.GzipFile) and len(file.read(MOST_BEHIND + 1)) > MOST_BEHIND:  # to its checksum
            raise DataError(f"{path}: it goes on behind the voxels that its header states", reason="unreadable")
    if strange > MOST_NOT_FINITE * hu.size:
        raise DataError(f"{path}: {strange} of {hu.size} values are no number", reason="not-finite")
    notes = [Note("not-finite", f"{path}: {strange} values that are no number were set to air")] if strange else []
    check_air(hu, str(path))
    return CTVolume(hu, (float(lengths[2]), float(lengths[1]), float(lengths[0])), affine, "", tuple(notes))


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.name.lower().endswith(".gz") else path.open("rb")


def _reading(path: Path) -> AbstractContextManager[None]:
    return decoding(f"{path}: not readable as NIfTI")


def _check_stated(path: Path) -> None:
    """Hold the sizes that the header states against the limits and the file's length, before anything is allocated."""
    import nibabel

    packed = path.name.lower().endswith(".gz")
    size = path.stat().st_size
    with _opened(path) as file:
        start = file.read(348)
        header = nibabel.Nifti1Header(start, check=False)
        voxels, first = math.prod(max(n, 1) for n in header.get_data_shape()), float(header["vox_offset"])
        check_size(str(path), "voxels", voxels)
        stated = first + voxels * header.get_data_dtype().itemsize
        if not stated <= size * (MOST_GZIP if packed else 1):
            text = f"{path}: {size:,} bytes cannot hold the {voxels:,} voxels that its header states"
            raise DataError(text, reason="unreadable")
        _check_extensions(file, first, header.endianness, path)


def _check_extensions(file: Any, first: float, endianness: str, path: Path) -> None:
    """Between the header and the voxels; nibabel reads as many bytes as each states."""
    if first > LONG_ELEMENT:
        raise DataError(f"{path}: its voxels begin {first:,.0f} bytes behind its header", reason="unreadable")
    between = file.read(max(0, int(first) - 348))
    place = 4
    while between[:1] not in (b"", b"\0") and place + 8 <= len(between):
        (length,) = struct.unpack_from(f"{endianness}i", between, place)
        if not 8 <= length <= len(between) - place:
            raise DataError(f"{path}: an extension of {length:,} bytes before its voxels", reason="unreadable")
        place += length


def _geometry(image: Any, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Affine, and the voxel sizes in mm along x, y, z."""
    if not (image.header["sform_code"] or image.header["qform_code"]):
        raise DataError(f"{path}: neither sform nor qform says how the volume lies", reason="no-orientation")
    affine = np.asarray(image.affine, np.float64)
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.all(np.isfinite(affine)) or lengths.min() <= 0:
        raise DataError(f"{path}: voxel sizes {lengths} mm", reason="no-pixel-spacing")
    check_spacing(str(path), *lengths)
    axes = affine[:3, :3] / lengths
    skew = float(np.abs(axes.T @ axes - np.eye(3)).max())
    if skew > math.sin(math.radians(TILT_TOLERANCE_DEG)):
        angle = math.degrees(math.asin(min(1.0, skew)))
        raise DataError(f"{path}: axes {angle:.1f} degrees off the perpendicular; resample it", reason="gantry-tilt")
    return affine, lengths


def _values(image: Any, shape: tuple[int, ...], where: str) -> tuple[np.ndarray, int]:
    """int16 (z, y, x), and how many values were not a number."""
    hu = np.empty(shape[::-1], np.int16)
    strange = 0
    rest = (0,) * (len(image.shape) - 3)
    for k in range(shape[2]):
        check_time(where)
        plane = np.asanyarray(image.dataobj[(slice(None), slice(None), k, *rest)])
        if plane.dtype.kind == "f":
            strange += int(plane.size - np.isfinite(plane).sum())
        hu[k] = to_int16(plane).T
    return hu, strange
