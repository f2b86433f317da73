"""The corrected hypergradient against whole rounds run again, with local training and its reference in numpy."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from fedtar_flare.methods.fedtar.policy import RetainedShares, hypergradient
from fedtar_flare.methods.fedtar.release import t_numbers

D, K, T, ROUNDS, ALPHA = 40, 3, 4, 4, 0.6


class Federation:
    """Sites that descend on quadratics of a curvature of their own, several steps a task; validation is another one."""

    def __init__(self, seed, spread, noise, steps):
        rng = np.random.default_rng(seed)
        self.seed, self.noise, self.steps = seed, noise, steps
        self.curvature = np.exp(rng.uniform(-spread, spread, (K, T, D)))
        self.goals = rng.normal(size=D) + 0.5 * rng.normal(size=(K, T, D))
        self.visits = rng.integers(5, 20, (K, T))
        self.target = self.goals.mean((0, 1)) + 0.2 * rng.normal(size=D)

    def mean_update(self, w, t, r):
        total = 0
        for k in range(K):
            v = w.copy()
            for step in range(self.steps[t]):
                chance = np.random.default_rng([self.seed, k, t, r, step]).normal(size=D)
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


def tensors(vector):
    return {"a": torch.from_numpy(vector[:10].reshape(2, 5)), "b": torch.from_numpy(vector[10:])}


SETTINGS = {
    "alike": {"spread": 0.0, "noise": 0.0, "steps": [6, 6, 6, 6]},
    "steps of unlike length": {"spread": 0.0, "noise": 0.0, "steps": [3, 9, 5, 7]},
    "unlike curvatures": {"spread": 0.5, "noise": 0.0, "steps": [6, 6, 6, 6]},
    "noise": {"spread": 0.3, "noise": 0.2, "steps": [5, 8, 5, 8]},
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SETTINGS)
def test_corrected_is_within_a_tenth_of_whole_rounds_run_again(name, seed):
    federation, retained, w, starts = Federation(seed, **SETTINGS[name]), RetainedShares(), np.zeros(D), []
    alphas = np.full(T, ALPHA)
    for r in range(ROUNDS):
        path, updates = federation.walk(w, alphas, r)
        for t in range(T):
            retained.add(t + 1, tensors(path[t]), tensors(updates[t]))
        starts.append((path, updates))
        start, w = w, path[-1]
    again = []
    for e in 1e-4 * np.eye(T):
        losses = [federation.loss(federation.walk(start, alphas + sign * e, r)[0][-1]) for sign in (1, -1)]
        again.append((losses[0] - losses[1]) / 2e-4)

    numbers = torch.tensor(t_numbers(tensors(w - federation.target), [tensors(v) for v in path]))
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


def test_without_a_move_the_share_is_the_papers_and_it_stays_within_bounds():
    retained, w = RetainedShares(), {"x": torch.zeros(2)}
    assert retained.shares(3) == [0, 0, 0]
    for value in (1.0, 1.0, 1.0):
        retained.add(1, w, {"x": torch.full((2,), value)})
    retained.add(2, w, {"x": torch.ones(2)})
    retained.add(2, {"x": torch.ones(2)}, {"x": torch.full((2,), 3.0)})  # farther, the more it moved
    retained.add(3, w, {"x": torch.ones(2)})
    retained.add(3, {"x": torch.ones(2)}, {"x": torch.full((2,), -3.0)})  # overshoots
    assert retained.shares(3) == [0, 1, 0]


def test_the_state_goes_on_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    draws = [[{"x": torch.randn(5, generator=generator, dtype=torch.float64)} for _ in range(2)] for _ in range(8)]
    retained, resumed = RetainedShares(), RetainedShares()
    for i, pair in enumerate(draws):
        if i == 5:
            resumed.load_state({"other": torch.ones(1)} | retained.state())
        retained.add(i % 2 + 1, *pair)
        if i >= 5:
            resumed.add(i % 2 + 1, *pair)
    assert retained.shares(2) == resumed.shares(2) and 0 < retained.shares(2)[0] < 1
    assert all(torch.equal(value, resumed.state()[name]) for name, value in retained.state().items())
