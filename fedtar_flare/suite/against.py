"""Scores of arms over patients and seeds with their intervals, and each arm against the reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtar_flare.metrics.language import LanguageStatistics
from fedtar_flare.metrics.significance import (
    Interval,
    PatientSums,
    bleu_score,
    compare,
    f1_score,
    holm,
    mean_score,
    over_seeds,
)
from fedtar_flare.suite.results import Done, Row
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS, NEW_FINDINGS

SumsOf = Callable[[Sequence[Row]], PatientSums | None]


@dataclass(frozen=True)
class Difference:
    """An arm's score less the reference's: mean over seeds, 95 % interval, p corrected after Holm over the arms."""

    arm: str
    score: str
    difference: Interval
    p: float


def differences(results: Sequence[Done], reference: str) -> list[Difference]:
    """All arms against the reference, on the seeds that both have; reports of the hospitals that took part.

    Patients of all hospitals are drawn together; p is of a permutation of the two arms' results patient by patient.
    """
    rows = {(one.experiment.name, one.experiment.seed): one.members() for one in results}
    both = [(name, seed) for name, seed in rows if name != reference and (reference, seed) in rows]
    found = []
    for score in COMPARED:
        pairs = {
            arm: paired(score, [(rows[arm, s], rows[reference, s]) for name, s in both if name == arm])
            for arm in dict.fromkeys(name for name, _ in both)
        }
        pairs = {arm: (a, b) for arm, (a, b) in pairs.items() if a}
        p = {arm: compare(_pooled(a), _pooled(b)).p for arm, (a, b) in pairs.items()}
        corrected = holm({arm: value for arm, value in p.items() if np.isfinite(value)})
        found += [
            Difference(arm, score, over_seeds(a, b), corrected.get(arm, float("nan"))) for arm, (a, b) in pairs.items()
        ]
    return found


def paired(score: str, runs: Iterable[tuple[list[Row], list[Row]]]) -> tuple[list[PatientSums], list[PatientSums]]:
    """Sums of both systems, seed by seed, where both have the score."""
    sums = [(SUMS[score](a), SUMS[score](b)) for a, b in runs]
    pairs = [(a, b) for a, b in sums if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def value(score: str, runs: Iterable[list[Row]]) -> Interval | None:
    """A score's mean over seeds with its interval over patients and seeds; None where nobody has it."""
    sums = [one for rows in runs if (one := SUMS[score](rows)) is not None]
    return over_seeds(sums, replicates=OF_VALUES) if sums else None


def _pooled(runs: Sequence[PatientSums]) -> PatientSums:
    """Patients of several seeds as one group."""
    names = tuple((i, name) for i, run in enumerate(runs) for name in run.patients)
    return PatientSums(names, np.concatenate([run.sums for run in runs]), runs[0].score)


def _patients(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return [(row["site"], row["patient_id"]) for row in rows]


def _mean(name: str) -> SumsOf:
    def mean(rows: Sequence[Row]) -> PatientSums | None:
        return mean_score(_patients(rows), [row[name] for row in rows]) if rows else None

    return mean


def _bleu(n: int) -> SumsOf:
    def bleu(rows: Sequence[Row]) -> PatientSums | None:
        if not rows:
            return None
        columns = {name: np.asarray([row[name] for row in rows]) for name in LanguageStatistics.__dataclass_fields__}
        return bleu_score(_patients(rows), LanguageStatistics(**columns), n)

    return bleu


def _f1(there: str, named: str, names: Collection[str] | None = None) -> SumsOf:
    """F1 of what is there and what a report names, two columns of a row; None where no report has them."""

    def f1(rows: Sequence[Row]) -> PatientSums | None:
        known = [row for row in rows if row.get(there) is not None]
        if not known:
            return None
        truth, found = ([_items(row[key], names) for row in known] for key in (there, named))
        hits = [len(a & b) for a, b in zip(truth, found, strict=True)]
        return f1_score(_patients(known), hits, [len(one) for one in found], [len(one) for one in truth])

    return f1


def _items(values: Sequence[Any], names: Collection[str] | None) -> set[Any]:
    """Findings, or pairs of a finding and what became of it."""
    items = {tuple(value) if isinstance(value, list) else value for value in values}
    return items if names is None else items & set(names)


SUMS: dict[str, SumsOf] = {
    "bleu_1": _bleu(1),
    "bleu_4": _bleu(4),
    "rouge_l": _mean("rouge_l"),
    "cider": _mean("cider"),
    "finding_f1": _f1("findings", "findings_in_text", FINDINGS),
    "finding_f1_known": _f1("findings", "findings_in_text", KNOWN_FINDINGS),
    "finding_f1_new": _f1("findings", "findings_in_text", NEW_FINDINGS),
    "finding_change_micro_f1": _f1("changes", "changes_in_text"),
    "token_loss": _mean("token_loss"),
}
"""What a patient adds to each score that tables give with an interval, by its name in the registry."""

OF_VALUES = 1_000
"""Bootstrap replicates of a value; differences, on which a decision may rest, have five times as many."""

COMPARED = ("bleu_4", "cider", "finding_f1_known", "finding_f1_new", "finding_change_micro_f1")
"""Scores in which arms are compared."""
