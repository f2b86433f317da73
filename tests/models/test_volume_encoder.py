"""The encoder of whole CT volumes: the grid, what is frozen, weights files, refusals."""

import numpy as np
import pytest
import torch
from batches import noise, rows
from refused import refused

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models import volume_encoder
from fedtar_flare.models.adapters.lora import shared_parameters
from fedtar_flare.models.classifier import ClassifierConfig, build_classifier
from fedtar_flare.models.volume_encoder import interpolation, monai_names, volumes
from fedtar_flare.testing import executor_of

TINY = ClassifierConfig(
    encoder="swin_unetr",
    encoder_config={"feature_size": 12, "window_size": 4},
    slices=32,
    image_size=32,
    rank=1,
    hu_window="all",
)


def test_planes_are_even_between_slices_that_are_not():
    position = np.array([[0.0, 5.0, 5.0, 6.0, 30.0, 99.0]], np.float32)
    mask = np.array([[True] * 5 + [False]])
    weights = interpolation(position, mask)[0]
    np.testing.assert_allclose(weights @ position[0], np.linspace(0, 30, 6), rtol=1e-6)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    assert not weights[:, 5].any() and ((weights > 0).sum(1) <= 2).all() and (weights >= 0).all()


def test_axes_are_those_of_monai_s_ras():
    from monai.data import MetaTensor

    from fedtar_flare.imaging.transforms import displayed

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


def test_every_volume_stands_for_itself():
    model, batch = build_classifier(TINY), noise(2, 32)
    torch.testing.assert_close(model(rows(batch, 1)), model(batch)[1:], rtol=1e-4, atol=1e-5)


def test_what_a_site_is_told_of_its_size_holds():
    config = TINY.replace(encoder_config={"feature_size": 12})
    model = build_classifier(config)
    site = executor_of("fedkei", preset="tiny", model=config.to_dict()).strategy
    described = site.adapted_model(2)
    assert described.reach({}).parameters == sum(parameter.numel() for parameter in model.parameters())
    exchanged = sum(parameter.numel() for parameter in shared_parameters(model).values())
    assert described.sizes()["exchanged"] == exchanged


def test_weights_of_a_local_file_are_loaded_under_every_published_name(tmp_path):
    from safetensors.torch import save_file

    other = build_classifier(TINY.replace(seed=5)).unload().encoder.backbone.state_dict()
    path = tmp_path / "voco.safetensors"
    files = {
        "as it is": other,
        "of a whole Swin UNETR": {f"module.swinViT.{n}": v for n, v in other.items()} | {"encoder1.w": torch.zeros(2)},
        "self-supervised": {f"module.{n.replace('.mlp.linear', '.mlp.fc')}": v for n, v in other.items()},
    }
    for about, tensors in files.items():
        save_file(tensors, path)
        loaded = build_classifier(TINY.replace(encoder_weights=str(path))).unload().encoder.backbone.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in other.items()), about
    with pytest.raises(ConfigError, match=r"patch_embed.proj.weight has shape \(12, 3, 2, 2, 2\), in the model"):
        build_classifier(TINY.replace(encoder_weights=str(path), hu_window="lung"))
    save_file({name: value for name, value in other.items() if "layers4" not in name}, path)
    with pytest.raises(ConfigError, match="lacks tensor layers4"):
        build_classifier(TINY.replace(encoder_weights=str(path)))


def test_a_file_of_two_encoders_is_refused():
    with pytest.raises(ConfigError, match="two encoders"):
        monai_names({"student.swinViT.x": torch.zeros(1), "teacher.swinViT.x": torch.zeros(1)})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"slices": 8}, "slices is 8: it must be a multiple of 32"),
        ({"image_size": 48}, "image_size is 48: it must be a multiple of 32"),
        ({"encoder_config": {"feature_size": 40}}, "feature_size that is a multiple of 12"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        TINY.replace(**wrong)


def test_a_machine_without_einops_says_so(monkeypatch):
    monkeypatch.setattr(volume_encoder, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"einops \(pip install 'fedtar_flare\[volumes\]'\)") as error:
        build_classifier(TINY)
    assert "einops" in error.value.public
