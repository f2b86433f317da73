"""Image encoders that turn each slice into tokens: CvT through transformers, or any timm backbone."""

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.models.config import STATISTICS, ModelConfig
from fedtar_flare.models.sources import fetching, is_folder, load_or_make, offline, quiet_loading


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
    """A backbone for all slices; ``mean`` and ``std`` normalise its images, per channel, in [0, 1]."""

    def __init__(self, backbone: nn.Module, width: int, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__(backbone, width)
        scale, shift = torch.tensor(std), torch.tensor(mean)
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
    """Build the encoder of a configuration; also return the names of its random parameters.

    ``load_pretrained=False`` is for a model whose whole checkpoint is loaded later. ConfigError as for a decoder.
    """
    return (_timm if config.encoder == "timm" else _cvt)(config, load_pretrained)


def _cvt(config: ModelConfig, load_pretrained: bool) -> tuple[SliceEncoder, tuple[str, ...]]:
    from transformers.models.cvt.configuration_cvt import CvtConfig
    from transformers.models.cvt.modeling_cvt import CvtModel

    sizes: dict[str, Any] = {**config.encoder_config, "mlp_ratio": (config.encoder_config["mlp_ratio"],) * 3}
    still: dict[str, Any] = {key: [0.0] * 3 for key in ("drop_path_rate", "drop_rate", "attention_drop_rate")}
    if config.encoder_name is None:
        own = CvtConfig(
            **sizes,
            cls_token=[False] * 3,
            initializer_range=0.06,  # for widths of some hundred and less; CvT's own 0.02 hardly starts to learn
            **still,
        )
        cvt, untrained = load_or_make(CvtModel, own, None)
    else:
        with fetching("encoder", config.encoder_name), quiet_loading():
            published = CvtConfig.from_pretrained(config.encoder_name, **still)
            if published.model_type != "cvt":
                raise ConfigError(
                    f"model setting encoder_name is '{config.encoder_name}', a {published.model_type} model: it must "
                    "be a CvT checkpoint (or take encoder='timm')"
                )
            cvt, untrained = load_or_make(CvtModel, published, config.encoder_name if load_pretrained else None)
    encoder = CvtEncoder(cvt, int(cvt.config.embed_dim[-1]), *STATISTICS[config.image_statistics])
    return encoder, tuple(f"backbone.{name}" for name in untrained)


def _timm(config: ModelConfig, load_pretrained: bool) -> tuple[SliceEncoder, tuple[str, ...]]:
    import timm

    assert config.encoder_name is not None
    name = f"local-dir:{config.encoder_name}" if is_folder(config.encoder_name) else config.encoder_name
    repository = None
    if ":" not in name:
        if not timm.is_model(name):
            near = timm.list_models(f"*{name.split('_')[0]}*")[:4]
            raise ConfigError(
                f"model setting encoder_name is '{name}': it is no folder, and timm has no such architecture"
                + (f" (it has {', '.join(near)}, ...)" if near else "")
            )
        published = timm.get_pretrained_cfg(name)
        repository = published.hf_hub_id if published else None
        if load_pretrained and repository is None and offline():  # timm would take it from an address of its own
            raise ConfigError(
                f"model setting encoder_name is '{name}': its weights are on no Hugging Face hub, and nothing is "
                "fetched here. Take a local folder"
            )
    with fetching("encoder", config.encoder_name, repository):
        backbone: Any
        try:
            backbone = timm.create_model(name, pretrained=load_pretrained, num_classes=0, img_size=config.image_size)
        except TypeError:  # an architecture that takes any size has no such argument
            backbone = timm.create_model(name, pretrained=load_pretrained, num_classes=0)
    encoder = TimmEncoder(backbone, int(backbone.num_features), *STATISTICS[config.image_statistics])
    missing = () if load_pretrained else tuple(f"backbone.{key}" for key, _ in backbone.named_parameters())
    return encoder, missing
