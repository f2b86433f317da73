"""Radiographs in grey and photographs in colour."""

import struct
import zlib
from contextlib import nullcontext, suppress
from dataclasses import replace

import broken as mk
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_dicom import of, write_radiograph
from mutations import META, elements
from PIL import Image
from pydicom import dcmread
from refused import refused
from tables import cases

from fedtar_flare.core.errors import DataError
from fedtar_flare.curation.archive import index_folder
from fedtar_flare.curation.partition import partition_source
from fedtar_flare.data.sources.manifest import read_manifest, write_rows
from fedtar_flare.imaging.cache import file_identity, files_of
from fedtar_flare.imaging.pipeline import Size, entry_of, prepare, prepare_visits
from fedtar_flare.imaging.readers import dicom_files
from fedtar_flare.imaging.readers.pictures import read_photograph, read_radiograph
from fedtar_flare.learning.study import study_of
from fedtar_flare.models.config import preset

GREY = mk.GREY
GREY16 = GREY.astype(np.uint16) << 4
RIGHT = "the right picture"


def picture(name, change=lambda image: image, cut=None, **options) -> mk.Make:
    def make(folder):
        change(Image.fromarray(GREY)).save(folder / name, **options)
        (folder / name).write_bytes((folder / name).read_bytes()[:cut])
        return folder / name

    return make


def stated_picture(side) -> mk.Make:
    """A PNG whose header states another size."""

    def make(folder):
        content = bytearray(picture("f.png")(folder).read_bytes())
        content[16:24] = struct.pack(">2L", side, side)
        content[29:33] = struct.pack(">L", zlib.crc32(content[12:29]))
        return mk.file("f.png", bytes(content))(folder)

    return make


def radiograph(values=None, bits=12, **changes) -> mk.Make:
    stored = GREY16 if values is None else values
    return lambda folder: write_radiograph(folder / "f.dcm", stored, bits, **changes)


def without_transfer_syntax(folder):
    path = radiograph()(folder)
    path.write_bytes(path.read_bytes().replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.5.1.4\0"))
    return path


def pages(folder):
    first = Image.fromarray(GREY)
    first.save(folder / "f.tif", save_all=True, append_images=[Image.fromarray(255 - GREY)])
    return folder / "f.tif"


def see_through(image):
    image = image.convert("RGBA")
    image.putalpha(0)
    return image


def noise(image):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60), np.uint8))


def not_finite(image):
    values = GREY.astype(np.float32)
    values[0, 0] = np.nan
    return Image.fromarray(values)


COLOUR = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 1}
RADIOGRAPHS: dict[str, tuple[str | tuple[str, ...], mk.Make]] = {
    "PNG": (RIGHT, picture("f.png")),
    "a palette": (RIGHT, picture("f.png", lambda image: image.convert("P"))),
    "CMYK": (RIGHT, picture("f.tif", lambda image: image.convert("CMYK"))),
    "alpha": (RIGHT, picture("f.png", lambda image: image.convert("LA"))),
    "all transparent": (RIGHT, picture("f.png", see_through)),
    "a PNG named .jpg": (RIGHT, picture("f.jpg", format="PNG")),
    "a cut PNG": ("unreadable", picture("f.png", noise, cut=900)),
    "a cut JPEG": ("unreadable", picture("f.jpg", cut=500, quality=100)),
    "an empty PNG": ("unreadable", mk.file("f.png", b"")),
    "one pixel": ("blank", picture("f.png", lambda image: image.crop((0, 0, 1, 1)))),
    "a stamp": ("too-small", picture("f.png", lambda image: image.crop((0, 0, 12, 9)))),
    "all black": ("blank", picture("f.png", lambda image: image.point(lambda v: 0))),
    "black and white alone": ("not-a-radiograph", picture("f.png", lambda image: image.convert("1"))),
    "several pages": ("not-a-radiograph", pages),
    "values that are no number": ("not-finite", picture("f.tif", not_finite)),
    "a PNG of 6000 x 6000": ("too-large", stated_picture(6_000)),
    "a PNG of 10 gigapixels": ("unreadable", stated_picture(100_000)),
    "DX in colour": ("not-a-radiograph", radiograph(np.stack([GREY] * 3).astype(np.uint16), **COLOUR)),
    "DX of several frames": ("not-a-radiograph", radiograph(np.stack([GREY16] * 4), NumberOfFrames=4)),
    "DX of signed values": (RIGHT, radiograph((GREY.astype(np.int16) << 4) - 2000, PixelRepresentation=1)),
    "a UID that is no transfer syntax": ("unsupported-transfer-syntax", without_transfer_syntax),
    "zeros with a mark": (("unreadable", "not-a-radiograph"), mk.zeros(8 << 20)),
    "a folder": ("no-image", lambda folder: folder),
    "no file": ("no-image", lambda folder: folder / "f.jpg"),
    "text named .png": ("unreadable", mk.file("f.png", b"no picture")),
    "text named .dcm": ("unreadable", mk.file("f.dcm", b"clear")),
    **{name: (why, radiograph(**tags)) for name, (why, tags) in cases(__file__, "radiographs.yaml").items()},
}  # fmt: skip


