"""What a site tells of its validation gradient: T numbers, coarse, few, and only along steps of many values.

An inner product with a step of the server's own making is a question about the gradient. A step that changes one value
asks for that value alone; steps that differ in one value ask for it by subtraction. So a step must spread over many
values, a number is sent no finer than :data:`RESOLUTION` of the largest that the step's length allows, and a run gets
fewer numbers than the gradient has values. The outer step of FedTAR divides by a running norm (AdamW) and needs no
more. What remains: each number still tells how well the step fits the site's validation patients, to two or three
digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.methods.fedtar.policy import t_numbers
from fedtar_flare.protocol.exchange import Tensors, euclidean_norm

LEAST_SPREAD = 0.01
"""Share of the values that a step must at least change, counted by weight: ``(sum |d|)^2 / sum d^2`` over their number.

Steps of honest sites have 0.5 to 0.7 where all parts train, and a part's own share of the values where one does.
"""
RESOLUTION = 2.0**-10
"""Step of a T number, over ``||g|| ||w_t - w_{t-1}||``, which bounds it."""
MOST_SHARE = 0.1
"""Most T numbers of a run, over the number of values in the gradient."""


def require_spread(before: Tensors, after: Tensors) -> None:
    """Refuse (:class:`ExchangeError`) a broadcast that differs from the one before in few values; none at all is fine.

    Both have the names and shapes of the exchange.
    """
    values, absolute, squares = 0, 0.0, 0.0
    for name in sorted(after):
        change = (after[name].double() - before[name].double()).abs()
        values += change.numel()
        absolute += float(change.sum())
        squares += float(change.square().sum())
    if squares and absolute**2 < LEAST_SPREAD * values * squares:
        raise ExchangeError("the broadcast differs from the one before in few values: no server of FedTAR sends that")


def released_t_numbers(gradient: Tensors, broadcasts: Sequence[Tensors]) -> list[float]:
    """T numbers (:func:`.policy.t_numbers`) to the nearest multiple of their resolution, which is rounded down to a
    power of two, so that it tells the gradient's norm no finer than by a factor of two. Raises :class:`ExchangeError`
    as :func:`require_spread`, which here is of what the site sees of the broadcasts.
    """
    numbers, length = t_numbers(gradient, broadcasts), euclidean_norm(gradient)
    released = []
    for number, (before, after) in zip(numbers, pairwise(broadcasts), strict=True):
        require_spread(before, after)
        most = length * euclidean_norm({name: after[name].double() - before[name].double() for name in gradient})
        if not most:
            released.append(0.0)
            continue
        step = 2.0 ** math.floor(math.log2(RESOLUTION * most))
        released.append(round(number / step) * step)
    return released
