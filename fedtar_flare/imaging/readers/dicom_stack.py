"""The slices of one series, sorted by position and checked to be one regular stack."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from fedtar_flare.errors import DataError, collecting
from fedtar_flare.imaging.readers.dicom_order import check_order
from fedtar_flare.imaging.readers.dicom_pixels import read_hu
from fedtar_flare.imaging.readers.dicom_series import AXIAL, Series
from fedtar_flare.imaging.readers.dicom_slices import Slice
from fedtar_flare.imaging.readers.stray_files import said
from fedtar_flare.imaging.readers.volume import TILT_TOLERANCE_DEG, CTRules, Note, check_spacing

SAME_PLACE_MM = 0.01
ROUNDING_MM = 0.1
"""Positions are often rounded: a slice may always lie this far from the even grid."""
SPACING_TOLERANCE = 0.1
"""How far a slice may lie from the even grid, as a share of the slice spacing."""


def build_stack(series: Series, rules: CTRules) -> tuple[list[Slice], float, list[Note]]:
    """The slices, ascending along their normal, the distance between them in mm, and notes.

    Raises:
        DataError: the series' own damage, or that of a file among its slices (``unreadable``, ``truncated``,
            ``missing-files``); ``conflicting-copies``, ``too-few-slices``, ``localizer``, ``mixed-orientation``,
            ``mixed-size``, ``mixed-pixel-spacing``, ``duplicate-slices``, ``missing-slices``, ``uneven-spacing``,
            ``implausible-spacing``, ``gantry-tilt``, ``shifted-slices``; of a copy, what :func:`read_hu` raises; and
            what :func:`check_order` does.
    """
    if series.damage:
        error = series.damage[0]
        raise DataError(f"{error} ({len(series.damage)} such file(s) in the series)", reason=error.reason)
    where = series.describe()
    slices, notes = _without_copies(series.slices, rules)
    if series.unread:
        where += f"; {said(series.unread)}"
        if rules.unreadable_files == "refuse":
            text = f"{where}; copy them again, or take away what is no slice"
            raise DataError(text, reason=series.unread[0].reason)
        notes.append(Note("unreadable", where))
    with _scouts_in_mind(slices, rules):
        _check_alike(slices, where)
    normal = slices[0].normal
    slices = sorted(slices, key=lambda s: float(s.position @ normal))
    slices, more = _one_acquisition(slices, normal, where)
    notes += more
    if len(slices) < rules.min_slices:
        with _scouts_in_mind(slices, rules):
            text = f"{where}: {len(slices)} slices, at least {rules.min_slices} needed"
            raise DataError(text, reason="too-few-slices")
    if len(slices) == 1:
        if slices[0].step_mm is None:
            notes.append(Note("no-slice-spacing", f"{where}: one slice without a thickness; 1 mm is assumed"))
        return slices, slices[0].step_mm or 1.0, notes
    offsets = np.array([s.position for s in slices]) - slices[0].position
    positions = offsets @ normal
    wrong: list[DataError] = []
    spacing = 0.0
    with collecting(wrong):
        spacing = _even_spacing(positions, where)
        check_spacing(where, spacing)
    with collecting(wrong):
        _check_shear(slices[0], offsets, positions, where)
    if wrong:  # both, if both are
        raise DataError("; ".join(map(str, wrong)), reason=wrong[0].reason)
    return slices, spacing, notes + check_order(slices, positions, spacing, where, rules)


def _without_copies(slices: Sequence[Slice], rules: CTRules) -> tuple[list[Slice], list[Note]]:
    """Drop files that repeat an object (SOPInstanceUID) at the same place; refuse those that differ in what they show.

    Raises :class:`DataError` ``conflicting-copies``.
    """
    kept: dict[tuple[str, tuple[float, ...]], Slice] = {}
    for slice_ in slices:
        first = kept.setdefault((slice_.sop_uid, tuple(slice_.position)), slice_)
        if first is not slice_ and not _shows_the_same(first, slice_, rules):
            text = f"{first.source.name} and {slice_.source.name}: one SOPInstanceUID and place, other pixels"
            raise DataError(f"{text}; keep the one that is right", reason="conflicting-copies")
    dropped = len(slices) - len(kept)
    return list(kept.values()), [Note("copies", f"{dropped} copies of slices were dropped")] if dropped else []


def _shows_the_same(one: Slice, other: Slice, rules: CTRules) -> bool:
    if (one.size, one.spacing) != (other.size, other.spacing):
        return False
    if not (np.array_equal(one.row, other.row) and np.array_equal(one.column, other.column)):
        return False
    return np.array_equal(read_hu([one], rules)[0], read_hu([other], rules)[0])


@contextmanager
def _scouts_in_mind(slices: Sequence[Slice], rules: CTRules) -> Iterator[None]:
    """A few pictures along the body's axis are scouts, whatever keeps them from being a stack."""
    try:
        yield
    except DataError as error:
        if len(slices) < rules.min_slices and all(abs(slice_.normal[2]) < AXIAL for slice_ in slices):
            raise DataError(f"{error}; localizers, by how they lie", reason="localizer") from error
        raise


