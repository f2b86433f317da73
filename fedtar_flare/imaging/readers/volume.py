"""A CT volume in Hounsfield units, and checks of its values for damage."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedtar_flare.core.errors import DataError

MIN_SLICES = 8  # A series with fewer is no chest CT
AIR_HU = -1024
ONLY_AIR_HU = -700  # A volume whose values all lie at or below this shows no body
INT16 = np.iinfo(np.int16)
PLAUSIBLE_MM = (0.05, 50.0)  # distance between voxels of a body CT; beyond, the unit is not millimetres
TILT_TOLERANCE_DEG = 0.5  # angle off the perpendicular from which slices, or the axes of a volume, count as tilted
SAMPLE = 4  # step of the rows and columns that are compared between slices
AROUND = 3  # slices on either side with which one is compared
RATIO, LEAST_HU = 2.0, 5.0  # a slice is noted whose mean distance is so much of, and above, the largest around it
SWAPPED = 1.5  # Rows and Columns are swapped when exchanging them makes neighbouring rows this many times more alike


class Note(NamedTuple):
    """Something unusual that a reader tolerated: a stable slug, and a text for people."""

    reason: str
    text: str


@dataclass(frozen=True, eq=False)
class CTVolume:
    """A CT volume, and what its reader tolerated: several series, padding, copies, ..."""

    hu: np.ndarray  # int16 (z, y, x), Hounsfield units
    spacing_mm: tuple[float, float, float]  # between voxel centres along z, y, x
    affine: np.ndarray  # float64 (4, 4), voxel index (x, y, z) to mm in RAS (right, anterior and superior are positive)
    warnings: tuple[Note, ...] = ()


def to_int16(values: np.ndarray) -> np.ndarray:
    """Round to int16 Hounsfield units, clipped; NaN and -inf become air. An int16 array is returned itself."""
    if values.dtype == np.int16:
        return values
    if values.dtype.kind == "f":
        values = np.rint(np.nan_to_num(values, nan=AIR_HU, posinf=INT16.max, neginf=AIR_HU))
    return np.clip(values, INT16.min, INT16.max).astype(np.int16)


def check_spacing(where: str, *spacing_mm: float) -> None:
    """Refuse (``implausible-spacing``) distances between voxels that no body CT has."""
    if not all(PLAUSIBLE_MM[0] <= abs(step) <= PLAUSIBLE_MM[1] for step in spacing_mm):
        shown = ", ".join(f"{step:g}" for step in spacing_mm)
        raise DataError(f"{where}: {shown} mm between voxels; in another unit?", reason="implausible-spacing")


def check_air(hu: np.ndarray, where: str) -> None:
    """Refuse nothing but air (``blank``), and a chest without a voxel in -1,100 to -300 HU (``implausible-hu``)."""
    step = max(1, hu.shape[0] // 16)
    sample = hu[::step, ::8, ::8]
    if not np.any((sample >= -1100) & (sample <= -300)):
        held = f"{where}: no voxel is air (values {sample.min()} to {sample.max()})"
        text = f"{held}: no Hounsfield units of a chest; are slope and intercept applied?"
        raise DataError(text, reason="implausible-hu")
    if hu[::step].max() <= ONLY_AIR_HU:
        raise DataError(f"{where}: nothing but air", reason="blank")


def check_shape(hu: np.ndarray, where: str) -> None:
    """Refuse (``wrong-pixel-count``) slices whose Rows and Columns are swapped."""
    _, rows, columns = hu.shape
    if rows == columns or min(rows, columns) < 2:
        return
    planes = hu[:: max(1, len(hu) // 5)].astype(np.int32)
    stated = np.abs(np.diff(planes, axis=1)).mean()
    if stated > SWAPPED * np.abs(np.diff(planes.reshape(-1, columns, rows), axis=1)).mean():
        text = f"{where}: rows of a picture of {columns} rows and {rows} columns, not of {rows} and {columns}"
        raise DataError(text, reason="wrong-pixel-count")


def unlike_neighbours(hu: np.ndarray) -> list[int]:
    """Indices of slices (z, y, x) far outside the range of their two neighbours, as only gross damage puts them."""
    if len(hu) < 2 * AROUND + 1:
        return []
    distance = np.zeros(len(hu))
    below, here = (hu[i, ::SAMPLE, ::SAMPLE].astype(np.int32) for i in (0, 1))
    for i in range(1, len(hu) - 1):
        above = hu[i + 1, ::SAMPLE, ::SAMPLE].astype(np.int32)
        outside = np.maximum(here - np.maximum(below, above), np.minimum(below, above) - here)
        distance[i] = np.maximum(outside, 0).mean()
        below, here = here, above
    unlike = []
    for i in range(1, len(hu) - 1):
        around = np.concatenate([distance[max(1, i - AROUND) : i], distance[i + 1 : min(len(hu) - 1, i + 1 + AROUND)]])
        if distance[i] > max(RATIO * around.max(), around.max() + LEAST_HU):
            unlike.append(i)
    return unlike
