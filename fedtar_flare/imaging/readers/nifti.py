"""NIfTI volumes of a chest CT in Hounsfield units, in any orientation."""

import gzip
import math
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from nibabel.arrayproxy import ArrayProxy
from nibabel.orientations import aff2axcodes

from fedtar_flare.core.errors import DataError, decoding
from fedtar_flare.core.files import open_regular
from fedtar_flare.imaging.limits import LONG_ELEMENT, check_size, check_time
from fedtar_flare.imaging.readers.volume import TILT_TOLERANCE_DEG, CTVolume, Note, check_air, check_spacing, to_int16

MOST_NOT_FINITE = 0.5  # share of NaN and infinite values; a fifth of a slice lies outside the scanner's circle
MOST_GZIP = 1032  # bytes that one packed byte of gzip can give at most
MOST_BEHIND = 1 << 20  # bytes behind the voxels of a packed file that are passed over on the way to its checksum


def read_nifti(path: Path, min_slices: int) -> CTVolume:
    """Read a NIfTI file and apply its scaling (scl_slope, scl_inter) by slice, so that memory holds one volume."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file", reason="no-image")
    packed, unread = path.name.lower().endswith(".gz"), f"{path}: not readable as NIfTI"
    with decoding(unread), open_regular(path) as stored, gzip.open(stored) if packed else stored as file:
        start = file.read(nibabel.Nifti1Header.sizeof_hdr)
        _check_stated(nibabel.Nifti1Header(start, check=False), path, packed)
        return _volume(file, nibabel.Nifti1Header(start), path, min_slices)


def _volume(file: Any, header: Any, path: Path, min_slices: int) -> CTVolume:
    shape = tuple(header.get_data_shape())
    if header.get_data_dtype().kind not in "iuf":
        raise DataError(f"{path}: values of type {header.get_data_dtype()} are no CT", reason="not-a-volume")
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) != 3:
        raise DataError(f"{path}: shape {shape} is not one volume", reason="not-a-volume")
    affine, lengths = _geometry(header, path)
    if header.get_data_dtype().itemsize == 1:
        raise DataError(f"{path}: 8-bit values cannot hold Hounsfield units", reason="lossy-8bit")
    if min(shape) < min_slices:
        raise DataError(f"{path}: {shape} voxels, at least {min_slices} slices needed", reason="too-few-slices")
    hu, strange = _values(ArrayProxy(file, header), shape, str(path))
    if isinstance(file, gzip.GzipFile) and len(file.read(MOST_BEHIND + 1)) > MOST_BEHIND:  # to its checksum
        raise DataError(f"{path}: it goes on behind the voxels that its header states", reason="unreadable")
    if strange > MOST_NOT_FINITE * hu.size:
        raise DataError(f"{path}: {strange} of {hu.size} values are no number", reason="not-finite")
    notes = [Note("not-finite", f"{path}: {strange} values that are no number were set to air")] if strange else []
    check_air(hu, str(path))
    return CTVolume(hu, (float(lengths[2]), float(lengths[1]), float(lengths[0])), affine, tuple(notes))


def _check_stated(header: Any, path: Path, packed: bool) -> None:
    """Check the stated sizes against the limits and the file's length, before anything is allocated."""
    voxels, first = math.prod(max(n, 1) for n in header.get_data_shape()), float(header["vox_offset"])
    check_size(str(path), "voxels", voxels)
    size = path.stat().st_size
    if not first + voxels * header.get_data_dtype().itemsize <= size * (MOST_GZIP if packed else 1):
        text = f"{path}: {size:,} bytes cannot hold the {voxels:,} voxels that its header states"
        raise DataError(text, reason="unreadable")
    if first > LONG_ELEMENT:
        raise DataError(f"{path}: its voxels begin {first:,.0f} bytes behind its header", reason="unreadable")


def _geometry(header: Any, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Affine, and the voxel sizes in mm along x, y, z."""
    if not (header["sform_code"] or header["qform_code"]):
        raise DataError(f"{path}: neither sform nor qform says how the volume lies", reason="no-orientation")
    affine = np.asarray(header.get_best_affine(), np.float64)
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.all(np.isfinite(affine)) or lengths.min() <= 0:
        raise DataError(f"{path}: voxel sizes {lengths} mm", reason="no-pixel-spacing")
    check_spacing(str(path), *lengths)
    stated, text = np.abs(np.asarray(header["pixdim"][1:4], np.float64)), ""
    if stated.min() > 0 and not np.allclose(stated, lengths, rtol=0.01):  # as after a faulty conversion
        text = f"voxels of {lengths.round(3)} mm by the sform, of {stated.round(3)} mm by pixdim"
    elif header["sform_code"] and header["qform_code"]:
        named = aff2axcodes(affine), aff2axcodes(header.get_qform())
        text = f"axes {named[0]} by the sform, {named[1]} by the qform" if named[0] != named[1] else ""
    if text:
        raise DataError(f"{path}: {text}; convert it again from DICOM", reason="conflicting-geometry")
    axes = affine[:3, :3] / lengths
    skew = float(np.abs(axes.T @ axes - np.eye(3)).max())
    if skew > math.sin(math.radians(TILT_TOLERANCE_DEG)):
        angle = math.degrees(math.asin(min(1.0, skew)))
        raise DataError(f"{path}: axes {angle:.1f} degrees off the perpendicular; resample it", reason="gantry-tilt")
    return affine, lengths


def _values(voxels: Any, shape: tuple[int, ...], where: str) -> tuple[np.ndarray, int]:
    """Give int16 (z, y, x), and how many values were not a number."""
    hu = np.empty(shape[::-1], np.int16)
    strange = 0
    rest = (0,) * (len(voxels.shape) - 3)
    for k in range(shape[2]):
        check_time(where)
        plane = np.asanyarray(voxels[(slice(None), slice(None), k, *rest)])
        if plane.dtype.kind == "f":
            strange += int(plane.size - np.isfinite(plane).sum())
        hu[k] = to_int16(plane).T
    return hu, strange
