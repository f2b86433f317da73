"""DICOM files to series, and which series of a study is read.

Preference, in this order: slices across the body's axis; no projection (MIP); a soft-tissue kernel; most slices;
thinnest; smallest SeriesInstanceUID, so that the choice never depends on file names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedtar_flare.data.sources.reading import by_reason
from fedtar_flare.errors import DataError
from fedtar_flare.imaging.readers.dicom_files import Source, read_header
from fedtar_flare.imaging.readers.dicom_slices import PROJECTIONS, NotASlice, Slice, slices_of
from fedtar_flare.imaging.readers.dicom_tags import first
from fedtar_flare.imaging.readers.kernels import softness
from fedtar_flare.imaging.readers.volume import CTRules, Note

AXIAL = 0.85
"""Least component of an axial slice's normal along the body's axis (32 degrees)."""


@dataclass(eq=False)
class Series:
    """The slices of one series, and the errors of its damaged files."""

    uid: str
    slices: list[Slice] = field(default_factory=list)
    damage: list[DataError] = field(default_factory=list)

    def rank(self) -> tuple[bool, bool, int, int, float, str]:
        """Smaller is better."""
        if not self.slices:
            return True, True, 2, 0, 0.0, self.uid
        one = self.slices[0]
        return (
            abs(one.normal[2]) < AXIAL,
            bool(PROJECTIONS & set(one.image_type)),
            softness(one.kernel),
            -len(self.slices),
            one.thickness or 0.0,
            self.uid,
        )

    def describe(self) -> str:
        one = self.slices[0] if self.slices else None
        what = f"kernel '{one.kernel}', {one.thickness} mm" if one else "damaged"
        return f"series {self.uid} ({len(self.slices)} slices, {what})"


def scan(sources: Sequence[Source], where: str) -> tuple[list[Series], list[DataError]]:
    """All CT series in these files, best first, and why other files were left out.

    Raises :class:`DataError` ``no-dicom`` when no file is DICOM, the commonest reason when none is a CT slice, or
    ``mixed-patients``.
    """
    series: dict[str, Series] = {}
    left_out: list[DataError] = []
    for source in sources:
        header = None
        try:
            if (header := read_header(source)) is None:
                continue
            for slice_ in slices_of(header):
                series.setdefault(slice_.series_uid, Series(slice_.series_uid)).slices.append(slice_)
        except NotASlice as error:
            left_out.append(error)
        except DataError as error:
            if header is None:
                left_out.append(error)
            else:
                uid = first(header.dataset, "SeriesInstanceUID")
                series.setdefault(uid, Series(uid)).damage.append(error)
    if not series:
        if not left_out:
            raise DataError(f"{where}: no DICOM file among {len(sources)} file(s)", reason="no-dicom")
        reason = Counter(error.reason for error in left_out).most_common(1)[0][0]
        raise next(error for error in left_out if error.reason == reason)
    patients = {slice_.patient_id for one in series.values() for slice_ in one.slices}
    if len(patients) > 1:
        raise DataError(f"{where}: files of {len(patients)} patients; one folder is one study", reason="mixed-patients")
    return sorted(series.values(), key=Series.rank), left_out


def candidates(series: Sequence[Series], where: str, rules: CTRules) -> list[Series]:
    """Series to try, best first; raises :class:`DataError` ``no-such-series`` or ``several-studies``."""
    if rules.series_uid is not None:
        if named := [one for one in series if one.uid == rules.series_uid]:
            return named
        known = ", ".join(one.describe() for one in series)
        raise DataError(f"{where}: no series {rules.series_uid}; there is {known}", reason="no-such-series")
    if len({slice_.study_uid for one in series for slice_ in one.slices}) > 1:
        raise DataError(
            f"{where}: files of several studies, whose dates differ; give each its own folder, or name the series",
            reason="several-studies",
        )
    return list(series)


def notes_of(
    chosen: Series, refused: Sequence[tuple[Series, DataError]], all_: Sequence[Series], left_out: Sequence[DataError]
) -> list[Note]:
    """Notes on how the series was chosen."""
    notes = []
    if len(all_) > 1:
        others = "; ".join(one.describe() for one in all_ if one is not chosen)
        notes.append(Note("several-series", f"{chosen.describe()} was chosen by rule; not read: {others}"))
    notes += [Note("series-refused", f"{one.describe()}: {error.reason}: {error}") for one, error in refused]
    examples = {error.reason: error for error in reversed(left_out)}
    left = by_reason(left_out).items()
    return notes + [Note(reason, f"{n} file(s) left out, such as {examples[reason]}") for reason, n in left]
