"""The baselines at a site: pooled visits, the proximal term, and an adapter that stays."""

from itertools import pairwise

import pytest
import torch
from hospital_site import HospitalSite, T, executor_of, write_site_files
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.errors import ConfigError, ExchangeError
from fedtar_flare.methods.fedavg_finetune import kept
from fedtar_flare.methods.fedprox import ProximalLearner
from fedtar_flare.models.adapters.lora import shared_parameters
from fedtar_flare.protocol.messages import ok, version
from fedtar_flare.site.guard import InboundTask, OutboundGuard
from fedtar_flare.site.state import SiteState


@pytest.fixture(autouse=True)
def _environment(home, tmp_path, monkeypatch):
    write_site_files(tmp_path, home, monkeypatch)


def moved(w):
    """Weights that are not the start."""
    generator = torch.Generator().manual_seed(1)
    return {name: value + 0.01 * torch.randn(value.shape, generator=generator) for name, value in w.items()}


def test_the_visits_of_all_steps_are_pooled(tmp_path):
    site = HospitalSite(tmp_path, method="fedavg")
    reply, w = site.handshake()
    for t in range(1, T + 1):
        trained, update = site.train(w, 1, t)
        assert trained.numbers["samples"] == sum(reply.payload["counts"]["train"]) and update.keys() == w.keys()
    closing, tensors = site.close(w, 1, evaluate=True)
    assert closing.numbers["validation_loss"] > 0 and set(closing.payload) == {"scores"} and not tensors


# --------------------------------------------------------------------------- FedProx
def test_the_proximal_gradient_is_autograd_s_of_the_proximal_term(tmp_path):
    site = HospitalSite(tmp_path, method="fedprox", fresh=False, proximal={"mu": 0.3})
    _, w = site.handshake()
    site.train(w, 1, 1)
    learner = site.executor.strategy.learner
    assert isinstance(learner, ProximalLearner) and learner.mu == 0.3
    start = learner.shared()
    learner.load_shared(moved(start))
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


def test_without_its_weight_fedprox_is_fedavg_to_the_bit_and_with_it_stays_nearer(tmp_path):
    training = {"local_steps": 4, "batch_size": 4, "max_grad_norm": 0}
    updates = {}
    for name, method, more in (
        ("fedavg", "fedavg", {}),
        ("mu-0", "fedprox", {"proximal": {"mu": 0}}),
        ("mu-large", "fedprox", {"proximal": {"mu": 1e4}}),
    ):
        site = HospitalSite(tmp_path, method=method, training=training, **more)
        _, w = site.handshake(run_id=name)
        updates[name] = site.train(w, 1, 1, run_id=name)[1]
    assert all(torch.equal(updates["fedavg"][n], updates["mu-0"][n]) for n in w)
    size = {name: sum(float(v.square().sum()) for v in update.values()) for name, update in updates.items()}
    assert size["mu-large"] < 0.5 * size["fedavg"]


@pytest.mark.parametrize("mu", [-1, float("inf"), "much"])
def test_a_weight_that_cannot_be_fails_when_built(mu):
    with pytest.raises(ConfigError, match="mu"):
        executor_of("fedprox", proximal={"mu": mu})


# --------------------------------------------------------------------------- SCAFFOLD
def with_control(w, value):
    return w | {f"control.{name}": torch.full_like(tensor, value) for name, tensor in w.items()}


def test_the_mean_of_a_site_s_gradients_is_option_two_of_scaffold_under_plain_descent(tmp_path):
    """``c_i+ = c_i - c + (x - y_i) / (K lr)``, where nothing is clipped and no weight decays."""
    training = {"local_steps": 3, "batch_size": 4, "lr": 0.05, "max_grad_norm": 0.0, "weight_decay": 0.0}
    site = HospitalSite(tmp_path, method="scaffold", training=training, scaffold={"optimizer": "sgd"})
    _, w = site.handshake()
    own = {name: torch.zeros_like(value) for name, value in w.items()}
    for t, common in ((1, 0.0), (2, 0.002)):
        reply, update = site.train(with_control(w, common), 1, t)
        assert reply.status == "ok", reply.reason
        assert update.keys() == with_control(w, 0).keys()
        for name in w:
            fresh = own[name] - common - update[name] / (3 * 0.05)
            torch.testing.assert_close(update[f"control.{name}"], fresh - own[name], rtol=1e-3, atol=2e-6)
            own[name] = own[name] + update[f"control.{name}"]
    state = state_of(tmp_path).read(version(1, 2))[0]
    assert all(torch.allclose(state[f"control.{name}"], own[name], atol=1e-7) for name in w)
    assert max(float(value.abs().max()) for value in own.values()) > 1e-4


def test_with_no_control_yet_scaffold_s_first_update_is_fedavg_s_to_the_bit(tmp_path):
    updates = []
    for method, down in (("fedavg", lambda w: w), ("scaffold", lambda w: with_control(w, 0.0))):
        site = HospitalSite(tmp_path, method=method)
        _, w = site.handshake(method)
        updates.append(site.train(down(w), 1, 1, method)[1])
    assert all(torch.equal(updates[0][name], updates[1][name]) for name in w)


def test_control_variates_of_whole_parameters_are_refused_when_built():
    with pytest.raises(ConfigError, match=r"exchange.*adapter alone"):
        executor_of("scaffold", lora={"exchange": ["projection.*"]})


