"""Read a CT volume in Hounsfield units: a DICOM series (folder, file, zip, DICOMDIR) or NIfTI. Needs no MONAI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedtar_flare.errors import DataError
from fedtar_flare.imaging.readers.volume import MIN_SLICES, CTVolume, check_air, check_shape

LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def read_ct(path: Path | str | Sequence[Path | str], min_slices: int = MIN_SLICES) -> CTVolume:
    """Read one CT volume; its slices ascend along their normal (towards the head for an ordinary axial series).

    Of a study with several series, :mod:`.dicom_series` chooses which to read; when that one is refused, the next is
    tried, and ``warnings`` notes both.

    Parameters
    ----------
    path : path, or sequence of paths
        A folder (searched recursively), file, zip or DICOMDIR, or the files of one study.
    min_slices : int, default 8
        A series with fewer is refused.

    Raises
    ------
    DataError
        With a reason for each kind of trouble (``docs/images.md``); nothing is guessed in silence.
    """
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(p) for p in path]
    if len(paths) == 1 and paths[0].name.lower().endswith((".nii", ".nii.gz")):
        from fedtar_flare.imaging.readers.nifti import read_nifti

        return read_nifti(paths[0], min_slices)
    return _read_series(paths, min_slices)


def _read_series(paths: list[Path], min_slices: int) -> CTVolume:
    from fedtar_flare.imaging.readers.dicom_files import sources
    from fedtar_flare.imaging.readers.dicom_pixels import read_hu
    from fedtar_flare.imaging.readers.dicom_series import notes_of, scan
    from fedtar_flare.imaging.readers.dicom_stack import build_stack

    where = str(paths[0]) if len(paths) == 1 else f"{len(paths)} files beside {paths[0]}"
    with sources(paths) as files:
        series, left_out = scan(files, where)
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
