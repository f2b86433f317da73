"""From images to the memory that the decoder attends to: encoders, pooling of slices, marks of the visit before."""

import math
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.core.settings import suggestion
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models.config import STATISTICS, ModelConfig, Statistics
from fedtar_flare.models.sources import fetching, is_folder, load_or_make

WAVELENGTHS_MM = (16.0, 1024.0)  # shortest and longest of the position features
FREQUENCIES = 8
KINDS = ("image", "report")
KIND_SIZE, TIME_SIZE = 1.0, 0.3
STRIDE = 32  # voxels of the volume, along each axis, per voxel of the last feature map
NARROWEST = 12  # divisor of the feature size, since the first stage has three heads

HUWindow = Literal["lung", "mediastinum", "bone", "all"]
# channels of a prepared image (``imaging.transforms.WINDOWS``)
_CHANNELS = {"lung": slice(0, 1), "mediastinum": slice(1, 2), "bone": slice(2, 3), "all": slice(0, 3)}
_WITHIN = re.compile(r"(?:.*\.)?(?:swinViT|swin_vit)\.(.+)")
_NAMES = ((re.compile(r"^module\."), ""), (re.compile(r"\.mlp\.fc([12])\."), r".mlp.linear\1."))


class EvalEncoder(nn.Module):
    """A backbone of ``width`` channels, always in eval mode, else BatchNorm statistics would drift at each site."""

    def __init__(self, backbone: nn.Module, width: int):
        super().__init__()
        self.backbone = backbone
        self.width = width
        self.eval()

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


