"""The only way from a study on disk to model input: a ``Compose`` of MONAI transforms, built by :func:`preparation`.

Slices of a CT are chosen, windowed and shrunk in plane. The volume itself is resampled only where a study lead adds a
transform for it, since that takes tenths of a second.
"""

import json
import logging
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import monai.transforms
import nibabel.orientations as nio
import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import Compose, MapTransform
from torch.nn.functional import interpolate

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.data.cohort import Modality
from fedtar_flare.imaging.limits import check_size
from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.pictures import read_photograph, read_radiograph
from fedtar_flare.imaging.readers.volume import to_int16
from fedtar_flare.imaging.transform_list import CT_ONLY, Spec, checked, deterministic, split

logger = logging.getLogger(__name__)
WINDOWS = ((-600.0, 1500.0), (40.0, 400.0), (400.0, 1800.0))  # (level, width) in HU: lung, mediastinum, bone
PLANES_AT_ONCE = 6  # planes resized together: few enough for the processor's cache
BODY_HU = -400  # air and lung lie below, the body above
COARSE_MM = 3.0
MIN_AREA_CM2 = 15.0
MIN_SHARE = 0.1
MIN_RANGE_MM = 60.0
DISPLAY_AXES = ("S", "P", "L")
"""Slices from feet to head; in a slice, rows from front to back and columns from the patient's right to the left."""


class InputSize(Protocol):
    """The part of a model's settings by which images are prepared: pixels of a side, slices of a CT volume."""

    @property
    def image_size(self) -> int: ...
    @property
    def slices(self) -> int: ...


def preparation(modality: Modality, size: InputSize, transforms: Sequence[Spec] = ()) -> Compose:
    """Compose the transforms from a study on disk to model input, for training, scoring, warm start and drafting alike.

    From ``{"image": path}`` to ``{"image": uint8 (S, 3, H, W), "position_mm": float32 (S,), ...}``; a picture has S = 1
    and position 0. Of a job's transforms (``data.transforms``), deterministic ones run on the image as it was read,
    before slices are chosen; random ones are left to :func:`.batch.augment`.
    """
    ct, added = modality == "ct", deterministic(checked(transforms))
    if wrong := [spec["name"] for spec in added if spec["name"] in CT_ONLY and not ct]:
        raise ConfigError(f"data: transforms: {wrong[0]} is for CT volumes; these images are pictures ({modality})")
    steps: list[tuple[str, dict[str, Any]]] = [("ReadStudyd", {"modality": modality})]
    for spec in added:
        if spec["name"] == "Spacingd":
            steps.append(("VoxelLimitd", {"pixdim": spec["pixdim"]}))
        steps.append(split(spec))
    if ct:
        steps += [("LungSlicesd", {"slices": size.slices}), ("HUWindowsd", {"windows": WINDOWS})]
    steps += [("SquareResized", {"size": size.image_size}), *([] if ct else [("PictureToSliced", {})])]
    return Compose([_made(name, arguments) for name, arguments in steps])


def composed(specs: Sequence[Spec]) -> Compose:
    """Compose these transforms on the key ``image``; equal ``specs`` give the same object."""
    return _composed(json.dumps([dict(spec) for spec in checked(specs)], sort_keys=True))


@lru_cache(maxsize=8)
def _composed(text: str) -> Compose:
    return Compose([_made(*split(spec)) for spec in json.loads(text)])


def _made(name: str, arguments: dict[str, Any]) -> Any:
    try:
        return (globals().get(name) or getattr(monai.transforms, name))("image", **arguments)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"data: transforms: {name} cannot be made: {error}") from error


class _Changes(MapTransform):
    """Base of transforms that change a copy of the dictionary, key by key."""

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        out = dict(data)
        for key in self.key_iterator(out):
            self.change(out, key)
        return out

    @abstractmethod
    def change(self, out: dict[Hashable, Any], key: Hashable) -> None:
        """Replace the value of ``key``."""


