"""The learner by itself: equal to a loop written by hand, its hooks, skipped updates, rows; and the warm start's."""

import json
import re
from contextlib import nullcontext
from copy import copy
from functools import partial

import learners
import numpy as np
import pytest
import torch
from learners import MODEL
from refused import refused
from tiny_models import write_llama

from fedtar_flare.imaging.batch import collate
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.pipeline import prepare
from fedtar_flare.learning.evaluation import report_texts, write_report_scores
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.pretraining import PretrainingConfig, pretrain, write_reports
from fedtar_flare.learning.training import require_finite
from fedtar_flare.methods.drfa import DRFALearner
from fedtar_flare.methods.fedmrg import learner as fedmrg
from fedtar_flare.methods.fedmrg.learner import FedMRGLearner
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.demographics import fit_mixture
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.methods.fedtar.patient_lora import PatientLoRA
from fedtar_flare.metrics.language import LanguageStatistics
from fedtar_flare.models import report_generator
from fedtar_flare.models.adapters.lora import add_lora, shared_parameters, shared_state
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.report_generator import report_loss
from fedtar_flare.models.weights import model_tensors


def by_hand(cohort, prepared, *, personal):
    """Algorithm 1's inner loop written out: three updates of four reports; the update, losses and private part."""
    tokenizer = build_tokenizer(MODEL)
    model = add_lora(build_model(MODEL), targets=MODEL.lora_targets, rank=4, alpha=128, seed=3)
    shared = list(shared_parameters(model).values())
    groups, optimizers = [shared], [torch.optim.AdamW(shared, lr=1e-3, weight_decay=0.01)]
    patient, mixture = None, fit_mixture(cohort, PatientConfig(), 5)
    if personal:
        patient = PatientLoRA(model, PatientConfig(), time_steps=2, seed=3)
        groups.append(list(patient.parameters()))
        optimizers.append(torch.optim.AdamW(groups[1], lr=PatientConfig().lr, weight_decay=0.01))
    start, losses = shared_state(model), []
    samples = cohort.samples("train", 1)
    order, generator = [], torch.Generator().manual_seed(11)
    for _ in range(3):
        order = order or torch.randperm(len(samples), generator=generator).tolist()
        chosen, order = [samples[i] for i in order[:4]], order[4:]
        for parameter in (*model.parameters(), *groups[-1]):
            parameter.grad = None
        images = collate([prepare(s.visit, MODEL, prepared) for s in chosen])
        adapt = nullcontext()
        if patient is not None:
            q = mixture.memberships(chosen, cohort.key)
            adapt = patient.adapt(q, torch.tensor([s.time_step for s in chosen]))
        with adapt:
            losses_of = model.get_base_model()(images, *tokenizer.batch([s.visit.report for s in chosen]))
        loss = losses_of.sum() / len(chosen)
        loss.backward()
        losses.append(loss.item())
        for group, optimizer in zip(groups, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(group, 1.0)
            optimizer.step()
    end = shared_state(model)
    return {name: end[name] - start[name] for name in start}, losses, patient.state_dict() if patient else {}


@pytest.mark.parametrize("kind", [ReportLearner, PatientLearner])
def test_training_is_the_loop_written_out_to_the_bit(learner_of, cohort, home, kind):
    learner = learner_of(kind)
    seen = []
    trained = learner.train(1, 11, seen.append)
    update, losses, private = by_hand(cohort, home / "prepared", personal=kind is PatientLearner)
    assert trained.update.keys() == update.keys() and all(torch.equal(trained.update[n], update[n]) for n in update)
    assert seen == [1, 2, 3] and trained.loss == sum(losses) / 3
    assert (trained.skipped_updates, trained.loss_patients) == (0, trained.patients)
    own = learner.private()
    assert all(torch.equal(own[f"patient/{name}"], value) for name, value in private.items())
    assert bool(own) == learner.has_personal_part == (kind is PatientLearner)


@pytest.mark.parametrize("kind", [PatientLearner, FedMRGLearner])
def test_a_report_whose_loss_the_sent_weights_make_huge_shows_in_no_told_loss(cohort, learner_of, monkeypatch, kind):
    given, marked, now = [], cohort.samples("train")[0].visit.patient_id, []
    for extreme in (1e3, 1e6):
        learner = learners.fedmrg_learner(cohort) if kind is FedMRGLearner else learner_of(kind)
        learner.min_cell, learner.cohort = 2, copy(cohort)
        learner.cohort.samples = lambda split, *args, **kwargs: cohort.samples("train", *args, **kwargs)
        for name in ("report_losses", "training_losses"):

            def keeping(samples, *args, plain, **kwargs):
                now[:] = [sample.visit.patient_id == marked for sample in samples]
                return plain(samples, *args, **kwargs)

            monkeypatch.setattr(learner, name, partial(keeping, plain=getattr(learner, name)))
        for module in (report_generator, fedmrg):
            huge = lambda *args, more=extreme: report_loss(*args) + more * torch.tensor(now)  # noqa: E731
            monkeypatch.setattr(module, "report_loss", huge)
        trained = learner.train(None, 11, updates=6)
        given.append((trained.loss, learner.validate().loss, trained.parts))
    assert given[0] == given[1] and given[0][0] < 100


def test_drfa_tells_the_loss_of_the_first_update_alone_and_of_whom_it_is(learner_of):
    trained = learner_of(DRFALearner).train(1, 11)
    assert trained.loss == learner_of(ReportLearner, local_steps=1).train(1, 11).loss
    assert trained.loss != learner_of(ReportLearner).train(1, 11).loss
    assert 0 < trained.loss_patients <= trained.loss_visits <= 4 < trained.patients


@pytest.mark.parametrize("kind", [ReportLearner, PatientLearner])
def test_a_tasks_rate_multiplies_the_learning_rates_of_both_parts(learner_of, kind):
    """One AdamW update with no decay moves what has a gradient by its learning rate, so half the rate moves half."""
    whole, half = (learner_of(kind, local_steps=1, weight_decay=0, max_grad_norm=0) for _ in range(2))
    half.rate = 0.5
    before = {name: value.clone() for name, value in whole.private().items()}
    (one, other), states = [learner.train(1, 11) for learner in (whole, half)], [whole.private(), half.private()]
    moved = [(one.update[name], other.update[name]) for name in one.update]
    moved += [(states[0][n] - v, states[1][n] - v) for n, v in before.items() if not n.startswith("adamw/")]
    assert any(bool(far.any()) for far, _ in moved)
    for far, near in moved:
        torch.testing.assert_close(near, far / 2, rtol=1e-3, atol=1e-6)


def test_bfloat16_learns_nearly_the_same_and_keeps_float32(learner_of):
    kinds = ("float32", "bfloat16")
    full, half = (learner_of(PatientLearner, precision=kind, local_steps=2).train(1, 11) for kind in kinds)
    assert half.loss == pytest.approx(full.loss, rel=0.01) and half.loss != full.loss
    assert half.skipped_updates == 0 and {value.dtype for value in half.update.values()} == {torch.float32}
    both = [torch.cat([value.flatten() for value in trained.update.values()]) for trained in (full, half)]
    assert torch.cosine_similarity(*both, dim=0) > 0.9


def spoiled(kind, bad):
    """A learner whose batches of these numbers (from 1) have a NaN in the loss."""

    class Spoiled(kind):
        batch = 0

        def report_losses(self, samples, images, personal=True, **given):
            losses = super().report_losses(samples, images, personal, **given)
            self.batch += 1
            return losses * float("nan") if self.batch in bad else losses

    return Spoiled


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_updates_with_gradients_that_are_not_finite_are_skipped_and_counted(learner_of, max_grad_norm):
    learner = learner_of(spoiled(PatientLearner, {2}), max_grad_norm=max_grad_norm)
    seen = []
    trained = learner.train(1, 11, seen.append)
    assert trained.skipped_updates == 1 and seen == [1, 3] and np.isfinite(trained.loss)
    require_finite(trained.update)
    require_finite(learner.private())
    steps = {float(value) for name, value in learner.private().items() if name.startswith("adamw/step/")}
    assert steps == {2.0}, "the optimiser of the personal part did not step either"


class Overflow(ReportLearner):
    """Has an infinite gradient, though its loss is finite."""

    def after_backward(self, start):
        next(iter(self.shared_parameters.values())).grad[0, 0] = float("inf")


@pytest.mark.parametrize("kind", [Overflow, spoiled(PatientLearner, {1, 2, 3})])
def test_a_task_whose_every_update_is_skipped_fails_and_changes_nothing(learner_of, kind):
    learner = learner_of(kind)
    before = learner.shared() | {name: value.clone() for name, value in learner.private().items()}
    with refused("non-finite-gradient", "none of the 3 local updates"):
        learner.train(1, 11)
    after = learner.shared() | learner.private()
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())


