from __future__ import annotations

import numpy as np
import pytest
from make_dicom import write_radiograph
from PIL import Image

from fedtar_flare.imaging.readers.pictures import read_radiograph, stretch

GREY = np.add.outer(np.arange(40), np.arange(60)).astype(np.uint8) * 2


def test_16_bit_pictures_are_stretched_between_percentiles(tmp_path):
    deep = GREY.astype(np.uint16) * 20 + 1000
    deep[0, 0] = 65535  # a dead pixel
    Image.fromarray(deep).save(tmp_path / "f.png")
    radiograph = read_radiograph(tmp_path / "f.png")
    assert radiograph[0, 0] == 255 and radiograph[-1, -1] >= 250 and radiograph[1, 1] < 10
    assert np.corrcoef(radiograph.ravel()[1:], GREY.ravel()[1:])[0, 1] > 0.999


def test_a_turned_photograph_is_set_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    Image.fromarray(GREY).save(tmp_path / "f.jpg", exif=exif, quality=100)
    assert read_radiograph(tmp_path / "f.jpg").shape == (60, 40)


@pytest.mark.parametrize("bits", [8, 10, 12, 16])
@pytest.mark.parametrize("window", [False, True])
def test_dicom_depth_window_and_monochrome1(tmp_path, bits, window):
    values = GREY.astype(np.uint16) << (bits - 8)
    voi = {"WindowCenter": 1 << (bits - 1), "WindowWidth": 1 << bits} if window else {}
    radiograph = read_radiograph(write_radiograph(tmp_path / "2.dcm", values, bits, **voi))
    assert radiograph.dtype == np.uint8 and np.corrcoef(radiograph.ravel(), GREY.ravel())[0, 1] > 0.999
    inverted = ((1 << bits) - 1 - values).astype(np.uint16)
    voi["PhotometricInterpretation"] = "MONOCHROME1"
    other = read_radiograph(write_radiograph(tmp_path / "1.dcm", inverted, bits, **voi))
    assert np.abs(other.astype(int) - radiograph).max() <= 2


def test_a_window_clips(tmp_path):
    values = GREY.astype(np.uint16) << 4
    radiograph = read_radiograph(write_radiograph(tmp_path / "f.dcm", values, WindowCenter=2000, WindowWidth=400))
    assert (radiograph[values < 1800] == 0).all() and (radiograph[values > 2200] == 255).all()


def test_stretch_of_a_picture_with_two_values():
    values = np.zeros((50, 50), np.float32)
    values[0, 0] = 5
    assert sorted(np.unique(stretch(values))) == [0, 255]


@pytest.mark.shared_data
def test_real_radiographs(shared_data):
    files = sorted((shared_data / "covid_chestxray" / "images").iterdir())
    for file in files[::15]:
        radiograph = read_radiograph(file)
        with Image.open(file) as image:
            assert radiograph.shape == image.size[::-1]
        assert radiograph.std() > 20
