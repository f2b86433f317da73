"""Per-patient DP-SGD: without noise it is the plain update; one patient moves the sum by the clip alone."""

import pytest
import torch
from learners import gradients, learner_of
from opacus.accountants import RDPAccountant

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_text
from fedtar_flare.learning import patient_privacy
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.patient_privacy import poisson_batches
from fedtar_flare.methods.fedmrg.learner import FedMRGLearner
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.methods.scaffold import ScaffoldLearner
from fedtar_flare.record.events import Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.in_process import run_in_process
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.site_learner import may_be_private
from fedtar_flare.site.accountant import PATIENT_DELTA, PATIENT_FILE, PatientLedger


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
    patient_privacy.add_private_gradients(parameters, [], **settings)
    assert float(parameters[0].grad.std()) == pytest.approx(3.0 * 0.5 / 4, rel=0.02)


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(2)], ids=["real", "simulated"])
def test_patients_are_drawn_whole_and_as_often_as_they_should(generator):
    patients = [str(i // 3) for i in range(90)]
    drawn = list(poisson_batches(patients, 0.2, 2000, generator))
    assert all(len(batch) == 3 * len({patients[i] for i in batch}) for batch in drawn)
    assert sum(map(len, drawn)) / 2000 == pytest.approx(18, rel=0.03) and len({len(batch) for batch in drawn}) > 3


def test_the_ledger_charges_what_opacus_says_over_all_runs(tmp_path):
    accountant, file = RDPAccountant(), tmp_path / "ledger.json"
    for run, z, q, steps in (("a", 1.1, 0.1, 12), ("a", 0.8, 0.2, 6), ("b", 2.0, 0.05, 40)):
        accountant.history.append((z, q, steps))
        ledger = PatientLedger(file)
        epsilon = ledger.epsilon_with(z, q, steps)
        ledger.add(run, z, q, steps)
        assert epsilon == pytest.approx(accountant.get_epsilon(PATIENT_DELTA), rel=0.01)
    assert PatientLedger(file, scope="b").epsilon_with(2.0, 0.05, 1) < epsilon
    file.write_text("{")
    with pytest.raises(Exception, match="cannot be read"):
        PatientLedger(file)


def test_methods_whose_updates_it_does_not_cover_are_known():
    assert may_be_private(ReportLearner) and may_be_private(PatientLearner)
    assert not may_be_private(ScaffoldLearner) and not may_be_private(FedMRGLearner)


@pytest.mark.slow
def test_in_a_run_losses_stay_the_ledger_is_charged_and_a_spent_budget_ends_training(tmp_path, monkeypatch):
    """Two sites, one of which has next to no budget."""
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
    for site, policy in (("north", ""), ("south", "policy: {max_patient_epsilon: 0.001}\n")):
        write_text(tmp_path / "sites" / f"{site}.yaml", f"source: synthetic\n{policy}")
    training = {"local_steps": 2, "batch_size": 4, "noise_multiplier": 1.0}
    settings = {"num_rounds": 1, "time_steps": 1, "training": training, "data": {"synthetic_patients": 8}}
    recipe = MethodRecipe("fedavg", preset="tiny", **settings)
    folder = run_in_process(recipe, ["north", "south"], tmp_path / "run")
    step = of_kind(read_events(folder), Step)[0]
    assert step.sites["north"].train_loss is None and step.update_norm > 0
    assert "privacy budget" in step.abstained["south"]
    files = sorted((tmp_path / "home").rglob(PATIENT_FILE))
    assert [file.parent.name for file in files] == ["north"]
    with pytest.raises(ConfigError, match="scaffold"):
        MethodRecipe("scaffold", preset="tiny", training=training).executor.strategy  # noqa: B018
