from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused

from fedtar_flare.errors import ConfigError
from fedtar_flare.imaging.augment import AugmentConfig, augment, sample_seed


def study(slices=3, size=32):
    """Every slice and channel alike: a soft square off the middle."""
    plane = np.zeros((size, size), np.float32)
    plane[8:20, 10:26] = 180
    return np.repeat(plane[None, None], slices, 0).repeat(3, 1).astype(np.uint8)


@settings(max_examples=25)
@given(st.integers(0, 2**40), st.integers(1, 4), st.sampled_from([16, 33]))
def test_shape_type_and_the_same_picture_for_the_same_seed(seed, slices, size):
    images = np.random.default_rng(seed % 1000).integers(0, 256, (slices, 3, size, size), np.uint8)
    kept = images.copy()
    once = augment(images, seed)
    augment(images, seed + 1)  # another call in between leaves no trace, nor do global generators
    np.random.seed(seed % 1000)  # noqa: NPY002 - MONAI could draw from it
    torch.manual_seed(seed)
    assert once.dtype == np.uint8 and once.shape == images.shape
    assert np.array_equal(once, augment(images, seed)) and np.array_equal(images, kept)


def test_seeds_differ_and_so_do_pictures():
    pictures = [augment(study(), sample_seed(0, 1, update, "visit")) for update in range(12)]
    assert len({picture.tobytes() for picture in pictures}) == 12
    assert sample_seed(0, 1, 2) == 1942241016 != sample_seed(0, 12)  # in every process


def test_without_probability_nothing_changes():
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 20, 20), np.uint8)
    assert np.array_equal(augment(images, 5, AugmentConfig(probability=0)), images)


def test_slices_and_channels_move_together_and_little():
    config = AugmentConfig(intensity=0, contrast=0, noise=0, probability=1)
    for seed in range(8):
        moved = augment(study(), seed, config)
        assert (moved == moved[:1, :1]).all()
        place = np.argwhere(moved[0, 0] > 90).mean(axis=0)
        assert 0 < np.abs(place - (13.5, 17.5)).max() < 4  # 4 percent of 32 pixels, and a turn of 5 degrees


def test_brightness_contrast_and_noise_stay_small():
    config = AugmentConfig(rotation_deg=0, shift=0, scale=0, probability=1)
    changes = [np.abs(augment(study(), seed, config).astype(int) - study()) for seed in range(8)]
    assert all(0 < change.mean() < 0.15 * 255 for change in changes)


@pytest.mark.parametrize(
    "field, largest",
    [
        ("rotation_deg", 45),
        ("shift", 0.5),
        ("scale", 0.5),
        ("intensity", 1),
        ("contrast", 0.9),
        ("noise", 1),
        ("probability", 1),
    ],
)
def test_settings_are_checked(field, largest):
    for value in (-0.1, largest + 0.1, float("nan")):
        with pytest.raises(ConfigError, match=field):
            AugmentConfig(**{field: value})


@pytest.mark.parametrize("bad", [np.zeros((3, 9, 9), np.uint8), np.zeros((1, 3, 9, 9), np.float32)])
def test_what_is_no_model_input_is_refused(bad):
    with refused("not-model-input"):
        augment(bad, 0)
