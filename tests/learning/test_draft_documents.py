"""Drafts as DICOM SR and FHIR keep every letter of the draft and of whose it is, whatever the study's character set."""

import base64
from io import BytesIO

import numpy as np
import pytest
from make_dicom import put, slice_dataset
from pydicom import dcmread
from pydicom.data import get_charset_files
from refused import refused

from fedtar_flare.learning.draft_documents import diagnostic_report, structured_report
from fedtar_flare.learning.drafting import Draft
from fedtar_flare.learning.study import study_of

pytest.importorskip("highdicom", reason="of the extra 'sr'")
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
