"""Scores of arms over patients and seeds with their intervals, and each arm against the reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedtar_flare.metrics.label_scores import CERTAIN, CERTAIN_OR_NOT, Average, Metric, label_counts
from fedtar_flare.metrics.language import LanguageStatistics
from fedtar_flare.metrics.registry import EFFICACY, SCORES
from fedtar_flare.metrics.report_labels import classes_of
from fedtar_flare.metrics.significance import (
    Interval,
    PatientSums,
    bleu_score,
    compare,
    f1_score,
    holm,
    label_score,
    mean_score,
    over_seeds,
)
from fedtar_flare.suite.results import Done, Row
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS, NEW_FINDINGS

Units = Literal["patients", "studies"]
SumsOf = Callable[..., PatientSums | None]
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
    p = holm({str(i): one.p for i, one in enumerate(tests) if np.isfinite(one.p)})
    return [one._replace(p=p.get(str(i), one.p)) for i, one in enumerate(tests)]


def paired(score: str, runs: Iterable[Pair], units: Units = "patients") -> tuple[list[PatientSums], list[PatientSums]]:
    """Sums of both systems, seed by seed, where both have the score."""
    sums = [(SUMS[score](a, units), SUMS[score](b, units)) for a, b in runs]
    pairs = [(a, b) for a, b in sums if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def value(score: str, runs: Iterable[list[Row]]) -> Interval | None:
    """A score's mean over seeds with its interval over patients and seeds; None where nobody has it."""
    sums = [one for rows in runs if (one := SUMS[score](rows)) is not None]
    return over_seeds(sums, replicates=OF_VALUES) if sums else None


def _drawn(rows: Sequence[Row], units: Units) -> list[tuple[str, ...]]:
    """What is drawn, of each row: its patient, or its study."""
    keys = ("site", "patient_id", "visit_id")[: 2 if units == "patients" else 3]
    return [tuple(str(row.get(key)) for key in keys) for row in rows]


def _mean(name: str) -> SumsOf:
    def mean(rows: Sequence[Row], units: Units = "patients") -> PatientSums | None:
        return mean_score(_drawn(rows, units), [row[name] for row in rows]) if rows else None

    return mean


def _bleu(n: int) -> SumsOf:
    def bleu(rows: Sequence[Row], units: Units = "patients") -> PatientSums | None:
        if not rows:
            return None
        columns = {name: np.asarray([row[name] for row in rows]) for name in LanguageStatistics.__dataclass_fields__}
        return bleu_score(_drawn(rows, units), LanguageStatistics(**columns), n)

    return bleu


def _f1(there: str, named: str, names: Collection[str] | None = None) -> SumsOf:
    """F1 of what is there and what a report names, two columns of a row; None where no report has them."""

    def f1(rows: Sequence[Row], units: Units = "patients") -> PatientSums | None:
        known = [row for row in rows if row.get(there) is not None]
        if not known:
            return None
        truth, found = ([_items(row[key], names) for row in known] for key in (there, named))
        hits = [len(a & b) for a, b in zip(truth, found, strict=True)]
        return f1_score(_drawn(known, units), hits, [len(one) for one in found], [len(one) for one in truth])

    return f1


def _labels(labeler: str, average: Average, metric: Metric, uncertain: bool = False) -> SumsOf:
    """Agreement of the labels that a labeler reads off both texts of a row; None where no report has them."""

    def labels(rows: Sequence[Row], units: Units = "patients") -> PatientSums | None:
        known = [row for row in rows if labeler in row.get("labels", ())]
        if not known:
            return None
        codes = [row["labels"][labeler] for row in known]
        counts = label_counts(classes_of(labeler), codes, CERTAIN_OR_NOT if uncertain else CERTAIN)
        return label_score(_drawn(known, units), counts, average, metric)

    return labels


def _items(values: Sequence[Any], names: Collection[str] | None) -> set[Any]:
    """Findings, or pairs of a finding and what became of it."""
    items = {tuple(value) if isinstance(value, list) else value for value in values}
    return items if names is None else items & set(names)


SUMS: dict[str, SumsOf] = {
    **{f"bleu_{n}": _bleu(n) for n in (1, 2, 3, 4)},
    "rouge_l": _mean("rouge_l"),
    "cider": _mean("cider"),
    "finding_f1": _f1("findings", "findings_in_text", FINDINGS),
    "finding_f1_known": _f1("findings", "findings_in_text", KNOWN_FINDINGS),
    "finding_f1_new": _f1("findings", "findings_in_text", NEW_FINDINGS),
    "finding_change_micro_f1": _f1("changes", "changes_in_text"),
    "token_loss": _mean("token_loss"),
    "chexpert_rules_f1": _labels("chexpert-rules", "micro", "f1"),
    "ctrate_rules_f1": _labels("ctrate-rules", "micro", "f1"),
    **{name: _labels(*one) for name, one in EFFICACY.items()},
}
"""What a patient adds to each score that is given with an interval, by its name in the registry."""

OF_VALUES = 1_000
"""Bootstrap replicates of a value; differences, on which a decision may rest, have five times as many."""

COMPARED = ("bleu_4", "cider", "finding_f1_known", "finding_f1_new", "finding_change_micro_f1")
"""Scores in which arms are compared."""
