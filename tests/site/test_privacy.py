"""The filter: bound, noise, what else is taken out; and its account against independent computations."""

import json
import math

import numpy as np
import pytest
import torch
from flare_context import A, B, context, message, read, task_header
from hypothesis import given
from hypothesis import strategies as st
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from scipy import integrate, stats

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.protocol.contract import Field
from fedtar_flare.protocol.exchange import euclidean_norm, lowered, padded, sent_shapes
from fedtar_flare.protocol.messages import ABSTAIN, ERROR, OK
from fedtar_flare.site.accountant import Ledger, delta_of, epsilon_of
from fedtar_flare.site.context import state_of
from fedtar_flare.site.guard import OutboundGuard
from fedtar_flare.site.privacy import GaussianPrivacy

NEVER = 1e-9
"""Chance of right noise, which is drawn anew in each run, to be refused."""


def update(scale=1.0):
    generator = torch.Generator().manual_seed(3)
    return {n: scale * torch.randn(200, 3, generator=generator) for n in (A, B)}


@pytest.mark.parametrize("scale", [1e-6, 0.01, 1.0, 1e4])
def test_the_bound_holds_and_a_small_update_is_not_scaled(scale):
    sent, clipped = update(scale), GaussianPrivacy(clip_norm=0.7).clipped(update(scale))
    norm = euclidean_norm(sent)
    assert euclidean_norm(clipped) == pytest.approx(min(norm, 0.7), rel=1e-9)
    assert all(torch.allclose(clipped[n], min(1.0, 0.7 / norm) * sent[n].double()) for n in sent)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("frozen_a", [False, True])
def test_of_a_lower_rank_what_leaves_is_clipped_and_noisy_and_the_rest_is_the_server_s_own(tmp_path, rank, frozen_a):
    """What the server makes of it, by zeros or a decomposition, is of that and of its own weights alone."""
    whole = {A: torch.randn(4, 9000), B: torch.randn(7000, 4)}
    update = {name: 10 * value for name, value in lowered(whole, rank).items() if not (frozen_a and name == A)}
    privacy, ctx = GaussianPrivacy(clip_norm=0.5, noise_multiplier=1.5), context(tmp_path, sent=whole)
    message_ = privacy.process(message(update, numbers={"samples": 3}), ctx)
    reply, left = read(OutboundGuard(["fedtar"]).process(message_, ctx))
    shapes = {name: tuple(value.shape) for name, value in whole.items()}
    assert {name: tuple(value.shape) for name, value in left.items()} == sent_shapes(shapes, rank, frozen_a)
    clipped = privacy.clipped(update)
    assert euclidean_norm(clipped) == pytest.approx(0.5)
    noise = torch.cat([(left[name].double() - clipped[name]).flatten() for name in left]) / (1.5 * 2 * 0.5)
    assert bool(noise.all()) and float(noise.std()) == pytest.approx(1, abs=6 / (2 * len(noise)) ** 0.5)
    assert stats.kstest(noise.numpy(), "norm").pvalue > NEVER
    assert reply.payload["privacy"]["epsilon"] == pytest.approx(epsilon_of(1 / 1.5, 1e-5)), "of whatever rank"
    at_server = padded(left, whole)
    assert all(torch.equal(lowered(at_server, rank)[name], value) for name, value in left.items())
    for name, value in at_server.items():
        lacking = {A: value[rank:], B: value[:, rank:]}[name], {A: whole[A][rank:], B: whole[B][:, rank:]}[name]
        assert torch.equal(lacking[0], -lacking[1] if name in left else torch.zeros_like(lacking[1]))


LOSS, VECTOR = Field("loss", "number", "", noisy=True), Field("vector", "numbers", "", noisy=True)


def closing(privacy, loss, vector):
    released = privacy.noisy_fields(2, {LOSS: loss, VECTOR: vector})
    return released["loss"], released["vector"]


def test_closing_numbers_are_one_bounded_release():
    """Any two sites' closing numbers lie at most 2 sqrt(2) apart in the scale in which the noise is added."""
    privacy = GaussianPrivacy(vector_clip=0.1, loss_clip=5.0, closing_noise_multiplier=2.0)
    exact = GaussianPrivacy(vector_clip=0.1, loss_clip=5.0)  # multiplier 0: what is clipped, without noise
    far = [closing(exact, 1e9, [1e9, 0.0]), closing(exact, -3.0, [-1e9, 0.0])]
    points = [np.array([2 * loss / 5.0 - 1, *(np.array(t) / 0.1)]) for loss, t in far]
    assert np.linalg.norm(points[0] - points[1]) == pytest.approx(2 * np.sqrt(2))
    draws = np.array([[loss, *t] for loss, t in (closing(privacy, 2.0, [0.03, -0.01]) for _ in range(4000))])
    std = 2.0 * 2 * np.sqrt(2)
    assert draws.std(axis=0) == pytest.approx([std * 2.5, std * 0.1, std * 0.1], rel=0.06)
    assert draws.mean(axis=0) == pytest.approx([2.0, 0.03, -0.01], abs=5 * std * 2.5 / np.sqrt(4000))
    assert closing(exact, 2.0, [0.03, -0.01])[1] == pytest.approx([0.03, -0.01])
    assert closing(privacy, 2.0, None)[1] is None


