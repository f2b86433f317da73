"""Drafts as DICOM SR and FHIR, with every letter and what was read of a visit."""

import base64
from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace

import learners
import numpy as np
import pytest
import torch
from make_dicom import put, slice_dataset
from pydicom import dcmread
from pydicom.data import get_charset_files
from refused import refused

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning import draft_documents
from fedtar_flare.learning.comparison import CHANGES, Reading
from fedtar_flare.learning.draft_documents import diagnostic_report, structured_report
from fedtar_flare.learning.drafting import Draft
from fedtar_flare.learning.findings import ReadFinding, read_findings
from fedtar_flare.learning.labels import labeler
from fedtar_flare.learning.site_diagnosis import DiagnosisConfig
from fedtar_flare.learning.study import study_of
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.learner import PatientLearner

TEXT = "Erguss ≥ 3 cm, größer; 肺に結節。 Очаг, 결절."
DRAFT = Draft(TEXT, "run", 1, "model", False, created="2024-01-31T12:00:00+00:00")
EXAMPLES = [ds for ds in map(dcmread, get_charset_files("*.dcm")) if ds.get("PatientName")]
GB_2312 = b"Zhang^XiaoDong=\x1b$)A\xd5\xc5^\x1b$)A\xd0\xa1\xb6\xab"


def image(folder, **tags):
    put(StudyDate="20240131", AccessionNumber="A1", **tags)(ds := slice_dataset(np.zeros((8, 8)), 0))
    ds.save_as(path := folder / "1.dcm", enforce_file_format=True)
    return path


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda ds: str(ds.get("SpecificCharacterSet")))
def test_letters_stay_whatever_the_studys_character_set(tmp_path, example):
    name = str(example.PatientName)
    identity = {"PatientName": name, "PatientID": name.split("=")[0].replace("^", " ")}
    path = image(tmp_path, SpecificCharacterSet=example.get("SpecificCharacterSet"), **identity)
    right = dcmread(path)
    structured_report(DRAFT, path).save_as(file := BytesIO(), enforce_file_format=True)
    written = dcmread(BytesIO(file.getvalue()))
    assert written.ContentSequence[-1].TextValue == TEXT and written.PatientName == name
    assert written.PatientID == right.PatientID == study_of(path).patient_id
    resource = diagnostic_report(DRAFT, path)
    assert resource["subject"]["identifier"]["value"] == right.PatientID
    assert TEXT in base64.b64decode(resource["presentedForm"][0]["data"]).decode()


def test_gb_2312_is_read_and_letters_of_no_set_are_refused(tmp_path):
    path = image(tmp_path, SpecificCharacterSet=["", "ISO 2022 IR 58"], PatientName=GB_2312)
    structured_report(DRAFT, path).save_as(file := BytesIO(), enforce_file_format=True)
    assert dcmread(BytesIO(file.getvalue())).PatientName == "Zhang^XiaoDong=张^小东"
    content = image(tmp_path, SpecificCharacterSet="ISO_IR 192", PatientID="M1ller").read_bytes()
    path.write_bytes(content.replace(b"M1ller", b"M\xfcller"))
    for write in (structured_report, diagnostic_report):
        with refused("bad-charset"):
            write(DRAFT, path)


def test_headers_that_are_broken_or_name_no_study_are_refused(tmp_path):
    path = image(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"20240131", b"20241399"))
    with refused("unreadable"):
        structured_report(DRAFT, path)
    path = image(tmp_path, StudyInstanceUID=None)
    assert diagnostic_report(DRAFT, path)
    with refused("unreadable"):
        structured_report(DRAFT, path)
    content = image(tmp_path, PatientID="P7").read_bytes()
    at = content.index(b"\x10\0\x20\0LO")
    path.write_bytes(content[: at + 4] + b"??" + content[at + 6 :])
    for write in (structured_report, diagnostic_report):
        with pytest.raises(ConfigError, match="holds no DICOM file"):
            write(DRAFT, path)


def items_of(item):
    """A content item as (relation, concept, value) with its own items, by concept."""
    value = item.get("TextValue") or (
        item.ConceptCodeSequence[0].CodeValue
        if item.ValueType == "CODE"
        else (float(item.MeasuredValueSequence[0].NumericValue), item.MeasuredValueSequence[0][0x4008EA][0].CodeValue)
    )
    return value, {
        (part.RelationshipType, part.ConceptNameCodeSequence[0].CodeValue): items_of(part)
        for part in item.get("ContentSequence", ())
    }


def test_a_structured_report_gives_each_finding_with_its_parts_and_certainties(tmp_path):
    path = image(tmp_path)
    structured_report(replace(DRAFT, findings=READ), path).save_as(file := BytesIO(), enforce_file_format=True)
    written = dcmread(BytesIO(file.getvalue())).ContentSequence
    assert written[1].TextValue == TEXT
    kinds = {(item.RelationshipType, item.ConceptNameCodeSequence[0].CodeValue) for item in written[2:]}
    assert kinds == {("CONTAINS", "121071")}

    def sure(percent):
        return {("HAS PROPERTIES", "111012"): ((float(percent), "%"), {})}

    side, degree, change = (("HAS PROPERTIES", code) for code in ("272741003", "246112005", "111049"))
    effusion, opacity, cavity = map(items_of, written[2:])
    parts = {side: ("24028007", {}), degree: ("255507004", sure(70)), change: ("35105006", sure(83))}
    assert effusion == ("60046008", parts | sure(98))
    assert opacity == ("Lung Opacity", {degree: ("255509001", sure(70))} | sure(98)), "without a code: as text"
    assert cavity == ("cavity", {change: ("723506003", sure(83))} | sure(98))


