"""Prepared images: as a simulated site's own machine shows them, and as a batch."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.imaging.augment import BLUR, BRIGHTNESS, CONTRAST, SiteChange, change_of
from fedtar_flare.imaging.batch import collate
from fedtar_flare.imaging.cache import Prepared


def prepared(pixels):
    pixels.setflags(write=False)  # as a memory map is
    return Prepared(pixels, np.arange(len(pixels), dtype=np.float32))


def image(seed=0, slices=2):
    return prepared(np.random.default_rng(seed).integers(60, 190, (slices, 3, 12, 12), dtype=np.uint8))


@given(st.text("abcdefghijklmnop-0123456789", min_size=1, max_size=12), st.integers(0, 2**31), st.floats(0, 1))
def test_a_change_follows_from_site_and_seed_and_is_bounded_by_the_strength(site, seed, strength):
    change = change_of(site, seed, strength)
    assert change == change_of(site, seed, strength) and 0 <= change.blur <= strength * BLUR
    assert abs(math.log(change.contrast)) <= strength * CONTRAST + 1e-12
    assert abs(change.brightness) <= strength * BRIGHTNESS
    assert np.array_equal(change_of(site, seed, 0.0)(image()).image, image().image), "no strength changes nothing"


def test_sites_differ_and_so_do_seeds():
    assert len({change_of(f"site-{n}", seed, 1.0) for n in range(20) for seed in (0, 1)}) == 40


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