@pytest.mark.parametrize("name", RADIOGRAPHS)
def test_radiographs(tmp_path, monkeypatch, name):
    monkeypatch.setattr(dicom_files, "ELEMENT_READS", 20_000)
    expected, write = RADIOGRAPHS[name]
    path = write(tmp_path)
    if expected == RIGHT:
        read = read_radiograph(path)
        assert read.shape == GREY.shape and read.dtype == np.uint8
        assert "DX" in name or np.abs(read.astype(int) - GREY).max() <= 1  # a DX radiograph is stretched
        assert np.corrcoef(read.ravel(), GREY.ravel())[0, 1] > 0.999
        return
    with refused(expected):
        read_radiograph(path)


@pytest.mark.parametrize("vr", [b"FL", b"FD", b"AT", b"SQ", b"US", b"DA", b"UN"])
def test_a_value_of_a_wrong_vr_is_refused_or_read_right(tmp_path, vr):
    view = [of(CodeMeaning="postero-anterior")]
    content = radiograph(ViewCodeSequence=view, PatientSex="F", PatientAge="061Y")(tmp_path).read_bytes()
    right = read_radiograph(tmp_path / "f.dcm")
    for element in (one for one in elements(content) if one.tag > META):
        changed = mk.file("f.dcm", content[: element.vr] + vr + content[element.vr + 2 :])(tmp_path)
        with suppress(DataError):
            assert np.array_equal(read_radiograph(changed), right)
        study_of(changed)


@pytest.mark.parametrize(("times", "hours"), [(("0930", "10"), 0.5), (("", "10"), 0), (("233000.5", "120000"), -11.5)])
def test_headers_say_how_far_two_visits_are_apart(tmp_path, times, hours):
    before, now = (
        write_radiograph(tmp_path / f"{i}.dcm", GREY.astype(np.uint16), StudyDate="20240131", StudyTime=time)
        for i, time in enumerate(times)
    )
    assert study_of(now, prior_image=before).prior_days == pytest.approx(hours / 24)


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


def test_a_window_clips_and_one_of_other_pixels_is_passed_over(tmp_path):
    seen = read_radiograph(radiograph(WindowCenter=2000, WindowWidth=400)(tmp_path))
    assert (seen[GREY16 < 1800] == 0).all() and (seen[GREY16 > 2200] == 255).all()
    plain = read_radiograph(radiograph()(tmp_path))
    assert np.array_equal(read_radiograph(radiograph(WindowCenter=127, WindowWidth=255)(tmp_path)), plain)


@pytest.mark.parametrize("tags, reason", cases(__file__, "views.yaml"))
def test_the_view_is_read_from_whatever_tells_it_by_reader_and_index_alike(tmp_path, tags, reason):
    if meaning := tags.pop("ViewCodeSequence", None):
        tags["ViewCodeSequence"] = [of(CodeMeaning=meaning)]
    tags = {"ViewPosition": None, "StudyDate": "20200131", "PatientID": "P", "StudyInstanceUID": "1.2.1"} | tags
    path = radiograph(SOPClassUID="1.2.840.10008.5.1.4.1.1.7", **tags)(tmp_path)  # exported as a secondary capture
    with refused(reason) if reason else nullcontext():
        read_radiograph(path)
    assert [*index_folder(tmp_path, modality="radiograph").rejected()] == ([reason] if reason else [])


@pytest.mark.parametrize("slope", [1, -1])
def test_a_rescale_means_the_same_with_a_window_and_without(tmp_path, slope):
    rescale = {"RescaleSlope": slope, "RescaleIntercept": 4095 if slope < 0 else 0, "RescaleType": "US"}
    plain = read_radiograph(radiograph(**rescale)(tmp_path))
    windowed = read_radiograph(radiograph(WindowCenter=2000, WindowWidth=4000, **rescale)(tmp_path))
    assert np.corrcoef(plain.ravel(), GREY.ravel())[0, 1] * slope > 0.99
    assert np.abs(plain.astype(int) - windowed).max() <= 12


