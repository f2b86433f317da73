"""The servers' rules on three quadratics, each against the paper's algorithm written down once more."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import Spoilt
from scipy.optimize import minimize

from fedtar_flare.methods.drfa import onto_simplex
from fedtar_flare.protocol.contract import TRAIN
from fedtar_flare.protocol.messages import abstain, ok
from fedtar_flare.record.events import End, Start, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.testing import FunctionFederation, QuadraticSite
from fedtar_flare.testing import last_checkpoint as last
from fedtar_flare.testing import random_pair as pair
from fedtar_flare.testing.federation import NAMES

T, ROUNDS = 2, 4
SHARES = {"site-0": 0.3, "site-1": 0.5, "site-2": 0.2}


def three(kind):
    """Sites of 3, 5 and 2 visits, by default of loss ``|w - target|^2 / 2``, each taking one step of 0.5 an update."""
    return {f"site-{i}": kind(f"site-{i}", [pair(i)] * T, samples=n) for i, n in enumerate((3, 5, 2))}


def flat(tensors):
    return np.concatenate([np.asarray(value, np.float64).ravel() for value in tensors])


TARGETS = {name: flat(site.targets[0]) for name, site in three(QuadraticSite).items()}
START = flat(three(QuadraticSite)["site-0"].start().values())


def run(method, folder, local, **settings):
    controller = FunctionFederation(folder, local, method, **({"num_rounds": ROUNDS, "time_steps": T} | settings))
    controller.run()
    assert not controller.panics, controller.panics
    checkpoint = last(controller)
    return controller, checkpoint, flat(checkpoint.weights[name] for name in NAMES)


def unlike():
    return {
        "site-a": QuadraticSite("site-a", [pair(1), pair(1)], samples=3, validation=pair(9)),
        "site-b": QuadraticSite("site-b", [pair(4), pair(4)], samples=5, validation=pair(10)),
        "site-c": QuadraticSite("site-c", [None, pair(6)], samples=2),
    }


def boast(header, reply, tensors):
    """It trained on far more visits than it announced, 5 a step."""
    return replace(reply, numbers=reply.numbers | {"samples": 10**9}), tensors


def reference(local, weighting, rounds=3):
    """McMahan et al., Algorithm 1, in float64: every exchange replaces w by the weighted mean of the sites' weights."""
    w = [v.double() for v in local["site-a"].start().values()]
    for t in list(range(T)) * rounds:
        # T samples a step as announced, since the visits of all steps are pooled; a site may claim no more
        claimed = {name: site.samples for name, site in local.items()} | {"site-b": 10**9}
        size = {name: min(claimed[name], s.samples * T) for name, s in local.items() if s.targets[t] is not None}
        size = dict.fromkeys(size, 1) if weighting == "uniform" else size
        for i, v in enumerate(w):
            moved = {name: v - local[name].lr * (v - local[name].targets[t][i].double()) for name in size}
            w[i] = sum(n * moved[name] for name, n in size.items()) / sum(size.values())
    return w


@pytest.mark.parametrize(("method", "weighting"), [("fedavg", "samples"), ("fedprox", "uniform")])
def test_a_run_equals_an_independent_reference(tmp_path, method, weighting):
    local = unlike() | {"site-b": Spoilt("site-b", boast, TRAIN, [pair(4), pair(4)], 5)}
    controller, checkpoint, _ = run(method, tmp_path, local, weighting=weighting, num_rounds=3)
    events = read_events(controller.results_folder)
    for name, expected in zip(NAMES, reference(unlike(), weighting), strict=True):
        torch.testing.assert_close(checkpoint.weights[name].double(), expected, rtol=1e-6, atol=1e-6)
    assert [(step.round, step.step) for step in of_kind(events, Step)] == [(r, t) for r in (1, 2, 3) for t in (1, 2)]
    assert of_kind(events, Step)[0].abstained == {"site-c": "no visit"}
    assert of_kind(events, Start)[0].method == method and of_kind(events, End)[0].status == "completed"
    assert controller.strategy.numbers() == {}


