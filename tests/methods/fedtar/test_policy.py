import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.methods.fedtar.config import AlphaConfig
from fedtar_flare.methods.fedtar.policy import (
    ALPHA_FLOOR,
    AlphaPolicy,
    OuterOptimizer,
    hypergradient,
    pool_t_numbers,
)
from fedtar_flare.methods.fedtar.release import t_numbers

forms = st.sampled_from(("softmax", "sigmoid"))
D = 7


def moved(policy, seed, scale=0.5):
    """The policy with its psi moved away from the start, so that its alphas differ from each other."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return policy


class Round:
    """One round in float64: step means that are held fixed, and a quadratic validation loss (dense Hessian)."""

    def __init__(self, taken, seed):
        generator = torch.Generator().manual_seed(seed)
        vectors = torch.randn(2 + len(taken) + D, D, generator=generator, dtype=torch.float64)
        self.taken, self.w0, self.linear = taken, vectors[0], vectors[1]
        self.means, self.hessian = vectors[2 : 2 + len(taken)], vectors[2 + len(taken) :]

    def broadcasts(self, alphas):
        """w_0..w_T by Eq. 7."""
        path = [self.w0]
        for alpha, took, mean in zip(alphas, self.taken, self.means, strict=True):
            path.append(path[-1] + alpha * (mean - path[-1]) if took else path[-1])
        return path

    def loss(self, w):
        return 0.5 * (self.hessian @ w).square().sum() + self.linear @ w

    def gradient(self, w):
        return self.hessian.T @ (self.hessian @ w) + self.linear

    def t_numbers(self, alphas):
        path = self.broadcasts(alphas)
        return t_numbers(split(self.gradient(path[-1])), [split(w) for w in path])

    def by_autograd(self, policy):
        """grad_psi of the loss, straight through Eq. 7."""
        return torch.autograd.grad(self.loss(self.broadcasts(policy.alphas())[-1]), tuple(policy.parameters()))

    def by_recursion(self, policy):
        """``S_t = (1 - alpha_t) S_{t-1} + Delta_t (grad_psi alpha_t)^T`` and ``grad = S_T^T g``."""
        alphas = policy.alphas()
        size = sum(p.numel() for p in policy.parameters())
        s = torch.zeros(D, size, dtype=torch.float64)
        w = self.w0
        for t, took in enumerate(self.taken):
            if took:
                slope = torch.autograd.grad(alphas[t], tuple(policy.parameters()), retain_graph=True)
                delta = self.means[t] - w
                alpha = alphas[t].detach()
                s = (1 - alpha) * s + torch.outer(delta, torch.cat([g.flatten() for g in slope]))
                w = w + alpha * delta
        return s.T @ self.gradient(w)


def split(vector):
    return {"x": vector[:3].reshape(3, 1), "y": vector[3:]}


@pytest.mark.parametrize(("form", "start"), [("softmax", 0.2), ("sigmoid", 0.1), ("sigmoid", 0.7)])
def test_alphas_start_near_equal(form, start):
    for seed in range(5):
        alphas = AlphaPolicy(5, AlphaConfig(alpha_form=form, initial_alpha=start), seed=seed).alphas()
        assert alphas.tolist() == pytest.approx([start] * 5, abs=0.02)
        assert len(set(alphas.tolist())) == 5  # near, not equal: the steps can part


@settings(max_examples=120, deadline=None)
@given(forms, st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 2**31))
def test_hypergradient_equals_autograd_and_the_recursion(form, taken, seed):
    policy = moved(AlphaPolicy(len(taken), AlphaConfig(alpha_form=form), embedding_dim=6, seed=seed), seed + 1)
    round_ = Round(taken, seed)
    alphas = policy.alphas()
    assume(float(alphas.detach().min()) >= ALPHA_FLOOR)
    numbers = torch.tensor(round_.t_numbers(alphas.detach()), dtype=torch.float64)
    slope = hypergradient(numbers, alphas.detach(), torch.tensor(taken))

    free = alphas.detach().clone().requires_grad_()
    direct = torch.zeros_like(free)
    if any(taken):
        (direct,) = torch.autograd.grad(round_.loss(round_.broadcasts(free)[-1]), free)
    scale = 1 + float(direct.abs().max())
    # w_t - w_{t-1} has lost digits to cancellation in proportion to 1 / alpha_t, so a tiny alpha weighs its own error
    error = (slope - direct).abs()
    assert (error * alphas.detach() <= 1e-10 * scale).all()
    assert (error <= 1e-10 * scale)[alphas >= 1e-3].all()

    if any(taken):
        ours = torch.cat([g.flatten() for g in torch.autograd.grad(alphas, tuple(policy.parameters()), slope)])
        autograd = torch.cat([g.flatten() for g in round_.by_autograd(policy)])
        scale = 1 + float(autograd.abs().max())
        torch.testing.assert_close(ours, autograd, rtol=1e-10, atol=1e-10 * scale)
        torch.testing.assert_close(ours, round_.by_recursion(policy), rtol=1e-10, atol=1e-10 * scale)
    assert all(slope[t] == 0 for t, took in enumerate(taken) if not took)


def test_hypergradient_when_a_later_alpha_is_one_or_zero():
    round_ = Round([True, True, True], 4)
    for alphas in ([0.3, 1.0, 0.4], [0.3, 1.0, 1.0], [0.2, 0.5, 2e-5]):
        free = torch.tensor(alphas, dtype=torch.float64, requires_grad=True)
        (direct,) = torch.autograd.grad(round_.loss(round_.broadcasts(free)[-1]), free)
        numbers = torch.tensor(round_.t_numbers(free.detach()), dtype=torch.float64)
        slope = hypergradient(numbers, free, torch.ones(3, dtype=torch.bool))
        torch.testing.assert_close(slope, direct, rtol=1e-8, atol=1e-10)


def test_a_step_with_hardly_any_alpha_gets_no_gradient():
    alphas = torch.tensor([0.5, ALPHA_FLOOR / 2, 0.25, 0.0], dtype=torch.float64)
    taken = torch.tensor([True, True, True, False])
    slope = hypergradient(torch.tensor([1.0, 1.0, 1.0, 0.0]), alphas, taken)
    assert slope.tolist() == pytest.approx([0.75 / 0.5, 0, 4, 0], rel=1e-15)


def test_pooled_numbers_are_those_of_the_pooled_loss():
    rounds = {"site-b": Round([True, True, False], 1), "site-a": Round([True, True, False], 2)}
    reports = {"site-a": 3, "site-b": 5}
    shared = rounds["site-a"]
    for other in rounds.values():
        other.w0, other.means = shared.w0, shared.means  # the same broadcasts, another validation loss
    policy = moved(AlphaPolicy(3, AlphaConfig(alpha_form="sigmoid"), embedding_dim=4), 0)
    alphas = policy.alphas()
    pooled = pool_t_numbers({s: r.t_numbers(alphas.detach()) for s, r in rounds.items()}, reports)
    slope = hypergradient(pooled, alphas, torch.tensor(shared.taken))
    loss = sum(reports[s] / 8 * r.loss(shared.broadcasts(alphas)[-1]) for s, r in rounds.items())
    expected = torch.autograd.grad(loss, tuple(policy.parameters()), retain_graph=True)
    ours = torch.autograd.grad(alphas, tuple(policy.parameters()), slope)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_t_numbers_take_the_difference_of_float32_broadcasts_in_float64():
    generator = torch.Generator().manual_seed(0)
    before, after, gradient = ({"x": torch.randn(1000, generator=generator) * size} for size in (1.0, 1e-4, 1.0))
    terms = zip(gradient["x"].tolist(), before["x"].tolist(), after["x"].tolist(), strict=True)
    exact = math.fsum(g * (b - a) for g, a, b in terms)
    assert t_numbers(gradient, [before, after]) == [pytest.approx(exact, rel=1e-12)]


@pytest.mark.parametrize("after", [0, 1, 4])
def test_the_state_goes_through_a_file_and_the_next_steps_are_the_same_to_the_bit(after):
    generator = torch.Generator().manual_seed(1)
    slopes = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    policy = AlphaPolicy(3, AlphaConfig(), seed=2)
    outer = OuterOptimizer(policy, eta=3e-2)
    for slope in slopes[:after]:
        outer.step(slope)
    resumed = AlphaPolicy(3, AlphaConfig(), seed=7)
    again = OuterOptimizer(resumed, eta=3e-2)
    again.load_state(load(save(outer.state())))
    for slope in slopes[after:]:
        gradient = torch.autograd.grad(policy.alphas(), tuple(policy.parameters()), slope)
        norm = outer.step(slope)
        assert norm == again.step(slope) == pytest.approx(float(torch.cat([g.flatten() for g in gradient]).norm()))
        assert torch.equal(policy.alphas(), resumed.alphas())
    assert all(torch.equal(value, again.state()[name]) for name, value in outer.state().items())


def test_t_numbers_that_are_not_finite_are_refused_by_tensor_and_step():
    good = {"x": torch.ones(3), "y": torch.ones(2)}
    for gradient, path, words in (
        (good | {"x": torch.full((3,), math.nan)}, [good, good], "'x'.*step 1"),
        (good, [good, good, good | {"y": torch.full((2,), math.inf)}], "'y'.*step 2"),
    ):
        with pytest.raises(ExchangeError, match=words):
            t_numbers(gradient, path)
