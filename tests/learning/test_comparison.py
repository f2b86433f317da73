"""Levels and changes of findings, read off two visits: against enumerations, planted truth and reports."""

from itertools import product
from types import SimpleNamespace

import learners
import numpy as np
import pytest
import torch
from batches import noise, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.imaging.batch import PriorBatch
from fedtar_flare.learning import comparison
from fedtar_flare.learning.comparison import CHANGES, UNKNOWN, calibrated, joint, levels_given, read, stated_changes
from fedtar_flare.learning.diagnosis import extend
from fedtar_flare.learning.inputs import show_reports
from fedtar_flare.learning.labels import PRESENT, labeler
from fedtar_flare.learning.site_diagnosis import DiagnosisConfig, SiteDiagnosis
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.record.events import CERTAINTIES
from fedtar_flare.synthetic.vocabulary import FINDINGS

MODEL = preset("tiny", max_length=20, num_beams=1)
READER = labeler("synthetic")
NONE, NEW, INCREASED, DECREASED, UNCHANGED, RESOLVED, UNCERTAIN = range(len(CHANGES))
COMPARED = UNCERTAIN
DAYS = torch.tensor([10.0, 20.0, 30.0])


def branch_of(seed=0, weights=None):
    model = build_model(MODEL)
    settings = {"labeler": "synthetic", "prompt_classes": "levels", "prompt_place": "memory", "head_weights": weights}
    extend(model, {**settings, "candidates": 1, "complete": False, "certain": 0.0, "seed": seed})
    return model, model.diagnosis


@pytest.fixture(scope="module")
def model():
    made, branch = branch_of()
    with torch.no_grad():  # a head that sees something
        for number, name in enumerate(("weight", "bias", "change_weight")):
            getattr(branch.head, name).copy_(normal(*getattr(branch.head, name).shape, seed=number))
    return made


def weights_of_changes(before, now):
    """Which changes two levels allow, written anew."""
    if 0 in (before, now):
        return {(0, 0): {NONE: 1.0}}.get((before, now), {NEW: 1.0} if now else {RESOLVED: 1.0})
    right = INCREASED if now > before else DECREASED if now < before else UNCHANGED
    weights = {c: 1.0 if c == right else comparison.WITHIN_LEVEL for c in (INCREASED, DECREASED, UNCHANGED)}
    return {c: weight / sum(weights.values()) for c, weight in weights.items()}


def enumerated(before, now, change):
    """p(b, n, c) of one finding, from log-probabilities of its levels and logits of its changes."""
    p = np.zeros((4, 4, COMPARED))
    for b, n in product(range(4), range(4)):
        for c, weight in weights_of_changes(b, n).items():
            p[b, n, c] = np.exp(before[b] + now[n] + change[c]) * weight
    return p / p.sum()


seeds = st.integers(0, 10**6)


@settings(max_examples=30)
@given(seeds)
def test_the_joint_reading_is_the_enumerated_one_and_without_a_comparison_two_independent_readings(seed):
    before, now, change = (3 * normal(2, 3, n, seed=seed + i) for i, n in enumerate((4, 4, COMPARED)))
    before, now = before.log_softmax(-1), now.log_softmax(-1)
    together = joint(before, now, change).exp().numpy()
    for b, d in np.ndindex(2, 3):
        expected = enumerated(*(x[b, d].double().numpy() for x in (before, now, change)))
        np.testing.assert_allclose(together[b, d], expected, atol=1e-5)
    alone = joint(before, now, torch.zeros_like(change)).exp().sum(-1)
    torch.testing.assert_close(alone, before.exp()[..., None] * now.exp()[..., None, :])


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, COMPARED)), min_size=3, max_size=3), seeds)
def test_losses_are_those_of_what_is_stated_and_gradients_are_finite_whatever_a_report_before_says(stated, seed):
    levels, changes = (torch.tensor([column]) for column in zip(*stated, strict=True))
    leaves = [normal(1, 3, n, seed=seed + i).requires_grad_() for i, n in enumerate((4, 4, COMPARED))]
    before, now = (leaf.log_softmax(-1) for leaf in leaves[:2])
    given_before = levels_given(levels, before)
    together = joint(given_before, now, leaves[2])
    losses = comparison.level_losses(now, levels.clamp(min=0)) + comparison.change_losses(together, changes)
    losses.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    p, chances = now.exp()[0], together.exp().sum((-3, -2))[0]
    expected = 0.0
    for d, (level, change) in enumerate(stated):
        level_now = max(level, 0)
        expected -= (p[d, 1:].sum() if level_now == PRESENT else p[d, level_now]).log() / 3
        if 0 <= change < COMPARED and chances[d, change] > 0:
            expected -= chances[d, change].log() / 3
    torch.testing.assert_close(losses[0], expected)
    fixed = given_before.exp()[0]
    for d, level in enumerate(levels[0].tolist()):
        seen = before.exp()[0, d]
        if level in (UNKNOWN, PRESENT):
            seen = seen if level == UNKNOWN else torch.cat([torch.zeros(1), seen[1:] / seen[1:].sum()])
            torch.testing.assert_close(fixed[d], seen)
        else:
            assert fixed[d].tolist() == [float(level == k) for k in range(4)], "as the report says"


