"""``RadiographReader``: chest radiographs for MONAI's ``LoadImaged``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from monai.data import ImageReader

from fedtar_flare.data.sources.fields import PICTURES
from fedtar_flare.imaging.readers.radiograph import read_radiograph


class RadiographReader(ImageReader):
    """Reads one radiograph as uint8 (height, width), dense tissue bright; its affine is the identity.

    As in :class:`~fedtar_flare.imaging.readers.dicom_ct.CTSeriesReader`, :meth:`get_data` reads the file, so that no
    other reader takes over what this one refuses.
    """

    def __init__(self, lateral: bool = False):
        super().__init__()
        self.lateral = lateral

    def verify_suffix(self, filename: Sequence[Any] | Any) -> bool:
        """Whether a path looks like a radiograph: a picture, DICOM, or a file without a suffix."""
        names = [filename] if isinstance(filename, str | Path) else list(filename)
        return all(Path(name).suffix.lower() in (*PICTURES, ".dcm", ".dicom", "") for name in names)

    def read(self, data: Sequence[Any] | Any, **kwargs: Any) -> Path:
        names = [data] if isinstance(data, str | Path) else list(data)
        if len(names) != 1:
            raise ValueError(f"one radiograph at a time, not {len(names)}")
        return Path(names[0])

    def get_data(self, img: Path) -> tuple[np.ndarray, dict[str, Any]]:
        """Radiograph and metadata; raises :class:`DataError` (see :func:`read_radiograph`)."""
        radiograph = read_radiograph(img, lateral=self.lateral)
        affine = np.eye(4)
        return radiograph, {
            "affine": affine,
            "original_affine": affine.copy(),
            "spatial_shape": np.array(radiograph.shape),
            "original_channel_dim": float("nan"),
        }
