"""Configuration: what is refused and how it is said; builds are reproducible; weights load strictly; LoRA's targets."""

import json
import re

import pytest
import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import matches
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import PRESETS, ModelConfig, preset
from fedtar_flare.models.weights import load_weights, model_tensors, save_weights


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_and_survives_json(name):
    config = preset(name)
    assert config.preset == name
    assert ModelConfig(**json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"encoder": "timm"}, "encoder_name is None"),
        ({"encoder_config": {"depth": (1, 1, 1)}}, r"encoder_config is .* at least \(1, 2, 3\)"),
        ({"encoder_config": {"embed_dim": (8, 16)}}, r"encoder_config\[embed_dim\] is \(8, 16\)"),
        ({"encoder_config": {"num_heads": (3, 1, 2)}}, "multiples of num_heads"),
        ({"pooling": "none"}, "takes slices=1"),
        ({"decoder_config": {"n_head": 5}}, "a multiple of n_head"),
        ({"max_length": 97}, "at most n_positions=96"),
        ({"lora_targets": ["(.*)*!"]}, "not of regular expressions"),
        ({"tokenizer": "decoder"}, "tokenizer is 'decoder'"),
        ({"decoder": "r2gen", "decoder_name": "gpt2"}, "decoder_name is 'gpt2': it must be none"),
        ({"decoder": "prefix"}, "decoder_name"),
        ({"decoder_dtype": "bfloat16"}, "decoder_dtype"),
        ({"weights": "/nowhere/x.safetensors"}, "there is no file /nowhere/"),
        ({"tokenizer": "/nowhere/t.json"}, "there is no file /nowhere/"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build_model(preset("tiny", **overrides))


def test_building_is_reproducible_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    first, second = build_model(preset("tiny")), build_model(preset("tiny"))
    other = build_model(preset("tiny", seed=1))
    assert torch.equal(before, torch.random.get_rng_state())
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert not torch.equal(first.projection.weight, other.projection.weight)
    assert not first.training


def test_weights_survive_saving_and_load_strictly(tmp_path):
    model = build_model(preset("tiny"))
    path = tmp_path / "model.safetensors"
    save_weights(model, path, torch.float32)
    loaded = build_model(preset("tiny", weights=str(path), seed=5))
    for name, tensor in model_tensors(model).items():
        assert torch.equal(tensor, model_tensors(loaded)[name]), name
    assert loaded.decoder.lm_head.weight is loaded.decoder.transformer.wte.weight
    assert loaded.untrained == ()
    for setting, sizes, message in (
        ("encoder_config", {"embed_dim": (16, 16, 32)}, r"tensor encoder\.\S+ has shape"),
        ("decoder_config", {"n_layer": 3}, r"lacks tensor decoder\.transformer\.h\.2"),
        ("decoder_config", {"n_layer": 1}, r"has the unknown tensor decoder\.transformer\.h\.1"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_weights(build_model(preset("tiny", **{setting: sizes})), path)
    path.write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_weights(model, path)


@pytest.mark.parametrize(("value", "dtype"), [(1e6, torch.float16), (float("nan"), torch.float32)])
def test_weights_that_are_not_finite_are_not_written(tmp_path, value, dtype):
    model = build_model(preset("tiny"))
    with torch.no_grad():
        model.projection.weight[0, 0] = value
    with pytest.raises(ConfigError, match=rf"projection\.weight is not finite as {dtype}"):
        save_weights(model, tmp_path / "model.safetensors", dtype)
    assert not list(tmp_path.iterdir())


DECODER = {"decoder_name": None, "decoder_config": {"n_embd": 32, "n_layer": 2, "n_head": 2}, "max_length": 96}
TIMM = {"weights": "random", "tokenizer": "small", "slices": 2, **DECODER}
SWIN = {"image_size": 224, "encoder_name": "swin_tiny_patch4_window7_224"}


@pytest.mark.parametrize(
    ("name", "overrides", "layer", "in_encoder"),
    [
        ("tiny", {}, r"encoder\.backbone\.encoder\.stages\.\d\.layers\.\d\.", 6 * 6),
        ("small", {"weights": None}, r"encoder\.backbone\.encoder\.stages\.\d\.layers\.\d\.", 6 * 6),
        ("timm", {"image_size": 32, "encoder_name": "test_vit", **TIMM}, r"encoder\.backbone\.blocks\.\d\.", 4 * 6),
        ("timm", SWIN | TIMM, r"encoder\.backbone\.layers\.\d\.blocks\.\d\.", 4 * 12),
    ],
)
def test_lora_s_targets_are_the_linear_layers_of_every_transformer_layer(name, overrides, layer, in_encoder):
    from transformers.pytorch_utils import Conv1D

    config = preset(name, **overrides)
    modules = dict(build_model(config).named_modules())
    linear = {name for name, module in modules.items() if isinstance(module, torch.nn.Linear | Conv1D)}
    hit = {name for name in modules if matches(name, config.lora_targets)}
    assert hit == {name for name in linear if re.match(rf"({layer}|decoder\.transformer\.h\.\d\.)", name)}
    assert len([name for name in hit if name.startswith("encoder")]) == in_encoder
    assert len([name for name in hit if name.startswith("decoder")]) == 7 * config.decoder_config["n_layer"]
