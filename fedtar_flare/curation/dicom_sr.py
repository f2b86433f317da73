"""Reports of DICOM Structured Reports (Basic and Enhanced Text SR) whose content tree is understood whole."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydicom.charset import convert_encodings, default_encoding
from pydicom.sr.codedict import codes

from fedtar_flare.core.errors import DataError
from fedtar_flare.curation.archive_files import issuer_of
from fedtar_flare.curation.documents import FINAL, Document, Identifier, mistaken, moment, studies_of, understood
from fedtar_flare.imaging.readers.dicom_files import Source, read_header
from fedtar_flare.imaging.readers.dicom_tags import text

DOCUMENTS = ("1.2.840.10008.5.1.4.1.1.88.", "1.2.840.10008.5.1.4.1.1.104.")
"""Of all SRs, and of encapsulated PDF and CDA; the two of text are read."""
TEXT_SR = ("1.2.840.10008.5.1.4.1.1.88.11", "1.2.840.10008.5.1.4.1.1.88.22")
STATUS = {"COMPLETE VERIFIED FINAL": FINAL}  # of completion, verification and preliminary flag
FLAGS = {"COMPLETE", "PARTIAL", "VERIFIED", "UNVERIFIED", "FINAL", "PRELIMINARY"}
TITLES = {name for c in codes.cid7000.concepts.values() for name in (f"{c.scheme_designator} {c.value}", c.meaning)}
HEADINGS = {code.meaning.lower() for code in codes.cid7001.concepts.values()}
"""Of imaging reports (CID 7000, 7001). What has another heading says it in each of its sentences."""
CONTEXT = {f"DCM {n}" for n in (*range(121005, 121035), 121046, 121049, 121050, 121051)}
"""Observer, procedure and subject (TID 1002, 1005 and 1006), language, and the same in other words."""
ASSISTANTS = {"SCT 159016003", "SCT 106292003", "SCT 3430008", "SCT 415506007", "UMLS C1954848", "UMLS C1708969",
              "UMLS C2985483", *(f"DCM {n}" for n in (128674, 121082, 121083, 121084, 121090))}  # fmt: skip
"""Technologists, nurses, therapists, sonographers and physicists (CID 7452, also as it was)."""
SEQUENCES = {"ConceptNameCodeSequence", "ContentSequence", "ConceptCodeSequence", "MeasuredValueSequence",
             "ReferencedSOPSequence", "ContentTemplateSequence"}  # fmt: skip
REFERENCES = {"IMAGE", "WAVEFORM", "UIDREF", "SCOORD", "SCOORD3D", "TCOORD"}
DEEPEST, MOST = 30, 5_000  # levels and items of a content tree


def read_sr(file: Path) -> Iterator[Document]:
    """The report of a file, which has to be an SR."""
    if (header := read_header(Source(file), [])) is None:
        raise DataError("no DICOM file", reason="no-report")
    ds: Any = header.dataset
    kind = str(ds.get("SOPClassUID") or ds.file_meta.get("MediaStorageSOPClassUID", ""))
    if kind and not kind.startswith(DOCUMENTS) and ds.get("Modality") not in ("SR", "DOC"):
        raise DataError("a DICOM file that is no document", reason="other-dicom")
    if kind not in TEXT_SR:
        raise DataError("no text report", reason="other-sr")
    if TITLES.isdisjoint(_concept(ds)):
        raise DataError(f"'{_concept(ds)[1]}' is no title of an imaging report (CID 7000)", reason="other-title")
    flags = [ds.get(f"{name}Flag", "FINAL") for name in ("Completion", "Verification", "Preliminary")]
    status = " ".join(flag if flag in FLAGS else "unknown" for flag in flags)
    before = [s for s in ds.get("PredecessorDocumentsSequence") or () if s.StudyInstanceUID == ds.StudyInstanceUID]
    series = [series for study in before for series in study.ReferencedSeriesSequence]
    uids = [sop.ReferencedSOPInstanceUID for each in series for sop in each.ReferencedSOPSequence]
    document = Document(
        origin=str(file),
        names=frozenset(("sr", uid) for uid in (ds.SOPInstanceUID, *uids)),
        status=STATUS.get(status, status),
        issued=moment(f"{ds.ContentDate}{ds.ContentTime}{ds.get('TimezoneOffsetFromUTC', '')}"),
        study=ds.StudyInstanceUID,
    )
    document = understood(document, lambda: _whose(ds))
    yield document if document.unread else understood(document, lambda: {"text": "\n".join(_printed(ds, _lines(ds)))})


def _whose(ds: Any) -> dict[str, Any]:
    """Patient and order, where neither the context of the content nor the requests state others."""
    context: dict[str, set[str]] = defaultdict(set)
    for n, item in enumerate(_items(ds)):
        if n == MOST:
            raise DataError(f"a content tree of more than {MOST} items", reason="too-large")
        if (concept := _concept(item)[0]) in CONTEXT:
            value = _concept(item, "ConceptCodeSequence")[0].strip()
            context[concept].add(value or _text(item, "TextValue") or _text(item, "UID"))
    roles = context["DCM 121010"]
    if context["DCM 121005"] == {"DCM 121007"} or (roles and roles <= ASSISTANTS):
        raise DataError("observed by a device, or by no physician", reason="other-observer")
    if context["DCM 121024"] - {"DCM 121025"}:
        raise DataError("about a fetus, a specimen or a device", reason="other-subject")
    if context["DCM 121018"] - {"", ds.StudyInstanceUID}:
        raise DataError("about a procedure of another study", reason="several-studies")
    requests = [ds, *(ds.get("ReferencedRequestSequence") or ())]
    orders = [Identifier(_text(item, "AccessionNumber"), issuer_of(item)) for item in requests]
    studies = [_text(item, "StudyInstanceUID") for item in requests]
    patients = [Identifier(_text(ds, "PatientID").strip(), issuer_of(ds, "PatientID"))]
    patients += [Identifier(value) for value in context["DCM 121030"]]
    _printed(ds, [part for identifier in (*patients, *orders) for part in identifier])
    return {"patients": tuple(p for p in patients if p.value)} | studies_of(zip(orders, studies, strict=True))


def _printed(ds: Any, texts: list[str]) -> list[str]:
    """The texts; DataError where pydicom read or replaced characters that their set does not hold."""
    sets = ["ascii" if c == default_encoding else c for c in convert_encodings(ds.get("SpecificCharacterSet"))]
    held = all(any(c.encode(codec, "ignore") for codec in sets) for c in {*"".join(texts)})
    if not held or (len(sets) == 1 and any(mistaken(text, sets[0]) for text in texts)):
        raise DataError("text of another character set than SpecificCharacterSet names", reason="bad-charset")
    return texts


def _items(parent: Any, depth: int = 0) -> Iterator[Any]:
    if depth > DEEPEST:
        raise DataError(f"a content tree of more than {DEEPEST} levels", reason="too-deep")
    for item in parent.get("ContentSequence") or ():
        for element in item:  # a damaged tag must not take away what qualifies a sentence
            if not element.keyword or (element.VR == "SQ" and element.keyword not in SEQUENCES):
                raise DataError(f"{element.tag} is no element of a content item", reason="bad-item")
        yield item
        yield from _items(item, depth + 1)


def _children(item: Any) -> list[Any]:
    return [child for child in item.get("ContentSequence") or () if _concept(child)[0] not in CONTEXT]


def _lines(container: Any, heading: str = "") -> list[str]:
    """The sentences of a container: below its heading where that is one of a report's, else each begins with it."""
    details, lines = list[str](), list[str]()
    for child in _children(container):
        if child.get("RelationshipType") == "CONTAINS" and child.get("ValueType") == "CONTAINER":
            lines += _lines(child, _concept(child)[1])
        elif sentence := _sentence(child):
            (lines if child.get("RelationshipType") == "CONTAINS" else details).append(sentence)
    if container.get("ContinuityOfContent") == "CONTINUOUS" and len(lines) > 1:
        raise DataError("items that make one sentence together", reason="item-continuous")
    if not heading:
        return details + lines
    headed = f"{heading} ({'; '.join(details)})" if details else heading
    if heading.lower() in HEADINGS:
        return [headed, *lines] if details or lines else []
    return [f"{headed}: {line}" for line in lines] or [headed] * bool(details)


