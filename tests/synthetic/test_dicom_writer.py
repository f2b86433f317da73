import json
from datetime import datetime
from pathlib import Path

import numpy as np
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom.uid import UID, ExplicitVRLittleEndian
from refused import refused

from fedtar_flare.synthetic.dicom_writer import LOWEST_HU, content_uid, write_ct_series

WHEN = datetime(2021, 3, 4, 5, 6, 7)
SPACING = (10.5, 4.5, 4.25)


def volume(seed=0, shape=(3, 6, 5)):
    return np.random.default_rng(seed).integers(LOWEST_HU, 3072, shape).astype(np.int16)


def write(folder, hu=None, **changes):
    arguments = {"patient_id": "p-1", "study_datetime": WHEN, "age": 61.7, "sex": "F", "spacing_mm": SPACING} | changes
    return write_ct_series(folder, volume() if hu is None else hu, **arguments)


def test_against_the_tables_of_the_standard(tmp_path):
    """Every attribute of type 1 and 2 of every mandatory module of the CT Image IOD, from the standard's tables."""
    folder = Path(pytest.importorskip("highdicom").__file__).parent / "_standard"  # the tables come with it
    modules = json.loads((folder / "iod_module_map.json").read_text())["ct-image"]
    attributes = json.loads((folder / "module_attribute_map.json").read_text())
    mandatory = [module["key"] for module in modules if module["usage"] == "M"]
    assert {"patient", "general-study", "image-plane", "image-pixel", "ct-image", "sop-common"} <= set(mandatory)
    image = pydicom.dcmread(write(tmp_path)[0])
    types = {(a["keyword"], a["type"]) for module in mandatory for a in attributes[module] if not a["path"]}
    assert len(types) > 100
    assert [name for name, kind in types if kind == "1" and image.get(name) in (None, "")] == []
    assert [name for name, kind in types if kind == "2" and name not in image] == []
    known = {a["keyword"] for module in modules for a in attributes[module["key"]] if not a["path"]}
    assert {element.keyword for element in image} <= known  # nothing that the IOD does not have


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)))
def test_hounsfield_units_round_trip_exactly(tmp_path_factory, seed, shape):
    hu = volume(seed, shape)
    files = write(tmp_path_factory.mktemp("ct"), hu)
    images = [pydicom.dcmread(path) for path in files]
    back = np.stack([im.pixel_array.astype(int) * int(im.RescaleSlope) + int(im.RescaleIntercept) for im in images])
    np.testing.assert_array_equal(back, hu)


def test_geometry_and_identity(tmp_path):
    images = [pydicom.dcmread(path) for path in write(tmp_path)]
    positions = np.array([im.ImagePositionPatient for im in images], float)
    np.testing.assert_allclose(positions, [[-2 * 4.25, -2.5 * 4.5, z] for z in (-10.5, 0, 10.5)])
    assert [im.InstanceNumber for im in images] == [1, 2, 3]
    first = images[0]
    assert first.file_meta.TransferSyntaxUID == ExplicitVRLittleEndian and first.SOPClassUID.name == "CT Image Storage"
    assert first.file_meta.MediaStorageSOPInstanceUID == first.SOPInstanceUID
    assert (list(first.PixelSpacing), first.Rows, first.Columns) == ([4.5, 4.25], 6, 5)
    assert list(first.ImageOrientationPatient) == [1, 0, 0, 0, 1, 0]
    assert (first.PatientAge, first.PatientSex, first.PatientID) == ("061Y", "F", "p-1")
    assert (first.StudyDate, first.StudyTime) == ("20210304", "050607")
    for shared in ("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID"):
        assert len({im[shared].value for im in images}) == 1
    assert len({im.SOPInstanceUID for im in images}) == 3
    unknown = pydicom.dcmread(write(tmp_path / "unknown", age=None, sex=None)[0])
    assert "PatientAge" not in unknown and unknown.PatientSex == ""


def test_same_content_writes_the_same_bytes_and_other_content_other_identifiers(tmp_path):
    files, again = write(tmp_path / "files"), write(tmp_path / "again")
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in again]
    first = pydicom.dcmread(files[0])
    other = pydicom.dcmread(write(tmp_path / "other", volume(1))[0])
    assert other.SeriesInstanceUID != first.SeriesInstanceUID and other.StudyInstanceUID == first.StudyInstanceUID
    assert pydicom.dcmread(write(tmp_path / "seed", seed=1)[0]).StudyInstanceUID != first.StudyInstanceUID


@given(st.lists(st.text(max_size=5), max_size=3))
def test_content_uid_is_valid_and_depends_on_its_parts(parts):
    uid = content_uid("a", *parts)
    assert UID(uid).is_valid and uid == content_uid("a", *parts)
    assert uid != content_uid("b", *parts)


def test_bad_patient_ids_are_refused(tmp_path):
    for name in ("", "a\\b", "x" * 65):
        with refused("wrong-patient-id"):
            write(tmp_path / "series", patient_id=name)
    assert not (tmp_path / "series").exists()
