"""What one patient moves: equal shares of visits, per-patient DP-SGD and its account, and planted canaries."""

from collections import Counter

import pytest
import torch
from batches import near
from learners import MODEL, fedmrg_learner, gradients, learner_of
from opacus.accountants import RDPAccountant

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.core.files import write_text
from fedtar_flare.data.cohort import SPLITS
from fedtar_flare.imaging.pipeline import images_of
from fedtar_flare.learning import patient_privacy
from fedtar_flare.learning.canaries import BITS, canaries, exposure
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.patient_privacy import poisson_batches
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.adapters.lora import require_modest
from fedtar_flare.models.adapters.visit_shares import LEAST_LENGTH
from fedtar_flare.models.build import build_tokenizer
from fedtar_flare.protocol.exchange import factor
from fedtar_flare.record.events import Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.simulation import run_in_process
from fedtar_flare.site.accountant import PATIENT_DELTA, PATIENT_FILE, PatientLedger
from fedtar_flare.site.model_audit import training_on

KINDS = (ReportLearner, PatientLearner)


def built(cohort, kind, **settings):
    """A learner of a site with patients, whose factors are not those of the start, so that all have a gradient."""
    learner = learner_of(cohort, kind, has_patients=True, **{"batch_size": 6} | settings)
    learner.load_shared(near(learner.shared(), 0, 0.02))
    return learner


def by_rank(learner, samples, factors=None):
    """The gradient of each factor with a row for each rank, of losses that are multiplied by ``factors``."""
    losses = learner.training_losses
    if factors is not None:
        of = dict(zip(map(id, samples), factors, strict=True))
        learner.training_losses = lambda part, *a: losses(part, *a) * torch.tensor([of[id(s)] for s in part])
    learner._accumulate(samples, "seed")
    learner.training_losses = losses
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in learner.shared_parameters.items()}
    return {n: g if factor(n) == "A" else g.T for n, g in grads.items() if factor(n)}


