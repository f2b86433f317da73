"""The minimum cell: what may be reported about a group of patients. All that leaves a site passes through here.

A group of fewer than ``least`` distinct patients is not reported; numbers of visits of a larger one are rounded down
to a multiple of ``least``, shares of it to multiples of one such count, and mean losses to about their standard
error, so that one visit more or less, such as a withdrawal's, is hidden.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

Key = TypeVar("Key")
PLANTED = "fedtar canary "
"""How the ids of patients begin whom a site has made up (:mod:`fedtar_flare.learning.canaries`): no group has them."""


def enough(patients: Iterable[str], least: int) -> bool:
    """Whether these are at least ``least`` distinct patients, and at least one.

    >>> enough(["a", "a", "b"], 2), enough(["a", "a"], 2), enough([], 0)
    (True, False, False)
    """
    return sum(not patient.startswith(PLANTED) for patient in set(patients)) >= max(1, least)


def round_to_cell(count: int, least: int) -> int:
    """A number of visits down to a multiple of ``least``.

    >>> round_to_cell(14, 5), round_to_cell(14, 1)
    (10, 14)
    """
    return count - count % least


def round_loss(loss: float, visits: int, least: int) -> float:
    """A mean loss over n visits, to a multiple of the largest power of two up to ``|loss| / (2 sqrt(n))``.

    That is about its standard error, since losses of single visits vary by a third to a half of their mean: finer
    digits tell of these visits, not of the model. With a ``least`` of 1 nothing is withheld.

    >>> round_loss(1.23456, 14, 5), round_loss(1.23456, 140, 5), round_loss(1.23456, 14, 1)
    (1.25, 1.25, 1.23456)
    """
    if least == 1 or not loss or not math.isfinite(loss):
        return loss
    step = 2.0 ** math.floor(math.log2(abs(loss) / 2 / math.sqrt(max(1, round_to_cell(visits, least)))))
    return step * round(loss / step)


def winsorised_mean(losses: Sequence[tuple[str, float]], least: int) -> float:
    """Mean of losses, given as (patient, loss), in which what fewer than ``least`` patients have is no extreme.

    A loss counts at most as the ``least``-th largest of the patients' largest ones, and at least as the ``least``-th
    smallest of their smallest (of fewer than 2 ``least`` patients: as the median of either, which hides what fewer than
    half of them have). So weights for which one report's loss is huge, or not finite, do not show in the mean. With a
    ``least`` of 1 it is the plain mean.

    >>> winsorised_mean([("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 1e9)], 2)
    2.5
    """
    real = [one for one in losses if not one[0].startswith(PLANTED)] or losses
    found = [(patient, loss if loss == loss else math.inf) for patient, loss in real]
    largest, smallest = dict(sorted(found, key=lambda one: one[1])), dict(sorted(found, key=lambda one: -one[1]))
    tail = min(least, (len(largest) + 1) // 2)
    low, high = sorted(smallest.values())[tail - 1], sorted(largest.values())[-tail]
    return sum(min(max(loss, low), high) for _, loss in found) / len(found)


def round_share(share: float, count: int, least: int) -> float:
    """A share or score of a group of ``count`` to the nearest multiple of 1 / n, for the n that is reported of it.

    All groups of this n can then have the same values: 7 of 13 would tell the 13, and one member's change is about a
    step. With a ``least`` of 1 nothing is rounded.

    >>> round_share(7 / 13, 13, 5), round_share(7 / 10, 10, 5), round_share(0.123, 13, 1)
    (0.5, 0.7, 0.123)
    """
    n = round_to_cell(count, least)
    return round(share * n) / n if least > 1 and n else share


def shown_count(count: int, patients: Iterable[str], least: int) -> int:
    """The count to report for ``count`` visits of these patients: 0 of too few, else :func:`round_to_cell`."""
    return round_to_cell(count, least) if enough(patients, least) else 0


def full_cells(members: Iterable[tuple[Key, str]], least: int) -> set[Key]:
    """The cells of enough patients, given (cell, patient) of every visit."""
    patients: dict[Key, set[str]] = defaultdict(set)
    for cell, patient in members:
        patients[cell].add(patient)
    return {cell for cell, ids in patients.items() if enough(ids, least)}