def test_only_covered_and_public_values_leave(tmp_path):
    privacy, guard = GaussianPrivacy(closing_noise_multiplier=1.0), OutboundGuard(["fedtar"])
    sent = update()

    def leaving(task, *content, **fields):
        ctx = context(tmp_path, task, sent=sent)
        return read(guard.process(privacy.process(message(*content, **fields), ctx), ctx))

    numbers = {"samples": 12, "train_loss": 1.0, "seconds": 3.0}
    reply, tensors = leaving("train", sent, numbers=numbers)
    assert reply.status == OK and reply.numbers == {"samples": 12} and set(reply.payload) == {"privacy"}
    assert set(tensors) == set(sent) and not any(torch.equal(tensors[n], sent[n]) for n in sent)
    numbers = {"validation_loss": 2.0, "reports": 4, "seconds": 3.0}
    payload = {"t_numbers": [0.1, 0.2], "scores": {"all": {"n": 4}}}
    reply, _ = leaving("close_round", numbers=numbers, payload=payload)
    assert set(reply.numbers) == {"validation_loss", "reports"} and set(reply.payload) == {"t_numbers", "privacy"}
    assert reply.numbers["validation_loss"] != 2.0 and reply.payload["t_numbers"] != [0.1, 0.2]
    assert reply.payload["privacy"]["releases"] == 2
    payload = {"settings": "x", "counts": {"train": [1]}, "scores": {"all": {"n": 4}}, "skipped_studies": {"no": 1}}
    reply, _ = leaving("handshake", payload=payload)
    assert set(reply.payload) == {"settings", "counts", "privacy"} and reply.payload["privacy"]["releases"] == 2


def test_the_account_is_right_outlives_a_restart_and_the_budget_ends_it(tmp_path):
    z, allowed = 2.0, 3
    budget = sum(epsilon_of(np.sqrt(n) / z, 1e-5) for n in (allowed, allowed + 1)) / 2
    for number in range(1, allowed + 3):
        privacy = GaussianPrivacy(noise_multiplier=z, delta=1e-5, max_epsilon=budget)  # a new process each time
        ctx = context(tmp_path, run_id=f"run-{number % 2}")  # a new job speaks of the same patients
        reply, tensors = read(privacy.process(message(update(), numbers={"samples": 3}), ctx))
        if number <= allowed:
            assert reply.status == OK and tensors
            assert reply.payload["privacy"]["epsilon"] == pytest.approx(epsilon_of(np.sqrt(number) / z, 1e-5))
        else:
            assert reply.status == ABSTAIN and not tensors and "budget spent" in reply.reason
            assert reply.payload["privacy"]["releases"] == allowed and not reply.numbers
    ledger = json.loads((state_of(tmp_path) / "privacy_ledger.json").read_text())
    assert ledger["runs"] == {"run-0": {"2.0": 1}, "run-1": {"2.0": 2}}


def test_a_simulated_site_has_a_budget_for_each_run(tmp_path, own_home):
    privacy = GaussianPrivacy(noise_multiplier=2.0, max_epsilon=2.2)
    for run, status in (("one", OK), ("two", OK), ("two", ABSTAIN)):
        ctx = context(tmp_path, run_id=run, simulated=True)
        assert read(privacy.process(message(update(), numbers={"samples": 3}), ctx))[0].status == status


def test_what_is_not_covered_does_not_leave(tmp_path):
    nan = {**update(), A: torch.full((200, 3), float("nan"))}
    metrics = FLModelUtils.to_shareable(FLModel(metrics={"accuracy": 1.0}, meta=message().get("DXO")["meta"]))
    whole = message(update(), kind=ParamsType.FULL)
    sent = [("train", message(nan)), ("train", whole), ("close_round", message(update())), ("other", message(update()))]
    for task, leaving in (*sent, ("close_round", metrics), ("train", message(update()))):
        if leaving is metrics:
            state_of(tmp_path).mkdir(exist_ok=True)
            (state_of(tmp_path) / "privacy_ledger.json").write_text("{")
        reply, tensors = read(GaussianPrivacy().process(leaving, context(tmp_path, task)))
        assert reply.status == ERROR and not tensors, task
    assert "ledger" in reply.reason and str(tmp_path) not in reply.reason


def test_bad_settings_fail_when_built():
    wrong = {"clip_norm": 0, "delta": 1.0, "max_epsilon": math.inf, "closing_noise_multiplier": -0.1, "epsilon": 1.0}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=name):
            GaussianPrivacy(**{name: value})


