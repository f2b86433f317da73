"""The minimum cell: what may be reported about a group of patients. All that leaves a site passes through here.

A group of fewer than ``least`` distinct patients is not reported. Numbers of visits of a larger one are rounded down to
a multiple of ``least``, shares to multiples of one such count, and mean losses to about their standard error, so that
one visit more or less, such as a withdrawal's, is hidden.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

Key = TypeVar("Key")
PLANTED = "fedtar canary "
"""Prefix of the ids of canaries, patients that a site has made up (:mod:`.learning.canaries`); they never count."""


def enough(patients: Iterable[str], least: int) -> bool:
    """Whether a group is large enough to be reported.

    >>> enough(["a", "a", "b"], 2), enough(["a", "a"], 2), enough([], 0)
    (True, False, False)
    """
    return sum(not patient.startswith(PLANTED) for patient in set(patients)) >= max(1, least)


def round_to_cell(count: int, least: int) -> int:
    """Round a number of visits down to a multiple of ``least``.

    >>> round_to_cell(14, 5), round_to_cell(14, 1)
    (10, 14)
    """
    return count - count % least


def round_loss(loss: float, visits: int, least: int) -> float:
    """Round a mean loss to a multiple of the largest power of two up to ``|loss| / (2 sqrt(visits))``.

    That is about its standard error, as losses of visits vary by a third to a half of their mean.

    >>> round_loss(1.23456, 14, 5), round_loss(1.23456, 140, 5), round_loss(1.23456, 14, 1)
    (1.25, 1.25, 1.23456)
    """
    if least == 1 or not loss or not math.isfinite(loss):
        return loss
    step = 2.0 ** math.floor(math.log2(abs(loss) / 2 / math.sqrt(max(1, round_to_cell(visits, least)))))
    return step * round(loss / step)


def winsorised_mean(losses: Sequence[tuple[str, float]], least: int) -> float:
    """Mean of losses that no group of fewer than ``least`` patients can pull to an extreme.

    A loss counts at most as the ``least``-th largest of the patients' largest losses, and at least as the ``least``-th
    smallest of their smallest (of fewer than 2 ``least`` patients: as the median of either).

    >>> winsorised_mean([("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 1e9)], 2)
    2.5
    """
    real = [pair for pair in losses if not pair[0].startswith(PLANTED)] or losses
    finite = [(patient, loss if loss == loss else math.inf) for patient, loss in real]
    largest, smallest = dict(sorted(finite, key=lambda pair: pair[1])), dict(sorted(finite, key=lambda pair: -pair[1]))
    tail = min(least, (len(largest) + 1) // 2)
    low, high = sorted(smallest.values())[tail - 1], sorted(largest.values())[-tail]
    return sum(min(max(loss, low), high) for _, loss in finite) / len(finite)


def round_share(share: float, count: int, least: int) -> float:
    """Round a share or score of a group to the nearest multiple of 1 / n, where n is the group's reported size.

    All groups of one reported size can then have the same values, while 7 of 13 would reveal the 13.

    >>> round_share(7 / 13, 13, 5), round_share(7 / 10, 10, 5), round_share(0.123, 13, 1)
    (0.5, 0.7, 0.123)
    """
    n = round_to_cell(count, least)
    return round(share * n) / n if least > 1 and n else share


def shown_count(count: int, patients: Iterable[str], least: int) -> int:
    """Number of visits to report for a group."""
    return round_to_cell(count, least) if enough(patients, least) else 0


def full_cells(members: Iterable[tuple[Key, str]], least: int) -> set[Key]:
    """The cells of enough patients."""
    patients: dict[Key, set[str]] = defaultdict(set)
    for cell, patient in members:
        patients[cell].add(patient)
    return {cell for cell, ids in patients.items() if enough(ids, least)}