def _sentence(item: Any) -> str:
    """A content item with all that qualifies it; nothing for a reference without words."""
    kind, value = item.get("ValueType", "BY-REFERENCE"), ""
    details = "; ".join(filter(None, map(_sentence, _children(item))))
    if kind in REFERENCES and not details:
        return ""
    if kind == "TEXT":
        value = _text(item, "TextValue")
    elif kind == "CODE":
        value = _concept(item, "ConceptCodeSequence")[1]
    elif kind == "NUM" and "NumericValueQualifierCodeSequence" not in item:
        (measured,) = item.MeasuredValueSequence
        unit, name = _concept(measured, "MeasurementUnitsCodeSequence")
        value = f"{text(measured, 'NumericValue')} {'' if unit == 'UCUM 1' else name}"
        float(value.split()[0])
    if not value.strip():
        kind = kind if re.fullmatch("[A-Z3-]{1,12}", kind) else "unknown"
        raise DataError(f"an item of type {kind} is no part of a sentence", reason=f"item-{kind}")
    words = ": ".join(filter(None, (_concept(item)[1], value.strip(" "))))
    return f"{words} ({details})" if details else words


def _text(ds: Any, keyword: str) -> str:
    """A text of one value; a two-byte character may hold the separator of values."""
    value = ds.get(keyword) or ""
    if not isinstance(value, str):
        raise DataError(f"{keyword} has several values", reason="bad-item")
    return value.replace("\x1b$)A", "")  # of GB 2312


def _concept(item: Any, keyword: str = "ConceptNameCodeSequence") -> tuple[str, str]:
    """Scheme with value, and meaning, of a code that may be absent."""
    (code,) = item.get(keyword) or [{}]
    value = _text(code, "CodeValue") or _text(code, "LongCodeValue") or _text(code, "URNCodeValue")
    return f"{_text(code, 'CodingSchemeDesignator')} {value}", _text(code, "CodeMeaning")
