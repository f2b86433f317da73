"""DICOM files to series, and which series of a study is read.

Preference, in this order: slices across the body's axis; no projection (MIP); Hounsfield units; original, not derived
from other images; a soft-tissue kernel; most slices; thinnest; smallest SeriesInstanceUID, so that the choice never
depends on file names.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedtar_flare.core.errors import DataError, decoding
from fedtar_flare.data.sources.reading import by_reason
from fedtar_flare.imaging.readers.dicom_files import Source, compressed, is_companion, not_dicom, read_header
from fedtar_flare.imaging.readers.dicom_slices import PROJECTIONS, NotASlice, Slice, slices_of
from fedtar_flare.imaging.readers.dicom_tags import first
from fedtar_flare.imaging.readers.volume import Note

AXIAL = 0.85  # least component of an axial slice's normal along the body's axis (32 degrees)

SHARP_WORDS = ("LUNG", "BONE", "EDGE", "SHARP", "DETAIL", "ULTRA", "HRCT", "CHEST")
SOFT_WORDS = ("STANDARD", "SOFT", "SMOOTH", "BODY", "STND", "MEDIASTIN")
DECISIVE = ("localizer", "missing-files")  # these explain a whole folder without slices, however few files have them


@dataclass(eq=False)
class Series:
    """The slices of one series, the errors of its damaged files, and files among its slices that cannot be read."""

    uid: str
    slices: list[Slice] = field(default_factory=list)
    damage: list[DataError] = field(default_factory=list)
    unread: list[DataError] = field(default_factory=list)

    def rank(self) -> tuple[bool, bool, bool, bool, int, int, float, str]:
        """Key to sort by, best first."""
        if not self.slices:
            return True, True, True, True, 2, 0, 0.0, self.uid
        head = self.slices[0]
        return (
            abs(head.normal[2]) < AXIAL,
            bool(PROJECTIONS & set(head.image_type)),
            head.rescale_type not in ("", "HU"),
            "DERIVED" in head.image_type,
            softness(head.kernel),
            -len(self.slices),
            head.thickness or 0.0,
            self.uid,
        )

    def describe(self) -> str:
        """For messages."""
        what = f"kernel '{self.slices[0].kernel}', {self.slices[0].thickness} mm" if self.slices else "damaged"
        return f"series {self.uid} ({len(self.slices)} slices, {what})"


def scan(sources: Sequence[Source], where: str) -> tuple[list[Series], list[DataError]]:
    """Read all CT series of these files, best first, and why other files were left out."""
    series: dict[str, Series] = {}
    left_out: list[DataError] = []
    unread: list[tuple[Source, DataError]] = []
    strays: list[Source] = []
    for source in sources:
        header = None
        try:
            with decoding(f"{source.name}: its header cannot be read", "bad-header"):
                if (header := read_header(source)) is not None:
                    for slice_ in slices_of(header):
                        series.setdefault(slice_.series_uid, Series(slice_.series_uid)).slices.append(slice_)
                elif not is_companion(source.member or source.path.name):
                    strays.append(source)
        except NotASlice as error:
            left_out.append(error)
        except DataError as error:
            if header is not None and (uid := first(header.dataset, "SeriesInstanceUID")):
                series.setdefault(uid, Series(uid)).damage.append(error)
            else:
                unread.append((source, error))
    if not series:
        left_out += [error for _, error in unread]
        if not left_out:
            none = DataError(f"{where}: no DICOM file among {len(sources)} file(s)", reason="no-dicom")
            raise next(iter(compressed(source.path for source in strays)), none)
        raise _refusal(left_out, where)
    patients = {slice_.patient_id for item in series.values() for slice_ in item.slices}
    if len(patients) > 1:
        raise DataError(f"{where}: files of {len(patients)} patients; one folder is one study", reason="mixed-patients")
    if len({slice_.study_uid for item in series.values() for slice_ in item.slices}) > 1:
        text = f"{where}: files of several studies, whose dates differ; give each its own folder"
        raise DataError(text, reason="several-studies")
    unread += [(source, not_dicom(source)) for source in strays]
    folders: dict[tuple[Path, str], set[Series]] = defaultdict(set)
    for item in series.values():
        for slice_ in item.slices:
            folders[slice_.source.folder].add(item)
    for source, why in unread:  # each may be a lost slice of the series in its folder
        concerned = folders[source.folder]
        if source.lost_from is not None:
            concerned = {item for item in series.values() if item.uid == source.lost_from}
        for item in concerned:
            item.unread.append(why)
        left_out += [] if concerned else [why]
    return sorted(series.values(), key=Series.rank), left_out


def _refusal(errors: Sequence[DataError], where: str) -> DataError:
    """Make the refusal of files without a CT slice, for their commonest reason; scouts and lost files come first."""
    counts = Counter(error.reason for error in errors)
    reason = next((known for known in DECISIVE if counts[known]), counts.most_common(1)[0][0])
    text = f"{counts[reason]} of {len(errors)} file(s)" if len(errors) > 1 else "its file"
    example = next(error for error in errors if error.reason == reason)
    return DataError(f"{where}: no CT slice; {text}: {example}", reason=reason)


def notes_of(
    chosen: Series, refused: Sequence[tuple[Series, DataError]], all_: Sequence[Series], left_out: Sequence[DataError]
) -> list[Note]:
    """Note how the series was chosen, and the files that were left out."""
    notes = []
    if len(all_) > 1:
        others = "; ".join(item.describe() for item in all_ if item is not chosen)
        notes.append(Note("several-series", f"{chosen.describe()} was chosen by rule; not read: {others}"))
    notes += [Note("series-refused", f"{item.describe()}: {error.reason}: {error}") for item, error in refused]
    examples = {error.reason: error for error in reversed(left_out)}
    left = by_reason(left_out).items()
    return notes + [Note(reason, f"{n} file(s) left out, such as {examples[reason]}") for reason, n in left]


def softness(kernel: str) -> int:
    """Classify a reconstruction kernel: 0 soft tissue, 1 unknown, 2 sharp (lung, bone).

    Siemens: B31f, Br40d, I41f are soft below 50, sharp from there. Canon: FC01 to FC29 soft, FC30 and above sharp.
    Philips: A, B, C soft; D, E, L and Y.. sharp. GE: words.

    >>> [softness(k) for k in ("B31f", "Br64d", "FC08", "FC51", "B", "L", "STANDARD", "LUNG", "")]
    [0, 2, 0, 2, 0, 2, 0, 2, 1]
    """
    name = kernel.upper().strip()
    if any(word in name for word in SHARP_WORDS):
        return 2
    if any(word in name for word in SOFT_WORDS):
        return 0
    if canon := re.match(r"FC(\d\d)", name):
        return 0 if int(canon[1]) < 30 else 2
    if siemens := re.match(r"[A-Z]{1,2}(\d\d)", name):
        return 0 if int(siemens[1]) < 50 else 2
    if philips := re.fullmatch(r"([A-E]|L|Y[A-D])", name):
        return 0 if philips[1] in "ABC" else 2
    return 1
