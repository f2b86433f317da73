"""``CTSeriesReader``, ``RadiographReader`` and ``PhotographReader`` for MONAI's ``LoadImaged``.

The file is read in ``get_data``, not in ``read``: after an error in ``read``, ``LoadImage`` tries its other readers,
and they would return a silently wrong image for what these refuse.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import ImageReader

from fedtar_flare.data.sources.fields import PICTURES
from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.pictures import read_photograph
from fedtar_flare.imaging.readers.radiograph import read_radiograph

logger = logging.getLogger(__name__)


class CTSeriesReader(ImageReader):
    """Reads one CT volume in Hounsfield units (int16) with its exact geometry.

    ``LoadImaged(keys="image", reader=CTSeriesReader(), dtype=np.int16)`` gives a volume indexed (x, y, z) with a RAS
    affine, as MONAI's own readers do. The metadata holds ``affine``, ``original_affine``, ``spacing`` (mm along x, y,
    z), ``spatial_shape``, ``space``, ``original_channel_dim``, ``series_uid`` and ``warnings`` (texts).

    ``as_tensor`` returns a torch view instead of an array. ``LoadImage`` copies an array to make it contiguous in
    (x, y, z), which takes longer than reading it, but leaves a view alone.
    """

    def __init__(self, as_tensor: bool = False):
        super().__init__()
        self.as_tensor = as_tensor

    def verify_suffix(self, filename: Sequence[Any] | Any) -> bool:
        """Whether a path looks like CT: a folder, a DICOM or NIfTI file, a zip, or a file without a suffix."""
        known = (".dcm", ".ima", ".dicom", ".nii", ".nii.gz", ".zip")
        return all(p.is_dir() or not p.suffix or p.name.lower().endswith(known) for p in _paths(filename))

    def read(self, data: Sequence[Any] | Any, **kwargs: Any) -> list[Path]:
        """The path(s); several files are the slices of one study."""
        return _paths(data)

    def get_data(self, img: list[Path]) -> tuple[Any, dict[str, Any]]:
        """Volume (x, y, z) int16 and its metadata; raises :class:`DataError` as :func:`.ct.read_ct` does."""
        volume = read_ct(img)
        warnings = [f"{note.reason}: {note.text}" for note in volume.warnings]
        for warning in warnings:
            logger.warning("%s: %s", img[0], warning)
        hu = torch.from_numpy(volume.hu).permute(2, 1, 0) if self.as_tensor else volume.hu.transpose(2, 1, 0)
        more = {"space": "RAS", "series_uid": volume.series_uid, "warnings": warnings}
        return hu, _meta(volume.affine, hu.shape) | more | {"spacing": np.array(volume.spacing_mm[::-1])}


class RadiographReader(ImageReader):
    """Reads one radiograph as uint8 (height, width), dense tissue bright; its affine is the identity."""

    def verify_suffix(self, filename: Sequence[Any] | Any) -> bool:
        """Whether a path looks like a radiograph: a picture, DICOM, or a file without a suffix."""
        return all(path.suffix.lower() in (*PICTURES, ".dcm", ".dicom", "") for path in _paths(filename))

    def read(self, data: Sequence[Any] | Any, **kwargs: Any) -> Path:
        paths = _paths(data)
        if len(paths) != 1:
            raise ValueError(f"one radiograph at a time, not {len(paths)}")
        return paths[0]

    def get_data(self, img: Path) -> tuple[np.ndarray, dict[str, Any]]:
        """Radiograph and metadata; raises :class:`DataError` (see :func:`read_radiograph`)."""
        radiograph = read_radiograph(img)
        return radiograph, _meta(np.eye(4), radiograph.shape)


class PhotographReader(RadiographReader):
    """Reads one photograph as uint8 (3, height, width); its affine is the identity."""

    def verify_suffix(self, filename: Sequence[Any] | Any) -> bool:
        """Whether a path looks like a picture."""
        return all(path.suffix.lower() in PICTURES for path in _paths(filename))

    def get_data(self, img: Path) -> tuple[np.ndarray, dict[str, Any]]:
        """Photograph and metadata; raises :class:`DataError` (see :func:`read_photograph`)."""
        photograph = read_photograph(img)
        return photograph, _meta(np.eye(4), photograph.shape[1:]) | {"original_channel_dim": 0}


def _paths(names: Sequence[Any] | Any) -> list[Path]:
    return [Path(name) for name in ([names] if isinstance(names, str | Path) else names)]


def _meta(affine: np.ndarray, shape: Sequence[int]) -> dict[str, Any]:
    """What MONAI's readers tell of an image; NaN is its word for "no channel"."""
    return {
        "affine": affine.copy(),
        "original_affine": affine.copy(),
        "spatial_shape": np.array(shape),
        "original_channel_dim": float("nan"),
    }
