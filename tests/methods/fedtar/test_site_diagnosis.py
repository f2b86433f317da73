"""Findings as prompts of the decoder, and a head that learns and stays at its site, or is shared."""

from types import SimpleNamespace

import learners
import pytest
import torch
from learners import MODEL
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from tables import cases

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.settings import matches
from fedtar_flare.learning.comparison import NONE, stated_changes
from fedtar_flare.learning.labels import labeler
from fedtar_flare.learning.site_diagnosis import OWN_RATE, SHARED_RATE, DiagnosisConfig
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.methods.fedtar.method import CONTRACT
from fedtar_flare.models.config import CVT_TARGETS
from fedtar_flare.models.report_generator import report_loss
from fedtar_flare.protocol.contract import HEAD_NAMES
from fedtar_flare.protocol.messages import version
from fedtar_flare.site.guard import InboundTask, OutboundGuard
from fedtar_flare.testing import executor_of, task_of

PROMPTED = DiagnosisConfig(labeler="synthetic")
READER = labeler("synthetic")
HEAD = ("queries", "weight", "bias", "change_weight", "change_bias")


@pytest.fixture
def learner_of(cohort):
    def make(model=MODEL, enabled=True, diagnosis=PROMPTED, **others):
        others = {"local_steps": 2, "batch_size": 2, "patient": PatientConfig(enabled=enabled)} | others
        return learners.learner_of(cohort, PatientLearner, model=model, diagnosis=diagnosis, **others)

    return make


def test_nothing_more_travels_and_the_head_stays_at_the_site(learner_of):
    plain, prompted = learner_of(diagnosis=None), learner_of()
    assert set(prompted.shared()) == set(plain.shared()) and "extension" not in plain.describe()
    own = {"calibration/temperature", *(f"diagnosis/{name}" for name in HEAD)}
    assert set(prompted.private()) - set(plain.private()) == own
    assert not prompted.generator.diagnosis.embeddings.requires_grad


def test_a_task_trains_the_head_and_another_learner_takes_it_over_with_its_optimiser(learner_of):
    one, again = learner_of(), learner_of()
    prompts = one.generator.diagnosis.embeddings.clone()
    assert not one.personal_part_acts
    one.train(None, 5)
    assert one.personal_part_acts and one.findings.learnt
    assert torch.equal(one.generator.diagnosis.embeddings, prompts)
    again.load_private(one.private())
    again.load_shared(one.shared())
    for learner in (one, again):
        learner.train(None, 6)
    for name, value in one.private().items():
        assert torch.equal(value, again.private()[name]), name


def test_without_the_personal_part_the_head_is_the_one_all_sites_began_with(learner_of):
    learner = learner_of(enabled=False)
    samples = learner.cohort.samples("test")
    images = learner.images(samples)
    before = learner.report_losses(samples, images, personal=False)
    shared = learner.shared()
    learner.train(None, 1)
    learner.load_shared(shared)
    with torch.no_grad():  # so that it tells other findings
        learner.generator.diagnosis.head.bias += 9.0
    assert torch.equal(learner.report_losses(samples, images, personal=False), before)
    assert not torch.equal(learner.report_losses(samples, images, personal=True), before)