def learnt(tmp_path, tensors, privacy, numbers=None, payload=None, **reply):
    ctx = context(tmp_path, "learn", header=task_header(method="madeup"), sent=update())
    sent = message(tensors, numbers={"n": 3} | (numbers or {}), payload=payload, method="madeup", **reply)
    return read(OutboundGuard(["madeup"]).process(privacy.process(sent, ctx), ctx))


def test_a_task_with_an_update_and_noisy_fields_makes_two_releases(tmp_path, madeup):
    reply, left = learnt(tmp_path / "kit", update(), GaussianPrivacy(), {"loss": 2.0}, {"slopes": [1.0], "mode": "x"})
    assert reply.status == OK and reply.numbers == {"n": 3} and set(reply.payload) == {"privacy"} and left
    sent = message(update(), status=ABSTAIN, reason="too few", numbers={"seconds": 1.0}, payload={"min_cell": 5})
    reply, left = read(GaussianPrivacy().process(sent, context(tmp_path)))
    assert (reply.status, reply.reason) == (ABSTAIN, "too few") and not left and not reply.numbers and not reply.payload
    noise = {"noise_multiplier": 2.0, "closing_noise_multiplier": 4.0}
    both, single = epsilon_of((1 / 4 + 1 / 16) ** 0.5, 1e-5), epsilon_of(1 / 2, 1e-5)
    privacy = GaussianPrivacy(**noise, max_epsilon=(both + single) / 2)
    reply, left = learnt(tmp_path, update(), privacy, {"loss": 2.0})
    assert reply.status == ABSTAIN and reply.method == "madeup" and not left and not reply.numbers
    assert reply.payload["privacy"]["releases"] == 0, "the budget holds for all releases of a message together"
    numbers, payload = {"loss": 2.0, "seconds": 1.0}, {"slopes": [0.5, 0.5], "grades": {"a": 1}, "mode": "x"}
    reply, left = learnt(tmp_path, update(), GaussianPrivacy(**noise), numbers, payload)
    assert reply.status == OK and set(reply.numbers) == {"n", "loss"} and reply.numbers["loss"] != 2.0
    assert set(reply.payload) == {"slopes", "mode", "privacy"} and reply.payload["slopes"] != [0.5, 0.5]
    assert not any(torch.equal(left[name], value) for name, value in update().items())
    account = reply.payload["privacy"]
    assert account["releases"] == 2 and account["epsilon"] == pytest.approx(both)


def test_what_cannot_be_released_stays_and_costs_no_budget(tmp_path, madeup):
    for name, value, group in (("bank.features", torch.ones(2, 3), "rows"), ("module.a", torch.ones(2), "modules")):
        reply, left = learnt(tmp_path, {**update(), name: value}, GaussianPrivacy())
        assert reply.status == ERROR and f"'{group}'" in reply.reason and not left
    wrong = [({"loss": float("nan")}, {}), ({}, {"slopes": [float("inf")]}), ({}, {"slopes": "x"}), ({}, {"slopes": 1})]
    nan = {**update(), A: torch.full((2,), float("nan"))}
    for sent, numbers, payload in (*((update(), *fields) for fields in wrong), (nan, {}, {})):
        reply, left = learnt(tmp_path, sent, GaussianPrivacy(closing_noise_multiplier=1.0), numbers, payload)
        assert reply.status == ERROR and not left
    assert not (state_of(tmp_path) / "privacy_ledger.json").exists()


@pytest.mark.parametrize(("epsilon", "mu"), [(0.0, 1.0), (0.5, 0.3), (2.0, 1.0), (8.0, 3.0), (40.0, 8.0)])
def test_delta_is_the_hockey_stick_divergence_of_two_gaussians(epsilon, mu):
    """delta(epsilon) = integral of max(0, p(x) - e^epsilon q(x)) with p = N(mu, 1), q = N(0, 1): no formula of ours."""
    difference = lambda x: stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x)  # noqa: E731
    start = epsilon / mu + mu / 2  # where the two cross
    integral, _ = integrate.quad(difference, start, start + 40, epsabs=1e-15, limit=500)
    assert delta_of(epsilon, mu) == pytest.approx(integral, rel=1e-6, abs=1e-14)


@given(st.floats(1e-9, 200.0), st.floats(1e-12, 0.2))
def test_epsilon_is_the_smallest_that_keeps_delta(mu, delta):
    epsilon = epsilon_of(mu, delta)
    assert math.isfinite(epsilon) and delta_of(epsilon, mu) <= delta
    assert epsilon == 0 or delta_of(epsilon * (1 - 1e-6), mu) > delta * (1 - 1e-9)


RUNS = ([], {"a": []}, *({"a": {z: n}} for z, n in (("2.0", -5), ("nan", 1), ("0", 1), ("2.0", 1.5), ("2.0", True))))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 2, "runs": {}}', *(json.dumps({"format": 1, "runs": runs}) for runs in RUNS)]
)
def test_a_damaged_ledger_is_never_a_fresh_budget(tmp_path, content):
    file = tmp_path / "privacy_ledger.json"
    file.write_text(content)
    with pytest.raises(FedTARError, match="cannot be read"):
        Ledger(file)
