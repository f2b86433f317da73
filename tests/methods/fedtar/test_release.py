"""T numbers as they leave: true to their resolution, and of no use to a server that asks for single values."""

import math

import pytest
import torch

from fedtar_flare.errors import ExchangeError
from fedtar_flare.methods.fedtar.policy import ALPHA_FLOOR, residual_step, t_numbers
from fedtar_flare.methods.fedtar.release import RESOLUTION, released_t_numbers, require_spread

N = 40_000


def weights(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": scale * torch.randn(N // 2, generator=generator),
        "b": scale * torch.randn(N // 2, generator=generator),
    }


def plus(w, change):
    return {name: w[name] + change[name] for name in w}


def norm(w):
    return math.sqrt(sum(float(v.double().square().sum()) for v in w.values()))


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
def test_a_told_number_is_near_the_true_one_and_holds_few_digits(scale):
    gradient, start = weights(1, 0.1), weights(2)
    steps = [weights(seed, scale) for seed in (3, 4, 5)]
    steps[1] = {name: scale * 30 * gradient[name] for name in gradient}  # along the gradient: the largest there is
    broadcasts = [start]
    for step in steps:
        broadcasts.append(plus(broadcasts[-1], step))
    true, told = t_numbers(gradient, broadcasts), released_t_numbers(gradient, broadcasts)
    for one, other, before, after in zip(true, told, broadcasts, broadcasts[1:], strict=False):
        most = norm(gradient) * norm({name: after[name] - before[name] for name in after})
        assert abs(one - other) <= RESOLUTION * most / 2
        places = other / 2.0 ** math.floor(math.log2(RESOLUTION * most) - 1e-6)
        assert places == pytest.approx(round(places)) and abs(places) <= 2 / RESOLUTION + 1
    assert told[1] == pytest.approx(true[1], rel=2 * RESOLUTION)
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
    asked = range(N // 4, N // 4 + 60)

    def answer(step):
        after = plus(start, step)
        require_spread(start, after)
        return released_t_numbers(gradient, [start, after])[0]

    anchor, read, exact = answer(base), [], []
    for i in asked:
        probe = {name: v.clone() for name, v in base.items()}
        probe["a"][i] = 1.0
        read.append(answer(probe) - anchor)
        exact.append(float(gradient["a"][i]))
    error = torch.tensor(read) - torch.tensor(exact)
    spread = float(torch.tensor(exact).square().mean().sqrt())
    assert float(error.square().mean().sqrt()) >= 0.99 * spread  # no better than guessing 0


@pytest.mark.parametrize("update", [1e-3, 1e-2])
def test_a_step_of_the_smallest_alpha_that_is_taken_is_spread_wide_enough(update):
    start, mean = weights(6, 0.05), weights(7, update)
    require_spread(start, residual_step(start, mean, ALPHA_FLOOR)[0])
    with pytest.raises(ExchangeError, match="few values"):  # what the floor is there for
        require_spread(start, residual_step(start, mean, 1e-11 / update)[0])
