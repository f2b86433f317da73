"""Classifiers: a frozen image encoder, an adapter within it, and a binary head on its pooled features.

The encoder is that of the shipped report generator (``small``; CT slice by slice), a ViT of the sizes given here, or any
timm backbone. Adapter and head are what is trained and exchanged, under PEFT's names and as ``head.weight`` and
``head.bias``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.settings import Settings

if TYPE_CHECKING:
    from peft import PeftModel

    from fedtar_flare.imaging.batch import ImageBatch

CLASSES = 2
"""Logits of the head; index 1 stands for the new disease."""

_CVT_TARGETS = r"encoder\..*\.(projection_query|projection_key|projection_value)"
_TIMM_TARGETS = r"encoder\..*\bblocks\.\d+\..*\bqkv"


class ClassifierConfig(Settings):
    """A frozen encoder, its adapter and the head."""

    encoder: Literal["small", "tiny", "vit", "timm"] = Field(
        "small", description="'small': of the shipped report generator; 'tiny': random (tests); 'vit': random, of the "
        "sizes below (tests); 'timm': a named one",
    )  # fmt: skip
    encoder_name: str | None = Field(None, description="timm architecture, hub name or local folder, for 'timm'")
    encoder_pretrained: bool = Field(True, description="load the named encoder's weights, else random ones")
    encoder_weights: str | None = Field(
        None, description="local safetensors file of the named encoder's weights (RETFound and others)"
    )
    image_size: int = Field(64, ge=16, description="height and width of a slice or picture, pixels")
    slices: int = Field(16, ge=1, description="most slices of a CT volume; 1 for pictures")
    image_mean: tuple[float, float, float] = Field((0.5,) * 3, description="per channel, of images in [0, 1]")
    image_std: tuple[float, float, float] = Field((0.5,) * 3, description="per channel, of images in [0, 1]")
    width: int = Field(64, ge=8, description="of 'vit'")
    depth: int = Field(3, ge=1, le=100, description="blocks of 'vit'")
    heads: int = Field(4, ge=1, description="attention heads of 'vit'")
    patch: int = Field(8, ge=1, description="height and width of a patch of 'vit', pixels")
    adapter: Literal["lora", "ia3"] = Field("lora", description="low-rank factors, or scales of keys and values")
    rank: int = Field(2, ge=1, description="of LoRA; its scale is 1")
    targets: str | None = Field(
        None, description="regular expression on module names: the adapted layers; None: attention's queries, keys, "
        "values",
    )  # fmt: skip
    random_backbone: bool = Field(False, description="a frozen encoder of random weights is meant (tests)")
    seed: int = Field(0, ge=0, description="of the common start, and of every weight that is not loaded")


def build_classifier(config: ClassifierConfig, places: Mapping[str, Path | None] | None = None) -> PeftModel:
    """The classifier on the CPU, float32, eval mode; its module is the common start w0.

    LoRA's A is random and its B zero, IA3's factors are 1, the head is small and random: all by ``config.seed`` alone.
    ``models.adapters.lora``'s ``shared_parameters``, ``shared_state`` and ``load_shared_state`` work on it; calling it
    with an :class:`ImageBatch` gives logits (B, 2).

    Raises:
        ConfigError: the encoder cannot be had or its weights do not fit, it would stay random without
            ``random_backbone``, or the targets match no layer.
    """
    raise NotImplementedError
