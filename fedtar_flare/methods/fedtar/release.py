"""T numbers, and limits on what they reveal of a site's validation gradient: few, coarse, and only along wide steps.

An inner product with a step that the server chooses is a question about the gradient. A step that changes one value
asks for that value; two steps that differ in one value ask for it by subtraction. So a step must spread over many
values, a number is rounded to :data:`RESOLUTION` of the largest that the step's length allows, and a run gets fewer
numbers than the gradient has values. FedTAR's outer step divides by a running norm (AdamW) and needs no more. Each
number still shows, to two or three digits, how well the step fits the site's validation patients.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.protocol.exchange import Tensors, euclidean_norm

LEAST_SPREAD = 0.01
"""Least spread of a step d of n values: ``(sum |d|)^2 / (n sum d^2)``, the share of values that it changes.

Steps of honest sites have 0.5 to 0.7 where all parts train, and less where only one part does, by its size.
"""
RESOLUTION = 2.0**-10
"""To what T numbers are rounded, as a share of their bound ``||g|| ||w_t - w_{t-1}||``."""
MOST_SHARE = 0.1
"""Most T numbers of a run, as a share of the number of values in the gradient."""


def t_numbers(gradient: Tensors, broadcasts: Sequence[Tensors]) -> list[float]:
    """``<g, w_t - w_{t-1}>`` for t = 1..T, in float64: g is the gradient of the site's validation loss at w_T."""
    numbers = []
    for t, (before, after) in enumerate(pairwise(broadcasts), start=1):
        parts = []
        for name in sorted(gradient):
            parts.append(float((gradient[name].double() * (after[name].double() - before[name].double())).sum()))
            if not math.isfinite(parts[-1]):
                raise ExchangeError(f"tensor '{name}': its part of the T number of step {t} is not finite")
        numbers.append(math.fsum(parts))
    return numbers


def require_spread(before: Tensors, after: Tensors) -> None:
    """Raise :class:`ExchangeError` where a broadcast differs from the one before in few values (but more than none)."""
    values, absolute, squares = 0, 0.0, 0.0
    for name in sorted(after):
        change = (after[name].double() - before[name].double()).abs()
        values += change.numel()
        absolute += float(change.sum())
        squares += float(change.square().sum())
    if squares and absolute**2 < LEAST_SPREAD * values * squares:
        raise ExchangeError("the broadcast differs from the one before in few values: no server of FedTAR sends that")


def released_t_numbers(gradient: Tensors, broadcasts: Sequence[Tensors]) -> list[float]:
    """:func:`t_numbers`, each rounded to a multiple of its resolution, of steps that :func:`require_spread` lets pass.

    The resolution is rounded down to a power of two, so that it reveals the gradient's norm within a factor of two.
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