class SliceEncoder(EvalEncoder):
    """A backbone for all slices, which are normalised by the ``statistics`` (:data:`STATISTICS`) that it learned by."""

    def __init__(self, backbone: nn.Module, width: int, statistics: Statistics):
        super().__init__(backbone, width)
        shift, scale = (torch.tensor(values) for values in STATISTICS[statistics])
        self.register_buffer("pixel_scale", (0.5 / scale).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_shift", ((0.5 - shift) / scale).view(3, 1, 1), persistent=False)
        self.pixel_scale: Tensor
        self.pixel_shift: Tensor

    def forward(self, images: Tensor) -> Tensor:
        """Tokens (N, T, width) of uint8 images (N, 3, H, W)."""
        return self.run(self.normalised(images))

    def normalised(self, images: Tensor) -> Tensor:
        """Normalise uint8 images (N, 3, H, W) for the backbone."""
        return (images.float() / 127.5 - 1) * self.pixel_scale + self.pixel_shift

    def stage_modules(self) -> Sequence[nn.Module]:
        """Stages between which :meth:`run` can stop; the whole backbone where it has none."""
        return (self.backbone,)

    def run(self, states: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Run stages ``first`` to ``last`` (excluded), from normalised images or an earlier stage's states."""
        raise NotImplementedError


class CvtEncoder(SliceEncoder):
    """CvT: the feature map of its last stage, row by row."""

    def stage_modules(self) -> Sequence[nn.Module]:
        return tuple(cast(Any, self.backbone).encoder.stages)

    def run(self, states: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        stages = self.stage_modules()
        last = len(stages) if last is None else last
        for stage in stages[first:last]:
            states, _ = stage(states)  # the second is a class token, which nobody reads
        return states.flatten(2).transpose(1, 2) if first < last == len(stages) else states


class TimmEncoder(SliceEncoder):
    """A timm backbone: tokens as they are, or its last feature map row by row (both channel orders)."""

    def run(self, states: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        if first or last == 0:
            return states
        features = self.backbone.forward_features(states)  # type: ignore[operator]
        if features.dim() == 4 and features.shape[1] == self.width != features.shape[3]:
            features = features.permute(0, 2, 3, 1)
        return features.flatten(1, -2)


def build_encoder(config: ModelConfig, load_pretrained: bool) -> tuple[SliceEncoder, tuple[str, ...]]:
    """Build the encoder of a configuration; also return the names of its random parameters."""
    if config.encoder == "timm":
        return _timm(config, load_pretrained)
    from transformers.models.cvt.configuration_cvt import CvtConfig
    from transformers.models.cvt.modeling_cvt import CvtModel

    still: dict[str, Any] = {key: [0.0] * 3 for key in ("drop_path_rate", "drop_rate", "attention_drop_rate")}
    if config.encoder_name is None:
        sizes: dict[str, Any] = {**config.encoder_config, "mlp_ratio": (config.encoder_config["mlp_ratio"],) * 3}
        # range of the start: CvT's own 0.02 hardly starts to learn at widths of some hundred and less
        cvt_config = CvtConfig(**sizes, cls_token=[False] * 3, initializer_range=0.06, **still)
        cvt, untrained = load_or_make(CvtModel, cvt_config, None)
    else:
        with fetching("encoder", config.encoder_name):
            published = CvtConfig.from_pretrained(config.encoder_name, **still)
            if published.model_type != "cvt":
                text = f"model setting encoder_name is '{config.encoder_name}', a {published.model_type} model"
                raise ConfigError(f"{text}: it must be a CvT checkpoint (or take encoder='timm')")
            cvt, untrained = load_or_make(CvtModel, published, config.encoder_name if load_pretrained else None)
    encoder = CvtEncoder(cvt, int(cvt.config.embed_dim[-1]), config.image_statistics)
    return encoder, tuple(f"backbone.{name}" for name in untrained)


def _timm(config: ModelConfig, load_pretrained: bool) -> tuple[SliceEncoder, tuple[str, ...]]:
    import timm
    from huggingface_hub import constants

    assert config.encoder_name is not None
    name = f"local-dir:{config.encoder_name}" if is_folder(config.encoder_name) else config.encoder_name
    repository = None
    if ":" not in name:
        if not timm.is_model(name):
            text = f"model setting encoder_name is '{name}': it is no folder, and timm has no such architecture"
            raise ConfigError(text + suggestion(name, timm.list_models()))
        published = timm.get_pretrained_cfg(name)
        repository = published.hf_hub_id if published else None
        if load_pretrained and repository is None and constants.HF_HUB_OFFLINE:  # timm would take another address
            text = f"model setting encoder_name is '{name}': its weights are on no Hugging Face hub"
            raise ConfigError(f"{text}, and nothing is fetched here. Take a local folder")
    with fetching("encoder", config.encoder_name, repository):
        backbone: Any
        try:
            backbone = timm.create_model(name, pretrained=load_pretrained, num_classes=0, img_size=config.image_size)
        except TypeError:  # an architecture that takes any size has no such argument
            backbone = timm.create_model(name, pretrained=load_pretrained, num_classes=0)
    encoder = TimmEncoder(backbone, int(backbone.num_features), config.image_statistics)
    missing = () if load_pretrained else tuple(f"backbone.{key}" for key, _ in backbone.named_parameters())
    return encoder, missing


class VolumeEncoder(EvalEncoder):
    """Features of whole CT volumes by MONAI's Swin UNETR (``swinViT``; VoCo's too).

    They are the mean of the last feature map, normalised over channels. The S slices of a prepared CT become S evenly
    spaced planes, each interpolated between the two slices around it. Axes and values are those of the published
    weights: to the right, the front and the head (MONAI's ``RAS``), 0 to 1. Their distance between planes was not fixed
    either, but they were trained on crops, in which the body is larger.
    """

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


class SliceAttentionPooling(nn.Module):
    """``queries`` memory tokens a slice, softmax(q . norm(x)) of its tokens, plus its position in mm along the body."""

    def __init__(self, width: int, queries: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.position = nn.Linear(2 * FREQUENCIES, width)
        short, long = WAVELENGTHS_MM
        wavelengths = torch.logspace(math.log2(short), math.log2(long), FREQUENCIES, base=2)
        self.register_buffer("angular_frequency", 2 * math.pi / wavelengths, persistent=False)
        self.angular_frequency: Tensor

    def forward(self, tokens: Tensor, position_mm: Tensor) -> Tensor:
        """Memory (B, S * queries, C) of tokens (B, S, N, C) at positions (B, S) in millimetres."""
        x = self.norm(tokens)
        scores = torch.einsum("qc,bsnc->bsqn", self.queries, x) * x.shape[-1] ** -0.5
        pooled = scores.softmax(-1).to(x.dtype) @ x
        angles = position_mm[..., None] * self.angular_frequency
        position = self.position(torch.cat([angles.sin(), angles.cos()], dim=-1))
        return (pooled + position.unsqueeze(2)).flatten(1, 2)


class NoPooling(nn.Module):
    """The paper's form: every token of the one radiograph goes to the decoder unchanged."""

    def forward(self, tokens: Tensor, position_mm: Tensor) -> Tensor:
        """Memory (B, S * N, C) of tokens (B, S, N, C)."""
        return tokens.flatten(1, 2)


class PriorMarks(nn.Module):
    """Marks features of the visit before with their kind and the days between, by fixed codes."""

    def __init__(self, width: int):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("kinds", torch.randn(len(KINDS), width, generator=generator), persistent=False)
        angles = torch.randn(2 * FREQUENCIES, width, generator=generator) / math.sqrt(FREQUENCIES)
        self.register_buffer("times", angles, persistent=False)
        frequencies = 2 * math.pi / torch.logspace(2, 5, FREQUENCIES, base=2)  # per doubling of the days
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.kinds: Tensor
        self.times: Tensor
        self.frequencies: Tensor

    def forward(self, features: Tensor, kind: str, days: Tensor, size: Tensor) -> Tensor:
        """Mark features (B, M, E) of ``kind`` with the days (B,) between, by codes of the size (B,)."""
        angles = torch.log2(1 + days)[:, None] * self.frequencies
        time = torch.cat([angles.sin(), angles.cos()], dim=1) @ self.times
        code = KIND_SIZE * self.kinds[KINDS.index(kind)] + TIME_SIZE * time
        return features + (size[:, None] * code)[:, None].to(features.dtype)
