"""Classifiers: a frozen image encoder, an adapter within it, and a binary head on its pooled features.

Adapter and head are what is trained and exchanged, under PEFT's names and as ``head.weight`` and ``head.bias``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.core.settings import problem_of
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models.adapters.kinds import add_ia3
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import RANDOM, ImageModelConfig, ModelConfig, preset
from fedtar_flare.models.encoders import (
    NARROWEST,
    STRIDE,
    HUWindow,
    SliceEncoder,
    TimmEncoder,
    VolumeEncoder,
    build_encoder,
    monai_names,
)
from fedtar_flare.models.weights import load_weights

if TYPE_CHECKING:
    from peft import PeftModel

CLASSES = 2  # logits of the head; index 1 stands for the new disease
_DECODER = ("mask_token", *(f"decoder_{part}" for part in ("embed", "blocks", "norm", "pred", "pos_embed")))
# heads and the decoder of a masked autoencoder (RETFound), which a published file may have and the encoder has not
_LEFT = ("head", "fc", "classifier", *_DECODER)
_HEAD_STD = 0.02
_HEAD = ("head.weight", "head.bias")
_ADAPTED = {"lora": ("query", "key", "value"), "ia3": ("key", "value")}
SIZES: dict[str, dict[str, tuple[int, int, int]]] = {
    "vit": {"embed_dim": (64, 8, 65536), "depth": (3, 1, 100), "num_heads": (4, 1, 65536), "patch_size": (8, 1, 1024)},
    "swin_unetr": {"feature_size": (48, NARROWEST, 384), "window_size": (7, 2, 16)},
}
"""Sizes of encoders without a name: default, least and most. A published Swin UNETR has a window of 7 tokens."""
_DEFAULTS = "; ".join(f"{name}={size}" for sizes in SIZES.values() for name, (size, *_) in sizes.items())


class ClassifierConfig(ImageModelConfig):
    """Settings of a classifier: its frozen encoder, adapter and head."""

    encoder: Literal["small", "tiny", "vit", "timm", "swin_unetr"] = Field(
        "small",
        description="'small': of the shipped report generator; 'tiny': the same, random (tests); 'vit': a ViT of the "
        "sizes below; 'timm': a named one; 'swin_unetr': MONAI's, of whole CT volumes",
    )
    encoder_weights: str | None = Field(
        None,
        description="local safetensors file of the weights of 'vit', 'timm' (RETFound) or 'swin_unetr' (VoCo); "
        "'random': none of the named encoder's own are loaded (tests)",
    )
    encoder_config: dict[str, int] = Field({}, description=f"sizes of 'vit' or 'swin_unetr', if other than {_DEFAULTS}")
    hu_window: HUWindow = Field(
        "lung", description="window of a CT for 'swin_unetr': one, as the published weights have, or 'all' three"
    )
    adapter: Literal["lora", "ia3"] = Field("lora", description="low-rank factors, or scales of keys and values")
    rank: int = Field(2, ge=1, description="rank of LoRA, whose scale is 1")
    targets: tuple[str, ...] | None = Field(
        None, description="adapted layers, by whole names with '*' for any text; None: queries, keys and values"
    )

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if problem := problem_of(self.targets or ()):
            yield "targets", problem
        known = SIZES.get(self.encoder, {})
        for name, value in self.encoder_config.items():
            if name not in known:
                yield "encoder_config", f"of {', '.join(known) or 'no size'} with encoder='{self.encoder}'"
            elif not known[name][1] <= value <= known[name][2]:
                yield "encoder_config", f"of a {name} from {known[name][1]} to {known[name][2]}"
        if (self.encoder == "timm") is not bool(self.encoder_name):
            yield "encoder_name", "a timm architecture, hub name or local folder with encoder='timm', else none"
        if self.encoder in ("small", "tiny") and self.encoder_weights:
            yield "encoder_weights", f"none with encoder='{self.encoder}'"
        sizes = self.sizes
        if self.encoder == "vit" and self.image_size % sizes["patch_size"]:
            yield "image_size", f"a multiple of patch_size={sizes['patch_size']}"
        if self.encoder == "vit" and sizes["embed_dim"] % sizes["num_heads"]:
            yield "encoder_config", "of an embed_dim that is a multiple of num_heads"
        if self.whole_volumes:
            for name in ("slices", "image_size"):
                if getattr(self, name) % STRIDE:
                    yield name, f"a multiple of {STRIDE} with encoder='swin_unetr', whose grid it is"
            if sizes["feature_size"] % NARROWEST:
                yield "encoder_config", f"of a feature_size that is a multiple of {NARROWEST}"

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of 'vit' or 'swin_unetr', as timm and MONAI name them; empty for the others."""
        return {name: size for name, (size, *_) in SIZES.get(self.encoder, {}).items()} | self.encoder_config

    @property
    def whole_volumes(self) -> bool:
        """Whether the encoder sees a CT as one volume."""
        return self.encoder == "swin_unetr"

    @property
    def adapted_layers(self) -> tuple[str, ...]:
        """Globs of the adapted layers: ``targets``, or the encoder's attention."""
        if self.encoder in ("small", "tiny"):
            return self.targets or tuple(f"encoder.*.projection_{name}" for name in _ADAPTED[self.adapter])
        return self.targets or ("encoder.*.blocks.*.qkv",)


