from __future__ import annotations

import numpy as np
import pytest
import torch
from refused import refused

from fedtar_flare.imaging.batch import collate
from fedtar_flare.imaging.cache import Prepared


def prepared(slices, size=8, value=255):
    image = np.full((slices, 3, size, size), value, np.uint8)
    image.setflags(write=False)  # as a memory map is
    return Prepared(image, np.arange(slices, dtype=np.float32))


def test_values_positions_and_mask():
    batch = collate([prepared(3), prepared(1, value=0)])
    assert batch.images.shape == (2, 3, 3, 8, 8) and batch.images.dtype == torch.uint8
    assert (batch.images[0] == 255).all() and (batch.images[1] == 0).all()
    assert batch.position_mm.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.slice_mask.tolist() == [[True] * 3, [True, False, False]]
    assert batch.to("cpu").slice_mask.equal(batch.slice_mask)


def test_a_batch_does_not_change_when_others_join_it():
    one = prepared(2, value=100)
    assert collate([one]).images[0].equal(collate([prepared(5), one]).images[1, :2])


@pytest.mark.parametrize("items, reason", [([], "empty-batch"), ([prepared(1), prepared(1, size=16)], "mixed-size")])
def test_what_cannot_be_stacked_is_refused(items, reason):
    with refused(reason):
        collate(items)
