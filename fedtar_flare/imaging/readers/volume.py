"""A CT volume in Hounsfield units, and the rules by which a reader accepts or refuses one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from fedtar_flare.errors import DataError
from fedtar_flare.settings import Settings

AIR_HU = -1024
ONLY_AIR_HU = -700
"""A volume whose values all lie at or below this shows no body."""
INT16 = np.iinfo(np.int16)
PLAUSIBLE_MM = (0.05, 50.0)
"""Bounds of the distance between voxels of a body CT; beyond them the unit is not millimetres."""
TILT_TOLERANCE_DEG = 0.5
"""Angle off the perpendicular from which slices, or the axes of a volume, count as tilted."""


class Note(NamedTuple):
    """Something a reader met and tolerated: a stable slug and a text for people."""

    reason: str
    text: str


@dataclass(frozen=True, eq=False)
class CTVolume:
    """A CT volume; ``warnings`` lists what the reader met (several series, padding, copies, ...)."""

    hu: np.ndarray  # int16 (z, y, x), Hounsfield units
    spacing_mm: tuple[float, float, float]  # between voxel centres along z, y, x
    affine: np.ndarray  # float64 (4, 4), voxel index (x, y, z) to mm in RAS (right, anterior, superior positive)
    series_uid: str = ""  # DICOM SeriesInstanceUID; empty for other formats
    warnings: tuple[Note, ...] = ()


class CTRules(Settings):
    """What a CT reader accepts."""

    min_slices: int = Field(8, ge=1, description="a series with fewer is refused (too-few-slices)")
    rescale: tuple[float, float] | None = Field(
        None, description="(slope, intercept) for files that carry none; None refuses them (no-rescale)"
    )
    series_uid: str | None = Field(None, description="read this series and no other; None chooses by rule")
    mirrored: Literal["refuse", "read"] = Field(
        "refuse", description="axial slices whose orientation says that they are seen from the head"
    )
    unreadable_files: Literal["refuse", "note"] = Field(
        "refuse", description="what files among the slices do that cannot be read as DICOM: each may be a lost slice"
    )

    def misfits(self) -> Iterator[tuple[str, str]]:
        if self.rescale is not None and self.rescale[0] == 0:
            yield "rescale", "a slope other than 0, and an intercept"


def to_int16(values: np.ndarray) -> np.ndarray:
    """Round to int16 Hounsfield units; values out of range are clipped, NaN and -inf become air.

    An int16 array is returned itself, not a copy.
    """
    if values.dtype == np.int16:
        return values
    if values.dtype.kind == "f":
        values = np.rint(np.nan_to_num(values, nan=AIR_HU, posinf=INT16.max, neginf=AIR_HU))
    return np.clip(values, INT16.min, INT16.max).astype(np.int16)


def check_spacing(where: str, *spacing_mm: float) -> None:
    """Refuse distances between voxels that no body CT has; raises :class:`DataError` ``implausible-spacing``."""
    if not all(PLAUSIBLE_MM[0] <= abs(step) <= PLAUSIBLE_MM[1] for step in spacing_mm):
        shown = ", ".join(f"{step:g}" for step in spacing_mm)
        raise DataError(f"{where}: {shown} mm between voxels; in another unit?", reason="implausible-spacing")


def check_air(hu: np.ndarray, where: str) -> None:
    """A chest CT holds air: without a voxel in -1,100 to -300 HU, its values are most likely not Hounsfield units.

    Raises :class:`DataError` ``blank`` for nothing but air, ``implausible-hu`` for none.
    """
    step = max(1, hu.shape[0] // 16)
    sample = hu[::step, ::8, ::8]
    if not np.any((sample >= -1100) & (sample <= -300)):
        held = f"no voxel is air (values {sample.min()} to {sample.max()})"
        raise DataError(f"{where}: {held}: these are no Hounsfield units of a chest", reason="implausible-hu")
    if hu[::step].max() <= ONLY_AIR_HU:
        raise DataError(f"{where}: nothing but air", reason="blank")