@settings(max_examples=30)
@given(seeds, st.sampled_from((0.0, 0.5, 0.9)))
def test_what_is_read_is_the_likeliest_and_an_unsure_change_is_uncertain(seed, certain):
    before, now, change = (2 * normal(3, 4, n, seed=seed + i) for i, n in enumerate((4, 4, COMPARED)))
    before, now = before.log_softmax(-1), now.log_softmax(-1)
    together, shown = joint(before, now, change), normal(3, 4, seed=seed + 2) > 0
    reading = read(now, together, shown, certain)
    for b, d in np.ndindex(3, 4):
        p = together[b, d].exp().numpy()
        levels = p.sum((0, 2)) if shown[b, d] else now[b, d].exp().numpy()
        level = 1 + levels[1:].argmax() if levels[1:].sum() > 0.5 else 0
        assert reading.levels[b, d] == level and reading.presence[b, d] == pytest.approx(levels[1:].sum(), abs=1e-5)
        assert reading.degree[b, d] == pytest.approx(levels[1:].max() / levels[1:].sum(), abs=1e-4)
        chances = (p[:, 1:].sum((0, 1)) if level else p[:, 0].sum(0)) if shown[b, d] else np.eye(COMPARED)[NONE]
        chances = chances / chances.sum()
        assert reading.certainty[b, d] == pytest.approx(chances.max(), abs=1e-4)
        expected = UNCERTAIN if reading.certainty[b, d] < certain else chances.argmax()
        assert reading.changes[b, d] == expected
        assert (expected in (NONE, RESOLVED, UNCERTAIN)) if not level else (expected != RESOLVED)
    plain = read(now, None, None, certain)
    assert not plain.changes.any() and (plain.certainty == 1).all()
    assert torch.equal(plain.levels[~shown], reading.levels[~shown])


def seen_of(model, image_before=(), reports=None):
    """Three visits; those named show their image before, and those with a text their report."""
    batch = noise(3)
    batch.prior = PriorBatch(DAYS, noise(3, seed=2) if image_before else None)
    if image_before:
        batch.prior.images.slice_mask &= torch.tensor([row in image_before for row in range(3)])[:, None]
    if reports:
        show_reports(batch.prior, reports, build_tokenizer(MODEL))
    with torch.no_grad():
        return model.encoded(batch)


EFFUSION, VAGUE = "There is a small left pleural effusion.", "Left pleural effusion."


def test_nothing_is_claimed_where_no_visit_before_is_shown(model):
    branch = model.diagnosis
    seen = seen_of(model, image_before=(0,), reports=[None, VAGUE, " "])
    reading, alone = branch.read(seen), branch.read(seen._replace(prior=None, prior_tokens=None))
    shown = reading.changes.any(1).tolist()
    assert shown == [True, True, False] and not alone.changes.any() and alone.levels.any()
    assert torch.equal(reading.levels[2], alone.levels[2])
    for row, kinds in enumerate(({"image_before": (0,)}, {"reports": [None, VAGUE, None]})):
        own = branch.read(seen_of(model, **kinds))
        assert all(torch.equal(a[row], b[row]) for a, b in zip(own, reading, strict=True)), "whatever else is there"


def test_the_decoder_is_not_shown_the_visit_before_whose_changes_the_prompts_say(model):
    seen = seen_of(model, image_before=(0,), reports=[None, VAGUE, " "])
    with torch.no_grad():
        shown, alone = model.memory(noise(3), seen), model.memory(noise(3), seen._replace(prior=None))
    assert all(map(torch.equal, shown, alone))