def test_in_training_the_prompts_are_what_the_report_says(learner_of):
    learner = learner_of(model=MODEL.replace(lora_targets=CVT_TARGETS), enabled=False)
    samples = learner.cohort.samples("train")[:4]
    images, texts = learner.images(samples), [s.visit.report for s in samples]
    levels = [READER.levels(text) for text in texts]
    changes = [stated_changes(text, row, None, READER) for text, row in zip(texts, levels, strict=True)]
    levels, changes = torch.tensor(levels), torch.tensor(changes).clamp(min=NONE)
    assert levels.any() and torch.equal(learner.findings.levels(samples), levels)
    ids, labels = learner.tokenizer.batch(texts)
    prompts, encoded = learner.generator.diagnosis.embed(levels, changes), learner.generator.encoded(images)
    logits, _ = learner.generator.decode(*learner.generator.memory(images, encoded), ids, prompts)
    losses = learner.training_losses(samples, images, "seed")
    torch.testing.assert_close(losses, report_loss(logits, labels))  # the head's loss is not reported

    learner.findings.losses(samples, learner.encoded(samples, images)).sum().backward()
    moved = {name for name, p in learner.model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved and all(".diagnosis.head." in name for name in moved)


@pytest.mark.parametrize(("source", "method", "settings", "words"), cases(__file__, "refusals.yaml")["labelers"])
def test_a_hospital_refuses_synthetic_rules_for_real_reports_and_no_head(cohort, source, method, settings, words):
    executor = executor_of(method, preset="tiny", **settings)
    executor.strategy = executor.strategy.at(source, None)
    with pytest.raises(ConfigError, match=words):
        executor.strategy.at_handshake(task_of(executor, config=SimpleNamespace(source=source), cohort=cohort))


def test_what_is_trained_beside_the_adapter_is_held_against_the_site_s_bounds():
    diagnosis = {"labeler": "synthetic", "lr": 0.05, "candidates": 8}
    asked = executor_of("fedtar", preset="tiny", diagnosis=diagnosis).strategy.request(3, 2)
    assert asked.learning_rate["diagnosis.lr"] == 0.05 and asked.beams["diagnosis.candidates"] == 8
    off = executor_of("fedtar", preset="tiny", patient={"enabled": False}).strategy.request(3, 2)
    assert not {"diagnosis.lr", "patient.lr"} & set(off.learning_rate)


SHARED = PROMPTED.replace(shared=True, lr=0.02)


@pytest.fixture
def sharing(learner_of):
    def make(min_cell=1, diagnosis=SHARED, **training):
        exchange = executor_of("fedtar", diagnosis=diagnosis.to_dict()).strategy.settings.lora.exchange
        learner = learner_of(enabled=False, diagnosis=diagnosis, exchange=exchange, **training)
        learner.min_cell = min_cell
        return learner

    return make


def test_the_validation_gradient_is_of_a_shared_head_s_loss_too_where_alpha_is_to_know_findings(sharing):
    reports, findings = sharing().validate(), (learner := sharing(validates_findings=True)).validate()
    assert findings.loss == reports.loss
    samples = learner.cohort.samples("validation")
    for sample in samples:  # once more, one by one
        images = learner.images([sample])
        losses = learner.report_losses([sample], images)
        losses += learner.findings.losses([sample], learner.encoded([sample], images))
        (losses.sum() / len(samples)).backward()
    for name, parameter in learner.shared_parameters.items():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(findings.gradient[name], expected, rtol=1e-4, atol=1e-6)
        moved = ".head." in name and bool(expected.any())
        assert torch.equal(findings.gradient[name], reports.gradient[name]) != moved


def test_a_shared_head_travels_with_the_adapter_and_is_no_personal_part(sharing, learner_of):
    learner, plain = sharing(), learner_of()
    head = {f"diagnosis.head.{name}" for name in HEAD}  # without the hidden layer of the comparison
    assert set(learner.shared()) - set(plain.shared()) == head
    assert all(matches(name, CONTRACT.by_rows) == (name in head) for name in learner.shared())
    assert not learner.has_personal_part and learner.private() == {}
    learner.train(None, 1)
    moved = learner.shared()
    again = sharing()
    again.load_shared(moved)
    samples = learner.cohort.samples("test")
    images = learner.images(samples)
    with torch.no_grad():
        for personal in (True, False):
            losses = [model.report_losses(samples, images, personal=personal) for model in (learner, again, sharing())]
            assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])


@pytest.mark.parametrize("min_cell", [1, 3])
def test_a_site_says_nothing_of_findings_that_too_few_of_its_patients_have(sharing, min_cell):
    learner = sharing(min_cell, local_steps=3, batch_size=4)
    samples = learner.cohort.samples("train", None, min_cell)
    stated = [(sample.visit.patient_id, READER.levels(sample.visit.report)) for sample in samples]
    patients = [{patient for patient, levels in stated if levels[i]} for i in range(len(READER.findings))]
    enough = torch.tensor([len(group) >= max(2, min_cell) for group in patients])
    assert enough.any() and not enough.all()
    before = learner.shared()
    update = learner.train(None, 1).update
    for name in HEAD[:3]:
        assert torch.equal(update[f"diagnosis.head.{name}"].flatten(1).any(1), enough), name
    ones = learner.findings.mask_rare_findings({n: torch.ones_like(v) for n, v in update.items()}, samples, min_cell)
    for name, value in ones.items():
        rows = value.flatten(1) if name.startswith("diagnosis.head.") else value[None].flatten(1)
        assert torch.equal(rows.all(1), enough if len(rows) == len(enough) else torch.ones(1).bool()), name
    other = [name for name in update if not name.startswith("diagnosis.head.")]
    after = learner.shared()
    assert all(torch.allclose(update[name], after[name] - before[name], atol=1e-6) for name in other)


