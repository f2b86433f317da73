"""A draft as a DICOM Structured Report or a DiagnosticReport of FHIR R4, preliminary, and by its own text a draft."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.core.text import UNFIT_IN_ID
from fedtar_flare.imaging.readers.dicom_files import headers
from fedtar_flare.imaging.readers.dicom_tags import first, text_of
from fedtar_flare.learning.drafting import DISCLAIMER, Draft
from fedtar_flare.version import __version__

if TYPE_CHECKING:
    from pydicom import Dataset

TERMS = "http://terminology.hl7.org/CodeSystem"


def identity(draft: Draft, study: str) -> str:
    """Return the UID of a draft, the same for the same draft of a study and run, so that none is stored twice."""
    from pydicom.uid import generate_uid

    return generate_uid(entropy_srcs=[study, draft.run_id, str(draft.round), str(draft.personal), draft.text])


def _evidence(image: Path, needed: str) -> list[Dataset]:
    """Headers of a study whose patient can be named: its letters have to be of the character set that it names."""
    evidence = list(headers(image))
    if not evidence:
        raise ConfigError(f"{image} holds no DICOM file, {needed}")
    for name in ("PatientID", "PatientName", "AccessionNumber"):
        setattr(evidence[0], name, value := text_of(evidence[0], name))
        if UNFIT_IN_ID.search(value):
            text = f"{image}: {name} is in another character set than SpecificCharacterSet names"
            raise DataError(text, reason="bad-charset")
    return evidence


def structured_report(draft: Draft, image: Path) -> Dataset:
    """Write a draft as an Enhanced SR (without a TID: a container with text items)."""
    try:
        from highdicom.sr import (
            ContainerContentItem,
            ContentSequence,
            EnhancedSR,
            RelationshipTypeValues,
            TextContentItem,
        )
    except ImportError as error:
        raise ConfigError("a DICOM SR needs highdicom: pip install 'fedtar_flare[sr]'") from error
    from pydicom.sr.codedict import codes
    from pydicom.sr.coding import Code

    evidence = _evidence(image, "to which a DICOM SR would belong; choose text or json")
    needed = ("PatientBirthDate", "PatientSex", "StudyID", "StudyDate", "StudyTime")
    for name in needed:  # by highdicom; files without identity may lack them
        setattr(evidence[0], name, evidence[0].get(name))
    root = ContainerContentItem(name=Code("18748-4", "LN", "Diagnostic imaging report"), is_content_continuous=False)
    notice = f"{DISCLAIMER}. {draft.model}, adapter of run {draft.run_id}, round {draft.round}"
    root.ContentSequence = ContentSequence(
        [
            TextContentItem(name=name, value=value, relationship_type=RelationshipTypeValues.CONTAINS)
            for name, value in ((codes.DCM.Comment, notice), (Code("121070", "DCM", "Findings"), draft.text))
        ]
    )
    uid = evidence[0].StudyInstanceUID
    return EnhancedSR(
        evidence=evidence,
        content=root,
        series_instance_uid=identity(draft, f"series of {uid}"),
        series_number=9900,
        sop_instance_uid=identity(draft, uid),
        instance_number=1,
        manufacturer="fedtar_flare",
        manufacturer_model_name=f"fedtar_flare {__version__}",
        software_versions=__version__,
        device_serial_number="none",
        series_description=DISCLAIMER,
        is_complete=False,
        is_final=False,
        is_verified=False,
        specific_character_set="ISO_IR 192",  # the study's own may lack letters of the draft
    )


def diagnostic_report(draft: Draft, image: Path) -> dict[str, Any]:
    """Write a draft as a DiagnosticReport; the same draft gives the same resource."""
    header = _evidence(image, "so a report could not say whose it is; choose text or json")[0]

    def by(code: str, keyword: str) -> dict[str, Any]:
        kind = {"coding": [{"system": f"{TERMS}/v2-0203", "code": code}]}
        return {"identifier": {"type": kind, "value": header.get(keyword)}}

    study, order = first(header, "StudyInstanceUID"), header.AccessionNumber
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
