"""The servers' rules on three quadratics, each against the paper's algorithm written down once more; what they keep."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import federation_of
from scipy.optimize import minimize

from fedtar_flare.methods.drfa import onto_simplex
from fedtar_flare.protocol.messages import abstain, ok
from fedtar_flare.protocol.tasks import HANDSHAKE, TRAIN
from fedtar_flare.record.events import End, Start, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.testing import QuadraticSite, same_bits
from fedtar_flare.testing import last_checkpoint as last
from fedtar_flare.testing import random_pair as pair
from fedtar_flare.testing.federation import NAMES

T, ROUNDS = 2, 4


FedAdam, FedYogi, Scaffold, DRFA = map(federation_of, ("fedadam", "fedyogi", "scaffold", "drfa"))
FedAvg, FedProx, Local = map(federation_of, ("fedavg", "fedprox", "local"))


def sites():
    """Three sites whose loss is ``|w - target|^2 / 2``, of 3, 5 and 2 visits, each taking one step of 0.5 an update."""
    return {f"site-{i}": QuadraticSite(f"site-{i}", [pair(i)] * T, samples=n) for i, n in enumerate((3, 5, 2))}


def flat(tensors):
    return np.concatenate([np.asarray(value, np.float64).ravel() for value in tensors])


def targets(local):
    return {name: flat(site.targets[0]) for name, site in local.items()}


def start(local):
    return flat(local["site-0"].start().values())


def shares(local):
    total = sum(site.samples for site in local.values())
    return {name: site.samples / total for name, site in local.items()}


def run(kind, folder, local, **settings):
    controller = kind(folder, local, **({"num_rounds": ROUNDS, "time_steps": T} | settings))
    controller.run()
    assert not controller.panics, controller.panics
    checkpoint = last(controller)
    return controller, checkpoint, flat(checkpoint.weights[name] for name in NAMES)


class Boastful(QuadraticSite):
    """Says that it trained on far more visits than it announced: 5 a step."""

    def __call__(self, task, header, weights):
        reply, tensors = super().__call__(task, header, weights)
        return (replace(reply, numbers=reply.numbers | {"samples": 10**9}) if task == TRAIN else reply), tensors


class HasItsOwnWeights(QuadraticSite):
    """Trains without weights from the server, and tells in which tasks some came down; its update is sent unasked."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.came_down = set()

    def __call__(self, task, header, weights):
        self.came_down |= {task} if weights else set()
        return super().__call__(task, header, weights or self.start())


class KeepsItsWeights(HasItsOwnWeights):
    """Answers training as local-only does: numbers alone."""

    def __call__(self, task, header, weights):
        reply, tensors = super().__call__(task, header, weights)
        return reply, None if task == TRAIN else tensors


def unlike(kind=QuadraticSite, boastful=Boastful):
    return {
        "site-a": kind("site-a", [pair(1), pair(1)], samples=3, validation=pair(9)),
        "site-b": boastful("site-b", [pair(4), pair(4)], samples=5, validation=pair(10)),
        "site-c": kind("site-c", [None, pair(6)], samples=2),
    }


def recorded(kind, folder, local, **settings):
    controller, checkpoint, _ = run(kind, folder, local, **({"num_rounds": 3} | settings))
    return controller, checkpoint, read_events(controller.results_folder)


def reference(local, weighting, rounds=3):
    """McMahan et al., Algorithm 1, in float64: every exchange replaces w by the weighted mean of the sites' weights."""
    w = [v.double() for v in local["site-a"].start().values()]
    for t in list(range(T)) * rounds:
        # T samples a step as announced, since the visits of all steps are pooled; a site may claim no more
        size = {
            name: {"samples": min(s.samples if name != "site-b" else 10**9, s.samples * T), "uniform": 1}[weighting]
            for name, s in local.items()
            if s.targets[t] is not None
        }
        w = [
            sum(n * (v - local[name].lr * (v - local[name].targets[t][i].double())) for name, n in size.items())
            / sum(size.values())
            for i, v in enumerate(w)
        ]
    return w


