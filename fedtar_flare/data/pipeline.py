"""From a visit's image on disk to model input: MONAI pipelines, and :func:`prepare`, which runs them once per image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtar_flare.data.cache import Prepared, entry_key, load_entry, store_entry
from fedtar_flare.errors import ConfigError

if TYPE_CHECKING:
    from monai.transforms import Compose

    from fedtar_flare.data.types import Visit

CODE_VERSION = 1
"""Raised whenever the result of a pipeline changes: older cache entries are then made anew."""

NIFTI = (".nii", ".nii.gz")


@dataclass(frozen=True)
class InputConfig:
    """How images become model input.

    Args:
        image_size: height and width, pixels.
        slices: S, slices sampled over the lungs of a CT volume.
        windows: HU windows as channels, (level, width): lung, mediastinum, bone.

    Raises:
        ConfigError: for a value that is not allowed.
    """

    image_size: int = 64
    slices: int = 16
    windows: tuple[tuple[float, float], ...] = ((-600.0, 1500.0), (40.0, 400.0), (400.0, 1800.0))

    def __post_init__(self) -> None:
        if self.image_size < 16 or self.slices < 1:
            raise ConfigError(
                f"image_size ({self.image_size}) must be at least 16 and slices ({self.slices}) at least 1"
            )
        if len(self.windows) != 3 or any(width <= 0 for _, width in self.windows):
            raise ConfigError(f"windows {self.windows} must be three (level, width) pairs with positive widths")


def ct_pipeline(config: InputConfig, extra: Sequence[Callable[..., Any]] = ()) -> Compose:
    """``{"image": path}`` to ``{"image": uint8 (S, 3, H, W), "position_mm": float32 (S,)}``.

    Args:
        config: sizes and windows.
        extra: dictionary transforms of one's own, run on the volume (1, x, y, z) in HU, oriented to LPS, before slices
            are sampled.
    """
    from monai.transforms import Compose, LoadImaged, Orientationd

    from fedtar_flare.data.ct_transforms import HUWindowsd, LungSlicesd
    from fedtar_flare.data.readers.dicom_ct import CTSeriesReader

    return Compose(
        [
            LoadImaged("image", reader=CTSeriesReader(), dtype=np.int16, ensure_channel_first=True),
            Orientationd("image", axcodes="LPS", labels=None),
            *extra,
            LungSlicesd("image", config.slices, config.image_size),
            HUWindowsd("image", config.windows),
        ]
    )


def film_pipeline(config: InputConfig, extra: Sequence[Callable[..., Any]] = ()) -> Compose:
    """The same for a film: S = 1, three equal channels, position 0."""
    from monai.transforms import Compose

    from fedtar_flare.data.film_transforms import FilmChannelsd, LoadFilmd

    return Compose([LoadFilmd("image"), *extra, FilmChannelsd("image", config.image_size)])


def model_input(hu: np.ndarray, spacing_mm: Sequence[float], config: InputConfig) -> Prepared:
    """Model input of a volume in memory, by the same steps as :func:`ct_pipeline`.

    Args:
        hu: int16 (z, y, x): z towards the head, y to the back, x to the patient's left.
        spacing_mm: along z, y, x.
        config: sizes and windows.
    """
    from fedtar_flare.data.ct_transforms import AIR_FILL_HU, choose_slices, hu_windows, resize_square

    indices, positions = choose_slices(hu, float(spacing_mm[0]), config.slices)
    pixel = (float(spacing_mm[1]), float(spacing_mm[2]))
    planes = resize_square(hu[indices], config.image_size, AIR_FILL_HU, pixel)
    return Prepared(hu_windows(planes, config.windows), positions)


def prepare(visit: Visit, config: InputConfig, cache: Path) -> Prepared:
    """Model input of a visit: from the cache, else made and put there. A hit imports neither MONAI nor pydicom.

    Args:
        visit: its ``image`` and ``modality`` count.
        config: sizes and windows.
        cache: folder of entries; safe for several processes.

    Raises:
        DataError: the image cannot be read or is refused; its ``reason`` says why.
    """
    settings = {"code": CODE_VERSION, "modality": visit.modality, **asdict(config)}
    key = entry_key(visit.image, settings)
    found = load_entry(cache, key)
    if found is not None:
        return found
    made = (ct_pipeline if visit.modality == "ct" else film_pipeline)(config)({"image": str(visit.image)})
    store_entry(cache, key, np.asarray(made["image"]), np.asarray(made["position_mm"]))
    stored = load_entry(cache, key)
    return stored if stored is not None else Prepared(np.asarray(made["image"]), np.asarray(made["position_mm"]))
