"""The classifier: what is frozen, what travels, slices, adapters, weights files."""

import re
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from adapted_models import shake
from batches import noise, padded

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models.adapters.lora import shared_parameters, shared_state
from fedtar_flare.models.adapters.peft_file import write_adapter
from fedtar_flare.models.build import build_model
from fedtar_flare.models.classifier import ClassifierConfig, build_classifier
from fedtar_flare.models.config import preset

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
VIT = ClassifierConfig(encoder="vit", image_size=32, slices=1, encoder_config=SIZES)
TINY = ClassifierConfig(encoder="tiny", image_size=32, slices=4)
VOLUMES = ClassifierConfig(
    encoder="swin_unetr",
    encoder_config={"feature_size": 12, "window_size": 4},
    slices=32,
    image_size=32,
    rank=1,
    targets=["encoder.*.attn.qkv", "encoder.*.attn.proj"],
)
SWIN = ClassifierConfig(
    encoder="timm", encoder_name="swin_tiny_patch4_window7_224", encoder_weights="random", image_size=64, slices=1
)


@pytest.mark.parametrize("adapter", ["lora", "ia3"])
@pytest.mark.parametrize("config", [VIT, TINY, VOLUMES, SWIN], ids=lambda config: config.encoder)
def test_adapter_and_head_alone_are_trained_and_the_start_is_the_seeds(config, adapter):
    config = config.replace(adapter=adapter)
    model, again = build_classifier(config), build_classifier(config)
    own = shared_parameters(model)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in own.values()}
    assert {"head.weight", "head.bias"} < set(own) and all(
        name.startswith("head.") or name.endswith(("lora_A.weight", "lora_B.weight", "ia3_l")) for name in own
    )
    start = shared_state(model)
    assert all(torch.equal(value, shared_state(again)[name]) for name, value in start.items())
    batch = noise(3, config.slices, config.image_size)
    logits = model(batch)
    assert logits.shape == (3, 2) and torch.equal(logits, again(batch))
    for name, value in start.items():
        if name.endswith("lora_B.weight") or name == "head.bias":
            assert not value.any()
        if name.endswith("ia3_l"):
            assert (value == 1).all()
    model(batch).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in own.values())
    shake(model)
    assert not torch.allclose(model(batch), logits)


def test_queries_stay_at_one_under_ia3():
    model = build_classifier(VIT.replace(adapter="ia3"))
    own = {name: p for name, p in shared_parameters(model).items() if name.endswith("ia3_l")}
    gradients = torch.autograd.grad(model(noise(3, 1)).square().sum(), list(own.values()))
    for gradient in gradients:
        assert not gradient[:32].any() and gradient[32:].any()


def test_slices_that_are_padding_do_not_count_and_the_others_count_alike():
    model = build_classifier(TINY)
    shake(model)
    batch = noise(2, 3)
    turned = ImageBatch(batch.images.flip(1), batch.position_mm, batch.slice_mask)
    torch.testing.assert_close(model(padded(batch, 2)), model(batch), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(turned), model(batch), rtol=1e-5, atol=1e-6)


def test_a_module_loaded_by_peft_gives_equal_logits(tmp_path):
    from peft import PeftModel

    from fedtar_flare.models.adapters.lora import adapter_config

    model = build_classifier(VIT)
    shake(model)
    state = shared_state(model)
    write_adapter(tmp_path, state, adapter_config(model))
    base = build_classifier(VIT).unload()
    base.head.weight.data, base.head.bias.data = state["head.weight"], state["head.bias"]
    assert torch.equal(PeftModel.from_pretrained(base, tmp_path)(noise(3, 1)), model(noise(3, 1)))


def test_weights_of_a_local_file_are_loaded_and_its_own_head_or_decoder_is_left_out(tmp_path, repository):
    """Of a checkpoint in the published form, saved as safetensors by the command of the page."""
    from safetensors.torch import save_file

    other = build_classifier(VIT.replace(seed=5)).unload().encoder.backbone.state_dict()
    path = tmp_path / "model.safetensors"
    more = ("head.weight", "decoder_embed.weight", "decoder_blocks.0.norm1.weight", "mask_token")  # as RETFound's
    published = {
        "model": {**other, **{name: torch.zeros(3, 32) for name in more}},
        "args": Namespace(lr=1e-3),
        "epoch": 9,
    }
    torch.save(published, tmp_path / "RETFound_oct_weights.pth")
    page = (repository / "docs" / "explanation" / "fedkei.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^```\n(python - RETFound.*?)^```", page, flags=re.M | re.S)
    subprocess.run(["bash", "-c", command.replace("python", sys.executable, 1)], check=True, cwd=tmp_path)
    loaded = build_classifier(VIT.replace(encoder_weights=str(path))).unload().encoder.backbone.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in other.items())
    first = sorted(other)[0]
    save_file({name: value for name, value in other.items() if name != first}, path)
    with pytest.raises(ConfigError, match=f"lacks tensor {first}"):
        build_classifier(VIT.replace(encoder_weights=str(path)))


def test_the_shipped_encoder_is_the_report_generators():
    ours = build_classifier(ClassifierConfig()).unload().encoder.state_dict()
    theirs = build_model(preset("small")).encoder.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"encoder": "timm"}, "encoder_name"),
        ({"encoder": "vit", "image_size": 60}, "patch"),
        ({"encoder": "small", "encoder_weights": "x"}, "encoder_weights"),
        ({"encoder": "vit", "image_size": 32, "encoder_config": {"embed_dim": 30}}, "num_heads"),
        ({"encoder": "vit", "encoder_config": {"depth": 101}}, "a depth from 1 to 100"),
        ({"encoder": "small", "encoder_config": {"depth": 3}}, "of no size with encoder='small'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        ClassifierConfig(**wrong)