@pytest.mark.parametrize("kind", [FedAvg, FedProx])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_run_equals_an_independent_reference(tmp_path, kind, weighting):
    controller, checkpoint, events = recorded(kind, tmp_path, unlike(), weighting=weighting)
    for name, expected in zip(NAMES, reference(unlike(), weighting), strict=True):
        torch.testing.assert_close(checkpoint.weights[name].double(), expected, rtol=1e-6, atol=1e-6)
    assert [(step.round, step.step) for step in of_kind(events, Step)] == [(r, t) for r in (1, 2, 3) for t in (1, 2)]
    assert of_kind(events, Step)[0].abstained == {"site-c": "no visit"}
    assert of_kind(events, Start)[0].method == kind.__name__ and of_kind(events, End)[0].status == "completed"
    assert controller._progress()["numbers"] == {}


def test_nobody_with_a_visit_leaves_the_weights_as_they_are(tmp_path):
    local = {name: QuadraticSite(name, [None, None]) for name in "ab"}
    _, checkpoint, events = recorded(FedAvg, tmp_path, local)
    assert all(torch.equal(checkpoint.weights[name], value) for name, value in local["a"].start().items())
    assert all(step.skipped for step in of_kind(events, Step))
    assert "No site learnt anything" in of_kind(events, End)[0].reason


def test_local_training_is_resumed_from_what_the_sites_keep(tmp_path):
    first, _, _ = recorded(Local, tmp_path / "first", unlike(KeepsItsWeights, KeepsItsWeights), num_rounds=1)
    local, checkpoint = unlike(KeepsItsWeights, KeepsItsWeights), str(first.results_folder / "checkpoint")
    _, resumed, events = recorded(Local, tmp_path / "second", local, resume_from=checkpoint)
    assert all(site.came_down == {HANDSHAKE} for site in local.values())
    assert [step.round for step in of_kind(events, Step)] == [2, 2, 3, 3]
    assert resumed.info["run_id"] == first.run_id


def test_local_training_leaves_the_server_with_the_common_start_and_no_adapter(tmp_path):
    local = unlike(KeepsItsWeights, KeepsItsWeights)
    controller, checkpoint, events = recorded(Local, tmp_path, local)
    assert not any(site.came_down for site in local.values())
    assert all(torch.equal(checkpoint.weights[name], value) for name, value in local["site-a"].start().items())
    for step in of_kind(events, Step):
        assert step.sites and step.update_norm is None and not step.skipped
        assert step.bytes_up == step.bytes_down == 0
    folder = controller.results_folder
    assert not (folder / "adapter").exists() and (folder / "report.html").is_file()
    assert json.loads((folder / "metrics.json").read_text())["method"] == "local"


def test_an_update_that_local_training_did_not_ask_for_is_refused_by_the_server(tmp_path):
    events = recorded(Local, tmp_path, unlike(KeepsItsWeights, HasItsOwnWeights))[2]
    for step in of_kind(events, Step):
        assert "site-b" in step.refused and "tensors" in step.refused["site-b"] and "site-a" not in step.refused


SERVER = {"server_lr": 0.3, "beta1": 0.8, "beta2": 0.95, "tau": 0.05}


def adaptive(local, yogi, server_lr, beta1, beta2, tau):
    """Reddi et al., Algorithm 2."""
    x = start(local)
    m, v = np.zeros_like(x), np.full_like(x, tau**2)
    for _ in range(ROUNDS * T):
        delta = sum(p * (-0.5) * (x - targets(local)[name]) for name, p in shares(local).items())
        m = beta1 * m + (1 - beta1) * delta
        v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2) if yogi else beta2 * v + (1 - beta2) * delta**2
        x = x + server_lr * m / (np.sqrt(v) + tau)
    return x


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_adaptive_servers_follow_the_paper_s_algorithm(tmp_path, kind):
    w = run(kind, tmp_path, sites(), **SERVER)[2]
    np.testing.assert_allclose(w, adaptive(sites(), kind is FedYogi, **SERVER), rtol=1e-6, atol=1e-6)


LR, K = 0.1, 3


