"""What is refused, or noted, for more than one reason at once, or by what several files say together."""

from __future__ import annotations

import numpy as np
import pytest
from broken import rle
from make_dicom import ORIGIN, another_series, chest, only, put, write_series
from pydicom.dataset import Dataset
from refused import refused

from fedtar_flare.imaging.readers.ct import read_ct


def reasons(folder):
    return [note.reason for note in read_ct(folder).warnings]


def test_a_tilt_and_uneven_gaps_are_named_at_once(tmp_path):
    def edit(ds, i):
        ds.ImagePositionPatient = [ORIGIN[0] + i / 2, ORIGIN[1], ORIGIN[2] + i * 2.5 + (i > 5) * 1.2]

    write_series(tmp_path, edit=edit)
    with refused("uneven-spacing", "slice distances from .* the gantry was tilted by"):
        read_ct(tmp_path)


def dose_report(ds, i):
    another_series(ds, 9)
    ds.Modality, ds.SOPClassUID = "SR", "1.2.840.10008.5.1.4.1.1.88.67"
    del ds.PixelData, ds.Rows
    return None


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("beside", [lambda ds, i: Dataset(), dose_report])
def test_a_folder_of_scouts_says_so(tmp_path, named, beside):
    """A frontal and a lateral one; some scanners do not call them so."""

    def edit(ds, i):
        if i > 1:
            return beside(ds, i)
        ds.ImageOrientationPatient = [1, 0, 0, 0, 0, -1] if i else [0, 1, 0, 0, 0, -1]
        if named:
            ds.ImageType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
        return None

    write_series(tmp_path, edit=edit)
    with refused("localizer"):
        read_ct(tmp_path)


def another_pixel(ds, i):
    ds.PixelData = ds.PixelData[:-2] + b"\x11\x01"


@pytest.mark.parametrize(
    "change",
    [
        another_pixel,
        put(RescaleIntercept=-1000),
        put(PixelSpacing=[0.8, 0.71]),
        put(ImageOrientationPatient=[0, 1, 0, -1, 0, 0]),
        lambda ds, i: (another_pixel(ds, i), rle(ds)),
    ],
)
def test_copies_that_show_something_else_are_refused_by_name(tmp_path, change):
    """Which file is right, their names do not tell."""
    write_series(tmp_path)
    write_series(tmp_path, edit=lambda ds, i: change(ds, i) and None if i == 5 else Dataset(), prefix="copy-")
    name = next(file.name for file in tmp_path.iterdir() if file.name.startswith("copy"))
    with refused("conflicting-copies", f"{name[5:]} and .*{name}"):
        read_ct(tmp_path)


@pytest.mark.parametrize("edit", [lambda ds, i: None, rle])
def test_copies_are_dropped_in_any_transfer_syntax(tmp_path, edit):
    hu = write_series(tmp_path / "a")
    write_series(tmp_path / "b", edit=edit)
    assert np.array_equal(read_ct(tmp_path).hu, hu) and reasons(tmp_path) == ["copies"]


def test_a_damaged_slice_condemns_its_series_and_another_one_is_read(tmp_path):
    hu = chest()
    write_series(tmp_path, hu, edit=only(11, put(ImagePositionPatient=None)))
    sharp = lambda ds, i: (another_series(ds, 1), put(ConvolutionKernel="B70f")(ds))[1]  # noqa: E731
    write_series(tmp_path, hu[::-1], edit=sharp, prefix="b")
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu[::-1])
    assert [note.reason for note in volume.warnings] == ["several-series", "series-refused"]
    assert "no-position" in volume.warnings[1].text


def test_a_rescale_that_differs_between_slices_is_noted(tmp_path):
    write_series(tmp_path, edit=only(5, put(RescaleIntercept=-1000)))
    assert reasons(tmp_path) == ["mixed-rescale"]


def test_duplicate_places_with_one_uid_are_no_copies(tmp_path):
    write_series(tmp_path, edit=put(SOPInstanceUID="1.2.3.4.1"))
    assert len(read_ct(tmp_path).hu) == 12
