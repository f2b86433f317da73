"""A frozen diagnosis head as a part of the base model."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedtar_flare.errors import ConfigError
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import ASSETS, PROMPTS_FILE, preset
from fedtar_flare.models.outline import outline
from fedtar_flare.models.weights import fingerprint

FINDINGS, CHANNELS, WIDTH = 3, 32, 32


def head(**changed):
    generator = torch.Generator().manual_seed(0)
    shapes = {"queries": (FINDINGS, CHANNELS), "weight": (FINDINGS, 2, CHANNELS), "bias": (FINDINGS, 2)}
    state = {n: torch.randn(*s, generator=generator) for n, s in {**shapes, "prompts": (FINDINGS, 2, WIDTH)}.items()}
    return {name: value for name, value in {**state, **changed}.items() if value is not None}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / PROMPTS_FILE
    save_file(head(), path)
    return path


def batch():
    images = (255 * torch.rand(2, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))).to(torch.uint8)
    return ImageBatch(images, torch.arange(8.0).view(2, 4), torch.ones(2, 4, dtype=torch.bool))


def test_prompts_stand_in_the_decoder_s_memory_and_tell_what_the_head_says(file):
    model, plain = build_model(preset("tiny", prompts=str(file))), build_model(preset("tiny"))
    with torch.no_grad():
        tokens = model.tokens(batch())
        said = model.diagnosis(tokens, batch().slice_mask).argmax(-1)
        told = torch.stack([head()["prompts"][torch.arange(FINDINGS), row] for row in said])
        assert torch.equal(model.prompts(batch(), tokens), told)
        ids = torch.randint(3, 300, (2, 6), generator=torch.Generator().manual_seed(2))
        memory, mask = plain.memory(batch())
        beside = torch.cat([memory, told], 1), torch.cat([mask, mask.new_ones(2, FINDINGS)], 1)
        assert torch.equal(model(batch(), ids, ids), model_loss(plain, *beside, ids))
        assert not torch.equal(model(batch(), ids, ids), plain(batch(), ids, ids))


def model_loss(model, memory, mask, ids):
    from fedtar_flare.models.report_generator import report_loss

    return report_loss(model.decode(memory, mask, ids)[0], ids)


def test_they_are_a_frozen_part_of_the_base_model(file):
    model = build_model(preset("tiny", prompts=str(file)))
    assert fingerprint(model) != fingerprint(build_model(preset("tiny")))
    assert not any(parameter.requires_grad for parameter in model.diagnosis.parameters())
    adapted = add_lora(model, targets=preset("tiny").lora_targets, seed=0)
    assert not [n for n, p in adapted.named_parameters() if p.requires_grad and "diagnosis" in n]


def test_the_outline_counts_them(file):
    with_prompts = preset("tiny", prompts=str(file))
    model = build_model(with_prompts)
    assert outline(with_prompts).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_shipped_ones_fit_the_shipped_model():
    model = build_model(preset("small", prompts="small"))
    shipped = load_file(ASSETS / "small" / PROMPTS_FILE)
    assert torch.equal(model.diagnosis.embeddings, shipped["prompts"].float())
    assert torch.equal(model.diagnosis.head.weight, shipped["weight"].float())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"queries": torch.zeros(FINDINGS, 7)}, r"queries has shape (3, 7), this model wants (3, 32)"),
        ({"prompts": None}, "prompts has shape None"),
        ({"weight": None}, "has shape"),
        ({"more": torch.zeros(1)}, "more has shape (1,), this model wants None"),
        ({"bias": torch.full((FINDINGS, 2), torch.nan)}, "bias is not finite"),
    ],
)
def test_a_file_that_does_not_fit_is_named(tmp_path, change, named):
    path = tmp_path / PROMPTS_FILE
    save_file(head(**change), path)
    with pytest.raises(ConfigError, match=re.escape(named)):
        build_model(preset("tiny", prompts=str(path)))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / PROMPTS_FILE
    path.write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        build_model(preset("tiny", prompts=str(path)))
    with pytest.raises(ConfigError, match="there is no file"):
        build_model(preset("tiny", prompts=str(tmp_path / "absent")))


def test_a_site_s_folder_stands_for_its_file(file):
    config = preset("tiny", prompts="somebody/prompts")
    assert config.named() == {"prompts": "somebody/prompts"}
    assert config.located({"somebody/prompts": file.parent}).prompts == str(file)
    assert preset("tiny", prompts="small").named() == {}
