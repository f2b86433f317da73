"""A CT volume in Hounsfield units, and the rules by which a reader accepts or refuses one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args

import numpy as np

from fedtar_flare.errors import ConfigError, DataError

AIR_HU = -1024
ONLY_AIR_HU = -700
"""A volume without a value above this shows no body."""
INT16 = np.iinfo(np.int16)
PLAUSIBLE_MM = (0.05, 50.0)
"""Bounds of the distance between voxels of a body CT; beyond them a file states another unit than millimetres."""
Repair = Literal["refuse", "resample"]


class Note(NamedTuple):
    """Something a reader met and could live with: a stable slug and a text for the reader on the spot."""

    reason: str
    text: str


@dataclass(frozen=True, eq=False)
class CTVolume:
    """A CT volume.

    Args:
        hu: int16 (z, y, x), Hounsfield units.
        spacing_mm: distance between voxel centres along z, y, x.
        affine: float64 (4, 4), voxel index (x, y, z) to millimetres in RAS (right, anterior, superior positive).
        series_uid: DICOM SeriesInstanceUID that was read; empty for other formats.
        warnings: what was met on the way (several series, padding, copies, lossy compression, ...).
    """

    hu: np.ndarray
    spacing_mm: tuple[float, float, float]
    affine: np.ndarray
    series_uid: str = ""
    warnings: tuple[Note, ...] = ()


@dataclass(frozen=True)
class CTRules:
    """What a CT reader accepts.

    Args:
        min_slices: a series with fewer is refused (``too-few-slices``).
        spacing_tolerance: how far a slice may lie from the even grid, as a share of the slice spacing (0.1 mm is
            always allowed: positions are often rounded).
        tilt_tolerance_deg: angle between the stack of slices and their normal from which it counts as tilted.
        missing_slices: ``refuse``, or ``resample`` to fill the gaps by interpolation.
        uneven_spacing: ``refuse``, or ``resample`` to an even grid.
        gantry_tilt: ``refuse``, or ``resample`` to a straight grid.
        implausible_hu: ``refuse`` or ``accept`` a volume without any air, which a chest CT always has: its values are
            most likely no Hounsfield units.
        rescale: (slope, intercept) for files that carry none; None refuses them (``no-rescale``).
        series_uid: read this series and no other; None chooses by rule.

    Raises:
        ConfigError: names the field and its value.
    """

    min_slices: int = 8
    spacing_tolerance: float = 0.1
    tilt_tolerance_deg: float = 0.5
    missing_slices: Repair = "refuse"
    uneven_spacing: Repair = "refuse"
    gantry_tilt: Repair = "refuse"
    implausible_hu: Literal["refuse", "accept"] = "refuse"
    rescale: tuple[float, float] | None = None
    series_uid: str | None = None

    def __post_init__(self) -> None:
        right = {
            "min_slices": self.min_slices >= 1,
            "spacing_tolerance": 0 <= self.spacing_tolerance < 0.5,
            "tilt_tolerance_deg": 0 <= self.tilt_tolerance_deg < 90,
            "missing_slices": self.missing_slices in get_args(Repair),
            "uneven_spacing": self.uneven_spacing in get_args(Repair),
            "gantry_tilt": self.gantry_tilt in get_args(Repair),
            "implausible_hu": self.implausible_hu in ("refuse", "accept"),
            "rescale": self.rescale is None or (len(self.rescale) == 2 and self.rescale[0] != 0),
        }
        for field in fields(self):
            if not right.get(field.name, True):
                raise ConfigError(f"CT rules: {field.name} = {getattr(self, field.name)!r} is not allowed")


def to_int16(values: np.ndarray) -> np.ndarray:
    """Round to int16 Hounsfield units; what does not fit is clipped, what is not a number becomes air.

    Values that are int16 already are handed back, not copied.
    """
    if values.dtype == np.int16:
        return values
    if values.dtype.kind == "f":
        values = np.rint(np.nan_to_num(values, nan=AIR_HU, posinf=INT16.max, neginf=AIR_HU))
    return np.clip(values, INT16.min, INT16.max).astype(np.int16)


def check_spacing(where: str, *spacing_mm: float) -> None:
    """Refuse distances between voxels that no body CT has.

    Raises:
        DataError: ``implausible-spacing``.
    """
    if not all(PLAUSIBLE_MM[0] <= abs(step) <= PLAUSIBLE_MM[1] for step in spacing_mm):
        shown = ", ".join(f"{step:g}" for step in spacing_mm)
        raise DataError(f"{where}: {shown} mm between voxels; in another unit?", reason="implausible-spacing")


def check_air(hu: np.ndarray, where: str, rules: CTRules) -> list[Note]:
    """A chest CT holds air. Without a voxel in -1,100 to -300 HU its values are most likely no Hounsfield units.

    Raises:
        DataError: ``blank`` for nothing but air; ``implausible-hu``, unless the rules accept it.
    """
    step = max(1, hu.shape[0] // 16)
    sample = hu[::step, ::8, ::8]
    if np.any((sample >= -1100) & (sample <= -300)):
        if hu[::step].max() <= ONLY_AIR_HU:
            raise DataError(f"{where}: nothing but air", reason="blank")
        return []
    text = (
        f"{where}: no voxel is air (values {sample.min()} to {sample.max()}): these are no Hounsfield units of a chest"
    )
    if rules.implausible_hu == "refuse":
        raise DataError(text, reason="implausible-hu")
    return [Note("implausible-hu", text)]
