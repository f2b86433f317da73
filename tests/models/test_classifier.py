"""The classifier: what is frozen, what travels, slices, adapters, weights files, whole CT volumes."""

import re
import subprocess
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from adapted_models import shake
from batches import noise, padded
from monai.data import MetaTensor
from refused import refused
from safetensors.torch import save_file
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.imaging.transforms import displayed
from fedtar_flare.models.adapters.lora import shared_parameters, shared_state
from fedtar_flare.models.classifier import ClassifierConfig, build_classifier
from fedtar_flare.models.encoders import interpolation, monai_names, volumes
from fedtar_flare.testing import executor_of

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
VIT = ClassifierConfig(encoder="vit", image_size=32, slices=1, encoder_config=SIZES)
TINY = ClassifierConfig(encoder="tiny", image_size=32, slices=4)
SWIN = ClassifierConfig(encoder="swin_unetr", slices=32, image_size=32, rank=1, hu_window="all")
VOLUMES = SWIN.replace(encoder_config={"feature_size": 12, "window_size": 4})
NAMED = ClassifierConfig(encoder="timm", encoder_name="test_vit", encoder_weights="random", image_size=32, slices=1)


@pytest.mark.parametrize("adapter", ["lora", "ia3"])
@pytest.mark.parametrize("config", [VIT, TINY, VOLUMES, NAMED], ids=lambda config: config.encoder)
def test_adapter_and_head_alone_are_trained_and_the_start_is_the_seeds(config, adapter):
    config = config.replace(adapter=adapter)
    model, again = build_classifier(config), build_classifier(config)
    trained = shared_parameters(model)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in trained.values()}
    factors = trained.keys() - {"head.weight", "head.bias"}
    assert len(factors) == len(trained) - 2
    assert all(name.endswith(("lora_A.weight", "lora_B.weight", "ia3_l")) for name in factors)
    start, same = shared_state(model), shared_state(again)
    assert all(torch.equal(value, same[name]) for name, value in start.items())
    batch = noise(2, config.slices, config.image_size)
    logits = model(batch)
    assert logits.shape == (2, 2) and torch.equal(logits, again(batch))
    for name, value in start.items():
        if name.endswith("lora_B.weight") or name == "head.bias":
            assert not value.any()
        if name.endswith("ia3_l"):
            assert (value == 1).all()
    model(batch).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in trained.values())
    shake(model)
    assert not torch.allclose(model(batch), logits)


def test_slices_that_are_padding_do_not_count_and_the_others_count_alike():
    model = build_classifier(TINY)
    shake(model)
    batch = noise(2, 3)
    turned = ImageBatch(batch.images.flip(1), batch.position_mm, batch.slice_mask)
    torch.testing.assert_close(model(padded(batch, 2)), model(batch), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(turned), model(batch), rtol=1e-5, atol=1e-6)


def test_weights_of_a_local_file_are_loaded_and_its_own_head_or_decoder_is_left_out(tmp_path, repository):
    """Of a checkpoint in the published form, saved as safetensors by the command of the page."""
    other = build_classifier(VIT.replace(seed=5)).unload().encoder.backbone.state_dict()
    path = tmp_path / "model.safetensors"
    more = ("head.weight", "decoder_embed.weight", "decoder_blocks.0.norm1.weight", "mask_token")  # as RETFound's
    parts = other | {name: torch.zeros(3, 32) for name in more}
    published = {"model": parts, "args": Namespace(lr=1e-3), "epoch": 9}
    torch.save(published, tmp_path / "RETFound_oct_weights.pth")
    page = (repository / "docs" / "explanation" / "fedkei.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^```\n(python - RETFound.*?)^```", page, flags=re.M | re.S)
    subprocess.run(["bash", "-c", command.replace("python", sys.executable, 1)], check=True, cwd=tmp_path)
    loaded = build_classifier(VIT.replace(encoder_weights=str(path))).unload().encoder.backbone.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in other.items())


@pytest.mark.parametrize(("settings", "setting"), cases(__file__, "refusals.yaml")["classifier"])
def test_settings_that_do_not_fit_are_refused(settings, setting):
    with pytest.raises(ConfigError, match=setting):
        ClassifierConfig(**settings)


def test_planes_are_even_between_slices_that_are_not():
    position = np.array([[0.0, 5.0, 5.0, 6.0, 30.0, 99.0]], np.float32)
    mask = np.array([[True] * 5 + [False]])
    weights = interpolation(position, mask)[0]
    np.testing.assert_allclose(weights @ position[0], np.linspace(0, 30, 6), rtol=1e-6)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    assert not weights[:, 5].any() and ((weights > 0).sum(1) <= 2).all() and (weights >= 0).all()


def test_axes_are_those_of_monai_s_ras():
    g = torch.Generator().manual_seed(1)
    values = torch.randint(0, 256, (5, 6, 7), generator=g).float()
    slices, spacing = displayed(MetaTensor(values, affine=np.diag([2.0, 2.0, 3.0, 1.0])))
    assert spacing == (3.0, 2.0, 2.0)
    images = torch.from_numpy(slices.copy()).to(torch.uint8)[None, :, None].expand(1, 7, 3, 6, 5)
    batch = ImageBatch(images, 3.0 * torch.arange(7)[None].float(), torch.ones(1, 7, dtype=torch.bool))
    torch.testing.assert_close(volumes(batch, "lung")[0, 0] * 255, values)


@pytest.mark.parametrize("slices", [1, 3])
def test_an_image_of_one_position_is_no_volume(slices):
    with refused("no-volume", "CT volumes"):
        volumes(noise(1, slices, 4, gap_mm=0.0), "lung")


def test_the_size_that_a_site_announces_holds():
    config = SWIN.replace(encoder_config={"feature_size": 12})
    model = build_classifier(config)
    site = executor_of("fedkei", preset="tiny", model=config.to_dict()).strategy
    described = site.adapted_model(2)
    assert described.reach({}).parameters == sum(parameter.numel() for parameter in model.parameters())
    exchanged = sum(parameter.numel() for parameter in shared_parameters(model).values())
    assert described.sizes()["exchanged"] == exchanged


def test_weights_of_a_local_file_are_loaded_under_every_published_name(tmp_path):
    other = build_classifier(VOLUMES.replace(seed=5)).unload().encoder.backbone.state_dict()
    path = tmp_path / "voco.safetensors"
    files = {
        "as it is": other,
        "of a whole Swin UNETR": {f"module.swinViT.{n}": v for n, v in other.items()} | {"encoder1.w": torch.zeros(2)},
        "self-supervised": {f"module.{n.replace('.mlp.linear', '.mlp.fc')}": v for n, v in other.items()},
    }
    for about, tensors in files.items():
        save_file(tensors, path)
        loaded = build_classifier(VOLUMES.replace(encoder_weights=str(path))).unload().encoder.backbone.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in other.items()), about
    with pytest.raises(ConfigError, match=r"patch_embed.proj.weight has shape \(12, 3, 2, 2, 2\), in the model"):
        build_classifier(VOLUMES.replace(encoder_weights=str(path), hu_window="lung"))
    with pytest.raises(ConfigError, match="two encoders"):
        monai_names({"student.swinViT.x": torch.zeros(1), "teacher.swinViT.x": torch.zeros(1)})
    save_file({name: value for name, value in other.items() if "layers4" not in name}, path)
    with pytest.raises(ConfigError, match="lacks tensor layers4"):
        build_classifier(VOLUMES.replace(encoder_weights=str(path)))