class Drifting:
    """A site whose loss is ``sum curvature (w - target)^2 / 2``; K corrected steps of gradient descent, option II."""

    def __init__(self, name, seed, samples):
        self.plain = QuadraticSite(name, [pair(seed)] * T, samples=samples)
        self.curvature = {n: 0.5 + torch.rand(3, 2, generator=torch.Generator().manual_seed(seed)) for n in NAMES}
        self.own = {n: torch.zeros(3, 2) for n in NAMES}
        self.down = None

    def __call__(self, task, header, weights):
        if task != TRAIN:
            return self.plain(task, header, weights)
        self.down = set(weights)
        x = {n: weights[n] for n in NAMES}
        c = {n: weights[f"control.{n}"] for n in NAMES}
        y = dict(x)
        for _ in range(K):
            gradient = {
                n: self.curvature[n] * (y[n] - goal) for n, goal in zip(NAMES, self.plain.targets[0], strict=True)
            }
            y = {n: y[n] - LR * (gradient[n] - self.own[n] + c[n]) for n in NAMES}
        own = {n: self.own[n] - c[n] + (x[n] - y[n]) / (K * LR) for n in NAMES}
        update = {n: y[n] - x[n] for n in NAMES} | {f"control.{n}": own[n] - self.own[n] for n in NAMES}
        self.own = own
        return ok(header, {"samples": self.plain.samples * T, "train_loss": 1.0}), update


def drifting():
    return {f"site-{i}": Drifting(f"site-{i}", i, n) for i, n in enumerate((3, 5, 2))}


