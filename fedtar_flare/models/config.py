"""Which report generator: a validated description, and presets.

``small`` is the shipped default (warm-started on generic phantoms), ``tiny`` has random weights for tests, ``paper`` is
CvT-21 (384, ImageNet-22K) with DistilGPT2, ``timm`` joins any timm encoder to any decoder of the GPT-2 family,
``fedmrg-paper`` is ResNet-101 with Llama-2-7B-chat, whose folder a site names in its policy (``models``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedtar_flare.errors import ConfigError
from fedtar_flare.settings import Settings, build, nearest

ASSETS = Path(__file__).resolve().parent.parent / "assets"

DECODER_TARGETS = r"decoder\..*\.(c_attn|q_attn|c_proj|c_fc)"
CVT_TARGETS = rf"(encoder\..*\.(projection_query|projection_key|projection_value|dense)|{DECODER_TARGETS})"
TIMM_TARGETS = rf"(encoder\..*\bblocks\.\d+\..*\b(qkv|proj|fc1|fc2)|{DECODER_TARGETS})"
MOST_LAYERS = 1000
"""Of the decoder, and of one stage of CvT."""
_IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}


class ModelConfig(Settings):
    """A report generator. A named encoder or decoder brings its own sizes; the size fields are for the others."""

    preset: str = Field(description="name of the preset that this started from")
    image_size: int = Field(64, ge=16, description="height and width of a slice or radiograph, pixels")
    slices: int = Field(16, ge=1, description="slices of a CT volume; 1 for radiographs")
    image_mean: tuple[float, float, float] = Field(
        (0.5,) * 3, description="per channel, of images in [0, 1], subtracted before the encoder"
    )
    image_std: tuple[float, float, float] = Field(
        (0.5,) * 3, description="per channel, of images in [0, 1], divided by before the encoder"
    )
    encoder: Literal["cvt", "timm"] = Field("cvt", description="family of the image encoder")
    encoder_name: str | None = Field(
        None, description="hub name or local folder (timm: or architecture); None: the sizes below"
    )
    encoder_pretrained: bool = Field(True, description="load the named encoder's own weights, else random ones")
    encoder_widths: tuple[int, ...] = Field((32, 64, 128), description="channels of CvT's stages")
    encoder_depths: tuple[int, ...] = Field(
        (1, 2, 3), description="layers of CvT's stages; stage i (from 0) needs more than i"
    )
    encoder_heads: tuple[int, ...] = Field((1, 2, 4), description="attention heads of CvT's stages")
    encoder_mlp_ratio: float = Field(2.0, gt=0, description="width of CvT's feed-forward layers over that of the stage")
    pooling: Literal["attention", "none"] = Field(
        "attention", description="'none' hands all tokens of one radiograph to the decoder"
    )
    queries: int = Field(4, ge=1, description="learned queries per slice (memory tokens that a slice gives)")
    decoder_name: str | None = Field(
        None, description="hub name or local folder of the decoder; None: a GPT-2 of the sizes below"
    )
    decoder: Literal["gpt2", "prefix"] = Field(
        "gpt2",
        description="GPT-2 family with cross-attention, or any causal language model that reads the image as a prefix",
    )
    decoder_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the weights of a frozen 'prefix' decoder: bfloat16 halves its memory"
    )
    decoder_width: int = Field(128, ge=1, description="width of the decoder")
    decoder_layers: int = Field(4, ge=1, le=MOST_LAYERS, description="layers of the decoder")
    decoder_heads: int = Field(4, ge=1, description="attention heads of the decoder")
    decoder_positions: int = Field(192, ge=1, description="longest sequence that the decoder has positions for")
    tokenizer: str = Field(
        "small", description="'small' (shipped), 'decoder' (the named decoder's own) or path of a tokenizer.json"
    )
    weights: str | None = Field(
        None, description="'small' (shipped), path of a safetensors file of the whole model, or None"
    )
    max_length: int = Field(
        160, ge=3, description="tokens of a report, begin and end tokens included; longer ones are cut"
    )
    num_beams: int = Field(4, ge=1, description="beams when generating")
    lora_targets: str = Field(
        CVT_TARGETS, description="regular expression on module names: the linear layers that LoRA adapts"
    )
    random_backbone: bool = Field(False, description="frozen random weights are meant (tests): see require_trained")
    seed: int = Field(0, ge=0, description="of every weight that is not loaded")

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if min(self.image_std) <= 0:
            yield "image_std", "three numbers above 0"
        if self.pooling == "none" and self.slices != 1:
            yield "pooling", "'attention' for CT volumes; 'none' takes slices=1, as it has no slice position"
        if self.encoder == "timm" and not self.encoder_name:
            yield "encoder_name", "a timm architecture ('vit_tiny_patch16_224'), hub name or local folder"
        if not self.encoder_name:
            yield from self._encoder_misfits()
        if self.decoder == "prefix" and not self.decoder_name:
            yield "decoder_name", "a local folder or hub name of a causal language model, as decoder is 'prefix'"
        if self.decoder_dtype != "float32" and self.decoder != "prefix":
            yield "decoder_dtype", "float32, unless decoder is 'prefix'"
        if self.decoder_name is None:
            if self.decoder_width % self.decoder_heads:
                yield "decoder_width", f"a multiple of decoder_heads={self.decoder_heads}"
            if self.max_length > self.decoder_positions:
                yield "max_length", f"at most decoder_positions={self.decoder_positions}"
            if self.tokenizer == "decoder":
                yield "tokenizer", "'small' or a path, as no decoder_name is given whose tokenizer to take"
        try:
            re.compile(self.lora_targets)
        except re.error as error:
            yield "lora_targets", f"a valid regular expression ({error})"

    def named(self) -> dict[str, str]:
        """What this takes from outside the package, a hub name or a path, by setting."""
        own = {"tokenizer": ("small", "decoder"), "weights": ("small",)}
        names = {name: getattr(self, name) for name in ("encoder_name", "decoder_name", "tokenizer", "weights")}
        return {setting: name for setting, name in names.items() if name and name not in own.get(setting, ())}

    def located(self, places: Mapping[str, Path | None]) -> ModelConfig:
        """A copy that takes what is in ``places`` from there; None leaves a name as it is.

        A folder stands for its ``model.safetensors`` as weights, and for its ``tokenizer.json`` as a tokenizer.
        """
        files = {"tokenizer": "tokenizer.json", "weights": "model.safetensors"}
        found = {}
        for setting, name in self.named().items():
            if (place := places.get(name)) is not None:
                found[setting] = str(place / files[setting] if setting in files and place.is_dir() else place)
        return self.replace(**found)

    def _encoder_misfits(self) -> Iterator[tuple[str, str]]:
        sizes = (self.encoder_widths, self.encoder_depths, self.encoder_heads)
        if any(len(values) != 3 for values in sizes) or min(map(min, sizes)) < 1:
            yield "encoder_widths", "three whole numbers above 0, as encoder_depths and encoder_heads"
        if max(self.encoder_depths) > MOST_LAYERS:
            yield "encoder_depths", f"at most {MOST_LAYERS} layers a stage"
        if any(depth <= stage for stage, depth in enumerate(self.encoder_depths)):
            yield "encoder_depths", "more than i layers at stage i counted from 0, so at least (1, 2, 3)"
        if any(width % heads for width, heads in zip(self.encoder_widths, self.encoder_heads, strict=True)):
            yield "encoder_widths", f"multiples of encoder_heads={self.encoder_heads}"


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "image_size": 32,
        "slices": 4,
        "encoder_widths": (8, 16, 32),
        "encoder_heads": (1, 1, 2),
        "queries": 2,
        "decoder_width": 32,
        "decoder_layers": 2,
        "decoder_heads": 2,
        "decoder_positions": 96,
        "max_length": 96,
        "num_beams": 2,
        "random_backbone": True,
    },
    "small": {"weights": "small"},
    "paper": {
        "image_size": 384,
        "slices": 1,
        **_IMAGENET,
        "encoder_name": "microsoft/cvt-21-384-22k",
        "pooling": "none",
        "decoder_name": "distilgpt2",
        "tokenizer": "decoder",
        "max_length": 128,
    },
    "timm": {
        "image_size": 224,
        **_IMAGENET,
        "encoder": "timm",
        "encoder_name": "vit_tiny_patch16_224",
        "decoder_name": "distilgpt2",
        "tokenizer": "decoder",
        "max_length": 128,
        "lora_targets": TIMM_TARGETS,
    },
    "fedmrg-paper": {
        "image_size": 224,
        "slices": 1,
        **_IMAGENET,
        "encoder": "timm",
        "encoder_name": "resnet101",
        "pooling": "none",
        "decoder": "prefix",
        "decoder_name": "meta-llama/Llama-2-7b-chat-hf",
        "decoder_dtype": "bfloat16",
        "tokenizer": "decoder",
        "max_length": 128,
        "lora_targets": r"decoder\..*\.(q_proj|v_proj)",
    },
}


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The named preset with some settings replaced.

    Raises:
        ConfigError: an unknown preset or setting (suggests the nearest one), or a value that is not allowed.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"model preset '{name}' is unknown: it must be one of {', '.join(PRESETS)}{nearest(name, PRESETS)}"
        )
    return build(ModelConfig, {**PRESETS[name], **overrides, "preset": name}, "model")


def asset(source: str, filename: str, field_name: str) -> Path:
    """The shipped file of a preset, else ``source`` as a path."""
    path = ASSETS / source / filename if source in PRESETS else Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(f"model setting {field_name} is '{source}': there is no file {path}")
    return path
