"""The encoder of MONAI's Swin UNETR (``swinViT``; VoCo's too), for whole CT volumes.

The S slices of a prepared CT become S evenly spaced planes, each interpolated between the two slices around it. Axes
and values are those of the published weights: to the right, the front and the head (MONAI's ``RAS``), 0 to 1. Their
distance between planes was not fixed either, but they were trained on crops, in which the body is larger.
"""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models.encoders import EvalEncoder

STRIDE = 32  # voxels of the volume, along each axis, per voxel of the last feature map
NARROWEST = 12  # divisor of the feature size, since the first stage has three heads

HUWindow = Literal["lung", "mediastinum", "bone", "all"]
# channels of a prepared image (``imaging.transforms.WINDOWS``)
_CHANNELS = {"lung": slice(0, 1), "mediastinum": slice(1, 2), "bone": slice(2, 3), "all": slice(0, 3)}
_WITHIN = re.compile(r"(?:.*\.)?(?:swinViT|swin_vit)\.(.+)")
_NAMES = ((re.compile(r"^module\."), ""), (re.compile(r"\.mlp\.fc([12])\."), r".mlp.linear\1."))


class VolumeEncoder(EvalEncoder):
    """Features of whole volumes: the mean of the last feature map, normalised over channels."""

    def __init__(self, feature_size: int, window_size: int, hu_window: HUWindow):
        if find_spec("einops") is None:  # MONAI itself says so only when the first volume comes
            text = "the encoder 'swin_unetr' needs the package einops"
            raise ConfigError(f"{text} (pip install 'fedtar_flare[volumes]')", public=f"{text}, which this site lacks")
        from monai.networks.nets.swin_unetr import SwinTransformer

        channels = _CHANNELS[hu_window]
        backbone = SwinTransformer(
            in_chans=channels.stop - channels.start,
            embed_dim=feature_size,
            window_size=(window_size,) * 3,
            patch_size=(2, 2, 2),
            depths=(2, 2, 2, 2),
            num_heads=(3, 6, 12, 24),
        )
        super().__init__(backbone, 16 * feature_size)
        self.hu_window: HUWindow = hu_window

    def forward(self, batch: ImageBatch) -> Tensor:
        """Features (B, width); raises as :func:`volumes`."""
        last: Tensor = self.backbone(volumes(batch, self.hu_window))[-1]
        return last.mean((2, 3, 4))


def volumes(batch: ImageBatch, hu_window: HUWindow) -> Tensor:
    """Volumes (B, C, W, H, S) in 0..1, evenly spaced, to the right, the front, the head; DataError (``no-volume``)."""
    between = torch.from_numpy(interpolation(batch.position_mm.cpu().numpy(), batch.slice_mask.cpu().numpy()))
    seen = batch.images[:, :, _CHANNELS[hu_window]].float() / 255
    planes = torch.einsum("bds,bschw->bcdhw", between.to(seen), seen)
    return planes.flip(-1, -2).permute(0, 1, 4, 3, 2).contiguous()


def interpolation(position_mm: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Weights (B, S, S), float32: each of S even planes (row) as a mean of the slices (column) that ``mask`` shows."""
    count, planes = position_mm.shape
    weights = np.zeros((count, planes, planes), np.float32)
    rows = np.arange(planes)
    for weight, position, present in zip(weights, position_mm.astype(np.float64), mask, strict=True):
        columns = np.flatnonzero(present)
        at, first = np.unique(position[columns], return_index=True)
        if len(at) < 2:
            text = f"an image has slices at {len(at)} position(s): model.encoder 'swin_unetr' takes CT volumes alone"
            raise DataError(text, reason="no-volume")
        wanted = np.linspace(at[0], at[-1], planes)
        below = np.clip(np.searchsorted(at, wanted, side="right") - 1, 0, len(at) - 2)
        share = (wanted - at[below]) / (at[below + 1] - at[below])
        weight[rows, columns[first[below]]] = 1 - share
        weight[rows, columns[first[below + 1]]] = share
    return weights


def monai_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a published file's tensors, a Swin UNETR's too, to MONAI's encoder's; ConfigError for two encoders."""
    within = {name: match[1] for name in weights if (match := _WITHIN.fullmatch(name))}
    renamed: dict[str, Tensor] = {}
    for name, monai in (within or {name: name for name in weights}).items():
        for pattern, other in _NAMES:
            monai = pattern.sub(other, monai)
        if monai in renamed:
            raise ConfigError(f"encoder weights: the file has two encoders: {monai} twice; keep one of them")
        renamed[monai] = weights[name]
    return renamed
