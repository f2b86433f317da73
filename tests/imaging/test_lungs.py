from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtar_flare.imaging.transforms import lung_range, sample_slices

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


@pytest.mark.parametrize("gas", [False, True])
def test_lungs_are_found_whatever_lies_above_and_below(gas):
    first, last = lung_range(body(gas=gas), SPACING)
    assert abs(first - 20) <= 1 and abs(last - 44) <= 1


def test_lungs_that_fill_the_volume():
    assert lung_range(body(24, (0, 24)), SPACING) == (0, 23)


@pytest.mark.parametrize(
    "hu",
    [np.full((30, 40, 40), 40, np.int16), np.full((30, 40, 40), -1000, np.int16), body(lungs=(30, 30), gas=False)],
)
def test_without_lungs_the_whole_volume_is_taken(hu):
    assert lung_range(hu, SPACING) == (0, len(hu) - 1)


def test_the_range_does_not_depend_on_resolution():
    hu = body()
    fine = hu.repeat(3, axis=1).repeat(3, axis=2)
    assert lung_range(fine, (5.0, 4 / 3, 4 / 3)) == lung_range(hu, SPACING)


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


def test_a_thin_range_repeats_slices():
    indices, position_mm = sample_slices(2, 3, 5.0, 4)
    assert indices.tolist() == [2, 2, 3, 3] and position_mm.tolist() == [-2.5, -2.5, 2.5, 2.5]
