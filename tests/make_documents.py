"""Reports as the documents of four standards, to be told apart by their patient, study and order."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from make_dicom import of, put
from pydicom.dataset import FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from fedtar_flare.curation.archive import Index, index_folder
from fedtar_flare.curation.archive_files import File
from fedtar_flare.curation.archive_reports import join_reports
from fedtar_flare.curation.documents import Identifier
from fedtar_flare.data.sources.manifest import write_rows

TEXT = "Größere Ergüsse bds.\n- Neu: Knoten 3 mm."
Resource = dict[str, Any]


def acsn(number: str, system: str = "urn:ris") -> Resource:
    return {"type": {"coding": [{"code": "ACSN"}]}, "system": system, "value": number}


def form(text: str | bytes, kind: str = "text/plain; charset=UTF-8", **more: Any) -> Resource:
    raw = text if isinstance(text, bytes) else text.encode()
    return {"contentType": kind, "data": base64.b64encode(raw).decode(), **more}


def report(number: str = "A1", text: str = TEXT, **more: Any) -> Resource:
    """A DiagnosticReport; a field that is given as None is left out."""
    content = {"resourceType": "DiagnosticReport", "id": number, "status": "final", "issued": "2024-01-31T12:00:00Z",
               "subject": {"reference": "Patient/1"}, "identifier": [acsn(number)],
               "presentedForm": [form(text)]}  # fmt: skip
    return {name: value for name, value in (content | more).items() if value is not None}


def patient(mrn: str = "P1", number: str = "1", system: str = "urn:mrn") -> Resource:
    own = {"type": {"coding": [{"code": "MR"}]}, "system": system, "value": mrn}
    return {"resourceType": "Patient", "id": number, "identifier": [own, {"system": "urn:insurance", "value": "9"}]}


def bundle(*resources: Resource, root: str = "", **more: Any) -> str:
    """A Bundle, of a server's resources where it has a ``root``."""
    entries = [
        item if "resource" in item or "request" in item else {"resource": item}
        | ({"fullUrl": f"{root}/{item['resourceType']}/{item['id']}"} if root else {})
        for item in resources
    ]  # fmt: skip
    return json.dumps({"resourceType": "Bundle", "type": "collection", "entry": entries} | more)


def lines(*resources: Resource) -> str:
    return "\n".join(map(json.dumps, resources))


def deletion(number: str) -> Resource:
    return {"request": {"method": "DELETE", "url": f"DiagnosticReport/{number}"}}


def oru(
    patient: str = "P1", number: str = "A1", text: str = TEXT, status: str = "F", when: str = "20240131120000+0100",
    filler: str = "", study: str = "",
) -> str:  # fmt: skip
    """An HL7 message with one order; each line of the text is an OBX."""
    uid = f"OBX|0|ST|113014^Study Instance UID^DCM||{study}||||||{status}\r" if study else ""
    texts = [f"OBX|{n}|TX|||{line}||||||{status}\r" for n, line in enumerate(text.split("\n"), 1)]
    order = f"OBR|1||{filler or number}^RIS|71250^CT chest{'|' * 14}{number}^RIS||||{when}||RAD|{status}\r"
    head = f"MSH|^~\\&|R|H|F|H|{when}||ORU^R01|1|P|2.5||||||UNICODE UTF-8\r"
    return f"{head}PID|1||{patient}^^^urn:mrn^MR\r{order}{uid}{''.join(texts)}"


def code(meaning, value="1", scheme="L"):
    return [of(CodeValue=value, CodingSchemeDesignator=scheme, CodeMeaning=meaning)]


def item(kind, name="", value="", *items, relation="CONTAINS", number="1", scheme="L"):
    ds = of(ValueType=kind, RelationshipType=relation, ContentSequence=list(items))
    if name:
        ds.ConceptNameCodeSequence = code(name, number, scheme)
    keyword = {"TEXT": "TextValue", "PNAME": "PersonName", "DATE": "Date", "UIDREF": "UID"}.get(kind)
    if keyword:
        setattr(ds, keyword, value)
    elif kind == "CODE":
        ds.ConceptCodeSequence = code(*([value] if isinstance(value, str) else value))
    elif kind == "NUM":
        unit = code("millimeter", "mm", "UCUM")
        ds.MeasuredValueSequence = [of(NumericValue=value, MeasurementUnitsCodeSequence=unit)] if value else []
    return ds


