"""The transforms of a CT: lungs, slices, windows and size."""

from itertools import permutations, product

import nibabel.orientations as nio
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.data import MetaTensor
from monai.transforms import Compose, ScaleIntensityRanged
from refused import refused

from fedtar_flare.imaging.transforms import HUWindowsd, LungSlicesd, SquareResized, displayed, lung_range, sample_slices

RNG = np.random.default_rng(5)
RAS = RNG.integers(-1000, 1000, (6, 7, 9)).astype(np.int16)
SIZES = (0.7, 0.8, 2.5)
AFFINE = np.diag((*SIZES, 1.0))


def volume(array=RAS, affine=AFFINE):
    return MetaTensor(torch.from_numpy(np.ascontiguousarray(array))[None], affine=affine)


@pytest.mark.parametrize("axes", permutations(range(3)))
@pytest.mark.parametrize("flips", product((1, -1), repeat=3))
def test_every_orientation_is_shown_the_same_way(axes, flips):
    """The 48 ways of storing one volume; reference: nibabel's own affine of a turned array."""
    turn = np.array([(axis, flip) for axis, flip in zip(axes, flips, strict=True)], float)
    array = nio.apply_orientation(RAS, turn)
    shown, spacing = displayed(volume(array, AFFINE @ nio.inv_ornt_aff(turn, RAS.shape)))
    assert np.array_equal(shown, RAS.transpose(2, 1, 0)[:, ::-1, ::-1])
    assert spacing == pytest.approx(SIZES[::-1])


def test_volumes_that_a_hospitals_own_transforms_made_float():
    scaled = ScaleIntensityRanged("image", -1000, 1000, -1000.4, 999.6)
    out = Compose([scaled, LungSlicesd("image", 9)])({"image": volume()})
    assert np.array_equal(out["image"], RAS.transpose(2, 1, 0)[:, ::-1, ::-1])


@pytest.mark.parametrize("bad", [RAS, volume()[0, 0], MetaTensor(torch.zeros(2, 3, 3, 3))])
def test_what_is_no_volume_is_refused(bad):
    with refused("not-a-volume"):
        LungSlicesd("image")({"image": bad})


def test_windows():
    hu = RNG.integers(-2000, 3000, (4, 5, 6)).astype(np.int16)
    windows = ((-600, 1500), (40, 400), (400, 1800))
    out = HUWindowsd("image", windows)({"image": hu})["image"]
    assert out.shape == (4, 3, 5, 6) and out.dtype == np.uint8
    for channel, (level, width) in enumerate(windows):
        expected = (np.clip((hu - level) / width + 0.5, 0, 1) * 255).astype(float)
        assert np.abs(out[:, channel] - expected).max() <= 0.51
    ends = HUWindowsd("image", [(40, 400)])({"image": np.array([[[-160, 240, -161, 241]]], np.int16)})["image"]
    assert ends.ravel().tolist() == [0, 255, 0, 255]


def test_shrinking_averages_areas():
    picture = RNG.integers(0, 256, (2, 3, 32, 48)).astype(np.uint8)
    out = SquareResized("image", 12)({"image": picture})["image"]
    assert out.shape == (2, 3, 12, 12) and out.dtype == np.uint8
    expected = picture.reshape(2, 3, 8, 4, 12, 4).mean(axis=(3, 5))
    assert np.abs(out[:, :, 2:10] - expected).max() <= 0.501
    assert (out[:, :, :2] == 0).all() and (out[:, :, 10:] == 0).all()


@pytest.mark.parametrize(
    "shape, pixel_mm, rows",
    [((30, 60), (2.0, 1.0), slice(None)), ((30, 60), (1.0, 1.0), slice(3, 9)), ((5, 5), (1.0, 1.0), slice(None))],
)
def test_pixels_keep_the_shape_of_the_body(shape, pixel_mm, rows):
    out = SquareResized("image", 12)({"image": np.full((1, *shape), 200, np.uint8), "pixel_mm": pixel_mm})["image"]
    expected = np.zeros((1, 12, 12), np.uint8)
    expected[:, rows] = 200
    assert np.array_equal(out, expected)


SPACING = (5.0, 4.0, 4.0)


def body(slices=60, lungs=(20, 45), size=96, gas=True):
    """A trunk in air, lungs in some of its slices, a windpipe above them and bowel gas below."""
    y, x = np.mgrid[:size, :size] / (size - 1) * 2 - 1
    hu = np.full((slices, size, size), -1000, np.int16)
    hu[:, (x / 0.9) ** 2 + (y / 0.6) ** 2 < 1] = 40
    for z in range(*lungs):
        width = 0.25 * np.sin(np.pi * (z - lungs[0] + 1) / (lungs[1] - lungs[0] + 1)) ** 0.5
        for side in (-0.45, 0.45):
            hu[z, ((x - side) / width) ** 2 + (y / 0.45) ** 2 < 1] = -850
    if gas:
        hu[lungs[1] :, (x**2 + y**2) < 0.06**2] = -1000
        hu[: lungs[0], ((x - 0.3) ** 2 + y**2) < 0.07**2] = -1000
    return hu


def test_lungs_are_found_whatever_lies_above_and_below_at_any_resolution():
    for gas in (False, True):
        hu = body(gas=gas)
        first, last = lung_range(hu, SPACING)
        assert abs(first - 20) <= 1 and abs(last - 44) <= 1
        assert lung_range(hu.repeat(3, axis=1).repeat(3, axis=2), (5.0, 4 / 3, 4 / 3)) == (first, last)


def test_the_whole_volume_is_taken_without_lungs_and_where_they_fill_it():
    of_one_value = (np.full((30, 40, 40), hu, np.int16) for hu in (40, -1000))
    for hu in (*of_one_value, body(24, (0, 24)), body(lungs=(30, 30), gas=False)):
        assert lung_range(hu, SPACING) == (0, len(hu) - 1)


@given(st.integers(0, 40), st.integers(0, 400), st.integers(1, 40), st.floats(0.3, 10))
def test_slices_are_within_the_range_even_and_centred(first, more, slices, spacing):
    last = first + more
    indices, position_mm = sample_slices(first, last, spacing, slices)
    assert indices.shape == position_mm.shape == (slices,) and position_mm.dtype == np.float32
    assert indices.min() >= first and indices.max() <= last
    steps = np.diff(indices)
    assert (steps >= 0).all() and (slices == 1 or steps.max() - steps.min() <= 1)
    if slices <= more + 1:
        assert (steps >= 1).all()
    expected = (indices - (first + last) / 2) * spacing
    assert position_mm == pytest.approx(expected, abs=1e-3)
    wanted = ((np.arange(slices) + 0.5) / slices - 0.5) * (more + 1) * spacing
    assert np.abs(position_mm - wanted).max() <= spacing * 0.501 + 1e-3
