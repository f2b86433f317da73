"""From a film to model input: one slice of three equal channels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from monai.config import KeysCollection
from monai.transforms import MapTransform

from fedtar_flare.data.ct_transforms import resize_square


class FilmChannelsd(MapTransform):
    """A film (1, H, W), 0 to 255, becomes uint8 (1, 3, size, size): padded to a square with black, never stretched.

    Args:
        keys: of the films.
        image_size: height and width.
        position_key: where the position of the one slice, 0 mm, is put.
    """

    def __init__(self, keys: KeysCollection, image_size: int, position_key: str = "position_mm"):
        super().__init__(keys)
        self.image_size, self.position_key = image_size, position_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Apply to all keys."""
        result = dict(data)
        for key in self.key_iterator(result):
            plane = resize_square(np.asarray(result[key]), self.image_size, fill=0)
            result[key] = np.repeat(np.rint(plane).clip(0, 255).astype(np.uint8)[:, None], 3, axis=1)
            result[self.position_key] = np.zeros(1, dtype=np.float32)
        return result
