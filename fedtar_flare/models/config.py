"""Which report generator: one validated description, and named presets of it.

Preset ``small`` is the embedded default (warm-started on generic phantoms), ``tiny`` has random weights and is for
tests, ``paper`` is CvT-21 (384, ImageNet-22K) with DistilGPT2, ``timm`` joins any timm encoder to any decoder of the
GPT-2 family.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fedtar_flare.errors import ConfigError

ASSETS = Path(__file__).resolve().parent.parent / "assets"

_DECODER_LINEARS = r"decoder\..*\.(c_attn|q_attn|c_proj|c_fc)"
CVT_TARGETS = rf"(encoder\..*\.(projection_query|projection_key|projection_value|dense)|{_DECODER_LINEARS})"
TIMM_TARGETS = rf"(encoder\..*\bblocks\.\d+\..*\b(qkv|proj|fc1|fc2)|{_DECODER_LINEARS})"
_IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}


def _help(text: str, default: Any = ...) -> Any:
    return field(metadata={"help": text}) if default is ... else field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A report generator, described by primitive values (each field says in its metadata what it is).

    A named encoder or decoder brings its own sizes; the size fields describe those that are built from scratch. Lists
    are taken as tuples, so that a configuration read back from JSON equals the one that was written.

    Raises:
        ConfigError: names the field, its value and what is allowed.
    """

    preset: str = _help("name of the preset that this started from")
    image_size: int = _help("height and width of a slice or radiograph, pixels", 64)
    slices: int = _help("slices of a CT volume; 1 for radiographs", 16)
    image_mean: tuple[float, ...] = _help("per channel, of images in [0, 1], subtracted before the encoder", (0.5,) * 3)
    image_std: tuple[float, ...] = _help("per channel, of images in [0, 1], divided by before the encoder", (0.5,) * 3)
    encoder: Literal["cvt", "timm"] = _help("family of the image encoder", "cvt")
    encoder_name: str | None = _help("hub name or local folder (timm: or architecture); None: the sizes below", None)
    encoder_pretrained: bool = _help("load the named encoder's own weights, else random ones", True)
    encoder_widths: tuple[int, ...] = _help("channels of CvT's stages", (32, 64, 128))
    encoder_depths: tuple[int, ...] = _help("layers of CvT's stages; stage i (from 0) needs more than i", (1, 2, 3))
    encoder_heads: tuple[int, ...] = _help("attention heads of CvT's stages", (1, 2, 4))
    encoder_mlp_ratio: float = _help("width of CvT's feed-forward layers over that of the stage", 2.0)
    pooling: Literal["attention", "none"] = _help("'none' hands a radiograph's tokens to the decoder", "attention")
    queries: int = _help("learned queries per slice (memory tokens that a slice gives)", 4)
    decoder_name: str | None = _help("hub name or local folder of a GPT-2-family decoder; None: the sizes below", None)
    decoder_width: int = _help("width of the decoder", 128)
    decoder_layers: int = _help("layers of the decoder", 4)
    decoder_heads: int = _help("attention heads of the decoder", 4)
    decoder_positions: int = _help("longest sequence that the decoder has positions for", 192)
    tokenizer: str = _help(
        "'small' (shipped), 'decoder' (the named decoder's own) or path of a tokenizer.json", "small"
    )
    weights: str | None = _help("'small' (shipped), path of a safetensors file of the whole model, or None", None)
    max_length: int = _help("tokens of a report, begin and end tokens included; longer ones are cut", 160)
    num_beams: int = _help("beams when generating", 4)
    lora_targets: str = _help("regular expression on module names: the linear layers that LoRA adapts", CVT_TARGETS)
    random_backbone: bool = _help("frozen random weights are meant (tests): see require_trained", False)
    seed: int = _help("of every weight that is not loaded", 0)

    def __post_init__(self) -> None:
        for name in ("image_mean", "image_std", "encoder_widths", "encoder_depths", "encoder_heads"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_choice("encoder", ("cvt", "timm"))
        self._check_choice("pooling", ("attention", "none"))
        for name in ("image_size", "slices", "queries", "decoder_width", "decoder_layers", "decoder_heads",
                     "decoder_positions", "num_beams"):  # fmt: skip
            self._check_whole(name, 1)
        self._check_whole("max_length", 3)
        self._check_whole("seed", 0)
        if self.image_size < 16:
            self._refuse("image_size", "at least 16: the encoder halves it four times")
        for name in ("image_mean", "image_std"):
            if len(getattr(self, name)) != 3:
                self._refuse(name, "three numbers, one per channel")
        if min(self.image_std) <= 0:
            self._refuse("image_std", "three numbers above 0")
        if self.pooling == "none" and self.slices != 1:
            self._refuse("pooling", "'attention' for CT volumes; 'none' takes slices=1, as it has no slice position")
        self._check_encoder()
        if self.decoder_name is None:
            if self.decoder_width % self.decoder_heads:
                self._refuse("decoder_width", f"a multiple of decoder_heads={self.decoder_heads}")
            if self.max_length > self.decoder_positions:
                self._refuse("max_length", f"at most decoder_positions={self.decoder_positions}")
            if self.tokenizer == "decoder":
                self._refuse("tokenizer", "'small' or a path, as no decoder_name is given whose tokenizer to take")
        try:
            re.compile(self.lora_targets)
        except re.error as error:
            self._refuse("lora_targets", f"a valid regular expression ({error})")

    def _check_encoder(self) -> None:
        if self.encoder == "timm" and not self.encoder_name:
            self._refuse("encoder_name", "a timm architecture ('vit_tiny_patch16_224'), hub name or local folder")
        sizes = (self.encoder_widths, self.encoder_depths, self.encoder_heads)
        if self.encoder == "timm" or self.encoder_name:
            return
        if any(len(values) != 3 for values in sizes) or min(map(min, sizes)) < 1:
            self._refuse("encoder_widths", "three whole numbers above 0, as encoder_depths and encoder_heads")
        if any(depth <= stage for stage, depth in enumerate(self.encoder_depths)):
            self._refuse("encoder_depths", "more than i layers at stage i counted from 0, so at least (1, 2, 3)")
        if any(width % heads for width, heads in zip(self.encoder_widths, self.encoder_heads, strict=True)):
            self._refuse("encoder_widths", f"multiples of encoder_heads={self.encoder_heads}")
        if self.encoder_mlp_ratio <= 0:
            self._refuse("encoder_mlp_ratio", "above 0")

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self._refuse(name, f"a whole number of at least {least}")

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            self._refuse(name, f"one of {', '.join(allowed)}")

    def _refuse(self, name: str, allowed: str) -> None:
        raise ConfigError(f"model setting {name} is {getattr(self, name)!r}: it must be {allowed}")


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
}


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The named preset with some settings replaced.

    Raises:
        ConfigError: unknown preset or setting (the nearest one is suggested), or a value that is not allowed.
    """
    if name not in PRESETS:
        raise ConfigError(f"model preset '{name}' is unknown: it must be one of {', '.join(PRESETS)}")
    known = [entry.name for entry in fields(ModelConfig) if entry.name != "preset"]
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"model setting '{key}' is unknown: {hint}")
    return ModelConfig(preset=name, **{**PRESETS[name], **overrides})


def asset(source: str, filename: str, field_name: str) -> Path:
    """A path, or the shipped file of that name."""
    path = ASSETS / source / filename if source in PRESETS else Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(f"model setting {field_name} is '{source}': there is no file {path}")
    return path
