"""Adapters of unlike ranks, put together in each form, against explicit dense weights."""

import pytest
import torch
from federation import slowed
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.methods.fedtar.config import AlphaConfig
from fedtar_flare.methods.fedtar.events import EVENTS
from fedtar_flare.methods.fedtar.policy import AlphaPolicy, hypergradient
from fedtar_flare.methods.fedtar.release import t_numbers
from fedtar_flare.protocol.contract import HANDSHAKE, TRAIN
from fedtar_flare.protocol.exchange import lowered, padded, pairs, sent_shapes, shapes_as_sent
from fedtar_flare.protocol.messages import ok
from fedtar_flare.record.events import SHARED
from fedtar_flare.record.log import read_events
from fedtar_flare.runtime.aggregation import site_weights
from fedtar_flare.runtime.checkpoint import load
from fedtar_flare.runtime.training import ROW_NORM, aligned, truncated
from fedtar_flare.testing import FunctionFederation, QuadraticSite, same_bits
from fedtar_flare.testing import last_checkpoint as last
from fedtar_flare.testing.federation import NAMES

A, B = NAMES
R, T, WIDE, HIGH = 3, 3, 5, 4
RANKS, SAMPLES = {"site-a": 1, "site-b": 2, "site-c": 3}, {"site-a": 1, "site-b": 2, "site-c": 5}
SHARES = site_weights(SAMPLES)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class LowRankSite(QuadraticSite):
    """Adds random numbers to its first ranks of what came down; ``learnt`` has its factors by round and step."""

    def __init__(self, name, form, rank=None, sent_rank=None, work=1):
        super().__init__(name, [], SAMPLES[name])
        self.form, self.rank, self.work, self.learnt = form, rank or RANKS[name], work, {}
        self.sent_rank = sent_rank or self.rank

    def start(self):
        return {A: draw(1, R, WIDE), B: torch.zeros(HIGH, R)}

    def __call__(self, task, header, weights):
        if task == HANDSHAKE:
            reply, tensors = super().__call__(task, header, weights)
            reply.numbers.update({"rank": self.rank} if self.rank < R else {})
            reply.payload.update({"lora_mean": self.form} if self.form != "factors" else {})
            return reply, tensors
        if task != TRAIN:
            return ok(header), None
        before, place = lowered(weights, self.sent_rank), 100 * header.round + 10 * header.step + self.samples
        names = [n for n in before if self.form != "ffa" or n == B]
        update = {n: draw(place + (n == B), *before[n].shape) for n in names}
        self.learnt[header.round, header.step] = {n: before[n] + update.get(n, 0) / self.work for n in before}
        done = {"updates": 4 * self.work, "planned_updates": 4}
        return ok(header, {"samples": self.samples, "train_loss": 1.0, **done}), update


def run(folder, form, method="fedtar", sites=None, slow="", **more):
    sites = {name: LowRankSite(name, form) for name in RANKS} | (sites or {})
    settings = {"num_rounds": 2, "time_steps": T, "step_time_limit": 1} | more
    controller = FunctionFederation(folder, sites, method, **settings)
    if slow:
        slowed(controller, slow, {(1, 1): (TRAIN, 2, 1)})
    controller.run()
    return controller, sites, read_events(controller.results_folder, (*SHARED, *EVENTS))


def dense(w):
    return w[B].double() @ w[A].double()


def svd(matrix, rank=R):
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


