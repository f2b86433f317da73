"""Scores of arms over patients and seeds with their intervals, and each arm against the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedtar_flare.metrics import report_sums
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.report_sums import SumsOf, Units, finding_f1
from fedtar_flare.metrics.significance import Interval, PatientSums, compare, holm, over_seeds
from fedtar_flare.suite.results import Done, Row
from fedtar_flare.synthetic.vocabulary import KNOWN_FINDINGS, NEW_FINDINGS

Pair = tuple[list[Row], list[Row]]
"""Reports of two runs with the same seed."""


class Difference(NamedTuple):
    """An arm's score less the reference's, as :class:`.Comparison` has it, with p corrected after Holm."""

    arm: str
    score: str
    difference: Interval
    p: float
    win_rate: float
    replicates_won: float


def differences(results: Sequence[Done], reference: str) -> list[Difference]:
    """All arms against the reference in :data:`COMPARED`, on the seeds that both have; p corrected over the arms.

    Reports are of the hospitals that took part; patients of all of them are drawn together.
    """
    arms = [name for name in dict.fromkeys(one.experiment.name for one in results) if name != reference]
    runs = {arm: both(results, arm, reference) for arm in arms}
    found = []
    for score in COMPARED:
        found += corrected([one for arm in arms if (one := difference(arm, score, runs[arm]))])
    return found


def every_metric(arm: str, runs: Sequence[Pair], units: Units) -> list[Difference]:
    """An arm against another in every score of :data:`SUMS`; p corrected over the scores (FedTAR, Table 5)."""
    return corrected([one for score in SUMS if (one := difference(arm, score, runs, units))])


def both(results: Sequence[Done], arm: str, reference: str) -> list[Pair]:
    """Reports of an arm's runs and the reference's, on the seeds that both have."""
    rows = {(o.experiment.name, o.experiment.seed): o for o in results if o.experiment.name in (arm, reference)}
    seeds = [seed for name, seed in rows if name == arm and (reference, seed) in rows]
    return [(rows[arm, seed].members(), rows[reference, seed].members()) for seed in seeds]


def difference(arm: str, score: str, runs: Sequence[Pair], units: Units = "patients") -> Difference | None:
    """The difference in a score, over seeds and patients or studies; None where no two runs have it."""
    a, b = paired(score, runs, units)
    higher = SCORES[score].higher_is_better is not False
    return Difference(arm, score, *compare(a, b, higher_is_better=higher)) if a else None


def corrected(tests: Sequence[Difference]) -> list[Difference]:
    """The same with p corrected after Holm for their number."""
    p = holm({i: one.p for i, one in enumerate(tests) if np.isfinite(one.p)})
    return [one._replace(p=p.get(i, one.p)) for i, one in enumerate(tests)]


def paired(score: str, runs: Iterable[Pair], units: Units = "patients") -> tuple[list[PatientSums], list[PatientSums]]:
    """Sums of both systems, seed by seed, where both have the score."""
    sums = [(SUMS[score](a, units), SUMS[score](b, units)) for a, b in runs]
    pairs = [(a, b) for a, b in sums if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def value(score: str, runs: Iterable[list[Row]]) -> Interval | None:
    """A score's mean over seeds with its interval over patients and seeds; None where nobody has it."""
    sums = [one for rows in runs if (one := SUMS[score](rows)) is not None]
    return over_seeds(sums, replicates=OF_VALUES) if sums else None


SUMS: dict[str, SumsOf] = {
    **report_sums.SUMS,
    "finding_f1_known": finding_f1("findings", "findings_in_text", KNOWN_FINDINGS),
    "finding_f1_new": finding_f1("findings", "findings_in_text", NEW_FINDINGS),
}
"""What a patient adds to each score that is given with an interval, by its name in the registry."""

OF_VALUES = 1_000
"""Bootstrap replicates of a value; differences, on which a decision may rest, have five times as many."""

COMPARED = ("bleu_4", "cider", "finding_f1_known", "finding_f1_new", "finding_change_micro_f1")
"""Scores in which arms are compared."""
