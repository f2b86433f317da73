"""Real CT: one slice in eight transfer syntaxes, and a whole chest series."""

from __future__ import annotations

import numpy as np
import pydicom
import pytest
from refused import refused

from fedtar_flare.imaging.readers.ct import read_ct

pytestmark = pytest.mark.shared_data
ONE_SLICE = 1


def test_all_lossless_files_give_the_same_hu(shared_data):
    files = sorted((shared_data / "ct_transfer_syntaxes").glob("CTImage*.dcm"))
    lossless = [file for file in files if "4.53" not in file.name]
    assert len(lossless) == 7
    plain = pydicom.dcmread(shared_data / "ct_transfer_syntaxes" / "CTImage.dcm")
    expected = plain.pixel_array.astype(int) * int(plain.RescaleSlope) + int(plain.RescaleIntercept)
    for file in lossless:
        volume = read_ct(file, ONE_SLICE)
        assert np.array_equal(volume.hu[0], expected), file.name
        assert volume.spacing_mm == pytest.approx((6.5, 0.675781, 0.675781))


@pytest.mark.parametrize(
    "name, least, reason, said",
    [
        ("*4.53.dcm", ONE_SLICE, "unsupported-transfer-syntax", r"1\.2\.840\.10008\.1\.2\.4\.53"),
        ("no-pixel-data.dcm", ONE_SLICE, "no-pixel-data", None),
        ("CTImage.dcm", 8, "too-few-slices", None),  # a single slice is no chest CT
    ],
)
def test_refusals(shared_data, name, least, reason, said):
    (file,) = (shared_data / "ct_transfer_syntaxes").glob(name)
    with refused(reason, said):
        read_ct(file, least)


def test_a_whole_series_against_pydicom(shared_data):
    volume = read_ct(shared_data / "lung_pet_ct_dx")
    slices = [pydicom.dcmread(file) for file in (shared_data / "lung_pet_ct_dx").rglob("*.dcm")]
    slices.sort(key=lambda ds: float(ds.ImagePositionPatient[2]))
    expected = np.stack([ds.pixel_array * ds.RescaleSlope + ds.RescaleIntercept for ds in slices])
    assert volume.hu.shape == (64, 512, 512) and volume.warnings == ()
    assert np.array_equal(volume.hu, expected)
    assert volume.spacing_mm == pytest.approx((5, 0.841796875, 0.841796875))
    for i in (0, 31, 63):
        lps = np.diag([-1, -1, 1, 1]) @ volume.affine @ [0, 0, i, 1]
        assert lps[:3] == pytest.approx(np.array(slices[i].ImagePositionPatient, float))


def test_a_whole_series_against_simpleitk(shared_data):
    sitk = pytest.importorskip("SimpleITK")
    (folder,) = (shared_data / "lung_pet_ct_dx").glob("A0001*")
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(folder)))
    image = reader.Execute()
    volume = read_ct(folder)
    assert np.array_equal(volume.hu, sitk.GetArrayFromImage(image))
    assert volume.spacing_mm[::-1] == pytest.approx(image.GetSpacing())
    assert (np.diag([-1, -1, 1, 1]) @ volume.affine)[:3, 3] == pytest.approx(image.GetOrigin())