SERVER = {"server_lr": 0.3, "beta1": 0.8, "beta2": 0.95, "tau": 0.05}


def adaptive(yogi, server_lr, beta1, beta2, tau):
    """Reddi et al., Algorithm 2."""
    x = START
    m, v = np.zeros_like(x), np.full_like(x, tau**2)
    for _ in range(ROUNDS * T):
        delta = sum(p * (-0.5) * (x - TARGETS[name]) for name, p in SHARES.items())
        m = beta1 * m + (1 - beta1) * delta
        v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2) if yogi else beta2 * v + (1 - beta2) * delta**2
        x = x + server_lr * m / (np.sqrt(v) + tau)
    return x


@pytest.mark.parametrize("method", ["fedadam", "fedyogi"])
def test_adaptive_servers_follow_the_paper_s_algorithm(tmp_path, method):
    w = run(method, tmp_path, three(QuadraticSite), **SERVER)[2]
    np.testing.assert_allclose(w, adaptive(method == "fedyogi", **SERVER), rtol=1e-6, atol=1e-6)


LR, K = 0.1, 3


class Drifting(QuadraticSite):
    """A site whose loss is ``sum curvature (w - target)^2 / 2``; K corrected steps of gradient descent, option II."""

    def __init__(self, name, targets, samples):
        super().__init__(name, targets, samples)
        generator = torch.Generator().manual_seed(int(name[-1]))
        self.curvature = {n: 0.5 + torch.rand(3, 2, generator=generator) for n in NAMES}
        self.c_i = {n: torch.zeros(3, 2) for n in NAMES}
        self.down = None

    def __call__(self, task, header, weights):
        if task != TRAIN:
            return super().__call__(task, header, weights)
        self.down = set(weights)
        update = {}
        for n, goal in zip(NAMES, self.targets[0], strict=True):
            x, c = weights[n], weights[f"control.{n}"]
            y = x
            for _ in range(K):
                y = y - LR * (self.curvature[n] * (y - goal) - self.c_i[n] + c)
            fresh = self.c_i[n] - c + (x - y) / (K * LR)
            update |= {n: y - x, f"control.{n}": fresh - self.c_i[n]}
            self.c_i[n] = fresh
        return ok(header, {"samples": self.samples * T, "train_loss": 1.0}), update