def test_a_diagnostic_report_contains_each_finding_by_the_rules_of_r4(tmp_path):
    path = image(tmp_path)
    plain, resource = (diagnostic_report(replace(DRAFT, findings=read), path) for read in (None, READ))
    assert not {"contained", "result"} & plain.keys() and plain.keys() <= resource.keys()
    assert plain["identifier"] != resource["identifier"], "another report under another name"
    contained = resource["contained"]
    assert [{"reference": f"#{of['id']}"} for of in contained] == resource["result"], "dom-3, and no other reference"
    for observation, read in zip(contained, READ, strict=True):
        assert not {"contained", "meta", "text"} & observation.keys(), "dom-2, dom-4, dom-5"
        assert observation["status"] == "preliminary" and observation["subject"] == resource["subject"]
        fields = "resourceType id status category code subject valueCodeableConcept component"
        assert set(observation) <= {*fields.split()}
        codes = [observation["code"], *(part["code"] for part in observation["component"])]
        assert len({str(code) for code in codes}) == len(codes), "obs-7"
        values = {}
        for part in observation["component"]:
            [value] = (part[key] for key in part if key.startswith("value"))
            values[part["code"]["text"]] = value.get("text", value.get("value"))
        assert observation["valueCodeableConcept"]["text"] == ("present" if read.degree else "absent")
        known = {"side": read.side, "degree": read.degree, "change": read.change}
        known |= {f"certainty of {part}": value for part, value in read.certainty.items()}
        assert values == {name: value for name, value in known.items() if value is not None}
    assert [of["code"].get("coding", [{}])[0].get("code") for of in contained] == ["60046008", None, None]


def test_the_codes_are_those_of_dicom_s_own_tables_where_these_have_them():
    from pydicom.sr import _concepts_dict

    checked = 0
    for code in draft_documents._codes().values():
        tables = _concepts_dict.concepts.get(code.scheme_designator, {}).values()
        names = [by_code[code.value][0].lower() for by_code in tables if code.value in by_code]
        assert not names or code.meaning.lower().split()[0] in names[-1], code
        checked += bool(names)
    assert checked > 20


CERTAIN = {"presence": 0.98, "degree": 0.7, "change": 0.83}
READ = (
    ReadFinding("effusion", "right", "small", "increased", CERTAIN),
    ReadFinding("Lung Opacity", None, "large", None, CERTAIN | {"change": None}),
    ReadFinding("cavity", None, None, "resolved", CERTAIN | {"degree": None}),
)


@pytest.mark.parametrize(("level", "change", "side"), [(1, 3, "right"), (0, 5, "left")])
def test_a_side_is_where_the_finding_is_or_was(level, change, side):
    reader, row = labeler("chexpert-rules"), torch.zeros(1, 14, dtype=torch.int64)
    levels, changes = row.clone(), row.clone()
    levels[0, -4], changes[0, -4] = level, change
    branch = SimpleNamespace(reader=reader, key_slices=lambda seen: (row, row))
    branch.read = lambda seen: Reading(levels, changes, *[torch.ones(1, 14)] * 3)
    (read,) = read_findings(branch, None, "Small right effusion; the left effusion has resolved.")
    assert (read.finding, read.side, read.change) == ("Pleural Effusion", side, CHANGES[change])


def test_a_draft_comes_with_what_its_prompts_tell_after_one_pass_through_the_encoder(cohort_of, monkeypatch):
    """Of a head with random weights."""
    diagnosis, patient = DiagnosisConfig(labeler="synthetic", certain=0.3), PatientConfig(enabled=False)
    learner = learners.learner_of(cohort_of("image"), PatientLearner, patient=patient, diagnosis=diagnosis)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learner.generator.diagnosis.head.parameters():
            parameter.copy_(2 * torch.randn(parameter.shape, generator=generator))
    sample = next(sample for sample in learner.cohort.samples("train") if sample.prior is not None)
    images = learner.images([sample])
    [text], passes = learner.generate([sample], images), []
    tokens = learner._frozen.tokens
    monkeypatch.setattr(learner._frozen, "tokens", lambda *args: passes.append(args) or tokens(*args))
    written, findings = learner.write(sample, images)
    assert written == text and len(passes) == 2, "this visit and the one before"
    reading = learner.generator.diagnosis.read(learner.encoded([sample], images))
    names = learner.generator.diagnosis.reader.findings
    by_name = {"_".join(filter(None, (read.finding.replace(" ", "_"), read.side))): read for read in findings}
    assert min(len({read.change for read in findings}), len({read.degree for read in findings})) > 2
    for i, name in enumerate(names):
        level, change = int(reading.levels[0, i]), CHANGES[reading.changes[0, i]]
        assert (name in by_name) == (level > 0 or change == "resolved")
        if read := by_name.get(name):
            assert read.degree == (None, "small", "moderate", "large")[level] and read.change == change
            assert read.certainty["presence"] == round(reading.presence[0, i].item(), 2)
            assert read.certainty["change"] == round(reading.certainty[0, i].item(), 2) >= 0.3 or change == "uncertain"
            assert (read.certainty["degree"] is None) == (level == 0)
    hidden = learner.images([sample])
    hidden.prior.images.slice_mask[:] = False
    for nothing_before in (learner.images([sample], prior=False), hidden):
        alone = learner.read_findings(sample, nothing_before, "")
        assert {(read.change, read.certainty["change"], read.slices[1]) for read in alone} == {(None, None, None)}