class Classifier(nn.Module):
    """Mean of the pooled features of a study's slices (or of a volume), and a linear head."""

    def __init__(self, encoder: SliceEncoder | VolumeEncoder, seed: int):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.width, CLASSES)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(self.head.weight.shape, generator=generator) * _HEAD_STD)
            self.head.bias.zero_()

    def forward(self, batch: ImageBatch) -> Tensor:
        """Logits (B, 2)."""
        return self.head(self.features(batch))

    def features(self, batch: ImageBatch) -> Tensor:
        """Features (B, C)."""
        if isinstance(self.encoder, VolumeEncoder):
            return self.encoder(batch)
        images = batch.images.flatten(0, 1)
        if isinstance(self.encoder, TimmEncoder):
            backbone: Any = self.encoder.backbone
            maps = backbone.forward_features(self.encoder.normalised(images))
            pooled = backbone.forward_head(maps, pre_logits=True)
        else:
            pooled = F.layer_norm(self.encoder(images).mean(1), (self.encoder.width,))
        slices = pooled.unflatten(0, batch.images.shape[:2])
        mask = batch.slice_mask[..., None].to(slices.dtype)
        return (slices * mask).sum(1) / mask.sum(1).clamp(min=1)


def bare_classifier(config: ClassifierConfig, local_paths: Mapping[str, Path | None] | None = None) -> Classifier:
    """Build the classifier without its adapter, on the CPU, float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Classifier(_encoder(config, local_paths or {}), config.seed)


def build_classifier(config: ClassifierConfig, local_paths: Mapping[str, Path | None] | None = None) -> PeftModel:
    """Build the classifier, whose exchanged parameters, the common start w0, follow from ``config.seed``."""
    classifier, targets = bare_classifier(config, local_paths), config.adapted_layers
    if config.adapter == "ia3":
        return add_ia3(classifier, targets=targets, extra=_HEAD).eval()
    rank = config.rank
    return add_lora(classifier, targets=targets, rank=rank, alpha=rank, seed=config.seed, extra=_HEAD).eval()


def _encoder(config: ClassifierConfig, local_paths: Mapping[str, Path | None]) -> SliceEncoder | VolumeEncoder:
    encoder: SliceEncoder | VolumeEncoder
    sizes: dict[str, Any] = config.sizes
    if config.encoder in ("small", "tiny"):
        return build_model(preset(config.encoder, seed=config.seed)).encoder
    if config.encoder == "vit":
        from timm.models.vision_transformer import VisionTransformer

        vit = VisionTransformer(img_size=config.image_size, num_classes=0, **sizes)
        encoder = TimmEncoder(vit, sizes["embed_dim"], config.image_statistics)
    elif config.encoder == "swin_unetr":
        encoder = VolumeEncoder(hu_window=config.hu_window, **sizes)
    else:
        shared = {name: getattr(config, name) for name in ("image_size", "image_statistics", "encoder_name")}
        named = ModelConfig(preset="classifier", encoder="timm", **shared).with_local_paths(local_paths)
        encoder, _ = build_encoder(named, load_pretrained=config.encoder_weights is None)
    if config.encoder_weights not in (None, RANDOM):
        path = local_paths.get(config.encoder_weights) or Path(config.encoder_weights).expanduser()
        load_weights(encoder.backbone, path, monai_names if config.whole_volumes else dict, _LEFT)
    return encoder
