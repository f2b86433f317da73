from __future__ import annotations

import nibabel
import numpy as np
import pytest
from make_dicom import chest

from fedtar_flare.imaging.readers.ct import read_ct

AFFINE = np.array([[0, -0.7, 0, 5], [0.8, 0, 0, 6], [0, 0, 2.5, 7], [0, 0, 0, 1]])


def save(path, values, affine=AFFINE, edit=lambda image: None):
    image = nibabel.Nifti1Image(values, affine)
    edit(image)
    nibabel.save(image, path)
    return path


@pytest.mark.parametrize("name", ["v.nii", "v.nii.gz"])
def test_values_and_geometry_in_any_orientation(tmp_path, name):
    hu = chest()
    volume = read_ct(save(tmp_path / name, hu.transpose(2, 1, 0)))
    assert volume.hu.dtype == np.int16 and np.array_equal(volume.hu, hu)
    assert volume.affine == pytest.approx(AFFINE) and volume.spacing_mm == pytest.approx((2.5, 0.7, 0.8))


def test_scaling_is_applied_and_values_that_are_no_number_become_air(tmp_path):
    def scale(image):
        image.header.set_slope_inter(2, -1000)

    hu = chest()
    volume = read_ct(save(tmp_path / "i.nii", hu.transpose(2, 1, 0), edit=scale))
    assert np.array_equal(volume.hu, hu.astype(int) * 2 - 1000)
    floats = hu.transpose(2, 1, 0).astype(np.float32)
    floats[0, 0, 0] = np.nan
    volume = read_ct(save(tmp_path / "f.nii", floats))
    assert volume.hu[0, 0, 0] == -1024 and [note.reason for note in volume.warnings] == ["not-finite"]
    assert np.array_equal(volume.hu.ravel()[1:], hu.ravel()[1:])
