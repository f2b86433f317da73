"""Models from configurations: what is refused, weights, LoRA's targets; and from published checkpoints."""

import re
from pathlib import Path

import pytest
import torch
from batches import noise
from safetensors.torch import load_file
from tables import cases
from tiny_models import write_cvt, write_gpt2, write_timm
from transformers.pytorch_utils import Conv1D

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import matches
from fedtar_flare.models.build import build_model, build_tokenizer, require_trained
from fedtar_flare.models.config import STATISTICS, preset
from fedtar_flare.models.weights import load_weights, model_tensors, save_weights

REFUSED = cases(__file__, "refusals.yaml")


@pytest.mark.parametrize(("overrides", "message"), REFUSED["tiny"])
def test_a_wrong_setting_is_named_with_its_value(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build_model(preset("tiny", **overrides))


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


@pytest.mark.parametrize(("name", "overrides", "layer", "in_encoder"), cases(__file__, "adapted_layers.yaml"))
def test_lora_s_targets_are_the_linear_layers_of_every_transformer_layer(name, overrides, layer, in_encoder):
    config = preset(name, **overrides)
    modules = dict(build_model(config).named_modules())
    linear = {name for name, module in modules.items() if isinstance(module, torch.nn.Linear | Conv1D)}
    hit = {name for name in modules if matches(name, config.lora_targets)}
    assert hit == {name for name in linear if re.match(rf"({layer}|decoder\.transformer\.h\.\d\.)", name)}
    assert len([name for name in hit if name.startswith("encoder")]) == in_encoder
    assert len([name for name in hit if name.startswith("decoder")]) == 7 * config.decoder_config["n_layer"]


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    """Of a CvT and a GPT-2 in folders."""
    folder = tmp_path_factory.mktemp("published")
    names = {"encoder_name": str(write_cvt(folder / "cvt")), "decoder_name": str(write_gpt2(folder / "gpt2"))}
    return preset("paper", **names, max_length=48, image_size=64)


def test_the_paper_preset_loads_published_checkpoints(paper):
    model, tokenizer = build_model(paper), build_tokenizer(paper)
    folders = (Path(paper.encoder_name), Path(paper.decoder_name))
    encoder, decoder = (load_file(folder / "model.safetensors") for folder in folders)
    state = model.state_dict()
    for name, tensor in encoder.items():
        if name.startswith("cvt."):
            assert torch.equal(state["encoder.backbone." + name.removeprefix("cvt.")], tensor), name
    for name, tensor in decoder.items():
        assert state["decoder." + name].dtype == torch.float32
        assert torch.equal(state["decoder." + name], tensor.float()), name
    assert not any(getattr(module, "drop_prob", 0.0) for module in model.modules())

    new = [name for name, _ in model.named_parameters() if "cross" in name]
    assert sorted(model.untrained) == sorted([*new, "projection.weight"])
    with pytest.raises(ConfigError, match=r"crossattention.*warm-started checkpoint"):
        require_trained(model, paper, exchanged=())
    require_trained(model, paper, exchanged=model.untrained)
    require_trained(model, paper.replace(weights="random"), exchanged=())

    seen, batch = [], noise(2, 1, 64)
    model.encoder.stage_modules()[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    memory, _ = model.encode(batch)
    assert memory.shape == (2, 4 * 4, 16)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in STATISTICS[paper.image_statistics])
    torch.testing.assert_close(seen[0], (batch.images[:, 0] / 255 - mean) / std, rtol=1e-4, atol=1e-5)
    ids, labels = tokenizer.batch(["the lungs are clear", "the"])
    assert tokenizer.bos_id == tokenizer.eos_id == tokenizer.pad_id == 0
    assert (labels[1] != -100).sum() == len(tokenizer.encode("the"))
    assert model(batch, ids, labels).isfinite().all()
    assert model.generate(batch, max_length=10).shape[0] == 2


def test_a_timm_folder_is_loaded(paper, tmp_path):
    weights = write_timm(tmp_path, "test_vit", img_size=64)
    names = {"encoder_name": str(tmp_path), "decoder_name": paper.decoder_name}
    model = build_model(preset("timm", image_size=64, slices=2, max_length=32, **names))
    state = model.encoder.backbone.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights.items())
    assert not any(name.startswith("encoder") for name in model.untrained)


@pytest.mark.parametrize(("overrides", "message"), REFUSED["paper"])
def test_a_part_that_does_not_fit_is_refused(paper, tmp_path, overrides, message):
    folders = {"GPT2": paper.decoder_name, "EMPTY": str(tmp_path)}
    with pytest.raises(ConfigError, match=message):
        build_model(paper.replace(**{name: folders.get(value, value) for name, value in overrides.items()}))
