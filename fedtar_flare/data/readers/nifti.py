"""NIfTI volumes of a chest CT in Hounsfield units, in any orientation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtar_flare.data.readers.volume import CTRules, CTVolume, Note, check_air, to_int16
from fedtar_flare.errors import DataError


def read_nifti(path: Path, rules: CTRules | None = None) -> CTVolume:
    """Read a NIfTI file; its scaling (scl_slope, scl_inter) is applied.

    Raises:
        DataError: ``no-image``, ``unreadable``, ``not-a-volume`` (2D, 4D or colour), ``no-orientation`` (neither sform
            nor qform), ``no-pixel-spacing``, ``lossy-8bit``, ``too-few-slices``, ``implausible-hu``.
    """
    import nibabel

    rules = rules or CTRules()
    if not path.is_file():
        raise DataError(f"{path}: there is no such file", reason="no-image")
    try:
        image = nibabel.nifti1.load(path)
        header = image.header
        if header.get_data_dtype().kind not in "iuf":
            raise DataError(f"{path}: values of type {header.get_data_dtype()} are no CT", reason="not-a-volume")
        values = np.asanyarray(image.dataobj)
    except DataError:
        raise
    except Exception as error:  # nibabel, gzip and zlib each raise their own
        raise DataError(
            f"{path}: not readable as NIfTI ({type(error).__name__}: {error})", reason="unreadable"
        ) from error
    while values.ndim > 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.ndim != 3:
        raise DataError(f"{path}: shape {values.shape} is not one volume", reason="not-a-volume")
    if not (header["sform_code"] or header["qform_code"]):
        raise DataError(f"{path}: neither sform nor qform says how the volume lies", reason="no-orientation")
    affine = np.asarray(image.affine, np.float64)
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.all(np.isfinite(affine)) or lengths.min() <= 0:
        raise DataError(f"{path}: voxel sizes {lengths} mm", reason="no-pixel-spacing")
    if header.get_data_dtype().itemsize == 1 and not np.isfinite(header["scl_slope"]):
        raise DataError(f"{path}: 8-bit values cannot hold Hounsfield units", reason="lossy-8bit")
    if min(values.shape) < rules.min_slices:
        raise DataError(
            f"{path}: {values.shape} voxels, at least {rules.min_slices} slices needed", reason="too-few-slices"
        )
    notes = []
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        notes.append(Note("not-finite", f"{path}: values that are no number were set to air"))
    hu = to_int16(values).transpose(2, 1, 0)
    notes += check_air(hu, str(path), rules)
    return CTVolume(hu, (float(lengths[2]), float(lengths[1]), float(lengths[0])), affine, "", tuple(notes))
