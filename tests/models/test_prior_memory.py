"""What the decoder attends to of the visit before."""

import pytest
import torch
from batches import noise, padded
from torch.nn import functional as F

from fedtar_flare.imaging.batch import ImageBatch, PriorBatch
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.weights import model_tensors

CONFIG = preset("tiny")
REPORTS = ["lungs are clear", "nodule of 7 mm in the right upper lobe, new", "effusion"]
BEFORE = ["effusion on the left", "small nodule", "heart enlarged"]


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(CONFIG)


def before(tokenizer, texts=BEFORE, days=(30.0, 7.0, 200.0)):
    ids, labels = tokenizer.batch(texts)
    return PriorBatch(torch.tensor(days), noise(3, seed=1), ids, labels != -100)


def losses(model, tokenizer, prior):
    batch = noise(3)
    batch.prior = prior
    with torch.no_grad():
        return model(batch, *tokenizer.batch(REPORTS))


def test_image_report_and_time_reach_the_loss_of_their_own_row_alone(model, tokenizer):
    base = losses(model, tokenizer, before(tokenizer))
    assert not torch.isclose(base, losses(model, tokenizer, None)).any()
    report = before(tokenizer, [BEFORE[0], "cavity on the right", BEFORE[2]])
    days, image = before(tokenizer, days=(30.0, 70.0, 200.0)), before(tokenizer)
    image.images.images[1] = 255 - image.images.images[1]
    for name, prior in {"report": report, "days": days, "image": image}.items():
        close = torch.isclose(losses(model, tokenizer, prior), base, rtol=1e-6, atol=1e-7)
        assert close.tolist() == [True, False, True], name


def test_a_masked_row_is_as_without_and_padding_changes_nothing(model, tokenizer):
    without, base = losses(model, tokenizer, None), losses(model, tokenizer, before(tokenizer))
    prior = before(tokenizer)
    prior.images.slice_mask[0], prior.text_mask[0] = False, False
    expected = torch.stack([without[0], base[1], base[2]])
    torch.testing.assert_close(losses(model, tokenizer, prior), expected, rtol=1e-5, atol=1e-6)
    longer = before(tokenizer)
    longer.input_ids = F.pad(longer.input_ids, (0, 5), value=tokenizer.pad_id)
    longer.text_mask = F.pad(longer.text_mask, (0, 5), value=False)
    longer.images = padded(longer.images, 2)
    torch.testing.assert_close(losses(model, tokenizer, longer), base, rtol=1e-5, atol=1e-6)


def test_the_codes_are_no_weights_and_the_same_for_every_model_of_a_width(model):
    assert not [name for name in model_tensors(model) if "prior" in name]
    assert not list(model.prior_marks.parameters())
    other = build_model(CONFIG.replace(seed=1))
    assert all(torch.equal(a, b) for a, b in zip(other.prior_marks.buffers(), model.prior_marks.buffers(), strict=True))
    assert len(list(other.prior_marks.buffers())) == 3


def test_no_gradient_flows_through_the_visit_before(model, tokenizer):
    model.zero_grad()
    batch = noise(3)
    batch.prior = before(tokenizer)
    memory, mask = model.memory(batch)
    present = CONFIG.slices * CONFIG.queries
    assert memory.shape[:2] == mask.shape == (3, 2 * present + batch.prior.input_ids.shape[1])
    assert not memory[:, present:].detach().requires_grad
    (gradient,) = torch.autograd.grad(memory[:, present:].sum(), model.projection.weight, allow_unused=True)
    assert gradient is None or not gradient.any()


@pytest.mark.slow
def test_only_a_model_that_sees_the_previous_report_learns_to_copy_it(tokenizer):
    """Eight visits with one image; each report repeats that of the visit before, one of eight words."""
    words = ["effusion", "nodule", "heart", "lungs", "clear", "spine", "cavity", "fibrosis"]
    ids, labels = tokenizer.batch(words)
    one = noise(1, 1)
    for shown in (False, True):
        model = build_model(CONFIG)
        model.encoder.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.decoder.parameters(), lr=3e-3)
        batch = ImageBatch(one.images.repeat(8, 1, 1, 1, 1), one.position_mm.repeat(8, 1), one.slice_mask.repeat(8, 1))
        if shown:
            batch.prior = PriorBatch(torch.full((8,), 30.0), None, ids, labels != -100)
        for _ in range(80):
            loss = model(batch, ids, labels).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        written = [tokenizer.decode(row) for row in model.generate(batch, num_beams=1, max_length=12).tolist()]
        assert (written == words) is shown
