"""Reports of DICOM Structured Reports (Basic and Enhanced Text SR)."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydicom import dcmread
from pydicom.charset import convert_encodings, default_encoding

from fedtar_flare.core.errors import DataError
from fedtar_flare.curation.archive_files import issuer_of
from fedtar_flare.curation.documents import FINAL, Document, Identifier, moment
from fedtar_flare.curation.hl7v2 import WRONG

TEXT_SR = ("1.2.840.10008.5.1.4.1.1.88.11", "1.2.840.10008.5.1.4.1.1.88.22")
STATUS = {"COMPLETE VERIFIED FINAL": FINAL}
"""Of completion, verification and preliminary flag."""


def read_sr(file: Path) -> Iterator[Document]:
    """The report of a file, if it is an SR."""

    def lines(items: Iterable[Any]) -> Iterator[str]:
        for item in items:
            heading = item.ConceptNameCodeSequence[0].CodeMeaning if "ConceptNameCodeSequence" in item else ""
            yield ": ".join(filter(None, (heading, item.get("TextValue", "").replace("\x1b$)A", ""))))  # of GB 2312
            yield from lines(item.get("ContentSequence", ()))

    ds = dcmread(file, stop_before_pixels=True)
    if ds.get("Modality") == "SR":
        if ds.SOPClassUID not in TEXT_SR:
            raise DataError("no text report", reason="other-sr")
        status = " ".join(ds.get(f"{n}Flag", "FINAL") for n in ("Completion", "Verification", "Preliminary"))
        document = Document(
            origin=str(file),
            names=frozenset({("sr", ds.SOPInstanceUID)}),
            status=STATUS.get(status, status),
            issued=moment(ds.ContentDate + ds.ContentTime),
            patients=(Identifier(str(ds.PatientID), ds.get("IssuerOfPatientID", "")),) if ds.PatientID else (),
            order=Identifier(ds.get("AccessionNumber", ""), issuer_of(ds)),
            study=ds.StudyInstanceUID,
            text="\n".join(filter(None, lines(ds.get("ContentSequence", ())))),
        )
        # pydicom reads characters of other sets as Latin-1, or replaces them
        text = document.text + document.order.value + document.order.issuer + "".join(map("".join, document.patients))
        sets = convert_encodings(ds.get("SpecificCharacterSet"))
        sets = ["ascii" if codec == default_encoding else codec for codec in sets]
        if WRONG.search(text) or not all(any(c.encode(codec, "ignore") for codec in sets) for c in {*text}):
            raise DataError("text of another character set than SpecificCharacterSet names", reason="bad-charset")
        yield document
