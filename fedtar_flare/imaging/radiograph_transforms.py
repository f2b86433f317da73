"""A radiograph as a study of one slice with three equal channels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from monai.config import KeysCollection
from monai.transforms import MapTransform


class RadiographToSliced(MapTransform):
    """Radiograph uint8 (1, H, W) to (1, 3, H, W); its position, 0 mm, goes under ``position_key``."""

    def __init__(self, keys: KeysCollection, position_key: str = "position_mm", allow_missing_keys: bool = False):
        super().__init__(keys, allow_missing_keys)
        self.position_key = position_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        out = dict(data)
        for key in self.key_iterator(out):
            out[key] = np.repeat(np.asarray(out[key])[:, None], 3, axis=1)
            out[self.position_key] = np.zeros(1, np.float32)
        return out