@settings(max_examples=40)
@given(
    st.booleans(), st.booleans(), st.sampled_from([(4095,) * 2, (3500, 4095), (0, 200), (2000, 2100)]), st.booleans()
)
def test_padding_is_black_and_moves_no_other_grey(tmp_path_factory, inverse, window, padding, signed):
    """Whatever the value, range, window and polarity: the film is as without its padded border."""
    tags = {"PhotometricInterpretation": f"MONOCHROME{1 if inverse else 2}", "PixelRepresentation": int(signed)}
    tags |= {"WindowCenter": 1500 - 2000 * signed, "WindowWidth": 2200} if window else {}
    film = np.random.default_rng(0).normal(1000, 100, (40, 60)).clip(600, 1500).astype(np.int16) - 2000 * signed
    right = read_radiograph(radiograph(film, **tags)(folder := tmp_path_factory.mktemp("padding")))
    low, high = (value - 2048 * signed for value in padding)
    border = np.pad(np.zeros(film.shape, bool), 12, constant_values=True)
    padded = np.random.default_rng(1).integers(low, high + 1, border.shape).astype(np.int16)
    padded[~border] = film.ravel()
    write_radiograph(folder / "p.dcm", padded, **tags)
    ds = dcmread(folder / "p.dcm")
    for keyword, value in (("PixelPaddingValue", low), ("PixelPaddingRangeLimit", high)):
        ds.add_new(keyword, "SS" if signed else "US", value)
    ds.save_as(folder / "p.dcm")
    read = read_radiograph(folder / "p.dcm")
    assert (read[border] == 0).all() and np.array_equal(read[~border], right.ravel())


@pytest.mark.parametrize("kind", ["u1", "u2", "f4"])
def test_a_tiff_in_which_white_is_zero(tmp_path, kind):
    Image.fromarray(240 - GREY.astype(kind)).save(path := tmp_path / "f.tif")
    black_is_zero, white_is_zero = (struct.pack("<HHLL", 262, 3, 1, value) for value in (1, 0))
    path.write_bytes(path.read_bytes().replace(black_is_zero, white_is_zero))
    assert np.corrcoef(read_radiograph(path).ravel(), GREY.ravel())[0, 1] > 0.999


CHANNELS = np.broadcast_arrays(np.arange(40)[:, None] * 6, np.arange(60) * 4, np.uint8(90))
COLOURS = np.stack(CHANNELS, -1).astype(np.uint8)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_colours_stay_greys_get_three_equal_channels_and_a_turned_photograph_is_set_upright(tmp_path, mode):
    Image.fromarray(COLOURS).convert(mode).save(tmp_path / "f.png")
    seen = read_photograph(tmp_path / "f.png")
    assert seen.dtype == np.uint8 and seen.shape == (3, 40, 60)
    assert not mode.startswith("RGB") or np.array_equal(seen, COLOURS.transpose(2, 0, 1))
    assert mode != "L" or (seen == seen[:1]).all()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(COLOURS).save(tmp_path / "f.jpg", exif=exif, quality=100)
    assert read_photograph(tmp_path / "f.jpg").shape == (3, 60, 40)


PHOTOGRAPHS = {name: RADIOGRAPHS[name] for name in ("a stamp", "all black", "a cut JPEG", "no file", "an empty PNG")}
PHOTOGRAPHS |= {
    "deep": ("not-a-photograph", picture("f.png", lambda image: image.convert("I;16"))),
    "black and white alone": ("not-a-photograph", picture("f.png", lambda image: image.convert("1"))),
    "DX": ("not-a-photograph", radiograph()),
}


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_what_is_no_photograph_is_refused(tmp_path, name):
    reason, write = PHOTOGRAPHS[name]
    with refused(reason):
        read_photograph(write(tmp_path))


def test_a_lateral_view_is_a_second_picture_where_a_model_is_shown_it_and_stays_with_its_study(tmp_path):
    for name in ("side", "same"):
        (tmp_path / name).mkdir()
    front, same = radiograph()(tmp_path), radiograph(GREY16[::-1])(tmp_path / "same")
    side = radiograph(GREY16[::-1], ViewPosition="LL")(tmp_path / "side")
    table, size = tmp_path / "manifest.csv", preset("vlm-tiny", lateral=True, slices=1)
    write_rows(table, [{"patient_id": "a", "study_datetime": "2020-01-01", "image": front.name, "report": "Clear.",
                        "lateral": "side/f.dcm"}])  # fmt: skip
    (visit,) = read_manifest(table).patients()[0].visits
    both, one = prepare(visit, size, tmp_path), prepare(visit, Size(32, 1), tmp_path)
    assert both.image.shape == (2, 3, 32, 32) and np.array_equal(both.image[:1], one.image)
    assert np.array_equal(both.image[1:], prepare(replace(visit, image=same), Size(32, 1), tmp_path).image)
    assert len([f for f in files_of(tmp_path, file_identity(front)) if f.suffix == ".npy"]) == 2, "purged together"
    wrong = {replace(visit, lateral=front): "frontal-view", replace(visit, image=side): "lateral-view"}
    errors = prepare_visits([*wrong], size, tmp_path).errors
    assert {study: error.reason for study, error in errors.items()} == wrong
    done = prepare_visits([visit], size, tmp_path)
    assert done.entries != done.compared == {visit: entry_of(visit, Size(32, 3), tmp_path)}
    ((site,), _) = partition_source("manifest", table, tmp_path / "out", by="random", sites=1)
    assert read_manifest(site.manifest).patients()[0].visits[0].lateral == side