def _check_alike(slices: Sequence[Slice], where: str) -> None:
    one = slices[0]
    for slice_ in slices:
        if min(float(slice_.row @ one.row), float(slice_.column @ one.column)) < math.cos(math.radians(0.5)):
            raise DataError(f"{where}: slices of different orientation", reason="mixed-orientation")
        if slice_.size != one.size:
            raise DataError(f"{where}: slices of {one.size} and of {slice_.size} pixels", reason="mixed-size")
        if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(slice_.spacing, one.spacing, strict=True)):
            text = f"{where}: pixel spacings {one.spacing} and {slice_.spacing} mm"
            raise DataError(text, reason="mixed-pixel-spacing")


def _one_acquisition(slices: list[Slice], normal: np.ndarray, where: str) -> tuple[list[Slice], list[Note]]:
    """Where one place has different images, take the largest acquisition if that settles it."""
    if not _doubles(slices, normal):
        return slices, []
    groups = Counter(slice_.acquisition for slice_ in slices)
    name, n = min(groups.items(), key=lambda item: (-item[1], item[0]))
    best = [slice_ for slice_ in slices if slice_.acquisition == name]
    if doubles := _doubles(best, normal):
        why = "(contrast phases or reconstructions in one series?); export them apart"
        raise DataError(f"{where}: {doubles} places hold different images {why}", reason="duplicate-slices")
    text = f"{where}: {len(groups)} acquisitions at the same places; '{name}' with {n} slices taken"
    return best, [Note("several-acquisitions", text)]


def _doubles(slices: Sequence[Slice], normal: np.ndarray) -> int:
    places = np.array([float(s.position @ normal) for s in slices])
    return int(np.sum(np.diff(np.sort(places)) < SAME_PLACE_MM))


def _even_spacing(positions: np.ndarray, where: str) -> float:
    """The distance between slices in mm; refuses gaps and other distances."""
    steps = np.diff(positions)
    mean = float(positions[-1]) / len(steps)
    tolerance = max(SPACING_TOLERANCE * mean, ROUNDING_MM)
    if np.max(np.abs(positions - mean * np.arange(len(positions)))) <= tolerance:
        return mean
    multiples = steps / np.median(steps)
    gaps = (np.rint(multiples) >= 2) & (np.abs(multiples - np.rint(multiples)) < 0.25)
    if gaps.any() and np.all(np.abs(multiples[~gaps] - 1) < 0.25):
        missing = int(np.sum(np.rint(multiples[gaps]) - 1))
        at = ", ".join(f"{p:.1f}" for p in positions[:-1][gaps][:3])
        raise DataError(f"{where}: {missing} slices missing, after {at} mm", reason="missing-slices")
    text = f"{where}: slice distances from {steps.min():.2f} to {steps.max():.2f} mm"
    raise DataError(text, reason="uneven-spacing")


def _check_shear(one: Slice, offsets: np.ndarray, positions: np.ndarray, where: str) -> None:
    """Refuse slices that drift across their normal, as with a tilted gantry, or jump."""
    drift = np.stack([offsets @ one.row, offsets @ one.column], axis=1)
    shear = positions @ drift / float(positions @ positions)
    stray = np.abs(drift - positions[:, None] * shear)
    if np.any(stray > np.maximum(0.5 * np.array([one.spacing[1], one.spacing[0]]), ROUNDING_MM)):
        raise DataError(f"{where}: slices are shifted in plane by up to {stray.max():.1f} mm", reason="shifted-slices")
    angle = math.degrees(math.atan(float(np.hypot(*shear))))
    if angle > TILT_TOLERANCE_DEG:
        raise DataError(f"{where}: the gantry was tilted by {angle:.1f} degrees", reason="gantry-tilt")
