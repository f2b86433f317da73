"""``CTSeriesReader`` in MONAI's ``LoadImaged``, beside MONAI's own reader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from make_dicom import ORIGIN, SPACING, write_series
from monai.data import MetaTensor, PydicomReader
from monai.transforms import LoadImaged, Orientationd, Spacingd
from pydicom.dataset import Dataset
from refused import refused

from fedtar_flare.imaging.readers.monai_readers import CTSeriesReader, RadiographReader


@pytest.mark.parametrize("as_tensor", [False, True])
def test_volume_and_affine_agree_with_monais_reader(tmp_path, as_tensor):
    def number(ds, i):
        ds.InstanceNumber = i + 1

    hu = write_series(tmp_path / "s", edit=number)
    ours = LoadImaged("image", reader=CTSeriesReader(as_tensor=as_tensor), dtype=np.int16)({"image": tmp_path / "s"})
    theirs = LoadImaged("image", reader=PydicomReader())({"image": tmp_path / "s"})
    assert isinstance(ours["image"], MetaTensor) and ours["image"].dtype == torch.int16
    assert np.array_equal(ours["image"].numpy(), hu.transpose(2, 1, 0))
    assert np.array_equal(ours["image"].numpy(), theirs["image"].numpy())
    assert ours["image"].affine.numpy() == pytest.approx(theirs["image"].affine.numpy())
    assert ours["image"].pixdim.tolist() == pytest.approx(SPACING[::-1])
    assert ours["image"].meta["series_uid"] == "1.2.3.4" and ours["image"].meta["warnings"] == []


def test_geometry_survives_stock_transforms(tmp_path):
    hu = write_series(tmp_path / "s")
    volume = LoadImaged("image", reader=CTSeriesReader(), ensure_channel_first=True)({"image": str(tmp_path / "s")})
    assert volume["image"].shape == (1, *hu.shape[::-1])
    turned = Orientationd("image", "RAS", labels=None)(volume)["image"]
    assert np.array_equal(turned.numpy()[0], hu.transpose(2, 1, 0)[::-1, ::-1])
    assert Spacingd("image", (1.0, 1.0, 2.5))(volume)["image"].shape == (1, 14, 19, 12)


def test_the_view_is_not_copied(tmp_path):
    write_series(tmp_path / "s")
    reader = CTSeriesReader(as_tensor=True)
    loaded = LoadImaged("image", reader=reader, dtype=np.int16)({"image": str(tmp_path / "s")})["image"]
    assert loaded.stride() == (1, 20, 480)


def gap(ds, i):
    ds.InstanceNumber = i + 1
    return Dataset() if i == 5 else None


def test_what_is_refused_is_not_handed_to_another_reader(tmp_path):
    """MONAI's reader takes the gap for a larger spacing: every slice above it lies in the wrong place."""
    hu = write_series(tmp_path / "s", edit=gap)
    wrong = LoadImaged("image", reader=PydicomReader())({"image": tmp_path / "s"})["image"]
    assert wrong.shape[2] == len(hu) - 1 and wrong.pixdim[2] > SPACING[0] + 0.1
    with refused("missing-slices"):
        LoadImaged("image", reader=CTSeriesReader())({"image": str(tmp_path / "s")})


def test_monais_reader_merges_what_ours_tells_apart(tmp_path):
    def number(ds, i):
        ds.InstanceNumber = i + 1

    def other(ds, i):
        ds.SeriesInstanceUID, ds.SOPInstanceUID, ds.InstanceNumber = "1.2.3.5", f"1.2.3.5.{i}", i + 1
        ds.ConvolutionKernel = "B70f"

    hu = write_series(tmp_path, edit=number)
    write_series(tmp_path, hu[::-1], edit=other, prefix="z")
    theirs = LoadImaged("image", reader=PydicomReader())({"image": tmp_path})["image"]
    ours, meta = CTSeriesReader().get_data(CTSeriesReader().read(str(tmp_path)))
    assert theirs.shape[2] == 2 * len(hu)
    assert np.array_equal(ours, hu.transpose(2, 1, 0)) and meta["warnings"][0].startswith("several-series")


def test_monais_reader_keeps_a_tilt_as_a_shear(tmp_path):
    """Its affine is no longer a box: a stock transform that works along the axes then measures along slanted ones."""

    def tilt(ds, i):
        ds.InstanceNumber = i + 1
        ds.ImagePositionPatient = [ORIGIN[0], ORIGIN[1] + 0.6 * i, ORIGIN[2] + SPACING[0] * i]

    write_series(tmp_path, edit=tilt)
    theirs = LoadImaged("image", reader=PydicomReader())({"image": tmp_path})["image"]
    axes = theirs.affine.numpy()[:3, :3] / np.linalg.norm(theirs.affine.numpy()[:3, :3], axis=0)
    assert abs(float(axes[:, 1] @ axes[:, 2])) > 0.2  # 13 degrees off the perpendicular, and not a word of it
    with refused("gantry-tilt"):
        LoadImaged("image", reader=CTSeriesReader())({"image": str(tmp_path)})


def test_monais_reader_drops_slices_without_an_instance_number(tmp_path):
    def number(ds, i):
        if i != 6:
            ds.InstanceNumber = i + 1

    hu = write_series(tmp_path, edit=number)
    theirs = LoadImaged("image", reader=PydicomReader())({"image": tmp_path})["image"]
    assert theirs.shape[2] == len(hu) - 1
    ours = LoadImaged("image", reader=CTSeriesReader(), dtype=np.int16)({"image": str(tmp_path)})["image"]
    assert np.array_equal(ours.numpy(), hu.transpose(2, 1, 0))


def test_suffixes(tmp_path):
    assert CTSeriesReader().verify_suffix([tmp_path]) and CTSeriesReader().verify_suffix("a.nii.gz")
    assert not CTSeriesReader().verify_suffix("a.png") and RadiographReader().verify_suffix("a.png")
    assert not RadiographReader().verify_suffix("a.nii")
    with pytest.raises(ValueError, match="one radiograph"):
        RadiographReader().read(["a.png", "b.png"])