def scaffold(local, p, exchanges):
    """Karimireddy et al., Algorithm 1 with option II, in float64."""
    curvature = {name: flat(site.curvature.values()) for name, site in local.items()}
    target = {name: flat(site.plain.targets[0]) for name, site in local.items()}
    x = flat(local["site-0"].plain.start().values())
    c, own = np.zeros_like(x), {name: np.zeros_like(x) for name in local}
    for _ in range(exchanges):
        steps, changes = {}, {}
        for name in local:
            y = x.copy()
            for _ in range(K):
                y -= LR * (curvature[name] * (y - target[name]) - own[name] + c)
            fresh = own[name] - c + (x - y) / (K * LR)
            steps[name], changes[name] = y - x, fresh - own[name]
            own[name] = fresh
        x = x + sum(p[name] * steps[name] for name in local)
        c = c + sum(p[name] * changes[name] for name in local)
    return x, c


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_scaffold_s_server_follows_the_paper_s_algorithm(tmp_path, weighting):
    local = drifting()
    _, checkpoint, w = run(Scaffold, tmp_path, local, weighting=weighting)
    p = {"samples": {"site-0": 0.3, "site-1": 0.5, "site-2": 0.2}, "uniform": dict.fromkeys(local, 1 / 3)}[weighting]
    x, c = scaffold(drifting(), p, ROUNDS * T)
    np.testing.assert_allclose(w, x, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(flat(checkpoint.method[f"control.{n}"] for n in NAMES), c, rtol=1e-6, atol=2e-6)


def test_a_site_that_is_away_leaves_its_share_of_scaffold_s_control_alone(tmp_path):
    """c stays the weighted mean of the c_i of all sites."""
    local = drifting()
    controller = Scaffold(tmp_path, local, num_rounds=2, time_steps=T)
    whole = local["site-2"]
    local["site-2"] = lambda task, header, weights: (
        (abstain(header, "away"), None) if task == TRAIN and header.round == 2 else whole(task, header, weights)
    )
    controller.run()
    assert not controller.panics and whole.down == {*NAMES, *(f"control.{n}" for n in NAMES)}
    own = {"site-0": local["site-0"].own, "site-1": local["site-1"].own, "site-2": whole.own}
    for n in NAMES:
        mean = 0.3 * own["site-0"][n] + 0.5 * own["site-1"][n] + 0.2 * own["site-2"][n]
        torch.testing.assert_close(controller.strategy.state()[f"control.{n}"].float(), mean, rtol=1e-5, atol=1e-5)


class Honest(QuadraticSite):
    """Says its loss at the weights that came down, as a site's first local update does."""

    def __call__(self, task, header, weights):
        reply, tensors = super().__call__(task, header, weights)
        if task == TRAIN:
            pairs = zip(NAMES, self.targets[0], strict=True)
            loss = sum(0.5 * float((weights[n] - goal).double().square().sum()) for n, goal in pairs)
            reply = replace(reply, numbers=reply.numbers | {"train_loss": loss})
        return reply, tensors


def honest():
    return {f"site-{i}": Honest(f"site-{i}", [pair(i)] * T, samples=n) for i, n in enumerate((3, 5, 2))}


def nearest_on_the_simplex(values):
    """By scipy's SLSQP, which knows nothing of simplices."""
    values = np.asarray(values, float)
    return minimize(
        lambda x: 0.5 * np.sum((x - values) ** 2),
        np.full(len(values), 1 / len(values)),
        jac=lambda x: x - values,
        bounds=[(0, None)] * len(values),
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    ).x


@pytest.mark.parametrize("scale", [0.01, 0.3, 5.0])
def test_the_projection_is_the_nearest_point_of_the_simplex(scale):
    generator = np.random.default_rng(0)
    for size in (1, 2, 3, 7):
        values = scale * generator.standard_normal(size)
        np.testing.assert_allclose(onto_simplex(values.tolist()), nearest_on_the_simplex(values), atol=1e-6)


def drfa(local, snapshots, lambda_lr):
    """Deng et al., Algorithm 1, with the expectation of the draw of sites in place of a draw."""
    x, mixing = start(local), shares(local)
    for snapshot in snapshots:
        for t in range(1, T + 1):
            if t == snapshot:
                losses = {name: 0.5 * np.sum((x - goal) ** 2) for name, goal in targets(local).items()}
            x = x + sum(mixing[name] * (-0.5) * (x - goal) for name, goal in targets(local).items())
        moved = nearest_on_the_simplex([mixing[name] + lambda_lr * losses[name] for name in sorted(local)])
        mixing = dict(zip(sorted(local), moved, strict=True))
    return x, mixing


def test_drfa_follows_the_paper_s_algorithm(tmp_path):
    controller, checkpoint, w = run(DRFA, tmp_path, honest(), lambda_lr=0.05)
    snapshots = [controller.strategy.snapshot(r) for r in range(1, ROUNDS + 1)]
    x, mixing = drfa(honest(), snapshots, 0.05)
    assert set(snapshots) == {1, 2}, "both exchanges are drawn"
    np.testing.assert_allclose(w, x, rtol=1e-6, atol=2e-6)
    for name, value in mixing.items():
        assert float(checkpoint.method[f"lambda.{name}"]) == pytest.approx(value, abs=1e-6)
    assert controller.strategy.numbers()["lambda"] == pytest.approx(list(mixing.values()), abs=1e-5)


def test_drfa_serves_the_worst_off_site_better_than_fedavg_and_without_its_step_is_fedavg(tmp_path):
    def worst(w):
        return max(0.5 * np.sum((w - goal) ** 2) for goal in targets(honest()).values())

    fedavg, robust, still = (
        run(kind, tmp_path / name, honest(), num_rounds=20, **settings)[2]
        for name, kind, settings in (("a", FedAvg, {}), ("b", DRFA, {"lambda_lr": 0.02}), ("c", DRFA, {"lambda_lr": 0}))
    )
    assert worst(robust) < worst(fedavg) - 0.1
    np.testing.assert_allclose(still, fedavg, rtol=1e-6, atol=1e-6)


def test_drfa_without_losses_leaves_lambda_and_an_absent_site_is_made_up_for(tmp_path):
    controller, _, _ = run(DRFA, tmp_path / "silent", sites())
    assert controller.strategy.numbers()["lambda"] == [0.3, 0.5, 0.2]
    local = honest()
    local["site-1"] = QuadraticSite("site-1", [None] * T, samples=5)
    controller, _, _ = run(DRFA, tmp_path / "absent", local)
    assert sum(controller.strategy.numbers()["lambda"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "parts"), [(FedAvg, set()), (FedAdam, {"m", "v"}), (FedYogi, {"m", "v"}), (DRFA, {"lambda"})]
)
def test_a_resumed_server_goes_on_to_the_same_bits(tmp_path, kind, parts):
    _, whole, _ = run(kind, tmp_path / "whole", honest())
    first, half, _ = run(kind, tmp_path / "first", honest(), num_rounds=2)
    again = {"resume_from": str(first.results_folder / "checkpoint")}
    second, resumed, _ = run(kind, tmp_path / "second", honest(), **again)
    assert {name.partition(".")[0] for name in half.method} == parts and (second.results_folder / "adapter").is_dir()
    assert same_bits(whole, resumed)


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [(FedAdam, {"beta1": 0.5}, "beta1"), (FedAvg, {}, "method: 'fedadam' then, 'fedavg' now")],
)
def test_a_server_is_not_resumed_with_other_settings_nor_by_another_method(tmp_path, kind, settings, problem):
    first, *_ = run(FedAdam, tmp_path / "first", sites(), num_rounds=1)
    checkpoint = str(first.results_folder / "checkpoint")
    other = kind(tmp_path / "b", sites(), time_steps=T, resume_from=checkpoint, **settings)
    other.run()
    assert problem in other.panics[0]
