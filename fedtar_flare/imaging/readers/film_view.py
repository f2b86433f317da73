"""The view of a radiograph, frontal or lateral, by the DICOM attributes that state it."""

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
"""Codes of ViewPosition that :data:`WORDS` does not match; oblique and decubitus films count as lateral ones."""
WORDS: dict[Side, str] = {
    "lateral": r"\b(?:[LR] ?LAT|LAT|lateral[eis]*|profil\w*|seitlich|sagittal|oblique?|[LR][AP]O|decubitus)\b",
    "frontal": r"\b(?:P\.? ?A|A\.? ?P|postero-?anterior|antero-?posterior|(?<!para)frontal[eis]*|face)\b",
}


class View(NamedTuple):
    """The view of a radiograph, and the keywords of the attributes that state it."""

    side: Side
    stated_by: tuple[str, ...]


def view_of(dataset: Any, name: str) -> View:
    """Decide the view of a CR or DX image.

    ViewPosition, ViewCodeSequence (DICOM PS3.16, CID 4010) and PatientOrientation (PS3.3, C.7.6.1.1.1) are read first.
    Only where none of them states a view, the descriptions are, that of the series before that of the study; one that
    names both views is about several films.
    """
    with decoding(f"{name}: the attributes of its view cannot be read", "bad-header"):
        stated = dict(_coded(dataset)) or dict(_described(dataset))
    if not stated:
        text_ = "neither ViewPosition, ViewCodeSequence, PatientOrientation nor a description states its view"
        raise DataError(f"{name}: {text_}; have the export corrected", reason="unknown-view")
    if len(set(stated.values())) > 1:
        views = ", ".join(f"{side} by {keyword}" for keyword, side in stated.items())
        raise DataError(f"{name}: {views}", reason="conflicting-view")
    return View(next(iter(stated.values())), tuple(stated))


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
