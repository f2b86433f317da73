"""The slices of one series, sorted by position and checked to be one regular stack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedtar_flare.errors import DataError
from fedtar_flare.imaging.readers.dicom_series import Series
from fedtar_flare.imaging.readers.dicom_slices import Slice
from fedtar_flare.imaging.readers.volume import CTRules, Note, check_spacing

SAME_PLACE_MM = 0.01
ROUNDING_MM = 0.1


@dataclass(eq=False)
class Stack:
    """Slices that lie behind one another."""

    slices: list[Slice]  # ascending along the normal
    positions: np.ndarray  # along the normal, mm, relative to the first slice
    spacing: float  # of the even grid, mm
    even: bool  # whether the slices lie on that grid
    shear: tuple[float, float]  # drift in mm along a row and a column, per mm along the normal; zero without tilt
    notes: list[Note]


def build_stack(series: Series, rules: CTRules) -> Stack:
    """Sort the slices and check them.

    Raises:
        DataError: the series' own damage; ``too-few-slices``, ``mixed-orientation``, ``mixed-size``,
            ``mixed-pixel-spacing``, ``duplicate-slices``, ``missing-slices``, ``uneven-spacing``,
            ``implausible-spacing``, ``gantry-tilt``, ``shifted-slices``.
    """
    if series.damage:
        error = series.damage[0]
        raise DataError(f"{error} ({len(series.damage)} such file(s) in the series)", reason=error.reason)
    slices, notes = _without_copies(series.slices)
    where = series.describe()
    _check_alike(slices, where)
    normal = slices[0].normal
    slices = sorted(slices, key=lambda s: float(s.position @ normal))
    slices, more = _one_acquisition(slices, normal, where)
    notes += more
    if len(slices) < rules.min_slices:
        raise DataError(f"{where}: {len(slices)} slices, at least {rules.min_slices} needed", reason="too-few-slices")
    offsets = np.array([s.position for s in slices]) - slices[0].position
    positions = offsets @ normal
    if len(slices) == 1:
        if slices[0].step_mm is None:
            notes.append(Note("no-slice-spacing", f"{where}: one slice without a thickness; 1 mm is assumed"))
        return Stack(slices, positions, slices[0].step_mm or 1.0, True, (0.0, 0.0), notes)
    spacing, even = _check_spacing(positions, where, rules, notes)
    check_spacing(where, spacing)
    shear = _check_shear(slices, offsets, positions, where, rules, notes)
    return Stack(slices, positions, spacing, even, shear, notes)


def _without_copies(slices: Sequence[Slice]) -> tuple[list[Slice], list[Note]]:
    """Drop files that repeat an object (SOPInstanceUID) at the same place."""
    kept: dict[tuple[str, tuple[float, ...]], Slice] = {}
    for slice_ in slices:
        kept.setdefault((slice_.sop_uid, tuple(slice_.position)), slice_)
    dropped = len(slices) - len(kept)
    return list(kept.values()), [Note("copies", f"{dropped} copies of slices were dropped")] if dropped else []


def _check_alike(slices: Sequence[Slice], where: str) -> None:
    one = slices[0]
    for slice_ in slices:
        if min(float(slice_.row @ one.row), float(slice_.column @ one.column)) < math.cos(math.radians(0.5)):
            raise DataError(f"{where}: slices of different orientation", reason="mixed-orientation")
        if slice_.size != one.size:
            raise DataError(f"{where}: slices of {one.size} and of {slice_.size} pixels", reason="mixed-size")
        if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(slice_.spacing, one.spacing, strict=True)):
            raise DataError(
                f"{where}: pixel spacings {one.spacing} and {slice_.spacing} mm", reason="mixed-pixel-spacing"
            )


def _one_acquisition(slices: list[Slice], normal: np.ndarray, where: str) -> tuple[list[Slice], list[Note]]:
    """Where one place has different images, take the largest acquisition if that settles it."""
    if not _doubles(slices, normal):
        return slices, []
    groups: dict[str, list[Slice]] = {}
    for slice_ in slices:
        groups.setdefault(slice_.acquisition, []).append(slice_)
    best = min(groups.values(), key=lambda group: (-len(group), group[0].acquisition))
    if len(groups) == 1 or _doubles(best, normal):
        raise DataError(
            f"{where}: {_doubles(best, normal)} places hold different images (contrast phases or reconstructions "
            "in one series?); export them apart",
            reason="duplicate-slices",
        )
    text = (
        f"{where}: {len(groups)} acquisitions at the same places; '{best[0].acquisition}' with {len(best)} slices taken"
    )
    return best, [Note("several-acquisitions", text)]


def _doubles(slices: Sequence[Slice], normal: np.ndarray) -> int:
    places = np.array([float(s.position @ normal) for s in slices])
    return int(np.sum(np.diff(np.sort(places)) < SAME_PLACE_MM))


def _check_spacing(positions: np.ndarray, where: str, rules: CTRules, notes: list[Note]) -> tuple[float, bool]:
    """Spacing of the even grid, and whether the slices lie on it."""
    steps = np.diff(positions)
    spacing = float(np.median(steps))
    mean = float(positions[-1]) / len(steps)
    tolerance = max(rules.spacing_tolerance * mean, ROUNDING_MM)
    if np.max(np.abs(positions - mean * np.arange(len(positions)))) <= tolerance:
        return mean, True
    multiples = steps / spacing
    gaps = (np.rint(multiples) >= 2) & (np.abs(multiples - np.rint(multiples)) < 0.25)
    if gaps.any() and np.all(np.abs(multiples[~gaps] - 1) < 0.25):
        missing = int(np.sum(np.rint(multiples[gaps]) - 1))
        at = ", ".join(f"{p:.1f}" for p in positions[:-1][gaps][:3])
        text, reason, policy = f"{missing} slices missing, after {at} mm", "missing-slices", rules.missing_slices
        spacing = float(np.median(steps[~gaps]))
    else:
        text = f"slice distances from {steps.min():.2f} to {steps.max():.2f} mm"
        reason, policy = "uneven-spacing", rules.uneven_spacing
    if policy == "refuse":
        raise DataError(f"{where}: {text}", reason=reason)
    notes.append(Note(reason, f"{where}: {text}; interpolated to {spacing:.3f} mm"))
    return spacing, False


def _check_shear(
    slices: Sequence[Slice], offsets: np.ndarray, positions: np.ndarray, where: str, rules: CTRules, notes: list[Note]
) -> tuple[float, float]:
    """Drift of the slices across their normal: none, or that of a tilted gantry; a jump is refused."""
    one = slices[0]
    drift = np.stack([offsets @ one.row, offsets @ one.column], axis=1)
    shear = positions @ drift / float(positions @ positions)
    stray = np.abs(drift - positions[:, None] * shear)
    if np.any(stray > np.maximum(0.5 * np.array([one.spacing[1], one.spacing[0]]), ROUNDING_MM)):
        raise DataError(f"{where}: slices are shifted in plane by up to {stray.max():.1f} mm", reason="shifted-slices")
    angle = math.degrees(math.atan(float(np.hypot(*shear))))
    if angle <= rules.tilt_tolerance_deg:
        return 0.0, 0.0
    if rules.gantry_tilt == "refuse":
        raise DataError(f"{where}: the gantry was tilted by {angle:.1f} degrees", reason="gantry-tilt")
    notes.append(Note("gantry-tilt", f"{where}: a tilt of {angle:.1f} degrees was straightened by interpolation"))
    return float(shear[0]), float(shear[1])
