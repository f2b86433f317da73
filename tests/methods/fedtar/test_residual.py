import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.errors import ExchangeError
from fedtar_flare.methods.fedtar.policy import residual_step

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


# ------------------------------------------------------------------ Theorems 1 and 2
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


def test_the_ends_of_alpha():
    w, goal = tensors(0), tensors(1)
    same, none = residual_step(w, difference(goal, w), 0.0)
    there, _ = residual_step(w, difference(goal, w), 1.0)
    assert none == 0.0 and all(torch.equal(same[n], w[n]) and torch.equal(there[n], goal[n]) for n in w)


def test_the_residual_norm_shows_an_update_that_float32_loses():
    w = {"a": torch.ones(1000)}
    moved, residual_norm = residual_step(w, {"a": torch.full((1000,), 1e-9)}, 0.5)
    assert torch.equal(moved["a"], w["a"]) and residual_norm == 0.0


def test_a_step_changes_neither_of_its_inputs():
    w, delta = tensors(0), tensors(1, torch.float64)
    copies = [{n: v.clone() for n, v in state.items()} for state in (w, delta)]
    residual_step(w, delta, 0.5)
    assert all(torch.equal(s[n], c[n]) for s, c in zip((w, delta), copies, strict=True) for n in s)


@pytest.mark.parametrize("value", [math.nan, 1e300])  # the latter is beyond float32
def test_a_step_that_leads_to_values_that_are_not_finite_names_the_tensor(value):
    bad = {"b": torch.full((5,), value, dtype=torch.float64)}
    with pytest.raises(ExchangeError, match=r"'b'.*not finite"):
        residual_step(tensors(0), tensors(1, torch.float64) | bad, 0.5)
