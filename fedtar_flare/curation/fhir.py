"""DiagnosticReports of FHIR R4, from Bundles (``.json``) and bulk exports (``.ndjson``)."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import DataError, collecting, decoding, within
from fedtar_flare.curation.documents import FINAL, WITHDRAWN, Document, Identifier, moment

STATUS = dict.fromkeys(("final", "amended", "corrected", "appended"), FINAL)
STATUS |= dict.fromkeys(("cancelled", "entered-in-error"), WITHDRAWN)
IMAGING = {"RAD", "CT", "CUS", "NMR", "NMS", "OUS", "RUS", "RX", "VUS", "XRC", "LP29684-5"}
"""Sections of HL7's table 0074, and LOINC's radiology; other sections may use the same accession numbers."""


def read_fhir(files: list[Path], problems: list[DataError]) -> Iterator[Document]:
    """The reports of FHIR files, whose resources refer to each other."""
    resources: dict[str, Any] = {}
    reports: list[tuple[str, Any]] = []
    for file in files:
        with collecting(problems), within(str(file)), decoding("cannot be read"):
            text = file.read_text(encoding="utf-8-sig")
            lines = filter(str.strip, text.split("\n")) if file.suffix == ".ndjson" else [text]
            for item in map(json.loads, lines):
                for entry in item.get("entry", [{"resource": item}]):
                    inner = entry.get("resource") or {"resourceType": ""}
                    names = f"{inner['resourceType']}/{inner.get('id')}", entry.get("fullUrl") or "none"
                    resources |= dict.fromkeys(names, inner)
                    if inner["resourceType"] == "DiagnosticReport":
                        reports.append((f"{file}, {names[0]}", inner))
    for origin, report in reports:
        with collecting(problems), within(origin), decoding("cannot be read", "bad-resource"):
            yield _document(origin, report, resources)


def _document(origin: str, report: Any, resources: dict[str, Any]) -> Document:
    inside = {f"#{inner['id']}": inner for inner in report.get("contained", ())}

    def identifiers(reference: Any) -> list[Any]:
        name = reference.get("reference", "")
        resource = inside.get(name) or resources.get(name) or resources.get("/".join(name.split("/")[-2:])) or reference
        value = resource.get("identifier", {})
        return value if isinstance(value, list) else [value]

    def typed(values: list[Any], code: str) -> list[Any]:
        return [i for i in values if any(c.get("code") == code for c in i.get("type", {}).get("coding", ()))]

    related = (report, *report.get("basedOn", ()), *report.get("imagingStudy", ()))
    values = [value for reference in related for value in identifiers(reference)]
    owners = identifiers(report["subject"])
    owners = typed(owners, "MR") or owners
    number: dict[str, str] = next(iter(typed(values, "ACSN")), {})
    texts = [base64.b64decode(form["data"]).decode("utf-8") for form in report.get("presentedForm", ())
             if form.get("contentType", "").startswith("text/plain") and "data" in form]  # fmt: skip
    studies = [i["value"].removeprefix("urn:oid:") for i in values if i.get("system") == "urn:dicom:uid"]
    sections = {c.get("code") for kind in report.get("category", ()) for c in kind.get("coding", ())}
    issued = report.get("issued") or report.get("meta", {}).get("lastUpdated")
    return Document(
        origin=origin,
        names=frozenset({("fhir", f"DiagnosticReport/{report.get('id')}")}),
        status=STATUS.get(report["status"], report["status"]),
        issued=moment(issued or report["effectiveDateTime"]),
        patients=tuple({Identifier(i["value"], i.get("system", "")) for i in owners if i.get("value")}),
        order=Identifier(number.get("value", ""), number.get("system", "")),
        study=studies[0] if len(studies) == 1 else "",
        text="\n".join(texts) or report.get("conclusion", ""),
        unread="" if not sections or sections & IMAGING else "other-section",
    )
