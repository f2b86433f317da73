"""Whether what else the headers say of the slices' order agrees with their positions, by which they are ordered.

InstanceNumber may descend, start anywhere and leave gaps; SliceLocation may run either way from any zero. Only a few
slices that contradict all others are a sign of damage (two that were swapped, say), and so are the same locations in
another order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from fedtar_flare.errors import DataError
from fedtar_flare.imaging.readers.dicom_series import AXIAL
from fedtar_flare.imaging.readers.dicom_slices import Slice
from fedtar_flare.imaging.readers.volume import CTRules, Note

LEAST_SLICES = 5
"""Fewer tell no order from its opposite."""
FEW = 10
"""One in so many slices (at least two) may contradict the others; when more do, the field means something else."""
GAP = 1.5
"""Distance between slices, in stated distances, from which some may be missing."""


def check_order(
    slices: Sequence[Slice], positions: np.ndarray, spacing: float, where: str, rules: CTRules
) -> list[Note]:
    """Notes on the order of slices that ascend by ``positions`` (mm), evenly by ``spacing``.

    Raises:
        DataError: ``mirrored`` (axial slices seen from the head), ``contradicting-order`` (SliceLocation),
            ``missing-slices`` (InstanceNumber leaves out as many as the distance does).
    """
    _check_mirrored(slices[0], where, rules)
    if len(slices) < LEAST_SLICES:
        return []
    _check_locations(slices, positions, spacing, where)
    return _by_number(slices, where) + _gaps(slices, spacing, where)


def _check_mirrored(one: Slice, where: str, rules: CTRules) -> None:
    if one.normal[2] <= -AXIAL and rules.mirrored == "refuse":
        text = f"{where}: ImageOrientationPatient has axial slices seen from the head, as no scanner does: mirrored?"
        raise DataError(text, reason="mirrored")


def _check_locations(slices: Sequence[Slice], positions: np.ndarray, spacing: float, where: str) -> None:
    if any(slice_.location is None for slice_ in slices):
        return
    stated = np.array([slice_.location for slice_ in slices], float)
    ways = [stated * sign for sign in (1, -1)]
    off = min((_apart(way, positions) > spacing / 2 for way in ways), key=np.count_nonzero)
    one_grid = any(np.all(_apart(np.sort(way), positions) <= spacing / 2) for way in ways)
    if off.any() and (one_grid or np.count_nonzero(off) <= _few(slices)):
        text = f"{where}: SliceLocation contradicts ImagePositionPatient in {_named(slices, np.flatnonzero(off))}"
        raise DataError(f"{text}; were slices swapped?", reason="contradicting-order")


def _apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """How far (mm) two rows of places lie apart, each from its own zero."""
    apart: np.ndarray = one - other
    return np.abs(apart - np.median(apart))


def _by_number(slices: Sequence[Slice], where: str) -> list[Note]:
    if (numbers := _numbers(slices)) is None or len(set(np.sign(np.diff(numbers)))) == 1:
        return []
    ways = [(way, _out_of_order(way)) for way in (numbers, [-n for n in numbers])]
    ascending, out = min(ways, key=lambda way: len(way[1]))
    if not 0 < len(out) <= _few(slices):
        return []
    moved = np.flatnonzero(np.argsort(np.argsort(ascending)) != np.arange(len(ascending)))
    named = _named(slices, moved if len(moved) <= 2 * len(out) else out)
    return [Note("instance-order", f"{where}: InstanceNumber contradicts ImagePositionPatient in {named}")]


def _gaps(slices: Sequence[Slice], spacing: float, where: str) -> list[Note]:
    stated = slices[0].step_mm
    if stated is None or spacing < GAP * stated:
        return []
    text = f"{where}: {spacing:.1f} mm between slices that state {stated:g} mm"
    if (numbers := _numbers(slices)) is not None:
        steps = set(np.abs(np.diff(numbers)).tolist())
        if len(steps) == 1 and (step := steps.pop()) > 1 and abs(spacing - step * stated) < 0.1 * spacing:
            text = f"{text}, numbered in steps of {step}: {step - 1} of {step} slices missing"
            raise DataError(text, reason="missing-slices")
    return [Note("slice-gaps", f"{text}; were some left out?")]


def _numbers(slices: Sequence[Slice]) -> list[int] | None:
    """The InstanceNumbers; None when one is absent or two are equal."""
    numbers = [slice_.number for slice_ in slices if slice_.number is not None]
    return numbers if len(set(numbers)) == len(slices) else None


def _out_of_order(numbers: Sequence[int]) -> list[int]:
    """Places outside one of the longest ascending subsequences."""
    ends: list[int] = []  # least last number of an ascending run of each length
    last: list[int] = []  # and its place
    before: list[int] = []
    for place, number in enumerate(numbers):
        length = bisect_left(ends, number)
        ends[length : length + 1] = [number]
        last[length : length + 1] = [place]
        before.append(last[length - 1] if length else -1)
    kept, place = set(), last[-1]
    while place >= 0:
        kept.add(place)
        place = before[place]
    return [place for place in range(len(numbers)) if place not in kept]


def _few(slices: Sequence[Slice]) -> int:
    return max(2, len(slices) // FEW)


def _named(slices: Sequence[Slice], places: Sequence[int] | np.ndarray) -> str:
    return ", ".join(slices[i].source.name for i in places[:5]) + (", ..." if len(places) > 5 else "")
