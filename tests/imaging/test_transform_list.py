"""Transforms that a lead may add or a simulated site has, where they run, what a site allows; and batches."""

import inspect
import math
from itertools import permutations, product

import monai.transforms
import nibabel.orientations as nio
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor
from refused import refused
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import build
from fedtar_flare.imaging import transforms
from fedtar_flare.imaging.batch import BLUR, BRIGHTNESS, CONTRAST, SiteChange, augment, change_of
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.limits import Limits, applied
from fedtar_flare.imaging.pipeline import Size
from fedtar_flare.imaging.transform_list import LISTED, RANDOM, SAFE, built_in
from fedtar_flare.learning.config import DataConfig
from fedtar_flare.site.site_file import Bounds

SPACING = {"name": "Spacingd", "pixdim": [1, 1, 2.5]}


@pytest.mark.parametrize("name", LISTED)
def test_every_argument_is_monais_and_none_but_the_needed_lacks_a_default(name):
    signature = inspect.signature(getattr(monai.transforms, name).__init__).parameters
    listed = LISTED[name]
    assert {*listed.needed, *listed.other} <= set(signature)
    without = {n for n, p in signature.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    assert without - {"self", "keys"} <= set(listed.needed)
    assert not {"keys", "fn", "func", "device", "dtype", "meta_keys", "factor_key"} & {*listed.needed, *listed.other}


@pytest.mark.parametrize(("spec", "words"), cases(__file__, "refused_transforms.yaml"))
def test_what_cannot_be_added_is_refused_when_settings_are_built_and_again_when_the_compose_is(spec, words):
    with pytest.raises(ConfigError) as caught:
        DataConfig(transforms=[spec])
    assert "transforms" in str(caught.value) and words in str(caught.value)
    for make in (lambda: transforms.preparation("ct", Size(16, 4), [spec]), lambda: transforms.composed([spec])):
        with pytest.raises(ConfigError):
            make()


def test_a_site_allows_listed_ones_alone_and_by_default_what_keeps_left_and_right():
    for name in ("Lambdad", "LoadImaged", "SaveImaged", "Spacing"):
        with pytest.raises(ConfigError, match=f"policy: transforms.*not '{name}'"):
            build(Bounds, {"transforms": [name]}, "policy")
    assert set(SAFE) < set(LISTED) and "RandFlipd" not in SAFE and Bounds().transforms == SAFE
    looser = {name: Bounds(transforms=[name]).looser() for name in ("Spacingd", "RandFlipd")}
    assert looser == {"Spacingd": [], "RandFlipd": ["transforms"]}


def volume(shape=(24, 26, 12)):
    hu = np.random.default_rng(2).integers(-1000, 400, shape).astype(np.float32)
    return MetaTensor(torch.from_numpy(hu)[None], affine=np.diag([2.0, 2.0, 5.0, 1.0]))


def example(name):
    """The least arguments that change something."""
    values = {"axcodes": "LPS", "pixdim": [4, 4, 5], "a_min": -1000, "a_max": 400, "b_min": -500, "b_max": 300}
    values |= {"threshold": 0, "sigma": 1.0, "roi_size": 16, "offsets": [0.2, 0.3], "factors": [0.2, 0.3]}
    values |= {"prob": 1.0, "rotate_range": 0.5, "cval": -900}
    listed = LISTED[name]
    return {"name": name} | {n: values[n] for n in (*listed.needed, *listed.other) if n in values}


@settings(max_examples=5)
@given(st.integers(0, 2**40))
@pytest.mark.parametrize("specs", [*([example(name)] for name in RANDOM), built_in(20)], ids=[*RANDOM, "built-in"])
def test_each_random_one_changes_model_input_and_one_seed_decides_how(specs, seed):
    images = np.random.default_rng(seed % 1000).integers(0, 256, (3, 3, 20, 20), np.uint8)
    before = images.copy()
    once = augment(images, seed, specs)
    augment(images, seed + 1, specs)  # another call in between leaves no trace, nor do global generators
    np.random.seed(seed % 1000)  # noqa: NPY002 - MONAI could draw from it
    torch.manual_seed(seed)
    assert once.dtype == np.uint8 and once.shape == images.shape and not np.array_equal(once, images)
    assert np.array_equal(once, augment(images, seed, specs)) and np.array_equal(images, before)


def test_the_built_in_changes_are_small_and_move_all_slices_and_channels_alike():
    plane = np.zeros((32, 32), np.uint8)
    plane[8:20, 10:26] = 180  # off the middle
    images = np.broadcast_to(plane, (3, 3, 32, 32))
    affine, *values = ([{**spec, "prob": 1.0}] for spec in built_in(32))
    for seed in range(8):
        moved = augment(images, seed, affine)
        assert (moved == moved[:1, :1]).all()
        place = np.argwhere(moved[0, 0] > 90).mean(axis=0)
        assert 0 < np.abs(place - (13.5, 17.5)).max() < 4  # 4 percent of 32 pixels, and a turn of 5 degrees
        changes = [np.abs(augment(images, seed, one).astype(int) - images).mean() for one in values]
        assert all(0 <= change < 0.15 * 255 for change in changes) and max(changes) > 0


def test_a_picture_has_no_spacing_and_what_monai_cannot_make_is_named():
    for modality in ("radiograph", "photograph"):
        with pytest.raises(ConfigError, match="Spacingd is for CT volumes"):
            transforms.preparation(modality, Size(16, 4), [SPACING])
    with pytest.raises(ConfigError, match="RandShiftIntensityd cannot be made"):
        transforms.composed([{"name": "RandShiftIntensityd", "offsets": [0.1]}])


def test_resampling_stays_within_the_sites_limits():
    """24 x 26 x 12 voxels of 2 x 2 x 5 mm at 1 mm are 48 x 52 x 60."""
    wanted = 48 * 52 * 60
    with applied(Limits(voxels=wanted)):
        transforms.VoxelLimitd("image", 1.0)({"image": volume()})
    with applied(Limits(voxels=wanted - 1)), refused("too-large", "resampled by Spacingd"):
        transforms.VoxelLimitd("image", [1, 1, 1])({"image": volume()})


def prepared(pixels):
    pixels.setflags(write=False)  # as a memory map is
    return Prepared(pixels, np.arange(len(pixels), dtype=np.float32))


def image(seed=0, slices=2):
    return prepared(np.random.default_rng(seed).integers(60, 190, (slices, 3, 12, 12), dtype=np.uint8))


@given(st.text("abcdefghijklmnop-0123456789", min_size=1, max_size=12), st.integers(0, 2**31), st.floats(0, 1))
def test_a_change_follows_from_site_and_seed_and_is_bounded_by_the_strength(site, seed, strength):
    change = change_of(site, seed, strength)
    assert len({change_of(f"site-{n}", s, 1.0) for n in range(3) for s in (seed, seed + 1)}) == 6
    assert change == change_of(site, seed, strength) and 0 <= change.blur <= strength * BLUR
    assert abs(math.log(change.contrast)) <= strength * CONTRAST + 1e-12
    assert abs(change.brightness) <= strength * BRIGHTNESS
    assert np.array_equal(change_of(site, seed, 0.0)(image()).image, image().image), "no strength changes nothing"


@given(st.floats(0.5, 2), st.floats(-0.3, 0.3), st.integers(0, 99))
@settings(max_examples=30)
def test_without_blur_brighter_pixels_stay_brighter_and_the_mean_moves_by_the_brightness(contrast, brightness, seed):
    before = image(seed).image
    after = SiteChange(0.0, contrast, brightness)(image(seed)).image
    assert (np.diff(after.flatten()[np.argsort(before, axis=None)].astype(int)) >= 0).all()
    if after.min() > 0 and after.max() < 255:  # nothing was cut off
        assert abs(after.mean() - before.mean() - 255 * brightness) < 0.5


@given(st.floats(0.3, 3), st.integers(0, 99))
@settings(max_examples=20)
def test_a_blur_stays_within_its_slice_and_makes_neighbours_more_alike(blur, seed):
    before, blurred = image(seed, 1), SiteChange(blur, 1.0, 0.0)
    after, twice = blurred(before).image, blurred(prepared(np.repeat(before.image, 2, 0))).image
    assert np.abs(np.diff(after.astype(float))).mean() < np.abs(np.diff(before.image.astype(float))).mean()
    assert np.array_equal(twice, np.repeat(after, 2, 0))


RNG = np.random.default_rng(5)
RAS = RNG.integers(-1000, 1000, (6, 7, 9)).astype(np.int16)
SIZES = (0.7, 0.8, 2.5)
AFFINE = np.diag((*SIZES, 1.0))


def stored(array=RAS, affine=AFFINE):
    return MetaTensor(torch.from_numpy(np.ascontiguousarray(array))[None], affine=affine)


@pytest.mark.parametrize("axes", permutations(range(3)))
@pytest.mark.parametrize("flips", product((1, -1), repeat=3))
def test_every_orientation_is_shown_the_same_way(axes, flips):
    """The 48 ways of storing one volume; reference: nibabel's own affine of a turned array."""
    turn = np.array([(axis, flip) for axis, flip in zip(axes, flips, strict=True)], float)
    array = nio.apply_orientation(RAS, turn)
    shown, spacing = transforms.displayed(stored(array, AFFINE @ nio.inv_ornt_aff(turn, RAS.shape)))
    assert np.array_equal(shown, RAS.transpose(2, 1, 0)[:, ::-1, ::-1])
    assert spacing == pytest.approx(SIZES[::-1])


@pytest.mark.parametrize("bad", [RAS, stored()[0, 0], MetaTensor(torch.zeros(2, 3, 3, 3))])
def test_what_is_no_volume_is_refused(bad):
    with refused("not-a-volume"):
        transforms.LungSlicesd("image")({"image": bad})


def test_windows():
    hu = RNG.integers(-2000, 3000, (4, 5, 6)).astype(np.int16)
    windows = ((-600, 1500), (40, 400), (400, 1800))
    out = transforms.HUWindowsd("image", windows)({"image": hu})["image"]
    assert out.shape == (4, 3, 5, 6) and out.dtype == np.uint8
    for channel, (level, width) in enumerate(windows):
        expected = (np.clip((hu - level) / width + 0.5, 0, 1) * 255).astype(float)
        assert np.abs(out[:, channel] - expected).max() <= 0.51


def test_shrinking_averages_areas():
    picture = RNG.integers(0, 256, (2, 3, 32, 48)).astype(np.uint8)
    out = transforms.SquareResized("image", 12)({"image": picture})["image"]
    assert out.shape == (2, 3, 12, 12) and out.dtype == np.uint8
    expected = picture.reshape(2, 3, 8, 4, 12, 4).mean(axis=(3, 5))
    assert np.abs(out[:, :, 2:10] - expected).max() <= 0.501
    assert (out[:, :, :2] == 0).all() and (out[:, :, 10:] == 0).all()


@pytest.mark.parametrize(
    "shape, pixel_mm, rows",
    [((30, 60), (2.0, 1.0), slice(None)), ((30, 60), (1.0, 1.0), slice(3, 9)), ((5, 5), (1.0, 1.0), slice(None))],
)
def test_pixels_keep_the_shape_of_the_body(shape, pixel_mm, rows):
    item = {"image": np.full((1, *shape), 200, np.uint8), "pixel_mm": pixel_mm}
    out = transforms.SquareResized("image", 12)(item)["image"]
    expected = np.zeros((1, 12, 12), np.uint8)
    expected[:, rows] = 200
    assert np.array_equal(out, expected)


COARSE = (5.0, 4.0, 4.0)


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
        first, last = transforms.lung_range(hu, COARSE)
        assert abs(first - 20) <= 1 and abs(last - 44) <= 1
        assert transforms.lung_range(hu.repeat(3, axis=1).repeat(3, axis=2), (5.0, 4 / 3, 4 / 3)) == (first, last)


def test_the_whole_volume_is_taken_without_lungs_and_where_they_fill_it():
    of_one_value = (np.full((30, 40, 40), hu, np.int16) for hu in (40, -1000))
    for hu in (*of_one_value, body(24, (0, 24)), body(lungs=(30, 30), gas=False)):
        assert transforms.lung_range(hu, COARSE) == (0, len(hu) - 1)


@given(st.integers(0, 40), st.integers(0, 400), st.integers(1, 40), st.floats(0.3, 10))
def test_slices_are_within_the_range_even_and_centred(first, more, slices, spacing):
    last = first + more
    indices, position_mm = transforms.sample_slices(first, last, spacing, slices)
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
