"""Transforms that a lead may add or a simulated site has, where they run, what a site allows; and batches."""

import inspect
import math

import monai.transforms
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
from fedtar_flare.imaging.augment import BLUR, BRIGHTNESS, CONTRAST, SiteChange, augment, change_of, sample_seed
from fedtar_flare.imaging.batch import collate
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.limits import Limits, applied
from fedtar_flare.imaging.pipeline import Size
from fedtar_flare.imaging.transform_list import (
    DETERMINISTIC,
    LISTED,
    MOST,
    RANDOM,
    SAFE,
    built_in,
    deterministic,
    random_for_training,
)
from fedtar_flare.imaging.transforms import VoxelLimitd, composed, preparation
from fedtar_flare.learning.config import DataConfig
from fedtar_flare.site.site_file import Bounds

SPACING = {"name": "Spacingd", "pixdim": [1, 1, 2.5]}
NOISE = {"name": "RandGaussianNoised", "prob": 1.0, "std": 0.1}


@pytest.mark.parametrize("name", LISTED)
def test_every_argument_is_monais_and_none_but_the_needed_lacks_a_default(name):
    signature = inspect.signature(getattr(monai.transforms, name).__init__).parameters
    listed = LISTED[name]
    assert {*listed.needed, *listed.other} <= set(signature)
    without = {n for n, p in signature.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    assert without - {"self", "keys"} <= set(listed.needed)
    assert not {"keys", "fn", "func", "device", "dtype", "meta_keys", "factor_key"} & {*listed.needed, *listed.other}


def test_a_job_adds_few_and_only_mappings():
    for wrong in ([NOISE] * (MOST + 1), ["Spacingd"]):
        with pytest.raises(ConfigError, match="transforms"):
            DataConfig(transforms=wrong)


@pytest.mark.parametrize(("spec", "words"), cases(__file__, "refused_transforms.yaml"))
def test_what_cannot_be_added_is_refused_when_settings_are_built_and_again_when_the_compose_is(spec, words):
    with pytest.raises(ConfigError) as caught:
        DataConfig(transforms=[spec])
    assert "transforms" in str(caught.value) and words in str(caught.value)
    for make in (lambda: preparation("ct", Size(16, 4), [spec]), lambda: composed([spec])):
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


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_each_deterministic_one_changes_a_volume(name):
    seen = composed([example(name)])({"image": volume()})["image"]
    assert isinstance(seen, MetaTensor) and seen.ndim == 4
    assert seen.shape != volume().shape or not torch.equal(seen.as_tensor(), volume().as_tensor())


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


def test_seeds_differ_and_so_do_pictures():
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 20, 20), np.uint8)
    pictures = [augment(images, sample_seed(0, 1, update, "visit"), built_in(20)) for update in range(12)]
    assert len({picture.tobytes() for picture in pictures}) == 12
    assert sample_seed(0, 1, 2) == 1942241016 != sample_seed(0, 12)  # in every process


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


def test_where_each_runs():
    specs = [NOISE, SPACING]
    assert deterministic(specs) == [SPACING] and random_for_training(specs, augment=False, image_size=16) == [NOISE]
    assert random_for_training(specs, augment=True, image_size=16) == [*built_in(16), NOISE]
    names = [type(t).__name__ for t in preparation("ct", Size(16, 4), specs).transforms]
    assert names == ["ReadStudyd", "VoxelLimitd", "Spacingd", "LungSlicesd", "HUWindowsd", "SquareResized"]


def test_a_picture_has_no_spacing_and_what_monai_cannot_make_is_named():
    for modality in ("radiograph", "photograph"):
        with pytest.raises(ConfigError, match="Spacingd is for CT volumes"):
            preparation(modality, Size(16, 4), [SPACING])
    with pytest.raises(ConfigError, match="RandShiftIntensityd cannot be made"):
        composed([{"name": "RandShiftIntensityd", "offsets": [0.1]}])


def test_resampling_stays_within_the_sites_limits():
    """24 x 26 x 12 voxels of 2 x 2 x 5 mm at 1 mm are 48 x 52 x 60."""
    wanted = 48 * 52 * 60
    with applied(Limits(voxels=wanted)):
        VoxelLimitd("image", 1.0)({"image": volume()})
    with applied(Limits(voxels=wanted - 1)), refused("too-large", "resampled by Spacingd"):
        VoxelLimitd("image", [1, 1, 1])({"image": volume()})


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


def test_values_positions_and_mask():
    batch = collate([prepared(np.full((slices, 3, 8, 8), value, np.uint8)) for slices, value in ((3, 255), (1, 0))])
    assert batch.images.shape == (2, 3, 3, 8, 8) and batch.images.dtype == torch.uint8
    assert (batch.images[0] == 255).all() and (batch.images[1] == 0).all()
    assert batch.position_mm.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.slice_mask.tolist() == [[True] * 3, [True, False, False]]
    assert batch.to("cpu").slice_mask.equal(batch.slice_mask)
