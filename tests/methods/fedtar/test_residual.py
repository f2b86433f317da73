"""The residual step (Theorems 1 and 2); T numbers as they leave: true to their resolution, no use for single values."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.methods.fedtar.policy import ALPHA_FLOOR, residual_step
from fedtar_flare.methods.fedtar.release import RESOLUTION, released_t_numbers, require_spread, t_numbers

SHAPES = {"a": (4, 3), "b": (5,), "c": ()}
FLOAT32 = torch.finfo(torch.float32).eps
steps = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=6)


def tensors(seed, dtype=torch.float32, shapes=None):
    generator = torch.Generator().manual_seed(seed)
    made = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in (shapes or SHAPES).items()}
    return {name: value.to(dtype) for name, value in made.items()}


def difference(after, before):
    return {name: after[name].double() - before[name].double() for name in before}


def telescoped_weights(alphas, taken):
    """Theorem 1: ``w_T = beta_0 w_0 + sum_x beta_x wbar_x``; products run over the steps taken."""
    betas, rest = [0.0] * (len(alphas) + 1), 1.0
    for t in range(len(alphas), 0, -1):
        if taken[t - 1]:
            betas[t] = alphas[t - 1] * rest
            rest *= 1.0 - alphas[t - 1]
    return [rest, *betas[1:]]


def norm(state):
    return torch.cat([v.double().flatten() for v in state.values()]).norm().item()


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(0, 2**31))
def test_theorem_1_with_skipped_steps(plan, seed):
    alphas, taken = [a for a, _ in plan], [t for _, t in plan]
    w0 = w = tensors(seed)
    means = [tensors(seed + t + 1) for t in range(len(plan))]
    for alpha, took, mean in zip(alphas, taken, means, strict=True):
        if took:
            w, _ = residual_step(w, difference(mean, w), alpha)
    betas = telescoped_weights(alphas, taken)
    assert len(betas) == len(plan) + 1 and min(betas) >= 0 and math.fsum(betas) == pytest.approx(1, abs=1e-14)
    assert all(beta == 0 for beta, took in zip(betas[1:], taken, strict=True) if not took)
    for name in SHAPES:
        expected = sum(b * v[name].double() for b, v in zip(betas, [w0, *means], strict=True))
        torch.testing.assert_close(w[name].double(), expected, rtol=0, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(st.floats(0, 1), st.floats(-8, 8), st.integers(0, 2**31))
def test_theorem_2_up_to_the_rounding_of_the_master(alpha, magnitude, seed):
    w = tensors(seed)
    delta = {name: v * 10**magnitude for name, v in tensors(seed + 1, torch.float64).items()}
    moved, residual_norm = residual_step(w, delta, alpha)
    update_norm = norm(delta)
    assert residual_norm == pytest.approx(norm(difference(moved, w)), rel=1e-12, abs=1e-300)  # measured, not derived
    assert abs(residual_norm - alpha * update_norm) <= FLOAT32 * norm(moved) + 1e-12 * update_norm


@pytest.mark.parametrize("value", [math.nan, 1e300])  # the latter is beyond float32
def test_a_step_that_leads_to_values_that_are_not_finite_names_the_tensor(value):
    bad = {"b": torch.full((5,), value, dtype=torch.float64)}
    with pytest.raises(ExchangeError, match=r"'b'.*not finite"):
        residual_step(tensors(0), tensors(1, torch.float64) | bad, 0.5)


N = 40_000


def weights(seed, scale=1.0):
    a, b = scale * torch.randn(2, N // 2, generator=torch.Generator().manual_seed(seed))
    return {"a": a, "b": b}


def plus(w, change):
    return {name: w[name] + change[name] for name in w}


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
def test_a_released_number_is_near_the_true_one_and_holds_few_digits(scale):
    gradient, start = weights(1, 0.1), weights(2)
    steps = [weights(seed, scale) for seed in (3, 4, 5)]
    steps[1] = {name: scale * 30 * gradient[name] for name in gradient}  # along the gradient: the largest there is
    broadcasts = [start]
    for step in steps:
        broadcasts.append(plus(broadcasts[-1], step))
    exact, released = t_numbers(gradient, broadcasts), released_t_numbers(gradient, broadcasts)
    for true, sent, (before, after) in zip(exact, released, pairwise(broadcasts), strict=True):
        most = norm(gradient) * norm({name: after[name] - before[name] for name in after})
        assert abs(true - sent) <= RESOLUTION * most / 2
        multiple = sent / 2.0 ** math.floor(math.log2(RESOLUTION * most) - 1e-6)
        assert multiple == pytest.approx(round(multiple)) and abs(multiple) <= 2 / RESOLUTION + 1
    assert released[1] == pytest.approx(exact[1], rel=2 * RESOLUTION)
    assert released_t_numbers(gradient, [start, start]) == [0.0]  # a step that nobody trained at


def test_a_step_of_few_values_is_refused_and_one_of_a_part_is_not():
    w = weights(1)
    for share, amount in ((0.0001, 1.0), (0.005, 1e-3), (0.009, 5.0)):
        few = {name: v.clone() for name, v in w.items()}
        few["a"][: int(share * N)] += amount
        with pytest.raises(ExchangeError, match="few values"):
            require_spread(w, few)
    hidden = plus(w, weights(2, 1e-6))  # every value changes, and one of them by far the most
    hidden["b"][7] += 1.0
    with pytest.raises(ExchangeError, match="few values"):
        require_spread(w, hidden)
    require_spread(w, dict(w))
    require_spread(w, plus(w, weights(3, 1e-4)))
    part = {name: v.clone() for name, v in w.items()}
    part["a"][: N // 10] += 1e-5 * torch.randn(N // 10)
    require_spread(w, part)


def test_single_values_of_the_gradient_cannot_be_read_by_subtraction():
    """Steps that the rule allows and that differ in one value: the differences say nothing of the gradient."""
    gradient, start = weights(1, 0.01), weights(2)
    base = {"a": torch.ones(N // 2), "b": torch.zeros(N // 2)}
    base["a"][N // 20 :] = 0.0

    def answer(step):
        after = plus(start, step)
        require_spread(start, after)
        return released_t_numbers(gradient, [start, after])[0]

    anchor, guesses = answer(base), []
    for i in range(N // 4, N // 4 + 60):
        probe = {name: v.clone() for name, v in base.items()}
        probe["a"][i] = 1.0
        guesses.append(answer(probe) - anchor)
    exact = gradient["a"][N // 4 : N // 4 + 60]
    error, spread = torch.tensor(guesses) - exact, float(exact.square().mean().sqrt())
    assert float(error.square().mean().sqrt()) >= 0.99 * spread  # no better than guessing 0


@pytest.mark.parametrize("update", [1e-3, 1e-2])
def test_a_step_of_the_smallest_alpha_that_is_taken_is_spread_wide_enough(update):
    start, mean = weights(6, 0.05), weights(7, update)
    require_spread(start, residual_step(start, mean, ALPHA_FLOOR)[0])
    with pytest.raises(ExchangeError, match="few values"):  # what the floor is there for
        require_spread(start, residual_step(start, mean, 1e-11 / update)[0])