@pytest.mark.parametrize("form", ["factors", "product", "ffa"])
@pytest.mark.parametrize("method", ["fedtar", "fedavg"])
def test_a_run_is_what_dense_weights_give_and_theorem_1_holds_with_what_is_cut_off(tmp_path, form, method):
    """With a site that makes half of its updates where products are averaged: the mean then counts tau times."""
    sites = {"site-c": LowRankSite("site-c", form, work=0.5)} if form == "product" else {}
    tau = 1 - SHARES["site-c"] / 2 if form == "product" else 1
    fixed = {"alpha_form": "given", "alphas": [t**-0.5 for t in range(1, T + 1)]} if method == "fedtar" else {}
    controller, sites, events = run(tmp_path, form, method, sites, **fixed)
    assert not controller.panics, controller.panics
    first = {n: value.double() for n, value in sites["site-a"].start().items()}
    w, whole, cut, uncut = first, dense(first), 0 * dense(first), dense(first)
    for step in (event for event in events if event.kind == "step"):
        alpha = tau * (step.step**-0.5 if method == "fedtar" else 1.0)
        learnt = {name: site.learnt[step.round, step.step] for name, site in sites.items()}
        mean = sum(SHARES[name] * dense(one) for name, one in learnt.items())
        zeros = {n: torch.zeros_like(value) for n, value in w.items()}
        middle = {n: sum(SHARES[s] * padded(one, zeros)[n].double() for s, one in learnt.items()) for n in NAMES}
        middle |= {A: w[A]} if form == "ffa" else {}
        assert not step.refused
        w = {n: w[n] + alpha * (middle[n] - w[n]) for n in NAMES}
        whole, uncut = whole + alpha * (mean - whole), uncut + alpha * (mean - uncut)  # Theorem 1, step by step
        if form == "product":
            cut, whole = (1 - alpha) * cut + whole - svd(whole), svd(whole)
    stopped, *_ = run(tmp_path / "stopped", form, method, sites, num_rounds=1, **fixed)
    kept = str(stopped.results_folder / "checkpoint")
    assert same_bits(last(run(tmp_path / "on", form, method, sites, resume_from=kept, **fixed)[0]), last(controller))
    found = last(controller).weights
    if form == "factors":
        assert all(torch.allclose(found[n].double(), w[n], atol=1e-5) for n in NAMES)
        return
    torch.testing.assert_close(dense(found), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole, uncut - cut, rtol=1e-8, atol=1e-8)
    assert (form == "ffa") is bool(torch.equal(found[A].double(), first[A])) is not bool(cut.any())


@pytest.mark.parametrize("form", ["factors", "product", "ffa"])
@pytest.mark.parametrize("work", [1, 0.5])
def test_what_a_site_of_lower_rank_answers_late_is_half_of_its_step_from_what_it_was_sent(tmp_path, form, work):
    settings = {"time_steps": 1, "wait_seconds": 0.01, "max_share": 1.0, "slow": "site-b"}
    late = {"site-b": LowRankSite("site-b", form, work=work)}
    controller, sites, events = run(tmp_path, form, "fedavg", late, **settings)
    assert not controller.panics, controller.panics
    first, second = (step for step in events if step.kind == "step")
    assert "site-b" in first.absent and second.sites["site-b"].late == 1 and not second.refused

    def seen(w):
        """What a mean is of: products, or factors, of which a lower rank lacks what is zero."""
        full = padded(w, {n: torch.zeros_like(value) for n, value in sites["site-a"].start().items()})
        return {"W": dense(full)} if form == "product" else {n: value.double() for n, value in full.items()}

    start, folder = sites["site-a"].start(), controller.results_folder / "checkpoint"
    one = load(folder / "round-0001.safetensors").weights
    tau, (late, *punctual) = 1 - SHARES["site-b"] * (1 - work), ("site-b", "site-a", "site-c")
    for name, before in seen(one).items():
        if (form, name) == ("ffa", A):
            continue
        steps = {site: seen(sites[site].learnt[2, 1])[name] - before for site in punctual}
        steps[late] = (seen(sites[late].learnt[1, 1])[name] - seen(start)[name]) / 2
        whole = before + tau * sum(SHARES[site] * step for site, step in steps.items())
        found = seen(last(controller).weights)[name]
        torch.testing.assert_close(found, svd(whole) if form == "product" else whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["factors", "product", "ffa"])
def test_another_shape_than_announced_is_refused_by_name(tmp_path, form):
    _, _, events = run(tmp_path, form, sites={"site-b": LowRankSite("site-b", form, rank=1, sent_rank=2)})
    step = next(event for event in events if event.kind == "step")
    assert sorted(step.sites) == ["site-a", "site-c"] and "agreed: (" in step.refused["site-b"]


def test_other_aggregations_have_neither_products_nor_unlike_ranks(tmp_path):
    alike = {name: LowRankSite(name, "product", rank=R) for name in RANKS}
    controller, *_ = run(tmp_path, "product", sites=alike, aggregation="median", min_sites=3)
    assert "lora.mean" in controller.panics[0]
    sites = {name: LowRankSite(name, "factors", rank=R) for name in ("site-b", "site-c")}
    _, _, events = run(tmp_path / "ranks", "factors", sites=sites, aggregation="norm_bounded_mean", min_sites=2)
    start = next(event for event in events if event.kind == "start")
    assert start.sites == ["site-b", "site-c"] and "has no form" in start.absent["site-a"]


