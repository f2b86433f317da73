"""Read a CT volume in Hounsfield units: a DICOM series (folder, file, zip, DICOMDIR) or NIfTI. Needs no MONAI."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtar_flare.errors import DataError
from fedtar_flare.imaging.readers.volume import MIN_SLICES, CTVolume, check_air, check_shape

LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def read_ct(path: Path | str, min_slices: int = MIN_SLICES) -> CTVolume:
    """Read one CT volume; its slices ascend along their normal (towards the head for an ordinary axial series).

    ``path`` is a folder (searched recursively), file, zip or DICOMDIR. Of several series, :mod:`.dicom_series` chooses
    which to read; when that one is refused, the next is tried, and ``warnings`` notes both. Raises :class:`DataError`
    with a reason for each kind of trouble (``docs/images.md``); nothing is guessed in silence.
    """
    path = Path(path)
    if path.name.lower().endswith((".nii", ".nii.gz")):
        from fedtar_flare.imaging.readers.nifti import read_nifti

        return read_nifti(path, min_slices)
    from fedtar_flare.imaging.readers.dicom_files import sources
    from fedtar_flare.imaging.readers.dicom_pixels import read_hu
    from fedtar_flare.imaging.readers.dicom_series import notes_of, scan
    from fedtar_flare.imaging.readers.dicom_stack import build_stack

    with sources(path) as files:
        series, left_out = scan(files, str(path))
        refused = []
        for one in series:
            try:
                slices, spacing, stack_notes = build_stack(one, min_slices)
                hu, notes = read_hu(slices)
                check_air(hu, one.describe())
                check_shape(hu, one.describe())
                break
            except DataError as error:
                refused.append((one, error))
        else:
            raise refused[0][1]
    first = slices[0]
    affine = np.eye(4)
    affine[:3, 0] = first.row * first.spacing[1]
    affine[:3, 1] = first.column * first.spacing[0]
    affine[:3, 2] = first.normal * spacing
    affine[:3, 3] = first.position
    notes = notes_of(one, refused, series, left_out) + stack_notes + notes
    return CTVolume(hu, (spacing, *first.spacing), LPS_TO_RAS @ affine, one.uid, tuple(notes))
