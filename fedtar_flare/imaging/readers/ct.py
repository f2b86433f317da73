"""Read a CT volume: NIfTI, or a DICOM series, whose slices are sorted by position and checked to be a regular stack."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import numpy as np

from fedtar_flare.core.errors import DataError, collecting
from fedtar_flare.imaging.readers.dicom_files import sources
from fedtar_flare.imaging.readers.dicom_series import AXIAL, Series, notes_of, scan
from fedtar_flare.imaging.readers.dicom_slices import Slice, read_hu
from fedtar_flare.imaging.readers.nifti import read_nifti
from fedtar_flare.imaging.readers.volume import (
    MIN_SLICES,
    TILT_TOLERANCE_DEG,
    CTVolume,
    Note,
    check_air,
    check_shape,
    check_spacing,
)

SAME_PLACE_MM = 0.05
ROUNDING_MM = 0.1  # positions are often rounded: a slice may always lie this far from the even grid
SPACING_TOLERANCE = 0.1  # how far a slice may lie from the even grid, as a share of the slice spacing
LEAST_SLICES = 5  # with fewer, an order cannot be told from its opposite
FEW = 10  # at most 1 of so many slices (at least 2) is in error; when more contradict, the field means something else
NAMED = 5  # unreadable files that a message names; the others are counted
GAP = 1.5  # distance between slices, in stated distances, from which some may be missing
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def read_ct(path: Path | str) -> CTVolume:
    """Read a CT volume; of several series the best that is not refused, which ``warnings`` of the volume note."""
    path = Path(path)
    if path.name.lower().endswith((".nii", ".nii.gz")):
        return read_nifti(path, MIN_SLICES)
    with sources(path) as files:
        series, left_out = scan(files, str(path))
        refused = []
        for chosen in series:
            try:
                slices, spacing, stack_notes = _stack(chosen)
                hu, notes = read_hu(slices)
                check_air(hu, chosen.describe())
                check_shape(hu, chosen.describe())
                break
            except DataError as error:
                refused.append((chosen, error))
        else:
            raise refused[0][1]
    first = slices[0]
    affine = np.eye(4)
    affine[:3, 0] = first.row * first.spacing[1]
    affine[:3, 1] = first.column * first.spacing[0]
    affine[:3, 2] = first.normal * spacing
    affine[:3, 3] = first.position
    notes = notes_of(chosen, refused, series, left_out) + stack_notes + notes
    return CTVolume(hu, (spacing, *first.spacing), LPS_TO_RAS @ affine, tuple(notes))


def _stack(series: Series) -> tuple[list[Slice], float, list[Note]]:
    """The slices, ascending along their normal, the distance between them in mm, and notes."""
    if series.damage:
        error = series.damage[0]
        raise DataError(f"{error} ({len(series.damage)} such file(s) in the series)", reason=error.reason)
    where = series.describe()
    if series.unread:
        named = "; ".join(map(str, series.unread[:NAMED])) + ("; ..." if len(series.unread) > NAMED else "")
        text = f"{where}; {len(series.unread)} file(s) beside its slices cannot be read ({named}); copy them again"
        raise DataError(text, reason=series.unread[0].reason)
    slices, notes = _without_copies(series.slices)
    with _refusing_scouts(slices):
        _check_alike(slices, where)
    normal = slices[0].normal
    slices, more = _one_acquisition(sorted(slices, key=lambda s: float(s.position @ normal)), normal, where)
    notes += more
    with _refusing_scouts(slices):
        if len(slices) < MIN_SLICES:
            text = f"{where}: {len(slices)} slices, at least {MIN_SLICES} needed"
            raise DataError(text, reason="too-few-slices")
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
    if slices[0].normal[2] <= -AXIAL and not slices[0].feet_first:
        text = f"{where}: axial slices seen from the head, of a patient who lay head first or nobody knows: mirrored?"
        raise DataError(text, reason="mirrored")
    _check_locations(slices, positions, spacing, where)
    return slices, spacing, notes + _by_number(slices, where) + _gaps(slices, spacing, where)


def _without_copies(slices: Sequence[Slice]) -> tuple[list[Slice], list[Note]]:
    """Drop files that repeat an object (SOPInstanceUID) at its place; refuse others (``conflicting-copies``)."""
    unique: dict[tuple[str, tuple[float, ...]], Slice] = {}
    for slice_ in slices:
        first = unique.setdefault((slice_.sop_uid, tuple(slice_.position)), slice_)
        if first is slice_:
            continue
        alike = (first.size, first.spacing) == (slice_.size, slice_.spacing)
        alike = alike and np.array_equal((first.row, first.column), (slice_.row, slice_.column))
        if not (alike and np.array_equal(read_hu([first])[0], read_hu([slice_])[0])):
            text = f"{first.source.name} and {slice_.source.name}: one SOPInstanceUID and place, other pixels"
            raise DataError(f"{text}; keep the one that is right", reason="conflicting-copies")
    dropped = len(slices) - len(unique)
    return list(unique.values()), [Note("copies", f"{dropped} copies of slices were dropped")] if dropped else []


@contextmanager
def _refusing_scouts(slices: Sequence[Slice]) -> Iterator[None]:
    """Refuse a few pictures along the body's axis as scouts, whatever is wrong with them as a stack."""
    try:
        yield
    except DataError as error:
        if len(slices) < MIN_SLICES and all(abs(slice_.normal[2]) < AXIAL for slice_ in slices):
            raise DataError(f"{error}; localizers, by how they lie", reason="localizer") from error
        raise


