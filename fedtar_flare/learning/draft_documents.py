"""A draft as a DICOM Structured Report or a DiagnosticReport of FHIR R4, preliminary, and by its own text a draft."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydicom import Dataset
from pydicom.uid import generate_uid

from fedtar_flare.core.errors import ConfigError, DataError, decoding
from fedtar_flare.core.files import read_yaml
from fedtar_flare.core.text import UNFIT_IN_ID
from fedtar_flare.imaging.readers.dicom_files import headers
from fedtar_flare.imaging.readers.dicom_tags import first, text_of
from fedtar_flare.learning.drafting import DISCLAIMER, Draft
from fedtar_flare.learning.findings import ReadFinding
from fedtar_flare.version import __version__

if TYPE_CHECKING:
    from highdicom.sr import ContentItem
    from pydicom.sr.coding import Code

TERMS = "http://terminology.hl7.org/CodeSystem"
SYSTEMS = {"SCT": "http://snomed.info/sct", "DCM": "http://dicom.nema.org/resources/ontology/DCM"}


@cache
def _codes() -> dict[str, Code]:
    """The words that have a code."""
    from pydicom.sr.coding import Code

    schemes = read_yaml(Path(__file__).with_name("finding_codes.yaml"), "codes").items()
    return {words: Code(str(code), scheme, name) for scheme, of in schemes for words, (code, name) in of.items()}


def identity(draft: Draft, study: str) -> str:
    """Return the UID of a draft, the same for the same draft of a study and run, so that none is stored twice."""
    read = [str(finding[:4]) for finding in draft.findings or ()]  # without certainties, which may differ in a digit
    return generate_uid(entropy_srcs=[study, draft.run_id, str(draft.round), str(draft.personal), draft.text, *read])


def _evidence(image: Path, needed: str) -> list[Dataset]:
    """Headers of a study whose patient can be named: its letters have to be of the character set that it names."""
    evidence = list(headers(image))
    if not evidence:
        raise ConfigError(f"{image} holds no DICOM file, {needed}")
    for name in ("PatientID", "PatientName", "AccessionNumber"):
        with decoding(f"{image}: {name} cannot be read"):
            setattr(evidence[0], name, value := text_of(evidence[0], name))
        if UNFIT_IN_ID.search(value):
            text = f"{image}: {name} is in another character set than SpecificCharacterSet names"
            raise DataError(text, reason="bad-charset")
    return evidence


def _content_item(name: str, words: str, certainty: float | None, parts: Iterable[Any] = ()) -> ContentItem:
    """A finding as a content item, or a part of one as its property; each has its certainty as a property."""
    from highdicom.sr import CodeContentItem, ContentSequence, NumContentItem, TextContentItem
    from pydicom.sr.codedict import codes

    code, relation = _codes().get(words.lower()), "CONTAINS" if name == "finding" else "HAS PROPERTIES"
    about: Any = (_codes()[name], code or words, relation)
    item: ContentItem = CodeContentItem(*about) if code else TextContentItem(*about)
    properties = [_content_item(*part) for part in parts]
    if certainty is not None:
        percent = {"unit": codes.UCUM.Percent, "relationship_type": "HAS PROPERTIES"}
        properties.append(NumContentItem(_codes()["certainty"], round(100 * certainty), **percent))
    if properties:
        item.ContentSequence = ContentSequence(properties)
    return item


def structured_report(draft: Draft, image: Path) -> Dataset:
    """Write a draft as an Enhanced SR (without a TID: a container with text items, and an item for each finding)."""
    try:
        from highdicom.sr import ContainerContentItem, ContentSequence, EnhancedSR, TextContentItem
    except ImportError as error:
        raise ConfigError("a DICOM SR needs highdicom: pip install 'fedtar_flare[sr]'") from error
    from pydicom.sr.codedict import codes
    from pydicom.sr.coding import Code

    evidence = _evidence(image, "to which a DICOM SR would belong; choose text or json")
    root = ContainerContentItem(name=Code("18748-4", "LN", "Diagnostic imaging report"), is_content_continuous=False)
    notice = f"{DISCLAIMER}. {draft.model}, adapter of run {draft.run_id}, round {draft.round}"
    texts = ((codes.DCM.Comment, notice), (Code("121070", "DCM", "Findings"), draft.text))
    items = [TextContentItem(name, text, "CONTAINS") for name, text in texts]
    read = [_content_item("finding", f.finding, f.certainty["presence"], f.parts) for f in draft.findings or ()]
    root.ContentSequence = ContentSequence([*items, *read])
    with decoding(f"{image}: its headers fit into no DICOM SR"):
        uid = evidence[0].StudyInstanceUID
        for name in ("PatientBirthDate", "PatientSex", "StudyID", "StudyDate", "StudyTime"):
            setattr(evidence[0], name, evidence[0].get(name))  # highdicom needs what files without identity may lack
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


def _concept(words: str, kind: str = "") -> dict[str, Any]:
    """Words as a CodeableConcept, with the code that they, or their ``kind``, have."""
    code = _codes().get((kind or words).lower())
    coding = {"system": SYSTEMS[code[1]], "code": code[0], "display": code[2]} if code else None
    return {"text": words, **({"coding": [coding]} if coding else {})}


def _observation(name: str, read: ReadFinding, subject: dict[str, Any]) -> dict[str, Any]:
    """A finding as an Observation that the report contains."""
    unit = {"system": "http://unitsofmeasure.org", "code": "1"}
    parts = [{"code": _concept(part), "valueCodeableConcept": _concept(words)} for part, words, _ in read.parts]
    certainties = [
        {"code": _concept(f"certainty of {part}", "certainty"), "valueQuantity": {"value": value, **unit}}
        for part, value in read.certainty.items()
        if value is not None
    ]
    return {
        "resourceType": "Observation",
        "id": name,
        "status": "preliminary",
        "category": [{"coding": [{"system": f"{TERMS}/observation-category", "code": "imaging"}]}],
        "code": _concept(read.finding),
        "subject": subject,
        "valueCodeableConcept": _concept("present" if read.degree else "absent"),
        "component": parts + certainties,
    }


def diagnostic_report(draft: Draft, image: Path) -> dict[str, Any]:
    """Write a draft as a DiagnosticReport; the same draft gives the same resource."""
    header = _evidence(image, "so a report could not say whose it is; choose text or json")[0]

    def by(code: str, keyword: str) -> dict[str, Any]:
        kind = {"coding": [{"system": f"{TERMS}/v2-0203", "code": code}]}
        return {"identifier": {"type": kind, "value": text_of(header, keyword)}}

    subject, read = by("MR", "PatientID"), draft.findings or ()
    observations = [_observation(f"finding-{i}", finding, subject) for i, finding in enumerate(read, start=1)]
    results = [{"reference": f"#{observation['id']}"} for observation in observations]
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
        "subject": subject,
        "issued": draft.created,
        **({"contained": observations, "result": results} if observations else {}),
        "imagingStudy": [{"identifier": {"system": "urn:dicom:uid", "value": f"urn:oid:{study}"}}],
        "presentedForm": [{"contentType": "text/plain; charset=utf-8", "data": text}],
    }


def draft_file(draft: Draft, image: Path, form: str) -> bytes:
    """Write a draft as ``text``, ``json``, ``fhir`` or ``sr``."""
    if form == "sr":
        structured_report(draft, image).save_as(file := BytesIO(), enforce_file_format=True)
        return file.getvalue()
    data = diagnostic_report(draft, image) if form == "fhir" else draft.to_dict()
    return (draft.to_text() if form == "text" else json.dumps(data, indent=2)).encode()