def test_a_head_that_a_job_exchanges_by_name_says_nothing_of_them_either(learner_of):
    learner = learner_of(enabled=False, exchange=["diagnosis.head.*"])
    update = learner.train(None, 1).update
    rows = update["diagnosis.head.bias"].any(1)
    assert rows.any() and not rows.all()


@pytest.mark.parametrize(("epochs", "share"), [(None, 1.0), (6.0, 1.0), (3.0, 1.0), (2.0, 2 / 3), (0.3, 0.1)])
def test_a_shared_head_has_its_own_rate_lower_where_a_task_goes_through_its_visits_too_often(sharing, epochs, share):
    learner = sharing(diagnosis=SHARED.replace(epochs=epochs))
    groups = learner.shared_optimizer([p for p in learner.model.parameters() if p.requires_grad], 3.0).param_groups
    assert [group["lr"] for group in groups] == pytest.approx([learner.training.lr, SHARED.lr * share])


@pytest.mark.parametrize(("source", "settings", "shared"), cases(__file__, "heads.yaml"))
def test_left_to_the_data_synthetic_data_alone_is_labelled_and_its_head_shared(source, settings, shared):
    rate = settings.get("lr", SHARED_RATE if shared else OWN_RATE)
    groups = {"diagnosis": settings, "lora": {"exchange": ["a"]}, "data": {"prior": "auto"}}
    before = executor_of("fedtar", preset="tiny", **groups).strategy
    strategy = before.at(source, None)
    assert strategy.settings.data.prior == ("report+image" if strategy.settings.diagnosis.on else "none")
    decided, (_, outside) = strategy.settings.diagnosis, strategy.shared_learner(source)
    auto = {"synthetic": "synthetic", "manifest": "none"}[source]
    assert decided.labeler == auto if settings["labeler"] == "auto" else settings["labeler"]
    assert (decided.shared, decided.lr, outside["diagnosis"].on) == (shared, rate, decided.labeler != "none")
    exchange = ("a", HEAD_NAMES) if shared else ("a",)
    assert strategy.settings.lora.exchange == outside["lora"].exchange == exchange
    if settings["labeler"] == "auto":  # sites that differ disagree
        assert (strategy.settings_digest() == before.settings_digest()) is (source == "synthetic")
        with pytest.raises(ConfigError, match="has not been decided"):
            assert strategy.settings.given.diagnosis.on


def test_a_trained_head_leaves_only_where_the_site_s_guard_names_it(hospital):
    site, _, w = hospital(diagnosis={"labeler": "synthetic", "shared": True})
    reply, update = site.train(w, 1, 1)
    assert reply.status == "ok" and "diagnosis.head.bias" in update
    message = FLModelUtils.to_shareable(FLModel(params=update, params_type=ParamsType.DIFF, meta=reply.to_meta()))
    shapes = {name: tuple(value.shape) for name, value in w.items()}
    asked = InboundTask(site.header("run", 1, 1, after=version(1, 0)), shapes)
    with pytest.raises(ExchangeError, match=r"diagnosis\.head\.\w+.*not allowed to leave.*extra_names"):
        OutboundGuard(["fedtar"])._check(message, "train", asked, "site-1")
    OutboundGuard(["fedtar"], extra_names=[HEAD_NAMES])._check(message, "train", asked, "site-1")


@pytest.mark.slow
def test_a_report_that_is_searched_for_again_is_written_with_its_own_patient_s_adapter(learner_of):
    learner = learner_of(diagnosis=PROMPTED.replace(candidates=4))
    assert learner.generator.choice.candidates == 4
    with torch.no_grad():  # so that each patient's adapter is another, and acts
        for parameter in learner.patient.parameters():
            parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    samples = learner.cohort.samples("train")[:6]
    plain = learner_of(diagnosis=PROMPTED)
    plain.load_private(learner.private())
    first = plain.generate(samples, plain.images(samples))
    odd = {text: number % 2 for number, text in enumerate(first)}  # every other report does not say what was read
    learner.generator.choice = choice = SimpleNamespace(candidates=4, complete=lambda text, prompted: text)
    choice.prompted_findings = lambda seen: [0] * len(seen.tokens)
    choice.count_differences = lambda text, prompted: odd.get(text, -len(text))
    assert len(odd) == len(samples)
    together = learner.generate(samples, learner.images(samples))
    apart = [learner.generate([sample], learner.images([sample]))[0] for sample in samples]
    assert together == apart
    assert [a == b for a, b in zip(together, first, strict=True)] == [True, False] * 3