def _check_alike(slices: Sequence[Slice], where: str) -> None:
    """Refuse slices of different orientation, size or pixel spacing."""
    first = slices[0]
    for slice_ in slices:
        if min(float(slice_.row @ first.row), float(slice_.column @ first.column)) < math.cos(math.radians(0.5)):
            raise DataError(f"{where}: slices of different orientation", reason="mixed-orientation")
        if slice_.size != first.size:
            raise DataError(f"{where}: slices of {first.size} and of {slice_.size} pixels", reason="mixed-size")
        if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(slice_.spacing, first.spacing, strict=True)):
            text = f"{where}: pixel spacings {first.spacing} and {slice_.spacing} mm"
            raise DataError(text, reason="mixed-pixel-spacing")


def _one_acquisition(slices: list[Slice], normal: np.ndarray, where: str) -> tuple[list[Slice], list[Note]]:
    """Choose the largest acquisition where several show the same part of the body."""
    groups = Counter(slice_.acquisition for slice_ in slices)
    if not _doubles(slices, normal) and not _interleaved(slices, normal):
        return slices, []
    name, n = min(groups.items(), key=lambda item: (-item[1], item[0]))
    best = [slice_ for slice_ in slices if slice_.acquisition == name]
    if doubles := _doubles(best, normal):
        why = "(contrast phases or reconstructions in one series?); export them apart"
        raise DataError(f"{where}: {doubles} places hold different images {why}", reason="duplicate-slices")
    text = f"{where}: {len(groups)} acquisitions of the same places; '{name}' with {n} slices taken"
    return best, [Note("several-acquisitions", text)]


def _interleaved(slices: Sequence[Slice], normal: np.ndarray) -> bool:
    """Tell whether two acquisitions cover mostly the same part of the body."""
    positions: dict[str, list[float]] = defaultdict(list)
    for slice_ in slices:
        positions[slice_.acquisition].append(float(slice_.position @ normal))
    ranges = [(min(along), max(along)) for along in positions.values() if len(along) >= LEAST_SLICES]
    return any(
        min(a[1], b[1]) - max(a[0], b[0]) > 0.5 * min(a[1] - a[0], b[1] - b[0]) for a, b in combinations(ranges, 2)
    )


def _doubles(slices: Sequence[Slice], normal: np.ndarray) -> int:
    """Count slices that lie at the place of another one."""
    positions = np.array([float(s.position @ normal) for s in slices])
    return int(np.sum(np.diff(np.sort(positions)) < SAME_PLACE_MM))


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


def _check_shear(first: Slice, offsets: np.ndarray, positions: np.ndarray, where: str) -> None:
    """Refuse slices that drift across their normal, as with a tilted gantry, or jump."""
    drift = np.stack([offsets @ first.row, offsets @ first.column], axis=1)
    shear = positions @ drift / float(positions @ positions)
    stray = np.abs(drift - positions[:, None] * shear)
    if np.any(stray > np.maximum(0.5 * np.array([first.spacing[1], first.spacing[0]]), ROUNDING_MM)):
        raise DataError(f"{where}: slices are shifted in plane by up to {stray.max():.1f} mm", reason="shifted-slices")
    angle = math.degrees(math.atan(float(np.hypot(*shear))))
    if angle > TILT_TOLERANCE_DEG:
        raise DataError(f"{where}: the gantry was tilted by {angle:.1f} degrees", reason="gantry-tilt")


def _check_locations(slices: Sequence[Slice], positions: np.ndarray, spacing: float, where: str) -> None:
    """Refuse a SliceLocation that contradicts the ``positions`` (mm), as damage does; it may run either way."""
    if any(slice_.location is None for slice_ in slices):
        return
    stated = np.array([slice_.location for slice_ in slices], float)
    ways = [stated * sign for sign in (1, -1)]
    off = min((_apart(way, positions) > spacing / 2 for way in ways), key=np.count_nonzero)
    one_grid = any(np.all(_apart(np.sort(way), positions) <= spacing / 2) for way in ways)
    if off.any() and (one_grid or np.count_nonzero(off) <= max(2, len(slices) // FEW)):
        text = f"{where}: SliceLocation contradicts ImagePositionPatient in {_named(slices, np.flatnonzero(off))}"
        raise DataError(f"{text}; were slices swapped?", reason="contradicting-order")


def _apart(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Distances (mm) between two lists of positions, whose zeros may differ."""
    difference: np.ndarray = first - second
    return np.abs(difference - np.median(difference))


def _by_number(slices: Sequence[Slice], where: str) -> list[Note]:
    """Note an InstanceNumber that contradicts the positions; it may descend, start anywhere and leave gaps."""
    if (numbers := _numbers(slices)) is None or len(set(np.sign(np.diff(numbers)))) == 1:
        return []
    ways = [(way, _out_of_order(way)) for way in (numbers, [-n for n in numbers])]
    ascending, out = min(ways, key=lambda way: len(way[1]))
    if not 0 < len(out) <= max(2, len(slices) // FEW):
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
    """Indices outside one of the longest ascending subsequences."""
    values, length = np.array(numbers), np.zeros(len(numbers), int)
    for i, number in enumerate(values):  # the longest that ends here
        length[i] = 1 + length[:i][values[:i] < number].max(initial=0)
    out, left, below = [], length.max(), np.inf
    for i in reversed(range(len(values))):
        if length[i] == left and values[i] < below:
            left, below = left - 1, values[i]
        else:
            out.append(i)
    return out[::-1]


def _named(slices: Sequence[Slice], chosen: Sequence[int] | np.ndarray) -> str:
    return ", ".join(slices[i].source.name for i in chosen[:5]) + (", ..." if len(chosen) > 5 else "")
