"""Which series of a study is read: axial, no projection, soft kernel, most slices, thinnest; and that it is noted."""

from __future__ import annotations

import numpy as np
import pytest
from make_dicom import ORIGIN, SPACING, another_series, chest, write_series
from pydicom.dataset import Dataset
from refused import refused

from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.dicom_series import softness


@pytest.mark.parametrize(
    "kernel, expected",
    [
        *((k, 0) for k in ("B20f", "B31f", "B40s", "Br40d", "I30f", "Bf37", "FC03", "FC08", "FC13", "A", "B", "C")),
        *((k, 0) for k in ("STANDARD", "SOFT", "BODY FILTER", "standard")),
        *((k, 2) for k in ("B50f", "B70f", "Bl57", "Br64d", "I70f", "FC30", "FC51", "FC86", "L", "D", "YA")),
        *((k, 2) for k in ("LUNG", "BONE", "BONEPLUS", "EDGE", "CHEST", "DETAIL")),
        *((k, 1) for k in ("", "UNKNOWN", "Q")),
    ],
)
def test_kernels(kernel, expected):
    assert softness(kernel) == expected


def coronal(ds, i):
    ds.ImageOrientationPatient = [1, 0, 0, 0, 0, -1]
    ds.ImagePositionPatient = [ORIGIN[0], ORIGIN[1] + i * SPACING[0], ORIGIN[2]]


def projection(ds, i):
    ds.ImageType = ["DERIVED", "SECONDARY", "AXIAL", "MIP"]


def sharp(ds, i):
    ds.ConvolutionKernel = "B70f"


def fewer(ds, i):
    return None if i < 10 else Dataset()


def thicker(ds, i):
    ds.SliceThickness = 5


@pytest.mark.parametrize("worse", [coronal, projection, sharp, fewer, thicker])
@pytest.mark.parametrize("first", ["better", "worse"])
def test_the_better_series_is_read_whatever_its_uid(tmp_path, worse, first):
    def other(ds, i):
        another_series(ds, 0 if first == "worse" else 9)
        return worse(ds, i)

    def better(ds, i):
        another_series(ds, 5)

    hu = write_series(tmp_path, edit=better, prefix="m")
    write_series(tmp_path, hu[::-1], edit=other, prefix="a" if first == "worse" else "z")
    volume = read_ct(tmp_path)
    assert volume.series_uid == "1.2.3.45" and np.array_equal(volume.hu, hu)
    (note,) = volume.warnings
    assert note.reason == "several-series" and ("1.2.3.40" in note.text or "1.2.3.49" in note.text)


@pytest.mark.parametrize("fewer_but", [sharp, projection, coronal])
def test_rank_before_number(tmp_path, fewer_but):
    """A longer series of a lower rank does not win."""

    def other(ds, i):
        another_series(ds, 9)
        return fewer_but(ds, i)

    hu = write_series(tmp_path, chest(10))
    write_series(tmp_path, chest(20), edit=other, prefix="z")
    assert np.array_equal(read_ct(tmp_path).hu, hu)


def test_the_best_one_is_named_when_none_can_be_read(tmp_path):
    write_series(tmp_path, edit=lambda ds, i: Dataset() if i == 5 else None)

    def other(ds, i):
        another_series(ds, 9)
        ds.ConvolutionKernel = "B70f"
        ds.ImageOrientationPatient = [1, 0, 0, 1, 0, 0]

    write_series(tmp_path, edit=other, prefix="z")
    with refused("missing-slices"):
        read_ct(tmp_path)