def test_evaluation_with_and_without_the_personal_part(learner_of, cohort, tmp_path):
    learner = learner_of(PatientLearner)
    with torch.no_grad():  # so that its personal part acts
        for parameter in learner.personal_parameters():
            parameter += 0.05
    result, plain, tests = learner.evaluate(1), learner_of().evaluate(1), cohort.samples("test")
    assert plain.scores_generic is None and len(plain.rows) == len(plain.samples)
    assert result.scores_generic == plain.scores != result.scores
    assert result.samples == tests and len(result.texts) == len(tests)
    for i, row in enumerate(result.rows):
        visit = tests[i % len(tests)].visit
        assert (row["patient_id"], row["visit_id"], row["split"]) == (visit.patient_id, visit.visit_id, "test")
        assert row["findings"] == sorted(visit.findings) and row["personal"] is (i < len(tests))

    path = write_report_scores(tmp_path, 3, result.rows)
    assert path.name == "report-scores-0003.jsonl" and path.stat().st_mode & 0o777 == 0o600
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == result.rows, "a number survives the file to the bit"
    assert report_texts(tmp_path, personal=False) == rows[len(tests) :]
    for scores, personal in ((result.scores, True), (result.scores_generic, False)):
        chosen = [row for row in rows if row["personal"] is personal]
        sums = (np.array([row[name] for row in chosen]) for name in LanguageStatistics.__dataclass_fields__)
        for name, value in LanguageStatistics(*sums).scores().items():
            assert value == pytest.approx(scores["all"][name], rel=1e-12, abs=1e-12), name
        assert np.mean([row["token_loss"] for row in chosen]) == pytest.approx(scores["all"]["token_loss"])