class ReadStudyd(_Changes):
    """Read a study by its path: a CT as int16 (1, X, Y, Z) in HU with its affine, a picture as uint8 (1 or 3, H, W).

    MONAI's ``LoadImaged`` would hand a file that our readers refuse to its other readers, whose image may be wrong.
    """

    def __init__(self, keys: KeysCollection, modality: Modality):
        super().__init__(keys)
        self.modality = modality

    def change(self, out: dict[Hashable, Any], key: Hashable) -> None:
        if self.modality == "ct":
            volume = read_ct(out[key])
            for note in volume.warnings:
                logger.warning("%s: %s: %s", out[key], note.reason, note.text)
            hu = torch.from_numpy(volume.hu).permute(2, 1, 0)[None]  # a view
            out[key] = MetaTensor(hu, affine=torch.from_numpy(volume.affine), meta={"space": "RAS"})
        elif self.modality == "photograph":
            out[key] = MetaTensor(torch.from_numpy(read_photograph(out[key])))
        else:
            pixels = read_radiograph(out[key], out.get("view", "frontal"))
            out[key] = MetaTensor(torch.from_numpy(pixels[None]))


class VoxelLimitd(_Changes):
    """Refuse (``too-large``) a volume that would have more voxels at this spacing than the site's limits allow."""

    def __init__(self, keys: KeysCollection, pixdim: Sequence[float] | float):
        super().__init__(keys)
        self.pixdim = np.resize(pixdim, 3)

    def change(self, out: dict[Hashable, Any], key: Hashable) -> None:
        extent = np.array(out[key].shape[-3:]) * np.linalg.norm(out[key].affine[:3, :3], axis=0)
        check_size("the volume, resampled by Spacingd", "voxels", int(np.prod(np.ceil(extent / self.pixdim))))


class LungSlicesd(_Changes):
    """Volume (1, X, Y, Z) or (X, Y, Z) in Hounsfield units to S slices that sample the lungs evenly in millimetres:
    int16 (S, H, W), feet to head, ``position_mm`` (S,) from the middle of the lungs, and ``pixel_mm`` of rows and
    columns.
    """

    def __init__(self, keys: KeysCollection, slices: int = 16):
        super().__init__(keys)
        self.slices = slices

    def change(self, out: dict[Hashable, Any], key: Hashable) -> None:
        hu, spacing = displayed(out[key])
        chosen, out["position_mm"] = sample_slices(*lung_range(hu, spacing), spacing[0], self.slices)
        out[key], out["pixel_mm"] = to_int16(hu[chosen]), spacing[1:]


def displayed(volume: Any) -> tuple[np.ndarray, tuple[float, float, float]]:
    """A view of a ``MetaTensor`` as (feet to head, front to back, right to left), and its spacing in mm along these."""
    if not isinstance(volume, MetaTensor) or volume.ndim not in (3, 4) or (volume.ndim == 4 and len(volume) > 1):
        text = f"a CT volume has three axes and an affine, not {type(volume).__name__} {tuple(np.shape(volume))}"
        raise DataError(text, reason="not-a-volume")
    array, affine = volume.as_tensor().numpy().reshape(volume.shape[-3:]), np.asarray(volume.affine, np.float64)
    turn = nio.ornt_transform(nio.io_orientation(affine), nio.axcodes2ornt(DISPLAY_AXES))
    sizes = np.linalg.norm(affine[:3, :3], axis=0)
    z, y, x = (float(sizes[int(np.flatnonzero(turn[:, 0] == axis)[0])]) for axis in range(3))
    return nio.apply_orientation(array, turn), (z, y, x)


def lung_range(hu: np.ndarray, spacing_mm: tuple[float, float, float]) -> tuple[int, int]:
    """First and last slice of the lungs.

    Air that the body encloses within a slice is mostly lung. Slices count while its area is at least a tenth of the
    largest slice's: that keeps the tips and leaves out windpipe and bowel gas. Where no lungs are found (another part
    of the body, an unusual field of view), the whole volume is the range.

    ``hu`` is (z, y, x) in Hounsfield units with z along the body's axis; the spacing is along z, y, x.
    """
    steps = [max(1, round(COARSE_MM / step)) for step in spacing_mm[1:]]
    voxels = _enclosed_air(hu[:, :: steps[0], :: steps[1]])
    area = voxels * (steps[0] * spacing_mm[1] * steps[1] * spacing_mm[2] / 100)
    whole = 0, len(hu) - 1
    if area.max() < MIN_AREA_CM2:
        return whole
    peak = int(area.argmax())
    low_air = np.flatnonzero(area < max(MIN_SHARE * area[peak], MIN_AREA_CM2 / 2))
    first = int(low_air[low_air < peak].max(initial=-1)) + 1
    last = int(low_air[low_air > peak].min(initial=len(hu))) - 1
    return (first, last) if (last - first + 1) * spacing_mm[0] >= MIN_RANGE_MM else whole


