"""Radiographs in grey and photographs in colour."""

from __future__ import annotations

import broken as mk
import numpy as np
import pytest
from make_dicom import write_radiograph
from PIL import Image
from refused import refused

from fedtar_flare.data.cohort import Visit
from fedtar_flare.data.sources.fields import date_of
from fedtar_flare.imaging.pipeline import Size, prepare
from fedtar_flare.imaging.readers.pictures import read_photograph, read_radiograph, stretch

GREY = np.add.outer(np.arange(40), np.arange(60)).astype(np.uint8) * 2


def test_16_bit_pictures_are_stretched_between_percentiles(tmp_path):
    deep = GREY.astype(np.uint16) * 20 + 1000
    deep[0, 0] = 65535  # a dead pixel
    Image.fromarray(deep).save(tmp_path / "f.png")
    radiograph = read_radiograph(tmp_path / "f.png")
    assert radiograph[0, 0] == 255 and radiograph[-1, -1] >= 250 and radiograph[1, 1] < 10
    assert np.corrcoef(radiograph.ravel()[1:], GREY.ravel()[1:])[0, 1] > 0.999


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


COLOURS = np.stack(np.broadcast_arrays(np.arange(40)[:, None] * 6, np.arange(60) * 4, np.uint8(90)), -1).astype(
    np.uint8
)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_colours_stay_and_greys_get_three_equal_channels(tmp_path, mode):
    Image.fromarray(COLOURS).convert(mode).save(tmp_path / "f.png")
    found = read_photograph(tmp_path / "f.png")
    assert found.dtype == np.uint8 and found.shape == (3, 40, 60)
    if mode.startswith("RGB"):
        assert np.array_equal(found, COLOURS.transpose(2, 0, 1))
    if mode == "L":
        assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_a_turned_photograph_is_set_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(COLOURS).save(tmp_path / "f.jpg", exif=exif, quality=100)
    assert read_photograph(tmp_path / "f.jpg").shape == (3, 60, 40)


REFUSED = {
    "a stamp": ("too-small", mk.picture("f.png", lambda image: image.crop((0, 0, 12, 9)))),
    "all black": ("blank", mk.picture("f.png", lambda image: image.point(lambda v: 0))),
    "deep": ("not-a-photograph", mk.picture("f.png", lambda image: image.convert("I;16"))),
    "black and white alone": ("not-a-photograph", mk.picture("f.png", lambda image: image.convert("1"))),
    "a cut JPEG": ("unreadable", mk.file("f.jpg", b"\xff\xd8\xff")),
    "DX": ("not-a-photograph", mk.radiograph()),
    "no file": ("no-image", lambda folder: folder / "f.png"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_photograph_is_refused(tmp_path, name):
    reason, write = REFUSED[name]
    with refused(reason):
        read_photograph(write(tmp_path))


def test_model_input_is_in_colour_and_apart_from_that_of_a_radiograph(tmp_path):
    Image.fromarray(COLOURS).save(tmp_path / "f.png")
    when = date_of("2020-01-01")
    seen = {
        kind: prepare(
            Visit("p", "v", when, tmp_path / "f.png", "", kind, labels=frozenset()),
            Size(16, 16),
            tmp_path / "cache",
        )
        for kind in ("photograph", "radiograph")
    }
    photograph, radiograph = (np.asarray(seen[kind].image) for kind in ("photograph", "radiograph"))
    assert photograph.shape == radiograph.shape == (1, 3, 16, 16)
    assert np.array_equal(radiograph[0, 0], radiograph[0, 1])
    top = photograph[0, :, 4].astype(int)  # the first rows are the margin of a wide picture
    assert abs(top[2, 8] - 90) <= 1 and top[1, 15] > top[1, 0] + 150
    assert seen["photograph"].position_mm.tolist() == [0.0]
