"""The warm start's training loop: it learns, repeats itself, and leaves the model as federated training needs it."""

import re

import numpy as np
import torch

from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.learning.pretraining import PretrainingConfig, pretrain, write_reports
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.weights import model_tensors

CONFIG = preset("tiny")
WORDS = {frozenset({"dark"}): "the lung is dark", frozenset({"bright"}): "a bright nodule"}
FINDINGS = [list(WORDS)[i % 2] for i in range(12)]
REPORTS = [WORDS[shown] for shown in FINDINGS]


def pictures() -> list[Prepared]:
    rng = np.random.default_rng(0)
    level = [40 if "dark" in shown else 200 for shown in FINDINGS]
    return [
        Prepared(rng.integers(v - 30, v + 30, (4, 3, 32, 32)).astype(np.uint8), np.arange(4, dtype=np.float32) * 20)
        for v in level
    ]


def trained(**settings):
    model, seen = build_model(CONFIG), []
    config = PretrainingConfig(batch_size=4, **settings)
    pretrain(model, build_tokenizer(CONFIG), pictures(), REPORTS, config, say=seen.append)
    return model, seen


def test_it_learns_to_tell_the_pictures_apart():
    model, seen = trained(steps=100, lr=4e-3)
    said = [re.match(r"step (\d+)/100, loss ([0-9.]+), ", line).groups() for line in seen]
    assert [step for step, *_ in said] == ["25", "50", "75", "100"]
    assert float(said[3][1]) < float(said[0][1])
    assert write_reports(model, build_tokenizer(CONFIG), pictures()) == REPORTS


def test_the_same_settings_give_the_same_bits():
    before = torch.random.get_rng_state()
    first, second = (model_tensors(trained(steps=3)[0]) for _ in range(2))
    other = model_tensors(trained(steps=3, seed=1)[0])
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not all(torch.equal(first[k], other[k]) for k in first)
    assert torch.equal(before, torch.random.get_rng_state())
