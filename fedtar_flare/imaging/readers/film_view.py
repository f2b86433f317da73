"""Which side a radiograph shows, by every DICOM attribute that can tell it."""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from fedtar_flare.core.errors import DataError, decoding
from fedtar_flare.imaging.readers.dicom_tags import first, text, words

Side = Literal["frontal", "lateral"]
DESCRIPTIONS = ("SeriesDescription", "ProtocolName", "AcquisitionDeviceProcessingDescription", "StudyDescription")
KEYWORDS = " ".join(("ViewPosition", "ViewCodeSequence", "PatientOrientation", *DESCRIPTIONS))
POSITIONS: dict[str, Side] = {
    **dict.fromkeys(("PA", "AP"), "frontal"),
    **dict.fromkeys(("LL", "RL", "L", "R", "LLD", "RLD", "LLO", "RLO"), "lateral"),
}
"""Values of ViewPosition that are no words of :data:`WORDS`; oblique and decubitus films count as lateral ones."""
WORDS: dict[Side, str] = {
    "lateral": r"\b(?:[LR] ?LAT|LAT|lateral[eis]*|profil\w*|seitlich|sagittal|oblique?|[LR][AP]O|decubitus)\b",
    "frontal": r"\b(?:P\.? ?A|A\.? ?P|postero-?anterior|antero-?posterior|(?<!para)frontal[eis]*|face)\b",
}


class View(NamedTuple):
    """Frontal or lateral, and the attributes that say so."""

    side: Side
    told_by: tuple[str, ...]


def view_of(dataset: Any, name: str) -> View:
    """The view of a CR or DX image.

    ViewPosition, ViewCodeSequence (DICOM PS3.16, CID 4010) and PatientOrientation (PS3.3, C.7.6.1.1.1) are asked, and
    only where none of them tells, the descriptions, the nearest to the image first; one that names both sides is about
    several films. Raises :class:`DataError` ``unknown-view`` where nothing tells, ``conflicting-view`` where two
    attributes differ, ``bad-header`` where one cannot be read.
    """
    with decoding(f"{name}: what tells its view cannot be read", "bad-header"):
        told = dict(_coded(dataset)) or dict(_described(dataset))
    if not told:
        said = "neither ViewPosition, ViewCodeSequence, PatientOrientation nor a description tells its view"
        raise DataError(f"{name}: {said}; have the export corrected", reason="unknown-view")
    if len(set(told.values())) > 1:
        said = ", ".join(f"{side} by {keyword}" for keyword, side in told.items())
        raise DataError(f"{name}: {said}", reason="conflicting-view")
    return View(next(iter(told.values())), tuple(told))


def _coded(dataset: Any) -> Iterator[tuple[str, Side]]:
    position = first(dataset, "ViewPosition").upper()
    if side := POSITIONS.get(position) or _in_words(position):
        yield "ViewPosition", side
    meanings = " ".join(str(code.get("CodeMeaning", "")) for code in dataset.get("ViewCodeSequence") or ())
    oblique = re.search(WORDS["lateral"], meanings, re.IGNORECASE)  # antero-posterior oblique
    if side := "lateral" if oblique else _in_words(meanings):
        yield "ViewCodeSequence", side
    main = [part[:1] for part in words(dataset, "PatientOrientation")]
    if len(main) == 2 and set(main) & set("AP"):
        yield "PatientOrientation", "lateral"
    elif len(main) == 2 and set(main) & set("LR") and set(main) & set("FH"):
        yield "PatientOrientation", "frontal"


def _described(dataset: Any) -> Iterator[tuple[str, Side]]:
    for keyword in DESCRIPTIONS:
        if side := _in_words(text(dataset, keyword).replace("_", " ")):
            yield keyword, side
            return


def _in_words(words: str) -> Side | None:
    named = [side for side, pattern in WORDS.items() if re.search(pattern, words, re.IGNORECASE)]
    return named[0] if len(named) == 1 else None
