"""Presets with named parts: tiny local checkpoints in the real formats, and what is said without a network."""

import json
from pathlib import Path

import pytest
import torch
from batches import noise

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.models.build import build_model, build_tokenizer, require_trained
from fedtar_flare.models.config import STATISTICS, preset
from fedtar_flare.models.decoder import decoder_tokenizer


@pytest.fixture(scope="module")
def cvt_folder(tmp_path_factory) -> Path:
    """A CvT image classifier, as microsoft/cvt-* are published."""
    from transformers.models.cvt.configuration_cvt import CvtConfig
    from transformers.models.cvt.modeling_cvt import CvtForImageClassification

    folder = tmp_path_factory.mktemp("cvt")
    torch.manual_seed(1)
    config = CvtConfig(embed_dim=[8, 16, 24], num_heads=[1, 1, 2], depth=[1, 2, 3], drop_path_rate=[0.0, 0.0, 0.1])
    CvtForImageClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory) -> Path:
    """A language model of the GPT-2 family without cross-attention, with GPT-2's one special token, in float16."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the lungs are clear"] * 3, 300, special_tokens=["<|endoftext|>"])
    tokenizer.save_model(str(folder))
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).half().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def paper(cvt_folder, gpt2_folder):
    return preset("paper", encoder_name=str(cvt_folder), decoder_name=str(gpt2_folder), max_length=48, image_size=64)


def test_the_paper_preset_loads_published_checkpoints(paper, cvt_folder, gpt2_folder):
    from safetensors.torch import load_file

    model, tokenizer = build_model(paper), build_tokenizer(paper)
    encoder, decoder = load_file(cvt_folder / "model.safetensors"), load_file(gpt2_folder / "model.safetensors")
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


def test_a_tokenizer_as_vocab_and_merges_is_loaded_too(paper, gpt2_folder, tmp_path):
    for name in ("config.json", "vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((gpt2_folder / name).read_bytes())
    text = "the lungs <|endoftext|> are 4 mm"
    old = decoder_tokenizer(str(tmp_path), 64)
    assert old.encode(text) == build_tokenizer(paper).encode(text)
    assert old.decode(old.encode(text)) == text


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_any_timm_encoder_gives_tokens(name, gpt2_folder):
    sizes = {"image_size": 64, "slices": 2, "max_length": 32}
    config = preset("timm", encoder_name=name, weights="random", decoder_name=str(gpt2_folder), **sizes)
    model = build_model(config)
    assert model.encode(noise(2, 2, 64))[0].shape == (2, 2 * config.queries, 16)
    assert any(name.startswith("encoder.backbone") for name in model.untrained)


def test_a_timm_folder_is_loaded(gpt2_folder, tmp_path):
    import timm
    from safetensors.torch import save_file

    source = timm.create_model("test_vit", num_classes=0, img_size=64)
    config = {"architecture": "test_vit", "num_classes": 0, "pretrained_cfg": {**source.pretrained_cfg}}
    config["pretrained_cfg"] |= {"num_classes": 0, "input_size": [3, 64, 64]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    names = {"encoder_name": str(tmp_path), "decoder_name": str(gpt2_folder)}
    model = build_model(preset("timm", image_size=64, slices=2, max_length=32, **names))
    state = model.encoder.backbone.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in source.state_dict().items())
    assert not any(name.startswith("encoder") for name in model.untrained)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_length": 65}, "has 64 positions"),
        ({"tokenizer": "small"}, "knows 300; take tokenizer='decoder'"),
        ({"encoder_name": "/nowhere"}, "there is no folder /nowhere"),
        ({"decoder_name": "./nowhere"}, "there is no folder nowhere"),
        ({"encoder": "timm", "encoder_name": "vit_none"}, "timm has no such architecture"),
        ({"encoder_name": "GPT2"}, "gpt2 model: it must be a CvT checkpoint"),
        ({"encoder_name": "EMPTY"}, r"encoder folder .* cannot be loaded .*must hold config\.json"),
        ({"decoder_name": "EMPTY"}, "decoder folder"),
    ],
)
def test_a_part_that_does_not_fit_is_refused(paper, gpt2_folder, tmp_path, overrides, message):
    folders = {"GPT2": str(gpt2_folder), "EMPTY": str(tmp_path)}
    with pytest.raises(ConfigError, match=message):
        build_model(paper.replace(**{name: folders.get(value, value) for name, value in overrides.items()}))


def test_without_a_network_the_error_names_both_ways_out(paper, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for encoder, setting, name in (
        ("cvt", "encoder_name", "microsoft/cvt-0"),
        ("cvt", "decoder_name", "distilgpt3"),
        ("timm", "encoder_name", "vit_tiny_patch16_224"),
    ):
        with pytest.raises(ConfigError, match=rf"(?s)hf download (timm/)?{name}.*set {setting}"):
            build_model(paper.replace(encoder=encoder, **{setting: name}))
