"""The command that makes the shipped diagnosis head and prompts again."""

import pytest
import torch

from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.learning.diagnosis import extend
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.report_generator import report_loss
from fedtar_flare.models.tokenizer import IGNORED
from fedtar_flare.synthetic.vocabulary import FINDINGS
from tools.make_diagnosis_head import START, Phantoms, fit_prompts, focal_loss, written_of
from tools.make_small_model import Pairs

MODEL = preset("tiny", max_length=20)


def test_prompts_are_taught_to_be_heeded_and_nothing_else_changes():
    """The loss of reports beside other images falls, by the prompts alone."""
    model, tokenizer = build_model(MODEL), build_tokenizer(MODEL)
    extend(model, START | {"head": "mean", "slices": MODEL.slices, "seed": 0})
    before = {n: p.clone() for n, p in model.named_parameters()}
    texts = ["Small right pleural effusion.", "The lungs are clear."]
    images = [Prepared(image.numpy(), torch.ones(4).numpy()) for image in torch.randint(256, (2, 4, 3, 32, 32)).byte()]
    pairs = Pairs(images, texts, texts, [frozenset({"effusion_right"}), frozenset()])
    phantoms = Phantoms(model, pairs)
    truth = torch.tensor([[int(name == "effusion_right") for name in FINDINGS], [0] * 14])
    assert torch.equal(phantoms.truth, truth)
    ids, labels = tokenizer.batch(texts)

    def loss():
        with torch.no_grad():
            logits, _ = model.decode(*phantoms.memory([1, 0]), ids, model.diagnosis.embed(truth))
            return float(report_loss(logits, labels).mean())

    start = loss()
    fit_prompts(phantoms, tokenizer, pairs, seed=0, steps=20)
    assert loss() < start
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert moved == ["diagnosis.embeddings"]
    own = model.diagnosis
    assert len(written_of(phantoms, tokenizer, [1, 0])) == 2 and model.diagnosis is own


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_focal_loss_is_that_of_its_paper(gamma):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 6, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 9, (4, 6), generator=generator)
    labels[0, 3:] = IGNORED
    chosen = logits[:, :-1].softmax(-1).gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    counted = labels[:, 1:] != IGNORED
    expected = (-((1 - chosen) ** gamma) * chosen.log() * counted).sum(1) / counted.sum(1)
    found = focal_loss(logits, labels, gamma)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    slopes = [torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-4, atol=1e-6)
