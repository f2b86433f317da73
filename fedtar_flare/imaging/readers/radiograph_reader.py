"""``FilmReader``: chest films for MONAI's ``LoadImaged``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from monai.data import ImageReader

from fedtar_flare.imaging.readers.radiograph import PICTURES, read_film


class FilmReader(ImageReader):
    """Reads one film as uint8 (height, width), dense tissue bright; a film has no place in the body: identity affine.

    As with :class:`~fedtar_flare.imaging.readers.dicom_ct.CTSeriesReader`, the file is read in :meth:`get_data`, so
    that no other reader takes over what this one refuses.

    Args:
        lateral: whether lateral views are accepted.
    """

    def __init__(self, lateral: bool = False):
        super().__init__()
        self.lateral = lateral

    def verify_suffix(self, filename: Sequence[Any] | Any) -> bool:
        """Whether a path looks like a film: a picture, DICOM, or a file without a suffix."""
        names = [filename] if isinstance(filename, str | Path) else list(filename)
        return all(Path(name).suffix.lower() in (*PICTURES, ".dcm", ".dicom", "") for name in names)

    def read(self, data: Sequence[Any] | Any, **kwargs: Any) -> Path:
        """The path of the one film."""
        names = [data] if isinstance(data, str | Path) else list(data)
        if len(names) != 1:
            raise ValueError(f"one film at a time, not {len(names)}")
        return Path(names[0])

    def get_data(self, img: Path) -> tuple[np.ndarray, dict[str, Any]]:
        """Radiograph and metadata; raises :class:`DataError` (see :func:`read_film`)."""
        film = read_film(img, lateral=self.lateral)
        affine = np.eye(4)
        return film, {
            "affine": affine,
            "original_affine": affine.copy(),
            "spatial_shape": np.array(film.shape),
            "original_channel_dim": float("nan"),
        }
