"""A draft as a DiagnosticReport of FHIR R4: preliminary, marked as an AI's, and called a draft in its own text."""

import base64
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.imaging.readers.dicom_tags import first, headers
from fedtar_flare.learning.dicom_sr import identity
from fedtar_flare.learning.drafting import Draft

TERMS = "http://terminology.hl7.org/CodeSystem"


def diagnostic_report(draft: Draft, image: Path) -> dict[str, Any]:
    """Write a draft as a DiagnosticReport; the same draft gives the same resource."""
    if (header := next(headers(image), None)) is None:
        raise ConfigError(f"{image} holds no DICOM file, so a report could not say whose it is; choose text or json")

    def by(code: str, keyword: str) -> dict[str, Any]:
        kind = {"coding": [{"system": f"{TERMS}/v2-0203", "code": code}]}
        return {"identifier": {"type": kind, "value": first(header, keyword)}}

    study, order = first(header, "StudyInstanceUID"), first(header, "AccessionNumber")
    asserted = {"code": "AIAST", "display": "Artificial Intelligence asserted"}
    text = base64.b64encode(draft.to_text().encode()).decode()
    return {
        "resourceType": "DiagnosticReport",
        "meta": {"security": [{"system": f"{TERMS}/v3-ObservationValue", **asserted}]},
        "identifier": [{"system": "urn:ietf:rfc:3986", "value": f"urn:oid:{identity(draft, study)}"}],
        **({"basedOn": [by("ACSN", "AccessionNumber")]} if order else {}),
        "status": "preliminary",
        "category": [{"coding": [{"system": f"{TERMS}/v2-0074", "code": "RAD"}]}],
        "code": {"coding": [{"system": "http://loinc.org", "code": "18748-4", "display": "Diagnostic imaging study"}]},
        "subject": by("MR", "PatientID"),
        "issued": draft.created,
        "imagingStudy": [{"identifier": {"system": "urn:dicom:uid", "value": f"urn:oid:{study}"}}],
        "presentedForm": [{"contentType": "text/plain; charset=utf-8", "data": text}],
    }