def _enclosed_air(hu: np.ndarray) -> np.ndarray:
    """For each slice, the number of air voxels that the body encloses within it."""
    from scipy import ndimage

    in_plane = np.zeros((3, 3, 3), bool)
    in_plane[1] = ndimage.generate_binary_structure(2, 1)
    labels, count = ndimage.label(hu < BODY_HU, in_plane)
    inside = np.ones(count + 1, bool)
    inside[0] = False
    for edge in (labels[:, 0], labels[:, -1], labels[:, :, 0], labels[:, :, -1]):
        inside[edge.ravel()] = False
    return inside[labels].sum(axis=(1, 2))


def sample_slices(first: int, last: int, spacing_mm: float, slices: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (S,) of slices nearest to the middles of equal parts of a range, and their mm (S,) from its middle."""
    middles = first - 0.5 + (np.arange(slices) + 0.5) * (last - first + 1) / slices
    indices = np.clip(np.ceil(middles - 0.5).astype(int), first, last)
    return indices, ((indices - (first + last) / 2) * spacing_mm).astype(np.float32)


class HUWindowsd(_Changes):
    """Hounsfield units (S, H, W) to uint8 (S, C, H, W): each (level, width) window is a channel, black to white."""

    def __init__(self, keys: KeysCollection, windows: Sequence[tuple[float, float]] = WINDOWS):
        super().__init__(keys)
        values = np.arange(1 << 16, dtype=np.uint16).view(np.int16).astype(np.float32)
        shown = (np.clip((values - (level - width / 2)) * (255 / width), 0, 255) for level, width in windows)
        self._tables = [np.rint(grey).astype(np.uint8) for grey in shown]

    def change(self, out: dict[Hashable, Any], key: Hashable) -> None:
        values = np.ascontiguousarray(to_int16(np.asarray(out[key]))).view(np.uint16)
        planes = (plane.astype(np.intp) for plane in values)
        # clip skips the check of each index
        out[key] = np.stack([np.stack([table.take(plane, mode="clip") for table in self._tables]) for plane in planes])


class SquareResized(_Changes):
    """Fit the last two axes into a black square, uint8, keeping the body's shape by the ``pixel_mm`` of rows and
    columns.
    """

    def __init__(self, keys: KeysCollection, size: int):
        super().__init__(keys)
        self.size = size

    def change(self, out: dict[Hashable, Any], key: Hashable) -> None:
        pictures, pixel_mm = np.asarray(out[key]), out.get("pixel_mm", (1.0, 1.0))
        *front, rows, columns = pictures.shape
        extent = rows * pixel_mm[0], columns * pixel_mm[1]
        height, width = (max(1, round(self.size * side / max(extent))) for side in extent)
        shrinks = height <= rows and width <= columns
        how: dict[str, Any] = {"mode": "area"} if shrinks else {"mode": "bilinear", "antialias": True}
        planes = torch.from_numpy(pictures.reshape(-1, 1, rows, columns))
        square = np.zeros((len(planes), self.size, self.size), np.uint8)
        top, left = (self.size - height) // 2, (self.size - width) // 2
        for i in range(0, len(planes), PLANES_AT_ONCE):
            part = interpolate(planes[i : i + PLANES_AT_ONCE].float(), size=(height, width), **how)
            placed = part[:, 0].round().clamp(0, 255).numpy()
            square[i : i + PLANES_AT_ONCE, top : top + height, left : left + width] = placed
        out[key] = square.reshape(*front, self.size, self.size)


class PictureToSliced(_Changes):
    """Picture uint8 (1 or 3, H, W) to one slice (1, 3, H, W), one channel three times; ``position_mm`` is 0."""

    def change(self, out: dict[Hashable, Any], key: Hashable) -> None:
        picture = np.asarray(out[key])
        out[key] = np.repeat(picture, 3 // len(picture), axis=0)[None]
        out["position_mm"] = np.zeros(1, np.float32)