def test_a_report_before_fixes_the_levels_that_it_states_and_those_of_the_image_beside_it_do_not_count(model):
    branch, i = model.diagnosis, FINDINGS.index("effusion_left")
    seen = seen_of(model, image_before=(0, 1, 2), reports=[EFFUSION, "The lungs are clear.", None])
    with torch.no_grad():
        _, together, _ = branch.likelihoods(seen)
    before = together.exp().sum((-2, -1))
    torch.testing.assert_close(before[0, i], torch.tensor([0.0, 1, 0, 0]))
    assert (before[:2].argmax(-1) > 0).sum() == 1 and (before[2].max(-1).values < 0.999).any()


def test_of_findings_that_a_warm_start_knows_presence_alone_is_the_trained_head_s(model, monkeypatch):
    state = {name: value.clone() for name, value in model.diagnosis.state_dict().items()}
    state["head.weight"][3:] = 0
    monkeypatch.setattr("fedtar_flare.learning.diagnosis._shipped", lambda name, file: state)
    branch, seen = branch_of(weights="small")[1], seen_of(model, image_before=(0, 1, 2))
    with torch.no_grad():
        torch.testing.assert_close(branch.likelihoods(seen), branch.by_head(branch.head, seen))
        slices = branch.key_slices(seen)[1]
        for number, parameter in enumerate(branch.head.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=10 + number))
        assert torch.equal(slices[:, :3], branch.key_slices(seen)[1][:, :3]), "of the head that reads the changes"
        all_three = branch.likelihoods(seen), branch.by_head(branch.head, seen), branch.by_head(branch.first, seen)
    (now, pair), trained, first = ([likely.exp() for likely in of[:2]] for of in all_three)
    torch.testing.assert_close([now[:, 3:], pair[:, 3:]], [of[:, 3:] for of in trained])
    torch.testing.assert_close(now[..., 0], trained[0][..., 0])
    torch.testing.assert_close(*(of[:, :3, 1:] / of[:, :3, 1:].sum(-1, keepdim=True) for of in (now, first[0])))
    for b, n in product((slice(1), slice(1, 4)), repeat=2):  # absent or present before and now
        blocks = [of[:, :3, b, n].flatten(2) for of in (pair, trained[1], first[1])]
        found, by_trained, by_first = (of.sum(-1, keepdim=True) for of in blocks)
        torch.testing.assert_close(found, by_trained)
        torch.testing.assert_close(blocks[0] / found, blocks[2] / by_first)


def test_a_prompt_is_the_level_and_the_change(model):
    branch, d = model.diagnosis, range(len(FINDINGS))
    levels, changes = (torch.tensor([[(k * i) % n for i in d]]) for k, n in ((3, 5), (2, 7)))
    with torch.no_grad():
        prompts = branch.embed(levels, changes)[0]
    for i, (level, change) in enumerate(zip(levels[0].tolist(), changes[0].tolist(), strict=True)):
        expected = branch.embeddings[i, PRESENT if change == RESOLVED else level]
        if CHANGES[change] not in ("none", "uncertain"):
            expected = expected + branch.changes[change - 1]
        torch.testing.assert_close(prompts[i], expected)


def test_what_nobody_trained_claims_nothing_and_prompts_are_fixed_and_trained_ones_stay():
    one, again, other = (branch_of(seed)[1] for seed in (7, 7, 8))
    assert torch.equal(one.embeddings, again.embeddings) and not torch.equal(one.embeddings, other.embeddings)
    assert not one.embeddings[:, 0].any()
    trained = torch.full_like(one.embeddings[2], 2.0)
    with torch.no_grad():
        one.embeddings[2], one.embeddings[4] = trained, 0.0
    rest = one.embeddings[[0, 1, 3]].clone()
    presence = 1 - one.head.levels(torch.zeros(1, len(FINDINGS), 32)).exp()[..., 0]
    torch.testing.assert_close(presence, torch.full_like(presence, comparison.UNTRAINED))
    one.fix_untrained(9)
    assert torch.equal(one.embeddings[2], trained) and torch.equal(one.embeddings[[0, 1, 3]], rest)
    assert one.embeddings[4, 1:].any()


def prompted(cohort, **settings):
    diagnosis = DiagnosisConfig(labeler="synthetic")
    patient = PatientConfig(enabled=False)
    learner = learners.learner_of(cohort, PatientLearner, model=MODEL, patient=patient, diagnosis=diagnosis, **settings)
    learner.prior_dropout = 0.0
    return learner, [s for s in cohort.samples("train") if s.prior is not None][:4]


