"""Scores of arms over patients and seeds with their intervals, and each arm against the reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Difference:
    """An arm's score less the reference's: mean over seeds, 95 % interval, p corrected after Holm over the arms."""

    arm: str
    score: str
    difference: Interval
    p: float


def differences(results: Sequence[Done], reference: str) -> list[Difference]:
    """All arms against the reference, on the seeds that both have; reports of the hospitals that took part.

    Patients of all hospitals are drawn together. The interval is over patients and seeds (hierarchical bootstrap), p of
    a permutation of the two arms' results patient by patient.
    """
    rows = {(one.experiment.name, one.experiment.seed): one.members() for one in results}
    found = []
    for score in COMPARED:
        of_score: list[Difference] = []
        for arm in dict.fromkeys(one.experiment.name for one in results if one.experiment.name != reference):
            a, b = paired(
                score, [(rows[arm, s], rows[reference, s]) for n, s in rows if n == arm and (reference, s) in rows]
            )
            if a:
                of_score.append(Difference(arm, score, over_seeds(a, b), compare(_pooled(a), _pooled(b)).p))
        known = {one.arm: one.p for one in of_score if np.isfinite(one.p)}
        corrected = holm(known)
        found += [Difference(o.arm, o.score, o.difference, corrected.get(o.arm, float("nan"))) for o in of_score]
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


def _mean(name: str) -> Callable[[Sequence[Row]], PatientSums | None]:
    def mean(rows: Sequence[Row]) -> PatientSums | None:
        return mean_score(_patients(rows), [row[name] for row in rows]) if rows else None

    return mean


def _bleu(n: int) -> Callable[[Sequence[Row]], PatientSums | None]:
    def bleu(rows: Sequence[Row]) -> PatientSums | None:
        if not rows:
            return None
        columns = {name: np.asarray([row[name] for row in rows]) for name in LanguageStatistics.__dataclass_fields__}
        return bleu_score(_patients(rows), LanguageStatistics(**columns), n)

    return bleu


def _findings(names: Collection[str]) -> Callable[[Sequence[Row]], PatientSums | None]:
    def f1(rows: Sequence[Row]) -> PatientSums | None:
        known = [row for row in rows if row["findings"] is not None]
        if not known:
            return None
        there, named = ([set(row[key]) & set(names) for row in known] for key in ("findings", "findings_in_text"))
        hits = [len(a & b) for a, b in zip(there, named, strict=True)]
        return f1_score(_patients(known), hits, [len(one) for one in named], [len(one) for one in there])

    return f1


def _changes(rows: Sequence[Row]) -> PatientSums | None:
    """F1 of pairs of a finding and what became of it; results of earlier versions do not have them."""
    known = [row for row in rows if row.get("changes") is not None]
    if not known:
        return None
    there, named = ([set(map(tuple, row[key])) for row in known] for key in ("changes", "changes_in_text"))
    hits = [len(a & b) for a, b in zip(there, named, strict=True)]
    return f1_score(_patients(known), hits, [len(one) for one in named], [len(one) for one in there])


SUMS: dict[str, Callable[[Sequence[Row]], PatientSums | None]] = {
    "bleu_1": _bleu(1),
    "bleu_4": _bleu(4),
    "rouge_l": _mean("rouge_l"),
    "cider": _mean("cider"),
    "finding_f1": _findings(FINDINGS),
    "finding_f1_known": _findings(KNOWN_FINDINGS),
    "finding_f1_new": _findings(NEW_FINDINGS),
    "finding_change_micro_f1": _changes,
    "token_loss": _mean("token_loss"),
}
"""What a patient adds to each score that tables give with an interval, by its name in the registry."""

OF_VALUES = 1_000
"""Bootstrap replicates of a value; differences, on which a decision may rest, have five times as many."""

COMPARED = ("bleu_4", "cider", "finding_f1_known", "finding_f1_new", "finding_change_micro_f1")
"""Scores in which arms are compared."""