def cosines(some, others):
    """Of two gradients, rank by rank, without factors of which none has a gradient (attention over one slice)."""
    return torch.cat([torch.cosine_similarity(some[n], others[n], dim=1) for n in some if some[n].any()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro_batch", [0, 1, 4])
def test_the_gradient_is_the_patients_sum_of_directions_times_their_geometric_mean(cohort, kind, micro_batch):
    learner = built(cohort, kind, micro_batch=micro_batch)
    samples = learner.cohort.samples("train")[:6]
    patients = [sample.visit.patient_id for sample in samples]
    assert 1 < len(set(patients)) < 6, "some have several visits, which share the weight of one"
    weights = torch.tensor([1 / patients.count(patient) for patient in patients])[:, None, None]
    equal, shares = by_rank(learner, samples), learner.shares
    learner.shares = None
    each = [by_rank(learner, [sample]) for sample in samples]  # of one visit, by autograd alone
    plain = by_rank(learner, samples)
    learner.shares = shares
    for name, rows in equal.items():
        visits = torch.stack([g[name] for g in each]) / len(samples)
        torch.testing.assert_close(visits.sum(0), plain[name], rtol=1e-3, atol=1e-7)
        lengths = visits.norm(dim=2, keepdim=True)
        if not lengths.any():  # a query of attention over one slice
            assert not rows.any()
            continue
        mean = ((weights * lengths.log()).sum(0) / weights.sum()).exp()
        expected = (weights * visits / lengths).sum(0) * mean.clamp(min=LEAST_LENGTH)
        torch.testing.assert_close(rows, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_one_visit_whose_gradient_is_a_million_times_the_others_changes_no_direction(cohort, kind):
    """What weights can be made for; without equal shares that visit's gradient is all there is."""
    learner = built(cohort, kind)
    samples = learner.cohort.samples("train")[:6]
    equal, loud = by_rank(learner, samples), by_rank(learner, samples, [1e6, 1, 1, 1, 1, 1])
    assert cosines(equal, loud).min() > 0.999
    learner.shares = None
    loud, alone = by_rank(learner, samples, [1e6, 1, 1, 1, 1, 1]), by_rank(learner, samples[:1])
    assert cosines(alone, loud).min() > 0.999, "else the attack has no point"


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_below_adam_s_epsilon_leave_as_signs_not_as_sizes(cohort, kind):
    learner = built(cohort, kind, weight_decay=0.0)
    samples, start = learner.cohort.samples("train")[:6], learner.shared()
    learner.personal_optimizer = None  # what stays at the site is the same in each update

    def moved(scale):
        """How far one update of losses times ``scale`` moves the factors, over the learning rate."""
        losses = learner.training_losses
        learner.load_shared(start)
        learner.training_losses = lambda *a: scale * losses(*a)
        optimizer = learner.shared_optimizer(list(learner.shared_parameters.values()), 1.0)
        assert learner.local_update(samples, "seed", optimizer, start) is not None
        learner.training_losses = losses
        ended = learner.shared()
        return torch.cat([(ended[n] - start[n]).flatten() for n in start if factor(n)]) / learner.training.lr

    usual, tiny = moved(1.0), moved(1e-10)
    acts = usual.abs() > 0.9
    assert acts.float().mean() > 0.8 and (tiny[acts].abs() > 0.9).float().mean() > 0.99
    assert float((tiny.sign() == usual.sign())[acts].float().mean()) > 0.99
    learner.shares = None
    if isinstance(learner, PatientLearner):
        learner.patient.shares = None
    assert moved(1e-10).abs().max() < 0.1, "else the attack has no point"


def test_a_rank_that_too_few_patients_have_a_gradient_of_does_not_move(cohort):
    learner = built(cohort, PatientLearner)
    learner.min_cell = 3
    samples = learner.cohort.samples("train")[:12]
    visits = Counter(sample.visit.patient_id for sample in samples).most_common()
    patients = [patient for patient, _ in visits]
    few, enough = ([float(s.visit.patient_id in patients[:n]) for s in samples] for n in (2, 3))
    assert sum(few) >= 3, "as many visits as a minimum cell has patients"
    assert not any(g.any() for g in by_rank(learner, samples, few).values())
    assert any(g.any() for g in by_rank(learner, samples, enough).values())


def test_only_a_site_with_patients_has_equal_shares_and_validation_is_of_the_plain_gradient(cohort):
    assert learner_of(cohort).shares is None
    assert learner_of(cohort, has_patients=True, noise_multiplier=1.0).shares is None
    learner = built(cohort, PatientLearner)
    gradient = learner.validate().gradient
    learner.shares = learner.patient.shares = None
    assert all(torch.equal(value, gradient[name]) for name, value in learner.validate().gradient.items())
    learner = fedmrg_learner(cohort, has_patients=True)
    learner.train(None, 0)
    assert learner.shares is not None, "in its decoder"


def test_an_adapter_that_outweighs_its_layer_is_refused_by_the_layer_s_name(cohort):
    learner = built(cohort, ReportLearner)
    require_modest(learner.model, learner.adapter, 20.0)
    weights = learner.shared()
    name = next(n for n in weights if n.endswith("mlp.c_proj.lora_B.weight"))
    learner.load_shared(weights | {name: 1e4 * weights[name]})
    with pytest.raises(ExchangeError, match=r"mlp\.c_proj"):
        require_modest(learner.model, learner.adapter, 20.0)


def gradient(cohort, kind, samples, **training):
    return gradients(learner_of(cohort, kind, batch_size=len(samples), **training), samples)[1]


@pytest.mark.parametrize("kind", [ReportLearner, PatientLearner])
def test_without_noise_and_clipping_it_is_the_plain_gradient(cohort, kind):
    samples = cohort.samples("train")[:6]
    assert len({sample.visit.patient_id for sample in samples}) < len(samples), "some patient has several visits"
    plain = gradient(cohort, kind, samples)
    private = gradient(cohort, kind, samples, noise_multiplier=1e-30, max_grad_norm=1e9)
    assert 0 < (plain - private).norm() < 1e-5 * plain.norm()


def test_a_patient_moves_the_sum_by_at_most_the_clip(cohort):
    samples, clip = cohort.samples("train")[:6], 1e-3
    gone = samples[0].visit.patient_id
    rest = [sample for sample in samples if sample.visit.patient_id != gone]
    settings = {"noise_multiplier": 1e-30, "max_grad_norm": clip}
    whole = gradient(cohort, PatientLearner, samples, **settings) * len(samples)
    less = gradient(cohort, PatientLearner, rest, **settings) * len(rest)
    assert 0.5 * clip < (whole - less).norm() <= clip * 1.001


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(1)], ids=["real", "simulated"])
def test_noise_has_the_deviation_that_the_account_counts(generator):
    parameters = [torch.nn.Parameter(torch.zeros(300, 100)), torch.nn.Parameter(torch.zeros(7))]
    settings = {"clip": 0.5, "noise_multiplier": 3.0, "reports": 4, "generator": generator}
    loss = patient_privacy.add_private_gradients(parameters, [lambda: torch.tensor(torch.nan)], **settings)
    assert loss == 0 and float(parameters[0].grad.std()) == pytest.approx(3.0 * 0.5 / 4, rel=0.02)


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(2)], ids=["real", "simulated"])
def test_patients_are_drawn_whole_and_as_often_as_they_should(generator):
    patients = [str(i // 3) for i in range(90)]
    drawn = list(poisson_batches(patients, 0.2, 2000, generator))
    assert all(len(batch) == 3 * len({patients[i] for i in batch}) for batch in drawn)
    assert sum(map(len, drawn)) / 2000 == pytest.approx(18, rel=0.06) and len({len(batch) for batch in drawn}) > 3


def test_the_ledger_charges_what_opacus_says_over_all_runs(tmp_path):
    accountant, file = RDPAccountant(), tmp_path / "ledger.json"
    for run, z, q, steps in (("a", 1.1, 0.1, 12), ("a", 0.8, 0.2, 6), ("b", 2.0, 0.05, 40)):
        accountant.history.append((z, q, steps))
        ledger = PatientLedger(file)
        epsilon = ledger.epsilon_with(z, q, steps)
        ledger.add(run, z, q, steps)
        assert epsilon == pytest.approx(accountant.get_epsilon(PATIENT_DELTA), rel=0.01)
    alone = PatientLedger(file, scope="b").spent("b")
    assert PatientLedger(file).spent("a") == PatientLedger(file).spent("b") > alone > 0
    assert PatientLedger(file).spent("c") is None, "it made no update"
    file.write_text("{")
    with pytest.raises(Exception, match="cannot be read"):
        PatientLedger(file)


@pytest.mark.slow
def test_in_a_run_losses_stay_the_ledger_is_charged_and_a_spent_budget_ends_training(tmp_path, monkeypatch):
    """Two sites, one of which has next to no budget."""
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
    for site, policy in (("north", ""), ("south", "policy: {max_patient_epsilon: 0.001}\n")):
        write_text(tmp_path / "sites" / f"{site}.yaml", f"source: synthetic\n{policy}")
    training = {"local_steps": 2, "batch_size": 4, "noise_multiplier": 1.0}
    settings = {"num_rounds": 1, "time_steps": 1, "training": training, "data": {"synthetic_patients": 8}}
    folder = run_in_process(MethodRecipe("fedavg", preset="tiny", **settings), ["north", "south"], tmp_path / "run")
    step = of_kind(read_events(folder), Step)[0]
    assert step.sites["north"].train_loss is None and step.update_norm > 0
    assert "privacy budget" in step.abstained["south"]
    files = sorted((tmp_path / "home").rglob(PATIENT_FILE))
    assert [file.parent.name for file in files] == ["north"]


def test_they_are_the_site_s_own_and_add_to_no_cell(cohort, tmp_path):
    made, again, other = (canaries(cohort, run, 5, build_tokenizer(MODEL), tmp_path / run) for run in ("a", "a", "b"))
    assert [s.visit.report for s in made] == [s.visit.report for s in again]
    assert not {s.visit.report for s in made} & {s.visit.report for s in other}
    images = [one.image for one in images_of([*made, cohort.samples(None)[0]])]
    assert len({image.tobytes() for image in images}) == 6 and len({image.shape for image in images}) == 1
    with_them = cohort.with_samples([*cohort.samples(None), *made])
    for split, least in ((split, least) for split in SPLITS for least in (1, 2, 5, 1000)):
        real = [s for s in with_them.samples(split, least=least) if not s.planted]
        assert real == cohort.samples(split, least=least)
        assert real or not with_them.samples(split, least=least), "canaries alone are never trained on"
    trained = learner_of(with_them, local_steps=10, batch_size=16).train(None, 0)
    assert trained.patients == trained.loss_patients == len({s.visit.patient_id for s in cohort.samples("train")})


def test_a_model_that_was_taught_a_canary_s_phrase_shows_it_and_no_other_does(cohort, tmp_path):
    made = canaries(cohort, "run", 3, build_tokenizer(MODEL), tmp_path)
    taught = {made[0].visit.patient_id, cohort.samples("train", 1)[0].visit.patient_id}
    model, training = MODEL.replace(max_length=32), {"local_steps": 40, "batch_size": 1, "lr": 1e-2}
    with_one = cohort.with_samples([*cohort.samples(None), made[0]])
    learner = learner_of(training_on(with_one, taught), model=model, **training)
    assert len({len(learner.tokenizer.encode(canary.visit.report)) for canary in made}) == 1
    assert 0 < sum(exposure(learner, canary, True) for canary in made) / 3 < 5, "about 1.4 by chance"
    learner.train(1, 0)
    after = [exposure(learner, canary, True) for canary in made]
    assert after[0] == BITS and sum(after[1:]) / 2 < 5