@pytest.mark.parametrize("form", ["factors", "product", "ffa"])
@pytest.mark.parametrize("rank", [2, R])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_t_numbers_give_the_gradient_of_alpha_that_dense_weights_give(form, rank, seed):
    """The site has ``rank``. Products lie in ``rank`` dimensions of input, so that nothing is cut off."""
    goal, space = draw(seed, HIGH, WIDE).double(), draw(seed + 1, rank, WIDE).double()
    policy = AlphaPolicy(T, AlphaConfig(alpha_form="sigmoid"), seed=seed)
    if form == "product":  # of the W, without factors
        means = [{"W": draw(seed + 7 * t, HIGH, rank).double() @ space} for t in range(T + 1)]
    else:
        frozen = form == "ffa"
        factors = [(draw(seed + 9 * t * (not frozen), R, WIDE), draw(seed + 5 * t, HIGH, R)) for t in range(T + 1)]
        means = [{A: a.double(), B: b.double()} for a, b in factors]

    def path(alphas):
        """w_0..w_T through Eq. 7."""
        found = means[:1]
        for alpha, mean in zip(alphas, means[1:], strict=True):
            found.append({n: value + alpha * (mean[n] - value) for n, value in found[-1].items()})
        return found

    def loss(w):
        return ((w["W"] if "W" in w else dense(lowered(w, rank))) - goal).square().sum() / 2

    alphas = policy.alphas().detach()
    sent = [decomposed(w["W"]) if "W" in w else w for w in path(alphas)]
    at = {n: v.clone().requires_grad_() for n, v in lowered(sent[-1], rank).items() if form != "ffa" or n == B}
    gradient = dict(zip(at, torch.autograd.grad(loss({**lowered(sent[-1], rank), **at}), [*at.values()]), strict=True))
    numbers = torch.tensor(t_numbers(*aligned(form, rank, gradient, sent)), dtype=torch.float64)
    policy.alphas().backward(hypergradient(numbers, alphas, torch.ones(T, dtype=torch.bool)))
    expected = torch.autograd.grad(loss(path(policy.alphas())[-1]), tuple(policy.parameters()))
    for parameter, one in zip(policy.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, one, rtol=1e-8, atol=1e-10)


def decomposed(matrix):
    """A and B of rank R, as the server sends them, in float64."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return {A: ROW_NORM * vh[:R], B: (u * s)[:, :R] / ROW_NORM}


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 9), rank=st.integers(1, 6), seed=st.integers(0, 99))
def test_a_truncation_is_the_nearest_of_every_lower_rank_too_and_leaves_nothing_dead(n, rank, seed):
    b, a = draw(seed, 7, n).double(), draw(seed + 1, n, 8).double()
    found = [one.double() for one in truncated(b, a, rank)]
    for lower in range(1, rank + 1):
        left = b @ a - found[1][:, :lower] @ found[0][:lower]
        assert float(left.norm()) == pytest.approx(float(torch.linalg.svdvals(b @ a)[lower:].norm()), abs=1e-4)
    living = min(rank, n)
    gram = found[0][:living] @ found[0][:living].T
    torch.testing.assert_close(gram, torch.eye(living).double() / 3, rtol=0, atol=1e-6)


@given(rank=st.integers(1, 4), frozen=st.booleans())
def test_what_a_site_is_about_to_send_tells_its_rank_and_a_missing_b_is_noticed(rank, frozen):
    shapes = {A: (R, WIDE), B: (HIGH, R), "head": (2, 2)}
    sent = sent_shapes(shapes, rank, frozen_a=frozen)
    assert shapes_as_sent(shapes, {n: torch.zeros(shape) for n, shape in sent.items()}) == sent
    assert shapes_as_sent(shapes, {A: torch.zeros(rank, WIDE)})[B] == (HIGH, min(rank, R))
    assert shapes_as_sent(shapes, None) == shapes_as_sent(shapes, {A: "text"}) == shapes
    assert pairs({A: torch.zeros(3, 2), B: torch.zeros(3, 2)}) == []