def scaffold(local, p, exchanges):
    """Karimireddy et al., Algorithm 1 with option II, in float64."""
    curvature = {name: flat(site.curvature.values()) for name, site in local.items()}
    x = START
    c, c_i = np.zeros_like(x), {name: np.zeros_like(x) for name in local}
    for _ in range(exchanges):
        steps, changes = {}, {}
        for name in local:
            y = x.copy()
            for _ in range(K):
                y -= LR * (curvature[name] * (y - TARGETS[name]) - c_i[name] + c)
            fresh = c_i[name] - c + (x - y) / (K * LR)
            steps[name], changes[name] = y - x, fresh - c_i[name]
            c_i[name] = fresh
        x = x + sum(p[name] * steps[name] for name in local)
        c = c + sum(p[name] * changes[name] for name in local)
    return x, c


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_scaffold_s_server_follows_the_paper_s_algorithm(tmp_path, weighting):
    local = three(Drifting) | {"site-9": Drifting("site-9", [], samples=90)}  # which never trains, and has no say
    _, checkpoint, w = run("scaffold", tmp_path, local, weighting=weighting, unseen=["site-9"])
    p = SHARES if weighting == "samples" else dict.fromkeys(SHARES, 1 / 3)
    x, c = scaffold(three(Drifting), p, ROUNDS * T)
    np.testing.assert_allclose(w, x, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(flat(checkpoint.method[f"control.{n}"] for n in NAMES), c, rtol=1e-6, atol=2e-6)


def test_a_site_that_is_away_leaves_its_share_of_scaffold_s_control_alone(tmp_path):
    """c stays the weighted mean of the c_i of all sites."""
    sites = three(Drifting)
    away = sites["site-2"]

    def at_times(task, header, weights):
        gone = task == TRAIN and header.round == 2
        return (abstain(header, "away"), None) if gone else away(task, header, weights)

    controller, _, _ = run("scaffold", tmp_path, sites | {"site-2": at_times}, num_rounds=2)
    assert away.down == {*NAMES, *(f"control.{n}" for n in NAMES)}
    for n in NAMES:
        mean = sum(p * sites[name].c_i[n] for name, p in SHARES.items())
        torch.testing.assert_close(controller.strategy.state()[f"control.{n}"].float(), mean, rtol=1e-5, atol=1e-5)


class Honest(QuadraticSite):
    """Reports its loss at the weights that came down, as a site's first local update does."""

    def __call__(self, task, header, weights):
        reply, tensors = super().__call__(task, header, weights)
        if task == TRAIN:
            pairs = zip(NAMES, self.targets[0], strict=True)
            loss = sum(0.5 * float((weights[n] - goal).double().square().sum()) for n, goal in pairs)
            reply = replace(reply, numbers=reply.numbers | {"train_loss": loss})
        return reply, tensors


def nearest_on_the_simplex(values):
    """By scipy's SLSQP, which knows nothing of simplices."""
    values, n = np.asarray(values, float), len(values)
    simplex = {
        "constraints": {"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like},
        "bounds": [(0, None)] * n,
    }
    how = {"method": "SLSQP", "jac": lambda x: x - values, "options": {"ftol": 1e-15, "maxiter": 500}}
    return minimize(lambda x: 0.5 * np.sum((x - values) ** 2), np.full(n, 1 / n), **simplex, **how).x


@pytest.mark.parametrize("scale", [0.01, 0.3, 5.0])
def test_the_projection_is_the_nearest_point_of_the_simplex(scale):
    generator = np.random.default_rng(0)
    for size in (1, 2, 3, 7):
        values = scale * generator.standard_normal(size)
        np.testing.assert_allclose(onto_simplex(values.tolist()), nearest_on_the_simplex(values), atol=1e-6)


def drfa(snapshots, lambda_lr):
    """Deng et al., Algorithm 1, with the expectation of the draw of sites in place of a draw."""
    x, mixing = START, SHARES
    for snapshot in snapshots:
        for t in range(1, T + 1):
            if t == snapshot:
                losses = {name: 0.5 * np.sum((x - goal) ** 2) for name, goal in TARGETS.items()}
            x = x + sum(mixing[name] * (-0.5) * (x - goal) for name, goal in TARGETS.items())
        moved = nearest_on_the_simplex([mixing[name] + lambda_lr * losses[name] for name in SHARES])
        mixing = dict(zip(SHARES, moved, strict=True))
    return x, mixing


def test_drfa_follows_the_paper_s_algorithm(tmp_path):
    local = three(Honest) | {"site-9": Honest("site-9", [], samples=90)}  # which never trains, and has no say
    controller, checkpoint, w = run("drfa", tmp_path, local, lambda_lr=0.05, unseen=["site-9"])
    snapshots = [controller.strategy.snapshot(r) for r in range(1, ROUNDS + 1)]
    x, mixing = drfa(snapshots, 0.05)
    assert set(snapshots) == {1, 2}, "both exchanges are drawn"
    np.testing.assert_allclose(w, x, rtol=1e-6, atol=2e-6)
    for name, value in mixing.items():
        assert float(checkpoint.method[f"lambda.{name}"]) == pytest.approx(value, abs=1e-6)
    assert controller.strategy.numbers()["lambda"] == pytest.approx(list(mixing.values()), abs=1e-5)


def test_drfa_without_losses_leaves_lambda_and_an_absent_site_is_made_up_for(tmp_path):
    controller, _, _ = run("drfa", tmp_path / "silent", three(QuadraticSite))
    assert controller.strategy.numbers()["lambda"] == [0.3, 0.5, 0.2]
    local = three(Honest) | {"site-1": QuadraticSite("site-1", [None] * T, samples=5)}
    controller, _, _ = run("drfa", tmp_path / "absent", local)
    assert sum(controller.strategy.numbers()["lambda"]) == pytest.approx(1, abs=1e-5)
