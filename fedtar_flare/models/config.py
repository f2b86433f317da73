"""Settings of a report generator, and presets.

``small`` is the shipped default (warm-started on generic phantoms), ``tiny`` and ``vlm-tiny`` have random weights, and
``timm`` joins any timm encoder to any decoder of the GPT-2 family; the papers' are in :mod:`fedtar_flare.presets`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import Settings, build, problem_of, suggestion
from fedtar_flare.presets import papers

ASSETS = Path(__file__).resolve().parent.parent / "assets"

DECODER_TARGETS = ("decoder.*.c_attn", "decoder.*.q_attn", "decoder.*.c_proj", "decoder.*.c_fc")
CVT_TARGETS = (
    *(f"encoder.*.projection_{name}" for name in ("query", "key", "value")),
    "encoder.*.dense",
    *DECODER_TARGETS,
)
VLM_TARGETS = tuple(
    f"decoder.*language_model.*.{name}"
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)  # every linear layer of the language part; a run names vision layers itself
TIMM_TARGETS = (*(f"encoder.*.blocks.*.{name}" for name in ("qkv", "proj", "fc1", "fc2")), *DECODER_TARGETS)
MOST_LAYERS = 64  # of a CvT or GPT-2 of configured sizes; to count more takes seconds, before a site can decline them
RANDOM = "random"  # value of ``weights`` for a model that is meant to be random

Statistics = Literal["half", "imagenet", "clip"]
STATISTICS: dict[Statistics, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
"""Mean and standard deviation per channel, of images in [0, 1], by which encoders were trained."""

Size = Annotated[int, Field(ge=1)]
PerStage = tuple[Size, Size, Size]


class CvtSizes(TypedDict):
    """Sizes of a CvT without a name, as ``transformers.CvtConfig`` names them; one ``mlp_ratio`` for all stages."""

    embed_dim: PerStage
    depth: PerStage
    num_heads: PerStage
    mlp_ratio: Annotated[float, Field(gt=0)]


class GPT2Sizes(TypedDict):
    """Sizes of a GPT-2 without a name, as ``transformers.GPT2Config`` names them."""

    n_embd: Size
    n_layer: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    n_head: Size
    n_positions: Size


class ImageModelConfig(Settings):
    """Settings that report generators and classifiers share."""

    image_size: int = Field(64, ge=16, description="height and width of a slice or picture, pixels")
    slices: int = Field(16, ge=1, description="slices of a CT volume; 1 for radiographs and other pictures")
    image_statistics: Statistics = Field(
        "half", description="mean and deviation of the images that the encoder learned from, for normalisation"
    )
    encoder_name: str | None = Field(
        None, description="hub name, local folder or timm architecture; None: an encoder of the sizes in encoder_config"
    )
    seed: int = Field(0, ge=0, description="seed of every weight that is not loaded")


class ModelConfig(ImageModelConfig):
    """Settings of a report generator. A named encoder or decoder brings its own sizes."""

    preset: str = Field(description="name of the preset that this started from")
    family: Literal["parts", "vlm"] = Field(
        "parts",
        description="'parts': an image encoder and a decoder; 'vlm': a vision-language model of transformers "
        "(AutoModelForImageTextToText) with its own processor and chat template, named by decoder_name",
    )
    prompt: str = Field(
        "Write the report of this study.", min_length=1, max_length=2000, description="question to a 'vlm'"
    )
    slice_view: Literal["slices", "montage"] = Field(
        "slices", description="a CT for a 'vlm': slice by slice, or all slices in one picture"
    )
    lateral: bool = Field(False, description="show a 'vlm' a radiograph's lateral view too, where the data has one")
    encoder: Literal["cvt", "timm"] = Field("cvt", description="family of the image encoder")
    encoder_config: CvtSizes = Field(
        CvtSizes(embed_dim=(32, 64, 128), depth=(1, 2, 3), num_heads=(1, 2, 4), mlp_ratio=2.0),
        description="sizes of a CvT without a name, by stage; stage i (from 0) needs a depth above i",
    )
    pooling: Literal["attention", "none"] = Field(
        "attention", description="'none' hands all tokens of one radiograph to the decoder"
    )
    queries: int = Field(4, ge=1, description="learned queries per slice (memory tokens that a slice gives)")
    decoder_name: str | None = Field(
        None, description="hub name or folder of the decoder or 'vlm'; None: a GPT-2 of decoder_config, or a Qwen2-VL"
    )
    decoder: Literal["gpt2", "transformer", "r2gen", "prefix"] = Field(
        "gpt2",
        description="GPT-2 family with cross-attention; a vanilla Transformer or R2Gen of the sizes in decoder_config, "
        "with as many layers over the image's tokens; or any causal language model that reads the image as a prefix",
    )
    decoder_dtype: Literal["float32", "bfloat16", "4bit"] = Field(
        "float32",
        description="precision of a frozen 'prefix' decoder or 'vlm': bfloat16 halves its memory; '4bit' "
        "(NF4, a 'vlm' alone) takes a seventh and needs the extra fedtar_flare[vlm]",
    )
    decoder_config: GPT2Sizes = Field(
        GPT2Sizes(n_embd=128, n_layer=4, n_head=4, n_positions=192),
        description="width, layers, attention heads and longest sequence of a GPT-2 without a name",
    )
    tokenizer: str = Field("small", description="'small' (shipped), 'decoder' (its own) or path of a tokenizer.json")
    weights: str | None = Field(
        None,
        description="'small' (shipped), path of a safetensors file of the whole model, 'random' (tests: no weights are "
        "loaded, and frozen random ones are meant), or None: those of the named parts",
    )
    max_length: int = Field(160, ge=3, description="tokens of a report, with begin and end tokens; longer ones are cut")
    num_beams: int = Field(4, ge=1, description="beams when generating")
    lora_targets: tuple[str, ...] = Field(
        CVT_TARGETS,
        description="list of the linear layers that LoRA adapts, by whole names with '*' for any text: "
        "['decoder.*.c_attn', 'decoder.*.c_fc']; '!' before a name takes it out",
    )

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def of_paper(self) -> bool:
        """Whether it is one of the encoder-decoder models of :mod:`~fedtar_flare.models.r2gen`."""
        return self.decoder in ("transformer", "r2gen")

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if self.pooling == "none" and self.slices != 1:
            yield "pooling", "'attention' for CT volumes; 'none' takes slices=1, as it has no slice position"
        if self.encoder == "timm" and not self.encoder_name:
            yield "encoder_name", "a timm architecture ('vit_tiny_patch16_224'), hub name or local folder"
        if not self.encoder_name:
            sizes = self.encoder_config
            if sum(sizes["depth"]) > MOST_LAYERS:
                yield "encoder_config", f"of at most {MOST_LAYERS} layers"
            if any(depth <= stage for stage, depth in enumerate(sizes["depth"])):
                yield "encoder_config", "of a depth above i at stage i counted from 0, so of at least (1, 2, 3)"
            if any(width % heads for width, heads in zip(sizes["embed_dim"], sizes["num_heads"], strict=True)):
                yield "encoder_config", "of an embed_dim whose widths are multiples of num_heads"
        if self.decoder == "prefix" and not self.decoder_name:
            yield "decoder_name", "a local folder or hub name of a causal language model, as decoder is 'prefix'"
        if self.of_paper and self.decoder_name:
            yield "decoder_name", f"none, as decoder is '{self.decoder}', which has no published weights of this form"
        if self.decoder_dtype not in ("float32", self.decoder == "prefix" and "bfloat16") and self.family != "vlm":
            yield "decoder_dtype", "float32, unless decoder is 'prefix' (or bfloat16) or family is 'vlm' (or 4bit)"
        if self.lateral and (self.family != "vlm" or self.slices > 1):
            yield "lateral", "false, unless family is 'vlm' and slices 1"
        if self.family == "vlm":
            if self.encoder_name:
                yield "encoder_name", "none, as family is 'vlm': decoder_name names the whole model"
            if not self.decoder_name and self.weights != RANDOM:
                yield "decoder_name", "a local folder or hub name, as family is 'vlm' (or weights 'random', for tests)"
        if self.decoder_name is None and self.family != "vlm":
            if self.decoder_config["n_embd"] % self.decoder_config["n_head"]:
                yield "decoder_config", "of an n_embd that is a multiple of n_head"
            if self.max_length > (positions := self.decoder_config["n_positions"]):
                yield "max_length", f"at most n_positions={positions} of decoder_config"
            if self.tokenizer == "decoder":
                yield "tokenizer", "'small' or a path, as no decoder_name is given whose tokenizer to take"
        if problem := problem_of(self.lora_targets):
            yield "lora_targets", problem

    @property
    def named(self) -> dict[str, str]:
        """Parts from outside the package, by setting: hub names or paths."""
        shipped = {"tokenizer": ("small", "decoder"), "weights": ("small", "random")}
        named: dict[str, str] = {}
        for setting in ("encoder_name", "decoder_name", "tokenizer", "weights"):
            if (name := getattr(self, setting)) and name not in shipped.get(setting, ()):
                named[setting] = name
        return named

    def with_local_paths(self, local_paths: Mapping[str, Path | None]) -> ModelConfig:
        """Return a copy that takes named parts from local paths."""
        files = {"tokenizer": "tokenizer.json", "weights": "model.safetensors"}
        replaced = {}
        for setting, name in self.named.items():
            if (path := local_paths.get(name)) is not None:
                replaced[setting] = str(path / files[setting] if setting in files and path.is_dir() else path)
        return self.replace(**replaced)


_TINY = {"image_size": 32, "slices": 4, "max_length": 96, "num_beams": 2, "weights": RANDOM}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_TINY,
        "encoder_config": {"embed_dim": (8, 16, 32), "depth": (1, 2, 3), "num_heads": (1, 1, 2), "mlp_ratio": 2.0},
        "queries": 2,
        "decoder_config": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 96},
    },
    "small": {"weights": "small"},
    "timm": {
        "image_size": 224,
        "image_statistics": "imagenet",
        "encoder": "timm",
        "encoder_name": "vit_tiny_patch16_224",
        "decoder_name": "distilgpt2",
        "tokenizer": "decoder",
        "max_length": 128,
        "lora_targets": TIMM_TARGETS,
    },
    "vlm-tiny": {**_TINY, "family": "vlm", "slice_view": "montage", "lora_targets": VLM_TARGETS},
    **{name: paper.group("model") for name, paper in papers().items() if not paper.classifies},
}


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the settings of a preset, some of them replaced."""
    if name not in PRESETS:
        known = f"{', '.join(PRESETS)}{suggestion(name, PRESETS)}"
        raise ConfigError(f"model preset '{name}' is unknown: it must be one of {known}")
    values = {**PRESETS[name], **overrides, "preset": name}
    for part in ("encoder_config", "decoder_config"):
        if isinstance(overrides.get(part), Mapping):
            base = PRESETS[name].get(part, ModelConfig.model_fields[part].default)
            values[part] = {**base, **overrides[part]}
    return build(ModelConfig, values, "model")


def asset(source: str, filename: str, field_name: str) -> Path:
    """Return the path of a preset's shipped file, else ``source`` as a path; ConfigError where no file is there."""
    path = ASSETS / source / filename if source in PRESETS else Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(f"model setting {field_name} is '{source}': there is no file {path}")
    return path
