import broken as mk
import numpy as np
import pytest
from PIL import Image
from refused import refused

from fedtar_flare.data.cohort import Visit
from fedtar_flare.data.sources.fields import date_of
from fedtar_flare.imaging.pipeline import Size, prepare
from fedtar_flare.imaging.readers.pictures import read_photograph

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
