"""The alphas and their hypergradient, the residual step (Theorem 2), and T numbers as they leave."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tables import cases

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.methods.fedtar.config import AlphaConfig
from fedtar_flare.methods.fedtar.policy import (
    ALPHA_FLOOR,
    RHO_START,
    WORSE,
    AlphaPolicy,
    RetainedShares,
    StepTest,
    hypergradient,
    residual_step,
)
from fedtar_flare.methods.fedtar.release import RESOLUTION, released_t_numbers, require_spread, t_numbers

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


def split(vector):
    """Two tensors of one."""
    vector = torch.as_tensor(vector)
    return {"x": vector[:3].reshape(3, 1), "y": vector[3:]}


@pytest.mark.parametrize(("form", "start"), [("softmax", 0.2), ("sigmoid", 0.1), ("sigmoid", 0.7)])
def test_alphas_start_near_equal(form, start):
    for seed in range(5):
        alphas = AlphaPolicy(5, AlphaConfig(alpha_form=form, initial_alpha=start), seed=seed).alphas()
        assert alphas.tolist() == pytest.approx([start] * 5, abs=0.02)
        assert len(set(alphas.tolist())) == 5  # near, not equal: the steps can part


@settings(max_examples=120, deadline=None)
@given(forms, st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 2**31))
def test_hypergradient_equals_autograd(form, taken, seed):
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
        psi, through_eq_7 = tuple(policy.parameters()), round_.loss(round_.broadcasts(policy.alphas())[-1])
        ours = torch.cat([g.flatten() for g in torch.autograd.grad(alphas, psi, slope)])
        autograd = torch.cat([g.flatten() for g in torch.autograd.grad(through_eq_7, psi)])
        scale = 1 + float(autograd.abs().max())
        torch.testing.assert_close(ours, autograd, rtol=1e-10, atol=1e-10 * scale)
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


def test_t_numbers_take_the_difference_of_float32_broadcasts_in_float64():
    generator = torch.Generator().manual_seed(0)
    before, after, gradient = ({"x": torch.randn(1000, generator=generator) * size} for size in (1.0, 1e-4, 1.0))
    terms = zip(gradient["x"].tolist(), before["x"].tolist(), after["x"].tolist(), strict=True)
    exact = math.fsum(g * (b - a) for g, a, b in terms)
    assert t_numbers(gradient, [before, after]) == [pytest.approx(exact, rel=1e-12)]


def test_t_numbers_that_are_not_finite_are_refused_by_tensor_and_step():
    good = {"x": torch.ones(3), "y": torch.ones(2)}
    for gradient, path, words in (
        (good | {"x": torch.full((3,), math.nan)}, [good, good], "'x'.*step 1"),
        (good, [good, good, good | {"y": torch.full((2,), math.inf)}], "'y'.*step 2"),
    ):
        with pytest.raises(ExchangeError, match=words):
            t_numbers(gradient, path)


DIM, K, T, ROUNDS, ALPHA = 40, 3, 4, 4, 0.6


class Federation:
    """Sites that descend on quadratics of a curvature of their own, several steps a task; validation is another one."""

    def __init__(self, seed, spread, noise, steps):
        rng = np.random.default_rng(seed)
        self.seed, self.noise, self.steps = seed, noise, steps
        self.curvature = np.exp(rng.uniform(-spread, spread, (K, T, DIM)))
        self.goals = rng.normal(size=DIM) + 0.5 * rng.normal(size=(K, T, DIM))
        self.visits = rng.integers(5, 20, (K, T))
        self.target = self.goals.mean((0, 1)) + 0.2 * rng.normal(size=DIM)

    def mean_update(self, w, t, r):
        total = 0
        for k in range(K):
            v = w.copy()
            for step in range(self.steps[t]):
                chance = np.random.default_rng([self.seed, k, t, r, step]).normal(size=DIM)
                v = v - 0.1 * (self.curvature[k, t] * (v - self.goals[k, t]) + self.noise * chance)
            total = total + self.visits[k, t] / self.visits[:, t].sum() * (v - w)
        return total

    def walk(self, w, alphas, r):
        path, updates = [w], []
        for t in range(T):
            updates.append(self.mean_update(path[-1], t, r))
            path.append(path[-1] + alphas[t] * updates[-1])
        return path, updates

    def loss(self, w):
        return 0.5 * ((w - self.target) ** 2).sum()


SETTINGS = cases(__file__, "federations.yaml")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SETTINGS)
def test_corrected_is_within_a_tenth_of_whole_rounds_run_again(name, seed):
    federation, retained, w, starts = Federation(seed, **SETTINGS[name]), RetainedShares(), np.zeros(DIM), []
    alphas = np.full(T, ALPHA)
    for r in range(ROUNDS):
        path, updates = federation.walk(w, alphas, r)
        for t in range(T):
            retained.add(t + 1, split(path[t]), split(updates[t]))
        starts.append((path, updates))
        start, w = w, path[-1]
    again = []
    for e in 1e-4 * np.eye(T):
        losses = [federation.loss(federation.walk(start, alphas + sign * e, r)[0][-1]) for sign in (1, -1)]
        again.append((losses[0] - losses[1]) / 2e-4)

    numbers = torch.tensor(t_numbers(split(w - federation.target), [split(v) for v in path]))
    given = numbers, torch.from_numpy(alphas), torch.ones(T, dtype=torch.bool)
    first, corrected = hypergradient(*given).numpy(), hypergradient(*given, retained.shares(T)).numpy()
    largest = np.abs(again).max()
    assert np.abs(corrected - again).max() <= 0.1 * largest
    assert again[T - 1] == pytest.approx(first[T - 1], abs=1e-3 * largest), "no step comes after the last one"
    assert np.abs(first - again).max() > 1.5 * np.abs(corrected - again).max()

    # rho once more, as a regression through the origin of all rounds' changes
    for t in range(T):
        moves = np.concatenate([b[0][t] - a[0][t] for a, b in pairwise(starts)])
        changes = np.concatenate([b[1][t] - a[1][t] for a, b in pairwise(starts)])
        slope = np.linalg.lstsq(moves[:, None], changes, rcond=None)[0][0]
        assert retained.shares(T)[t] == pytest.approx(1 + slope, abs=1e-5)
    if name == "alike":
        assert retained.shares(T) == pytest.approx([0.9**6] * T, abs=1e-5), "gradient descent keeps .9 a step"
        assert np.abs(again[0] / first[0]) > 4 and np.abs(again[1] / first[1]) > 2, "the first order is far off"


def test_without_a_move_the_share_is_a_half_and_it_stays_within_bounds():
    retained, w = RetainedShares(), {"x": torch.zeros(2)}
    assert retained.shares(3) == [RHO_START] * 3
    for value in (1.0, 1.0, 1.0):
        retained.add(1, w, {"x": torch.full((2,), value)})
    retained.add(2, w, {"x": torch.ones(2)})
    retained.add(2, {"x": torch.ones(2)}, {"x": torch.full((2,), 3.0)})  # farther, the more it moved
    retained.add(3, w, {"x": torch.ones(2)})
    retained.add(3, {"x": torch.ones(2)}, {"x": torch.full((2,), -3.0)})  # overshoots
    assert retained.shares(3) == [RHO_START, 1, 0]


SHAPES = {"a": (4, 3), "b": (5,), "c": ()}
FLOAT32 = torch.finfo(torch.float32).eps


def tensors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    made = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
    return {name: value.to(dtype) for name, value in made.items()}


def norm(state, less=None):
    """The length of a state, or of how far it is from another."""
    parts = [value.double() - (0 if less is None else less[name].double()) for name, value in state.items()]
    return torch.cat([part.flatten() for part in parts]).norm().item()


@settings(max_examples=150, deadline=None)
@given(st.floats(0, 1), st.floats(-8, 8), st.integers(0, 2**31))
def test_theorem_2_up_to_the_rounding_of_the_master(alpha, magnitude, seed):
    w = tensors(seed)
    delta = {name: v * 10**magnitude for name, v in tensors(seed + 1, torch.float64).items()}
    moved, residual_norm = residual_step(w, delta, alpha)
    update_norm = norm(delta)
    assert residual_norm == pytest.approx(norm(moved, w), rel=1e-12, abs=1e-300)  # measured, not derived
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
        most = norm(gradient) * norm(after, before)
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


@given(st.lists(st.floats(-1, 0), min_size=2, max_size=7), st.floats(allow_nan=False, allow_infinity=False, width=16))
def test_one_hospital_cannot_have_a_step_dropped(others, liar):
    test = StepTest(1)
    numbers = torch.tensor([[n] for n in (*others, liar)], dtype=torch.float64)
    assert test.judge(numbers, torch.tensor([*[1.0] * len(others), abs(liar)], dtype=torch.float64)) == []
    assert test.passed(1) and test.active.tolist() == [1.0]


@given(st.integers(3, 8), st.floats(1.01, 5.0))
def test_a_step_is_dropped_once_where_all_agree_and_an_added_one_is_tested(hospitals, share):
    test, numbers = StepTest(2), torch.full((hospitals, 2), -0.1, dtype=torch.float64)
    losses = torch.full((hospitals,), 0.5, dtype=torch.float64)
    assert StepTest(2).judge(numbers + 1.0, losses) == [], "where all look wrong it is the validation reports"
    assert not test.passed(2)
    numbers[:, 0] = share * WORSE * 0.5
    assert test.judge(numbers, losses) == [1] and test.judge(numbers, losses) == []
    assert not test.passed(2) and test.active.tolist() == [0.0, 1.0]
    longer = StepTest(3)
    longer.load_state(test.state())
    assert not longer.passed(3) and longer.active.tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("hospitals", [3, 4, 5])
@pytest.mark.parametrize(("number", "loss"), [(1e9, 0.5), (-1e9, 0.5), (0.3, 1e4), (-1e9, 1e4)])
def test_one_hospital_cannot_prevent_a_drop_that_the_others_agree_on(hospitals, number, loss):
    others = torch.tensor([[0.3, -0.1], [0.32, -0.1], [0.34, -0.12], [0.36, 0.0]]).double()[: hospitals - 1]
    numbers = torch.cat([others, torch.full((1, 2), number).double()])
    losses = torch.tensor([*[0.4, 0.5, 0.6, 0.5][: hospitals - 1], loss]).double()
    assert StepTest(2).judge(numbers, losses) == [1]


@given(st.integers(3, 6), st.integers(0, 2**31))
def test_after_a_drop_the_other_steps_are_judged_as_if_there_had_never_been_a_fourth(hospitals, seed):
    drawn = torch.randn(hospitals, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    numbers, losses = 0.3 * drawn + torch.tensor([0.5, 0.0, 0.0]), torch.ones(hospitals, dtype=torch.float64)
    four = StepTest(4)
    four.load_state({"verdicts": torch.tensor([0.0, 0.0, 0.0, -1.0])})
    zeros = torch.zeros(hospitals, 1, dtype=torch.float64)
    assert four.judge(torch.cat([numbers, zeros], 1), losses) == StepTest(3).judge(numbers, losses)
