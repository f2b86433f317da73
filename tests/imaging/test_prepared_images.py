"""Prepared images: as a simulated site's own machine shows them, and as a batch."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.imaging.augment import BLUR, BRIGHTNESS, CONTRAST, SiteChange, change_of
from fedtar_flare.imaging.batch import collate
from fedtar_flare.imaging.cache import Prepared

NAMES = st.text(alphabet="abcdefghijklmnop-0123456789", min_size=1, max_size=12)
SEEDS, STRENGTHS = st.integers(0, 2**31), st.floats(0, 1)


def image(seed=0, slices=2):
    pixels = np.random.default_rng(seed).integers(60, 190, (slices, 3, 12, 12), dtype=np.uint8)
    return Prepared(pixels, np.arange(slices, dtype=np.float32))


@given(NAMES, SEEDS, STRENGTHS)
def test_a_change_follows_from_site_seed_and_strength_and_is_bounded_by_the_strength(site, seed, strength):
    one = change_of(site, seed, strength)
    assert one == change_of(site, seed, strength)
    assert 0 <= one.blur <= strength * BLUR
    assert abs(math.log(one.contrast)) <= strength * CONTRAST + 1e-12
    assert abs(one.brightness) <= strength * BRIGHTNESS


def test_sites_differ_and_so_do_seeds():
    found = {change_of(f"site-{n}", seed, 1.0) for n in range(20) for seed in (0, 1)}
    assert len(found) == 40
    before = image()
    assert np.array_equal(change_of("site-1", 0, 0.0)(before).image, before.image), "no strength changes nothing"


@given(st.floats(0.5, 2), st.floats(-0.3, 0.3), st.integers(0, 99))
@settings(max_examples=30)
def test_without_blur_brighter_pixels_stay_brighter_and_the_mean_moves_by_the_brightness(contrast, brightness, seed):
    before = image(seed)
    after = SiteChange(0.0, contrast, brightness)(before).image
    order = np.argsort(before.image, axis=None)
    assert (np.diff(after.flatten()[order].astype(int)) >= 0).all()
    if after.min() > 0 and after.max() < 255:  # nothing was cut off
        assert abs(after.mean() - before.image.mean() - 255 * brightness) < 0.5


@given(st.floats(0.3, 3), st.integers(0, 99))
@settings(max_examples=20)
def test_a_blur_stays_within_its_slice_and_makes_neighbours_more_alike(blur, seed):
    before = image(seed)
    after = SiteChange(blur, 1.0, 0.0)(before).image.astype(float)
    assert np.abs(np.diff(after)).mean() < np.abs(np.diff(before.image.astype(float))).mean()
    alone = Prepared(before.image[:1], before.position_mm[:1])
    other = SiteChange(blur, 1.0, 0.0)(Prepared(np.repeat(alone.image, 2, 0), before.position_mm))
    np.testing.assert_array_equal(other.image[0], other.image[1])
    np.testing.assert_array_equal(SiteChange(blur, 1.0, 0.0)(alone).image[0], other.image[0])


def prepared(slices, value=255):
    image = np.full((slices, 3, 8, 8), value, np.uint8)
    image.setflags(write=False)  # as a memory map is
    return Prepared(image, np.arange(slices, dtype=np.float32))


def test_values_positions_and_mask():
    batch = collate([prepared(3), prepared(1, value=0)])
    assert batch.images.shape == (2, 3, 3, 8, 8) and batch.images.dtype == torch.uint8
    assert (batch.images[0] == 255).all() and (batch.images[1] == 0).all()
    assert batch.position_mm.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.slice_mask.tolist() == [[True] * 3, [True, False, False]]
    assert batch.to("cpu").slice_mask.equal(batch.slice_mask)