@pytest.mark.parametrize(("seconds", "least", "made"), [(7.9, 1, 3), (0.5, 4, 4), (12.0, 1, 6)])
def test_a_task_makes_as_many_updates_as_fit_as_a_shorter_task_does(learner_of, monkeypatch, seconds, least, made):
    now = [0.0]
    monkeypatch.setattr("fedtar_flare.learning.learner.clock", lambda: now[0])
    timed = learner_of(PatientLearner, local_steps=6, seconds=seconds)
    given = timed.train(1, 11, lambda number: now.append(now.pop() + 2), least=least)  # an update takes two
    whole = learner_of(PatientLearner, local_steps=6).train(1, 11, updates=made)
    assert given.updates == whole.updates == made and given.skipped_updates == 0
    assert all(torch.equal(given.update[name], value) for name, value in whole.update.items())
    assert (given.patients, given.loss) == (whole.patients, whole.loss)


REPORTS = ["the lung is dark", "a bright nodule"] * 6


def pictures():
    rng, positions = np.random.default_rng(0), np.arange(4, dtype=np.float32) * 20
    noise = [rng.integers(level - 30, level + 30, (4, 3, 32, 32)).astype(np.uint8) for level in (40, 200) * 6]
    return [Prepared(slices, positions) for slices in noise]


def warm_started(config=MODEL, **settings):
    model, seen = build_model(config), []
    settings = PretrainingConfig(batch_size=4, **settings)
    pretrain(model, build_tokenizer(config), pictures(), REPORTS, settings, say=seen.append)
    return model, seen


def test_the_warm_start_learns_to_tell_pictures_apart():
    model, seen = warm_started(steps=100, lr=4e-3)
    said = [re.match(r"step (\d+)/100, loss ([0-9.]+), ", line).groups() for line in seen]
    assert [step for step, *_ in said] == ["25", "50", "75", "100"] and float(said[3][1]) < float(said[0][1])
    assert write_reports(model, build_tokenizer(MODEL), pictures()) == REPORTS


@pytest.mark.parametrize("decoder", ["gpt2", "r2gen", "prefix"])
def test_the_same_settings_of_a_warm_start_give_the_same_bits(tmp_path, decoder):
    named = {"decoder_name": str(write_llama(tmp_path))} if decoder == "prefix" else {}
    config, before = MODEL.replace(decoder=decoder, **named), torch.random.get_rng_state()
    first, second, other = (model_tensors(warm_started(config, steps=3, seed=seed)[0]) for seed in (0, 0, 1))
    assert [all(torch.equal(first[k], of[k]) for k in first) for of in (second, other)] == [True, False]
    assert torch.equal(before, torch.random.get_rng_state())