@pytest.mark.parametrize("prior", ["report", "image", "report+image"])
def test_a_head_learns_changes_from_whatever_is_shown_of_the_visit_before(cohort_of, prior):
    learner, samples = prompted(cohort_of(prior), local_steps=8, lr=1e-2)
    head = learner.generator.diagnosis.head

    def loss():
        with torch.no_grad():
            images = learner.images(samples)
            return float(learner.findings.losses(samples, learner.encoded(samples, images)).mean())

    before = loss()
    trained = learner.train(None, 5)
    assert trained.skipped_updates == 0 and loss() < before
    assert all(bool(p.isfinite().all()) for p in head.parameters())
    assert bool(head.change_bias.any()) is ("image" in prior), "only two images are compared"


def test_prompts_of_training_are_those_of_a_draft_whose_head_reads_what_the_reports_state(cohort_of):
    learner, samples = prompted(cohort_of("report"))
    branch, truth = learner.generator.diagnosis, learner.findings.levels(samples)
    branch.head.levels = lambda attended: 50 * torch.nn.functional.one_hot(truth, 5)[..., :4].float().log_softmax(-1)
    images = learner.images(samples)
    drafted = learner.generator.prompts(learner.encoded(samples, images))
    torch.testing.assert_close(drafted, learner.findings.prompts(samples))
    assert learner.findings.changes(samples).clamp(min=0).any()


@pytest.mark.parametrize("prior", ["report+image", "generated"])
def test_scores_count_the_changes_of_visits_in_cells_that_are_large_enough(cohort_of, prior):
    learner, _ = prompted(cohort_of(prior))
    scored, withheld = (learner.evaluate(cell, None, generic=False) for cell in (1, 5))  # of four patients
    reports = [(s.visit.report, s.prior.report) for s in scored.samples if s.prior is not None]
    rows = (stated_changes(now, READER.levels(now), READER.levels(before), READER) for now, before in reports)
    assert scored.scores["certainty"]["0"][0] == sum(NONE < change < COMPARED for row in rows for change in row)
    assert withheld.scores["certainty"] == {}
    assert "certainty" not in prompted(cohort_of("none"))[0].evaluate(1, None, generic=False).scores


certainties = st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 2), st.floats(0.3, 1), st.booleans())


@given(st.lists(certainties, max_size=40), st.integers(1, 4))
def test_counts_of_changes_are_multiples_of_the_cell_and_of_findings_and_certainties_of_enough_patients(rows, least):
    """One change a visit; its true one is the first, and what is read the first or the second."""
    samples = [SimpleNamespace(visit=SimpleNamespace(patient_id=patient)) for patient, *_ in rows]
    chances, stated = torch.zeros(len(rows), 3, COMPARED), torch.full((len(rows), 3), UNKNOWN)
    for i, (_, finding, certainty, right) in enumerate(rows):
        stated[i, finding], chances[i, finding, NEW if right else RESOLVED] = NEW, certainty
    head = SimpleNamespace(_branch=SimpleNamespace(temperature=1.0))
    head._judged = lambda seen: [(samples, lambda temperature: chances, stated)]
    counts = SiteDiagnosis.count_by_certainty(head, [], least)
    common = {f for f in range(3) if len({row[0] for row in rows if row[1] == f}) >= least}
    for certainty in CERTAINTIES:
        told = [row for row in rows if row[1] in common and float(np.float32(row[2])) >= certainty / 100]
        n, right = (len(part) // least * least for part in (told, [row for row in told if row[3]]))
        assert counts.get(str(certainty)) == ([n, right] if len({row[0] for row in told}) >= max(1, least) else None)


@pytest.mark.parametrize(("sharpened", "temperature"), [(0.5, 0.5), (1.0, 1.0), (2.0, 2.0)])
def test_a_temperature_undoes_what_makes_chances_too_sharp_or_too_dull(sharpened, temperature):
    """Changes are drawn from chances; the head's are these to a power."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 1, COMPARED, generator=generator)
    logits[..., NONE] = -torch.inf
    true = torch.multinomial(logits.softmax(-1)[:, 0], 1, generator=generator)
    chances = [lambda t: (sharpened * logits / t).softmax(-1)]
    assert calibrated(chances, [true]) == temperature
    unread = torch.full_like(true, UNKNOWN)
    assert calibrated(chances, [unread]) == 1.0, "nothing to learn from"
