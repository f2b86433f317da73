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


def test_loss_stays_float32_under_autocast(model, tokenizer):
    input_ids, labels = tokenizer.batch(REPORTS)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(noise(3), input_ids, labels)
    assert loss.dtype == torch.float32 and loss.isfinite().all()


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


@pytest.mark.parametrize("beams", [1, 3])
def test_a_batch_of_beams_equals_single_ones(model, beams):
    batch = padded(noise(4), 1)
    batch.slice_mask[2, 2:] = False
    together = model.generate(batch, num_beams=beams, max_length=24)
    assert together.dtype == torch.int64 and (together[:, 0] == model.bos_id).all()
    for i in range(4):
        alone = model.generate(rows(batch, i), num_beams=beams, max_length=24)[0]
        row = together[i]
        assert row[: len(alone)].tolist() == alone.tolist()
        assert (row[len(alone) :] == model.pad_id).all()


def test_beams_share_what_they_attend_to_in_an_image(model, monkeypatch):
    batch = padded(noise(4), 1)
    batch.slice_mask[2, 2:] = False
    written = model.generate(batch, num_beams=4, max_length=24)
    monkeypatch.setattr("fedtar_flare.models.cross_decoder._beam_cache", dict)  # transformers' own
    assert torch.equal(model.generate(batch, num_beams=4, max_length=24), written)


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


def test_gradients_reach_every_part(tokenizer):
    model = build_model(CONFIG).train()
    model(noise(3), *tokenizer.batch(REPORTS)).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
