"""``CTSeriesReader``: chest CT (DICOM series or NIfTI) for MONAI's ``LoadImaged``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import ImageReader

from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.volume import CTRules

logger = logging.getLogger(__name__)


class CTSeriesReader(ImageReader):
    """Reads one CT volume in Hounsfield units (int16) with its exact geometry.

    ``LoadImaged(keys="image", reader=CTSeriesReader(), dtype=np.int16)`` gives a volume indexed (x, y, z) with a RAS
    affine, as MONAI's own readers do. The metadata holds ``affine``, ``original_affine``, ``spacing`` (mm along x, y,
    z), ``spatial_shape``, ``space``, ``original_channel_dim``, ``series_uid`` and ``warnings`` (texts).

    The file is read in :meth:`get_data`, not in :meth:`read`: after an error in ``read``, ``LoadImage`` tries its other
    readers, and they would return a silently wrong volume for what this reader refuses.

    ``as_tensor`` returns a torch view instead of an array. ``LoadImage`` copies an array to make it contiguous in
    (x, y, z), which takes longer than reading it, but leaves a view alone.
    """

    def __init__(self, rules: CTRules | None = None, as_tensor: bool = False):
        super().__init__()
        self.rules = rules or CTRules()
        self.as_tensor = as_tensor

    def verify_suffix(self, filename: Sequence[Any] | Any) -> bool:
        """Whether a path looks like CT: a folder, a DICOM or NIfTI file, a zip, or a file without a suffix."""
        paths = [Path(name) for name in _listed(filename)]
        known = (".dcm", ".ima", ".dicom", ".nii", ".nii.gz", ".zip")
        return all(path.is_dir() or not path.suffix or path.name.lower().endswith(known) for path in paths)

    def read(self, data: Sequence[Any] | Any, **kwargs: Any) -> list[Path]:
        """The path(s); several files are the slices of one study."""
        return [Path(name) for name in _listed(data)]

    def get_data(self, img: list[Path]) -> tuple[Any, dict[str, Any]]:
        """Volume (x, y, z) int16 and its metadata; raises :class:`DataError` as :func:`.ct.read_ct` does."""
        volume = read_ct(img, self.rules)
        for note in volume.warnings:
            logger.warning("%s: %s: %s", img[0], note.reason, note.text)
        hu = torch.from_numpy(volume.hu).permute(2, 1, 0) if self.as_tensor else volume.hu.transpose(2, 1, 0)
        meta = {
            "affine": volume.affine.copy(),
            "original_affine": volume.affine.copy(),
            "spacing": np.array(volume.spacing_mm[::-1]),
            "spatial_shape": np.array(hu.shape),
            "space": "RAS",
            "original_channel_dim": float("nan"),  # MONAI's word for "no channel"
            "series_uid": volume.series_uid,
            "warnings": [f"{note.reason}: {note.text}" for note in volume.warnings],
        }
        return hu, meta


def _listed(names: Sequence[Any] | Any) -> list[Any]:
    return [names] if isinstance(names, str | Path) else list(names)
