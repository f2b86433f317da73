"""Scores of an arm over patients and seeds with their intervals, and each arm against the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedtar_flare.metrics import report_sums
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.report_sums import SumsOf, Units, finding_f1
from fedtar_flare.metrics.significance import Interval, PatientSums, compare, holm, over_seeds
from fedtar_flare.suite.results import Result, Row
from fedtar_flare.synthetic.vocabulary import KNOWN_FINDINGS, NEW_FINDINGS

Pair = tuple[list[Row], list[Row]]
"""Reports of two runs with the same seed."""

SUMS: dict[str, SumsOf] = {
    **report_sums.SUMS,
    "finding_f1_known": finding_f1("findings", "findings_in_text", KNOWN_FINDINGS),
    "finding_f1_new": finding_f1("findings", "findings_in_text", NEW_FINDINGS),
}
"""By a score's name in the registry: what each patient adds to it, for scores with an interval."""

VALUE_REPLICATES = 1_000
"""Bootstrap replicates of a value; differences, on which a decision may rest, have five times as many."""

COMPARED = ("bleu_4", "cider", "finding_f1_known", "finding_f1_new", "finding_change_micro_f1")
"""Scores in which all arms are compared."""


class Difference(NamedTuple):
    """An arm's score minus the reference's (see :class:`.Comparison`), with p corrected after Holm."""

    arm: str
    score: str
    difference: Interval
    p: float
    win_rate: float
    replicates_won: float


def differences(results: Sequence[Result], reference: str) -> list[Difference]:
    """All arms against the reference in :data:`COMPARED`, on the seeds that both have; Holm over the arms.

    Reports are of the hospitals that took part; patients of all hospitals are drawn together.
    """
    arms = [name for name in dict.fromkeys(result.arm for result in results) if name != reference]
    pairs = {arm: paired_runs(results, arm, reference) for arm in arms}
    out = []
    for score in COMPARED:
        out += corrected([test for arm in arms if (test := difference(arm, score, pairs[arm]))])
    return out


def compare_scores(arm: str, runs: Sequence[Pair], units: Units) -> list[Difference]:
    """Compare an arm with another in every score of :data:`SUMS` (FedTAR, Table 5)."""
    return corrected([test for score in SUMS if (test := difference(arm, score, runs, units))])


def paired_runs(results: Sequence[Result], arm: str, reference: str) -> list[Pair]:
    """Report rows of an arm's runs and the reference's, on the seeds that both have."""
    runs = {(result.arm, result.experiment.seed): result for result in results if result.arm in (arm, reference)}
    seeds = [seed for name, seed in runs if name == arm and (reference, seed) in runs]
    return [(runs[arm, seed].members(), runs[reference, seed].members()) for seed in seeds]


def difference(arm: str, score: str, runs: Sequence[Pair], units: Units = "patients") -> Difference | None:
    """The difference in a score, over seeds and patients or studies; None where no pair of runs has it."""
    a, b = paired_sums(score, runs, units)
    higher = SCORES[score].higher_is_better is not False
    return Difference(arm, score, *compare(a, b, higher_is_better=higher)) if a else None


def corrected(tests: Sequence[Difference]) -> list[Difference]:
    """The same tests with p corrected after Holm for their number."""
    p = holm({i: test.p for i, test in enumerate(tests) if np.isfinite(test.p)})
    return [test._replace(p=p.get(i, test.p)) for i, test in enumerate(tests)]


def paired_sums(
    score: str, runs: Iterable[Pair], units: Units = "patients"
) -> tuple[list[PatientSums], list[PatientSums]]:
    """Sums of both systems, seed by seed, where both have the score."""
    sums = [(SUMS[score](a, units), SUMS[score](b, units)) for a, b in runs]
    pairs = [(a, b) for a, b in sums if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def interval_of(score: str, runs: Iterable[list[Row]]) -> Interval | None:
    """A score's mean over seeds with its interval over patients and seeds; None where no run has it."""
    sums = [of_run for rows in runs if (of_run := SUMS[score](rows)) is not None]
    return over_seeds(sums, replicates=VALUE_REPLICATES) if sums else None
