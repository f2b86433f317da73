"""Shapes, masks, losses and beams of the report generator."""

import pytest
import torch
from batches import noise, padded, rows

from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset

CONFIG = preset("tiny")
REPORTS = ["lungs are clear", "nodule of 7 mm in the right upper lobe, new", "effusion"]


@pytest.fixture(scope="module")
def model():
    model = build_model(CONFIG)
    with torch.no_grad():  # sharper than an untrained decoder, so that reports differ and end
        for parameter in model.decoder.parameters():
            parameter.mul_(6.0)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(CONFIG)


def test_loss_of_each_report_is_the_mean_over_its_tokens(model, tokenizer):
    batch = noise(3)
    input_ids, labels = tokenizer.batch(REPORTS)
    loss = model(batch, input_ids, labels)
    assert loss.shape == (3,) and loss.dtype == torch.float32
    for i, report in enumerate(REPORTS):
        ids = torch.tensor([tokenizer.encode(report)])
        memory, _ = model.encode(rows(batch, i))
        logits = model.decoder(input_ids=ids, encoder_hidden_states=memory).logits[0]
        chosen = logits.log_softmax(-1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
        torch.testing.assert_close(loss[i], -chosen.mean(), rtol=1e-4, atol=1e-5)


def test_padded_slices_change_nothing(model, tokenizer):
    batch, longer = noise(3), padded(noise(3), 3)
    input_ids, labels = tokenizer.batch(REPORTS)
    torch.testing.assert_close(model(longer, input_ids, labels), model(batch, input_ids, labels), rtol=1e-5, atol=1e-5)
    assert torch.equal(model.generate(longer), model.generate(batch))


def test_position_and_image_both_reach_the_loss(model, tokenizer):
    input_ids, labels = tokenizer.batch(REPORTS)
    batch, moved = noise(3), noise(3)
    moved.position_mm = moved.position_mm + 60.0
    base = model(batch, input_ids, labels)
    assert not torch.allclose(base, model(moved, input_ids, labels))
    assert not torch.allclose(base, model(noise(3, seed=1), input_ids, labels))


def test_the_encoder_stays_in_eval_mode_and_its_statistics_stay_put(model, tokenizer):
    before = {k: v.clone() for k, v in model.encoder.state_dict().items()}
    model.train()
    model.encoder.train()
    assert model.decoder.training and not any(module.training for module in model.encoder.modules())
    input_ids, labels = tokenizer.batch(REPORTS)
    first, second = (model(noise(3), input_ids, labels) for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(v, before[k]) for k, v in model.encoder.state_dict().items())
    model.eval()
