"""The baselines at a site: pooled visits, the proximal term, and an adapter that stays."""

import json
from itertools import pairwise

import pytest
import torch
from batches import near
from hospital_site import T, state_of

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.methods.fedavg_finetune import saved_learner
from fedtar_flare.methods.fedprox import ProximalLearner
from fedtar_flare.models.adapters.lora import shared_parameters
from fedtar_flare.protocol.messages import version
from fedtar_flare.site.accountant import PATIENT_FILE
from fedtar_flare.testing import Hospital


def write_policy(folder, least, more=""):
    text = f"source: synthetic\nstate_dir: {folder / 'state'}\npolicy: {{min_local_steps: {least}}}\n{more}"
    (folder / "sites" / "site-1.yaml").write_text(text)


def test_a_share_of_the_visits_is_learnt_from_in_no_fewer_updates_than_the_site_allows(hospital, tmp_path, monkeypatch):
    """Of so many visits, not of so many updates; the site's bound holds although no job can know it."""
    training = {"local_epochs": 0.5, "batch_size": 4}
    site, reply, w = hospital(method="fedavg", training=training)
    visits = sum(reply.payload["counts"]["train"])
    assert not site.executor.strategy.request(1, 1).local_steps, "the visits decide"
    made: list[int] = []
    monkeypatch.setattr("fedtar_flare.runtime.report_site.Progress", lambda *about: made.append)
    for least, updates in ((1, -(-visits // 8)), (visits, visits)):
        made.clear()
        write_policy(tmp_path, least, "precision: bfloat16\n")
        trained, _ = site.train(w, 1, 1)
        assert trained.status == "ok" and made == [*range(1, updates + 1)]
        assert state_of(tmp_path).precision == "bfloat16", "drafts are written in it"


def test_a_task_without_time_makes_the_updates_that_the_site_wants_and_reports_so(hospital, tmp_path):
    site, _, w = hospital(method="fedavg", training={"seconds": 1e-9, "local_steps": 6, "batch_size": 4})
    for least in (1, 4):
        write_policy(tmp_path, least)
        numbers = site.train(w, 1, 1)[0].numbers
        assert (numbers["updates"], numbers["planned_updates"]) == (least, 6)
    assert "as many as fit" in site.executor.strategy.work()


def test_the_proximal_gradient_is_autograd_s_of_the_proximal_term(hospital):
    site, _, w = hospital(method="fedprox", fresh=False, proximal={"mu": 0.3})
    site.train(w, 1, 1)
    learner = site.executor.strategy.learner
    assert isinstance(learner, ProximalLearner) and learner.mu == 0.3
    start = learner.shared()
    learner.load_shared(near(start))
    samples = learner.cohort.samples("train")[:4]
    learner._accumulate(samples)
    parameters = shared_parameters(learner.model)
    plain = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    term = 0.3 / 2 * sum((parameter - start[name]).square().sum() for name, parameter in parameters.items())
    proximal = dict(zip(parameters, torch.autograd.grad(term, list(parameters.values())), strict=True))
    learner.after_backward(start)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, plain[name] + proximal[name], rtol=1e-6, atol=1e-9)
    assert any(value.abs().max() > 1e-3 for value in proximal.values())


def with_control(w, value):
    return w | {f"control.{name}": torch.full_like(tensor, value) for name, tensor in w.items()}


def test_the_mean_of_a_site_s_gradients_is_option_two_of_scaffold_under_plain_descent(hospital, tmp_path):
    """``c_i+ = c_i - c + (x - y_i) / (K lr)``, where nothing is clipped and no weight decays."""
    training = {"local_steps": 3, "batch_size": 4, "lr": 0.05, "max_grad_norm": 0.0, "weight_decay": 0.0}
    site, _, w = hospital(method="scaffold", training=training, scaffold={"optimizer": "sgd"})
    c_i = {name: torch.zeros_like(value) for name, value in w.items()}
    for t, common in ((1, 0.0), (2, 0.002)):
        reply, update = site.train(with_control(w, common), 1, t)
        assert reply.status == "ok", reply.reason
        assert update.keys() == with_control(w, 0).keys()
        for name in w:
            fresh = c_i[name] - common - update[name] / (3 * 0.05)
            torch.testing.assert_close(update[f"control.{name}"], fresh - c_i[name], rtol=1e-3, atol=2e-6)
            c_i[name] = c_i[name] + update[f"control.{name}"]
    state = state_of(tmp_path).read(version(1, 2))[0]
    assert all(torch.allclose(state[f"control.{name}"], c_i[name], atol=1e-7) for name in w)
    assert max(float(value.abs().max()) for value in c_i.values()) > 1e-4


def test_updates_of_the_fine_tuning_are_charged_too(hospital, home):
    training = {"noise_multiplier": 2.0, "local_steps": 3, "batch_size": 4}
    site, _, w = hospital("noisy", method="fedavg_finetune", training=training)
    site.train(w, 9, 1, "noisy")
    site.close(w, 9, run_id="noisy")
    [ledger] = home.rglob(PATIENT_FILE)
    assert [updates for *_, updates in json.loads(ledger.read_text())["noisy"]] == [3, 3]


def test_a_site_fine_tunes_once_after_the_last_round_and_keeps_that_beside_the_shared_adapter(hospital, tmp_path):
    settings = {"model": {"max_length": 8, "num_beams": 1}, "training": {"schedule": "cosine"}}
    site, _, w = hospital(method="fedavg_finetune", fresh=False, **settings)
    site.train(w, 9, 1)
    early, _ = site.close(w, 8, evaluate=True)
    assert "scores_generic" not in early.payload, "nothing is tuned before the last round"
    site.train(w, 9, T)
    first, tensors = site.close(w, 9, evaluate=True)
    assert set(first.payload) == {"scores", "scores_generic"} and not tensors
    assert first.payload["scores"]["all"]["token_loss"] != first.payload["scores_generic"]["all"]["token_loss"]
    assert first.payload["scores_generic"] == early.payload["scores"], "without the tuned adapter it is the shared one"
    assert first.numbers["validation_loss"] == early.numbers["validation_loss"]
    learner, tuned = site.executor.strategy.learner, state_of(tmp_path).read(version(9, T))[0]
    assert all(torch.equal(value, w[name]) for name, value in learner.shared().items())
    assert tuned.keys() == w.keys() and max(float((tuned[name] - w[name]).abs().max()) for name in w) > 5e-4
    assert site.close(w, 9, evaluate=True)[0].payload["scores"] == first.payload["scores"], "it starts from there anew"

    saved = saved_learner(tmp_path / "state" / "run" / "site-1", None, "run", 2).private
    assert saved.keys() == tuned.keys() and all(torch.equal(value, tuned[name]) for name, value in saved.items())
    for folder, message in (("run/site-2", "no fine-tuned adapter"), ("other/site-1", "of run run")):
        with pytest.raises(ConfigError, match=message):
            saved_learner(tmp_path / "state" / folder, None, "run", 2)


def test_a_real_site_refuses_centralised_training_before_it_reads_anything(hospital, tmp_path):
    reply, weights = Hospital(tmp_path, name="hospital", simulated=False, method="centralised").handshake()
    assert reply.status == "error" and "runs in a simulation only" in reply.reason
    assert weights is None and not list((tmp_path / "state").iterdir())


def test_the_centre_trains_on_the_training_visits_of_all_sites_and_scores_its_own(without_site_files, tmp_path):
    sites = {name: Hospital(tmp_path, name, method="centralised") for name in ("site-1", "site-2", "unseen")}
    sites.pop("unseen").handshake("union", initial_site="site-1", score="all")
    greeted = {name: site.handshake("union", initial_site="site-1") for name, site in sites.items()}
    w = greeted["site-1"][1]
    visits = {name: sum(reply.payload["counts"]["train"]) for name, (reply, _) in greeted.items()}
    reply, update = sites["site-1"].train(w, 1, 1, "union")
    assert reply.numbers["samples"] == sum(visits.values()) > visits["site-1"] and update.keys() == w.keys()
    reply, _ = sites["site-1"].close(w, 1, run_id="union")
    assert reply.numbers["reports"] == sum(greeted["site-1"][0].payload["counts"]["validation"])


@pytest.fixture(scope="module")
def local_sites(place):
    """Sites that have trained for a round without the server's weights, by run id, and the common start."""
    sites = {}
    for run_id, fresh in (("many", True), ("one", False)):  # a process for each task, and one for all
        sites[run_id] = Hospital(place, method="local", fresh=fresh, lora={"mean": "ffa"}, model={"max_length": 8})
        _, w = sites[run_id].handshake(run_id)
        for t in range(1, T + 1):
            reply, update = sites[run_id].train(None, 1, t, run_id)
            assert reply.status == "ok" and reply.numbers["samples"] > 0 and not update
    return sites, w


def test_a_site_s_adapter_goes_on_from_task_to_task_and_nothing_comes_down(local_sites, place):
    sites, w = local_sites
    many, one = (state_of(place, run_id) for run_id in sites)
    versions = [many.read(at)[0] for at in (version(0, 0), *(version(1, t) for t in range(1, T + 1)))]
    assert all(torch.equal(versions[0][n], w[n]) for n in w)
    assert all(any(not torch.equal(a[n], b[n]) for n in w) for a, b in pairwise(versions))
    assert all(torch.equal(one.read(version(1, T))[0][n], versions[-1][n]) for n in w)
    reply, _ = sites["one"].train(near(w), 2, 1, "one")
    assert reply.status == "error" and "tensors in task 'train', in which none come down" in reply.reason


def test_validation_and_scores_are_of_the_site_s_own_adapter_which_a_resumed_run_needs(local_sites, place):
    (many, one), w = local_sites[0].values(), local_sites[1]
    after = version(1, T)
    closed, tensors = one.close(None, 1, evaluate=True, run_id="one")
    learner, own = one.executor.strategy.learner, state_of(place, "one").read(after)[0]
    assert all(torch.equal(value, own[name]) for name, value in learner.shared().items()) and not tensors
    assert closed.numbers["validation_loss"] == learner.validate().loss
    assert closed.payload["scores"]["all"] == learner.evaluate(1).scores["all"]
    learner.load_shared(w)
    assert learner.validate().loss != closed.numbers["validation_loss"]

    reply, _ = many.run("handshake", many.header("many", 0, 0, after=after, evaluate=True, member=True), w)
    assert reply.payload["scores"] == closed.payload["scores"], "of what was trained before"
    reply, _ = many.run("handshake", many.header("lost", 0, 0, after=after, member=True), w)
    assert reply.status == "error" and "no-site-state" in reply.reason


def test_the_common_start_comes_with_the_handshake(hospital, tmp_path):
    site, _, w = hospital("other", method="local")
    start = near(w)
    reply, _ = site.run("handshake", site.header("run", 0, 0, after=version(0, 0)), start)
    assert reply.status == "ok"
    own = state_of(tmp_path).read(version(0, 0))[0]
    assert all(torch.equal(own[name], value) for name, value in start.items())