def sr(*items, title=("Befund", "18748-4", "LN"), flags="COMPLETE VERIFIED FINAL", **changes):
    ds = of(ValueType="CONTAINER", ContentSequence=list(items or [item("TEXT", "Lung", "Klar.")]))
    ds.ConceptNameCodeSequence, ds.file_meta = code(*title), FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds.CompletionFlag, ds.VerificationFlag, ds.PreliminaryFlag = flags.split()
    values = {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.88.11", "SOPInstanceUID": generate_uid(), "Modality": "SR",
              "SpecificCharacterSet": "ISO_IR 192", "PatientID": "P1", "AccessionNumber": "A1",
              "StudyInstanceUID": "1.2.1", "ContentDate": "20240131", "ContentTime": "1200"} | changes  # fmt: skip
    put(**values)(ds)
    ds.file_meta.MediaStorageSOPClassUID, ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPClassUID, ds.SOPInstanceUID
    ds.save_as(held := BytesIO(), enforce_file_format=True)
    return held.getvalue()


def text_sr(
    patient: str = "P1", number: str = "A1", text: str = TEXT, study: str = "1.2.1", complete: bool = True
) -> bytes:
    """A Basic Text SR; each line of the text is an item."""
    flags = "COMPLETE VERIFIED FINAL" if complete else "PARTIAL UNVERIFIED FINAL"
    whose = {"PatientID": patient, "IssuerOfPatientID": "urn:mrn", "AccessionNumber": number, "StudyInstanceUID": study}
    return sr(*(item("TEXT", "Finding", line) for line in text.split("\n")), flags=flags, **whose)


OMOP = "note_id,person_id,note_date,note_type_concept_id,note_title,note_text"


def note(number: str, patient: str, day: str, text: str) -> str:
    return f'{number},{patient},{day},44814641,,"{text}"'


def file(uid: str, n: int, patient: Identifier, order: Identifier, day: str, **more: Any) -> File:
    """What is read of one file of an archive's study."""
    fields = {"path": f"{uid}/{n}.dcm", "in_zip": False, "kind": "ct", "patient": patient, "study": uid,
              "order": order, "date": day, "time": "", "birth_date": "", "age": "", "sex": "", "view": "",
              "sop": f"{uid}.{n}", "others": frozenset(), "rejects": frozenset()}  # fmt: skip
    return File(**fields | more)


def indexed(files: Iterable[File], reports: Path) -> Index:
    """The studies of an archive with their reports of a table beside it."""
    files = [file._replace(path=f"{reports.parent}/{file.path}") for file in files]
    with patch("fedtar_flare.curation.archive.all_headers", return_value=(files, [], {})):
        join_reports(index := index_folder(reports.parent), reports)
    return index


def joined(source: Path, studies: Iterable[tuple[str, str, str, str]], lost: list[str] | None = None) -> dict[str, str]:
    """The reports of studies (patient, number, UID, day) by UID, from documents, or from a table of reports.

    ``lost`` gets the files of one document that gave neither a row nor a problem.
    """
    from fedtar_flare.curation.report_sources import collect

    if source.is_dir():
        rows, problems, _ = collect(source)
        if lost is not None:
            files = {file.read_bytes(): file for file in source.rglob("*") if file.suffix in (".dcm", ".hl7")}
            unnamed = [f for f in files.values() if not any(str(f) in str(problem) for problem in problems)]
            lost += map(str, unnamed if len(unnamed) > len(rows) else ())
        source = source.parent / f"{source.name}.csv"
        if not rows:
            return {}
        write_rows(source, rows)
    files = [file(uid, 1, Identifier(owner, "urn:mrn"), Identifier(number), day) for owner, number, uid, day in studies]
    return {study.uid: study.report for study in indexed(files, source).studies if study.report}
