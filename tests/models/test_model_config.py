"""Configuration: what is refused and how it is said; builds are reproducible; weights load strictly."""

import json

import pytest
import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.models.build import build_model, require_trained
from fedtar_flare.models.config import PRESETS, ModelConfig, preset
from fedtar_flare.models.weights import load_weights, model_tensors, save_weights


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_and_survives_json(name: str):
    config = preset(name)
    assert config.preset == name
    assert ModelConfig(**json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"image_size": 8}, "image_size is 8"),
        ({"encoder": "vit"}, "encoder is 'vit': it must be 'cvt' or 'timm'"),
        ({"encoder": "timm"}, "encoder_name is None"),
        ({"encoder_config": {"depth": (1, 1, 1)}}, r"encoder_config is .* at least \(1, 2, 3\)"),
        ({"encoder_config": {"embed_dim": (8, 16)}}, r"encoder_config\[embed_dim\] is \(8, 16\)"),
        ({"encoder_config": {"num_heads": (3, 1, 2)}}, "multiples of num_heads"),
        ({"encoder_config": {"mlp_ratio": 0}}, r"mlp_ratio\] is 0: it must be above 0"),
        ({"encoder_config": {"embed": 3}}, r"encoder_config\[embed\]"),
        ({"encoder_config": 3}, "a mapping"),
        ({"pooling": "mean"}, "pooling is 'mean': it must be 'attention' or 'none'"),
        ({"pooling": "none"}, "takes slices=1"),
        ({"decoder_config": {"n_head": 5}}, "a multiple of n_head"),
        ({"max_length": 97}, "at most n_positions=96"),
        ({"image_statistics": "none"}, "it must be 'half', 'imagenet' or 'clip'"),
        ({"lora_targets": ["(.*)*!"]}, "not of regular expressions"),
        ({"tokenizer": "decoder"}, "tokenizer is 'decoder'"),
        ({"encoder_config": {"embed_dim": (8, 16, 32.0)}}, r"\[embed_dim\]\[2\] is 32.0: it must be a whole number"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(overrides: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        preset("tiny", **overrides)


def test_an_unknown_preset_lists_those_there_are():
    with pytest.raises(ConfigError, match="'smal' is unknown: it must be one of tiny, small, timm, vlm-tiny, paper"):
        preset("smal")


@pytest.mark.parametrize("setting", [{"weights": "/nowhere/x.safetensors"}, {"tokenizer": "/nowhere/t.json"}])
def test_a_missing_file_is_named(setting: dict):
    with pytest.raises(ConfigError, match="there is no file /nowhere/"):
        build_model(preset("tiny", **setting))


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

    with pytest.raises(ConfigError, match=r"tensor encoder\.\S+ has shape"):
        load_weights(build_model(preset("tiny", encoder_config={"embed_dim": (16, 16, 32)})), path)
    with pytest.raises(ConfigError, match=r"lacks tensor decoder\.transformer\.h\.2"):
        load_weights(build_model(preset("tiny", decoder_config={"n_layer": 3})), path)
    with pytest.raises(ConfigError, match=r"has the unknown tensor decoder\.transformer\.h\.1"):
        load_weights(build_model(preset("tiny", decoder_config={"n_layer": 1})), path)
    path.write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_weights(model, path)


def test_weights_that_are_not_finite_are_neither_written_nor_read(tmp_path):
    model = build_model(preset("tiny"))
    with torch.no_grad():
        model.projection.weight[0, 0] = 1e6
    with pytest.raises(ConfigError, match=r"projection\.weight is not finite as torch\.float16"):
        save_weights(model, tmp_path / "half.safetensors")
    with torch.no_grad():
        model.projection.weight[0, 0] = float("nan")
    with pytest.raises(ConfigError, match="not finite"):
        save_weights(model, tmp_path / "half.safetensors", torch.float32)


def test_random_frozen_parts_are_refused_unless_exchanged_or_meant():
    config = preset("tiny", weights=None)
    model = build_model(config)
    with pytest.raises(ConfigError, match=r"have no pre-trained weights.*weights=<file>.*exchange"):
        require_trained(model, config, exchanged=())
    require_trained(model, config, exchanged=set(model.untrained))
    require_trained(model, preset("tiny"), exchanged=())