# --------------------------------------------------------------------------- fine-tuning
def test_a_site_fine_tunes_once_after_the_last_round_and_keeps_the_outcome_beside_the_shared_adapter(tmp_path):
    site = HospitalSite(tmp_path, method="fedavg_finetune", fresh=False, model={"max_length": 8, "num_beams": 1})
    _, w = site.handshake()
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
    assert tuned.keys() == w.keys() and any(not torch.equal(tuned[name], w[name]) for name in w)
    again, _ = site.close(w, 9, evaluate=True)
    assert again.payload["scores"] == first.payload["scores"], "done again, it starts from the shared adapter"

    found = kept(tmp_path / "state" / "run" / "site-1", None, "run", 2).private
    assert found.keys() == tuned.keys() and all(torch.equal(value, tuned[name]) for name, value in found.items())
    for folder, message in (("run/site-2", "no fine-tuned adapter"), ("other/site-1", "run other")):
        with pytest.raises(ConfigError, match=message):
            kept(tmp_path / "state" / folder, None, "run", 2)


# --------------------------------------------------------------------------- centralised
def test_a_real_site_refuses_centralised_training_before_it_reads_anything(tmp_path):
    reply, weights = HospitalSite(tmp_path, name="hospital", simulated=False, method="centralised").handshake()
    assert reply.status == "error" and "runs in a simulation only" in reply.reason
    assert weights is None and not list((tmp_path / "state").iterdir())


def test_the_centre_trains_on_the_training_visits_of_all_sites_and_scores_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDTAR_SITES")
    sites = {name: HospitalSite(tmp_path, name, method="centralised") for name in ("site-1", "site-2")}
    greeted = {name: site.handshake("union", initial_site="site-1") for name, site in sites.items()}
    w = greeted["site-1"][1]
    visits = {name: sum(reply.payload["counts"]["train"]) for name, (reply, _) in greeted.items()}
    reply, update = sites["site-1"].train(w, 1, 1, "union")
    assert reply.numbers["samples"] == sum(visits.values()) > visits["site-1"] and update.keys() == w.keys()
    reply, _ = sites["site-1"].close(w, 1, run_id="union")
    assert reply.numbers["reports"] == sum(greeted["site-1"][0].payload["counts"]["validation"])


# --------------------------------------------------------------------------- local-only
def state_of(tmp_path, run_id="run"):
    return SiteState(tmp_path / "state", run_id, "site-1")


def trained_alone(tmp_path, run_id="run", **settings):
    """A site that has trained for a round without the server's weights, and the common start."""
    site = HospitalSite(tmp_path, method="local", **settings)
    _, w = site.handshake(run_id)
    for t in range(1, T + 1):
        reply, update = site.train(None, 1, t, run_id)
        assert reply.status == "ok" and reply.numbers["samples"] > 0 and not update
    return site, w


def test_a_site_s_adapter_goes_on_from_task_to_task_and_nothing_comes_down(tmp_path):
    _, w = trained_alone(tmp_path)
    state = state_of(tmp_path)
    versions = [state.read(one)[0] for one in (version(0, 0), *(version(1, t) for t in range(1, T + 1)))]
    assert all(torch.equal(versions[0][n], w[n]) for n in w)
    assert all(any(not torch.equal(a[n], b[n]) for n in w) for a, b in pairwise(versions))
    again, _ = trained_alone(tmp_path, "again", fresh=False)  # another process, all tasks in one
    end = state_of(tmp_path, "again").read(version(1, T))[0]
    assert all(torch.equal(end[n], versions[-1][n]) for n in w)
    reply, _ = again.train(moved(w), 2, 1, "again")
    assert reply.status == "error" and "tensors in task 'train', in which none come down" in reply.reason


def test_the_common_start_comes_with_the_handshake(tmp_path):
    site = HospitalSite(tmp_path, method="local")
    start = moved(site.handshake("other")[1])
    reply, _ = site.run("handshake", site.header("run", 0, 0, after=version(0, 0)), start)
    assert reply.status == "ok"
    own = state_of(tmp_path).read(version(0, 0))[0]
    assert all(torch.equal(own[name], value) for name, value in start.items())


def test_validation_and_scores_are_of_the_site_s_own_adapter(tmp_path):
    site, w = trained_alone(tmp_path, fresh=False)
    reply, tensors = site.close(None, 1, evaluate=True)
    learner = site.executor.strategy.learner
    own = state_of(tmp_path).read(version(1, T))[0]
    assert all(torch.equal(value, own[name]) for name, value in learner.shared().items()) and not tensors
    assert reply.numbers["validation_loss"] == learner.validate().loss
    assert reply.payload["scores"]["all"] == learner.evaluate(1).scores["all"]
    learner.load_shared(w)
    assert learner.validate().loss != reply.numbers["validation_loss"]


def test_a_resumed_run_needs_the_site_s_adapter(tmp_path):
    site, w = trained_alone(tmp_path)
    after = version(1, T)
    reply, _ = site.run("handshake", site.header("run", 0, 0, after=after, evaluate=True, member=True), w)
    assert reply.status == "ok"  # scored with what was trained before
    assert reply.payload["scores"] == site.close(None, 1, evaluate=True)[0].payload["scores"]
    reply, _ = site.run("handshake", site.header("lost", 0, 0, after=after, member=True), w)
    assert reply.status == "error" and "no-site-state" in reply.reason


def test_the_guard_lets_no_update_of_local_training_leave(tmp_path):
    site = HospitalSite(tmp_path, method="local")
    _, w = site.handshake()
    header = site.header("run", 1, 1, after=version(1, 0))
    reply = ok(header, {"samples": 3.0, "train_loss": 1.0})
    message = FLModelUtils.to_shareable(FLModel(params=w, params_type=ParamsType.DIFF, meta=reply.to_meta()))
    asked = InboundTask(header, {name: tuple(value.shape) for name, value in w.items()})
    with pytest.raises(ExchangeError, match="no tensors may leave in task 'train'"):
        OutboundGuard(["local"]).check(message, "train", asked, "site-1")
