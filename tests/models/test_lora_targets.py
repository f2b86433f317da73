"""The LoRA targets of each preset are exactly the linear layers of the transformer layers."""

import re

import pytest
import torch

from fedtar_flare.core.globs import matches
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import ModelConfig, preset

SMALL_DECODER = {"decoder_name": None, "decoder_config": {"n_embd": 32, "n_layer": 2, "n_head": 2}, "max_length": 96}
TIMM = {"weights": "random", "tokenizer": "small", "slices": 2, **SMALL_DECODER}
CASES = [
    (preset("tiny"), r"encoder\.backbone\.encoder\.stages\.\d\.layers\.\d\.", 6 * 6),
    (preset("small", weights=None), r"encoder\.backbone\.encoder\.stages\.\d\.layers\.\d\.", 6 * 6),
    (preset("timm", image_size=32, encoder_name="test_vit", **TIMM), r"encoder\.backbone\.blocks\.\d\.", 4 * 6),
    (
        preset("timm", image_size=224, encoder_name="swin_tiny_patch4_window7_224", **TIMM),
        r"encoder\.backbone\.layers\.\d\.blocks\.\d\.",
        4 * 12,
    ),
]


def linear_names(model: torch.nn.Module) -> set[str]:
    from transformers.pytorch_utils import Conv1D

    return {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}


@pytest.mark.parametrize(("config", "layer", "in_encoder"), CASES)
def test_targets_hit_every_linear_of_every_layer_and_nothing_else(config: ModelConfig, layer: str, in_encoder: int):
    model = build_model(config)
    hit = {name for name, _ in model.named_modules() if matches(name, config.lora_targets)}
    wanted = {n for n in linear_names(model) if re.match(rf"({layer}|decoder\.transformer\.h\.\d\.)", n)}
    assert hit == wanted
    assert len([name for name in hit if name.startswith("encoder")]) == in_encoder
    assert len([name for name in hit if name.startswith("decoder")]) == 7 * config.decoder_config["n_layer"]
    assert not {"decoder.lm_head", "projection", "pooling.position"} & hit
