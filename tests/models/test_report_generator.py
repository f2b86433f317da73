"""Shapes, masks and losses of the report generator, and what its decoder attends to of the visit before."""

import pytest
import torch
from batches import noise, padded, rows
from torch.nn import functional as F

from fedtar_flare.imaging.batch import PriorBatch
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.weights import model_tensors

CONFIG = preset("tiny")
TOKENIZER = build_tokenizer(CONFIG)
REPORTS = ["lungs are clear", "nodule of 7 mm in the right upper lobe, new", "effusion"]
BEFORE = ["effusion on the left", "small nodule", "heart enlarged"]


@pytest.fixture(scope="module")
def plain():
    return build_model(CONFIG)


@pytest.fixture(scope="module")
def model():
    model = build_model(CONFIG)
    with torch.no_grad():  # sharper than an untrained decoder, so that reports differ and end
        for parameter in model.decoder.parameters():
            parameter.mul_(6.0)
    return model


def losses(model, batch):
    with torch.no_grad():
        return model(batch, *TOKENIZER.batch(REPORTS))


def test_loss_of_each_report_is_the_mean_over_its_tokens(model):
    loss = losses(model, noise(3))
    assert loss.shape == (3,) and loss.dtype == torch.float32
    for i, report in enumerate(REPORTS):
        ids = torch.tensor([TOKENIZER.encode(report)])
        memory, _ = model.encode(rows(noise(3), i))
        logits = model.decoder(input_ids=ids, encoder_hidden_states=memory).logits[0]
        chosen = logits.log_softmax(-1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
        torch.testing.assert_close(loss[i], -chosen.mean(), rtol=1e-4, atol=1e-5)


def test_padded_slices_change_nothing(model):
    batch, longer = noise(3), padded(noise(3), 3)
    torch.testing.assert_close(losses(model, longer), losses(model, batch), rtol=1e-5, atol=1e-5)
    assert torch.equal(model.generate(longer), model.generate(batch))


def test_position_and_image_both_reach_the_loss(model):
    moved = noise(3)
    moved.position_mm = moved.position_mm + 60.0
    for other in (moved, noise(3, seed=1)):
        assert not torch.allclose(losses(model, noise(3)), losses(model, other))


def test_the_encoder_stays_in_eval_mode_and_its_statistics_stay_put(model):
    before = {k: v.clone() for k, v in model.encoder.state_dict().items()}
    model.train()
    model.encoder.train()
    assert model.decoder.training and not any(module.training for module in model.encoder.modules())
    assert torch.equal(losses(model, noise(3)), losses(model, noise(3)))
    assert all(torch.equal(v, before[k]) for k, v in model.encoder.state_dict().items())
    model.eval()


def followed(texts=BEFORE, days=(30.0, 7.0, 200.0)):
    """Three visits, each with one before."""
    batch, (ids, labels) = noise(3), TOKENIZER.batch(texts)
    batch.prior = PriorBatch(torch.tensor(days), noise(3, seed=1), ids, labels != -100)
    return batch


def test_image_report_and_time_reach_the_loss_of_their_own_row_alone(plain):
    base = losses(plain, followed())
    assert not torch.isclose(base, losses(plain, noise(3))).any()
    report = followed([BEFORE[0], "cavity on the right", BEFORE[2]])
    days, image = followed(days=(30.0, 70.0, 200.0)), followed()
    image.prior.images.images[1] = 255 - image.prior.images.images[1]
    for name, batch in {"report": report, "days": days, "image": image}.items():
        close = torch.isclose(losses(plain, batch), base, rtol=1e-6, atol=1e-7)
        assert close.tolist() == [True, False, True], name


def test_a_masked_row_is_as_without_and_padding_changes_nothing(plain):
    without, base = losses(plain, noise(3)), losses(plain, followed())
    masked, longer = followed(), followed()
    masked.prior.images.slice_mask[0], masked.prior.text_mask[0] = False, False
    expected = torch.stack([without[0], base[1], base[2]])
    torch.testing.assert_close(losses(plain, masked), expected, rtol=1e-5, atol=1e-6)
    longer.prior.input_ids = F.pad(longer.prior.input_ids, (0, 5), value=TOKENIZER.pad_id)
    longer.prior.text_mask = F.pad(longer.prior.text_mask, (0, 5), value=False)
    longer.prior.images = padded(longer.prior.images, 2)
    torch.testing.assert_close(losses(plain, longer), base, rtol=1e-5, atol=1e-6)


def test_the_codes_are_no_weights_and_the_same_for_every_model_of_a_width(plain):
    assert not [name for name in model_tensors(plain) if "prior" in name]
    codes, others = (list(m.prior_marks.buffers()) for m in (plain, build_model(CONFIG.replace(seed=1))))
    assert len(codes) == 3 and all(map(torch.equal, codes, others))


def test_no_gradient_flows_through_the_visit_before(plain):
    batch, present = followed(), CONFIG.slices * CONFIG.queries
    memory, mask = plain.memory(batch, plain.encoded(batch))
    assert memory.shape[:2] == mask.shape == (3, 2 * present + batch.prior.input_ids.shape[1])
    (gradient,) = torch.autograd.grad(memory[:, present:].sum(), plain.projection.weight, allow_unused=True)
    assert gradient is None or not gradient.any()
