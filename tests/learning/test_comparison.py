"""What became of findings since the visit before: by rule, told to the decoder, and only where a visit is shown."""

import learners
import pytest
import torch
from batches import noise
from hypothesis import given
from hypothesis import strategies as st

from fedtar_flare.data.cells import Timeline
from fedtar_flare.imaging.batch import PriorBatch
from fedtar_flare.learning.comparison import CHANGE_RMS, CHANGES, UNKNOWN, Comparison, changes_of, is_shown
from fedtar_flare.learning.diagnosis import extend
from fedtar_flare.learning.inputs import show_reports
from fedtar_flare.learning.labels import labeler
from fedtar_flare.learning.site_diagnosis import DiagnosisConfig
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.synthetic.cohort import synthetic_cohort
from fedtar_flare.synthetic.vocabulary import FINDINGS

MODEL = preset("tiny", max_length=20)
LABEL = labeler("synthetic", "positive").label
PROMPTS = {"prompt_classes": "positive", "prompt_place": "memory", "fixed_prompts": True, "changes": True}
SETTINGS = {"labeler": "synthetic", "head": "attention", "slices": MODEL.slices, "seed": 0, **PROMPTS}


@pytest.fixture(scope="module")
def model():
    made = build_model(MODEL)
    extend(made, SETTINGS)
    head = made.diagnosis.head
    with torch.no_grad():  # a head that sees something
        head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1)))
    return made


def classes_of(*names):
    return torch.tensor([[int(name in names) for name in FINDINGS]])


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 1)), min_size=1, max_size=8))
def test_the_change_of_a_finding_follows_from_now_and_before(pairs):
    now, before = (torch.tensor([column]) for column in zip(*pairs, strict=True))
    expected = [{(1, 0): 1, (0, 1): 2}.get(pair, 0) for pair in pairs]
    assert changes_of(now, before)[0].tolist() == expected and CHANGES == ("new", "resolved")


def test_the_rule_gives_what_was_planted_in_every_style(tmp_path):
    """New and resolved findings of the synthetic cohort, from the labels of two reports that follow each other."""
    checked, timeline = 0, Timeline(3, prior="report")
    for style in range(1, 7):
        cohort = synthetic_cohort(f"site-{style}", folder=tmp_path, patients=2, timeline=timeline, seed=0)
        for sample in (s for s in cohort.samples(None) if s.prior is not None):
            now, before = (torch.tensor([LABEL(visit.report)]) for visit in (sample.visit, sample.prior))
            numbered = zip(FINDINGS, changes_of(now, before)[0].tolist(), strict=True)
            planted = {pair for pair in sample.visit.changes if pair[1] in CHANGES}
            assert {(name, CHANGES[number - 1]) for name, number in numbered if number} == planted
            checked += 1
    assert checked > 12


def test_before_is_what_the_report_says_else_what_the_image_shows_else_unknown(model):
    prior = PriorBatch(torch.tensor([10.0, 20.0, 30.0]), noise(3, seed=2))
    prior.images.slice_mask[2] = False
    show_reports(prior, ["There is a small left pleural effusion.", None, None], build_tokenizer(MODEL))
    branch = model.diagnosis
    batch = noise(3)
    batch.prior = prior
    seen = branch(model.prior_tokens(batch), prior.images.slice_mask).argmax(-1)
    before = branch.comparison.before(prior, seen)
    assert torch.equal(before[:1], classes_of("effusion_left"))
    assert torch.equal(before[1], seen[1]) and seen[1].any() and not seen[1].all()
    assert (before[2] == UNKNOWN).all()
    assert is_shown(prior).tolist() == [True, True, False]


def test_a_prompt_tells_the_change_only_where_there_is_one(model):
    """A finding that is gone keeps the prompt of its absence, unless that is nothing and could not say which it is."""
    branch = model.diagnosis
    gone = ("effusion_right", "effusion_left")
    now, before = classes_of("nodule_left", "emphysema", "cavity"), classes_of("emphysema", *gone)
    with torch.no_grad():
        branch.embeddings[FINDINGS.index(gone[1]), 0] = 0.5
    told, plain = branch.embed(now, before)[0], branch.embed(now)[0]
    changes = {"nodule_left": 0, "cavity": 0, "effusion_right": 1, "effusion_left": 1}
    for i, name in enumerate(FINDINGS):
        expected = plain[i]
        if name in changes:
            base = branch.embeddings[i, 1] if name == gone[0] else plain[i]
            expected = base + branch.comparison.embeddings[changes[name]]
        torch.testing.assert_close(told[i], expected)
    with torch.no_grad():
        branch.embeddings[FINDINGS.index(gone[1]), 0] = 0
    assert torch.equal(branch.embed(now, torch.full_like(now, UNKNOWN)), branch.embed(now))


def test_the_directions_of_the_changes_depend_on_the_seed_alone_and_are_no_part_of_the_state():
    one, again, other = (Comparison(labeler("synthetic"), 64, seed) for seed in (3, 3, 4))
    assert torch.equal(one.embeddings, again.embeddings) and not torch.equal(one.embeddings, other.embeddings)
    torch.testing.assert_close(one.embeddings.square().mean(1).sqrt(), torch.tensor(CHANGE_RMS))
    assert not one.state_dict() and not list(one.parameters())


def learner_of(cohort, changes, prior_dropout=0.25):
    diagnosis = DiagnosisConfig(labeler="synthetic", changes=changes)
    patient = PatientConfig(enabled=False)
    learner = learners.learner_of(cohort, PatientLearner, model=MODEL, patient=patient, diagnosis=diagnosis)
    learner.prior_dropout = prior_dropout
    return learner


def losses(cohort, changes, **training):
    learner = learner_of(cohort, changes, **training)
    samples = [s for s in cohort.samples("train") if s.prior is not None][:4]
    return learner.training_losses(samples, learner.images(samples, "seed"), "seed").detach()


@pytest.mark.parametrize("prior", ["report", "image"])
def test_in_training_the_change_is_told_where_the_visit_before_is_shown(cohort_of, prior):
    shown, none = cohort_of(prior), cohort_of("none")
    assert not torch.equal(losses(shown, True, prior_dropout=0.0), losses(shown, False, prior_dropout=0.0))
    assert torch.equal(losses(shown, True, prior_dropout=1.0), losses(shown, False, prior_dropout=1.0))
    samples = none.samples("train")[:4]
    one, other = (learner_of(none, changes) for changes in (True, False))
    assert torch.equal(*(lr.training_losses(samples, lr.images(samples, "s"), "s") for lr in (one, other)))


def test_told_of_a_change_by_the_reports_as_by_the_image_that_says_the_same(cohort_of):
    """In training and in writing the same prompts, once the head sees what the report says."""
    learner = learner_of(cohort_of("report"), True, prior_dropout=0.0)
    samples = [s for s in learner.cohort.samples("train") if s.prior is not None][:3]
    batch = learner.images(samples, "seed")
    branch = learner.generator.diagnosis
    truth = learner.findings.classes(samples)
    branch.forward = lambda tokens, mask: torch.nn.functional.one_hot(truth, 2).float()
    told = learner.findings.prompts(samples, batch.prior)
    assert torch.equal(told, learner.generator.prompts(batch, learner.tokens(samples, batch)))
    assert not torch.equal(told, learner.findings.prompts(samples))
