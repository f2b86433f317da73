"""Each arm against the reference: the difference of a score on the same patients, with its interval and p value."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from fedtar_flare.suite.plan import Cell
from fedtar_flare.suite.run import rows_file
from fedtar_flare.synthetic.vocabulary import KNOWN_FINDINGS, NEW_FINDINGS

Row = dict[str, Any]
"""Scores of one report, as :func:`fedtar_flare.learning.evaluation.report_rows` gives them, with its ``site``."""


@dataclass(frozen=True)
class Difference:
    """An arm's score less the reference's: mean over seeds, 95 % interval, p corrected after Holm over the arms."""

    arm: str
    score: str
    difference: Interval
    p: float


def differences(folder: Path, cells: Sequence[Cell], reference: str) -> list[Difference]:
    """All arms against the reference, on the seeds that both have; reports of the hospitals that took part.

    Patients of all hospitals are drawn together. The interval is over patients and seeds (hierarchical bootstrap), p of
    a permutation of the two arms' results patient by patient.
    """
    rows = {(cell.name, cell.seed): _rows(folder, cell) for cell in cells if rows_file(folder, cell).is_file()}
    found = []
    for score, sums in SCORES.items():
        of_score: list[Difference] = []
        for arm in dict.fromkeys(cell.name for cell in cells if cell.name != reference):
            seeds = [seed for name, seed in rows if name == arm and (reference, seed) in rows]
            ours, theirs = ([sums(rows[name, seed]) for seed in seeds] for name in (arm, reference))
            pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
            if not pairs:
                continue
            a, b = (list(side) for side in zip(*pairs, strict=True))
            p = compare(_pooled(a), _pooled(b)).p
            of_score.append(Difference(arm, score, over_seeds(a, b), p))
        known = {one.arm: one.p for one in of_score if np.isfinite(one.p)}
        corrected = holm(known)
        found += [Difference(o.arm, o.score, o.difference, corrected.get(o.arm, float("nan"))) for o in of_score]
    return found


def _rows(folder: Path, cell: Cell) -> list[Row]:
    """Rows of the hospitals that took part, with the personal part where there is one."""
    lines = rows_file(folder, cell).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["site"] in cell.sites and row["personal"]]


def _pooled(runs: Sequence[PatientSums]) -> PatientSums:
    """Patients of several seeds as one group."""
    names = tuple((i, name) for i, run in enumerate(runs) for name in run.patients)
    return PatientSums(names, np.concatenate([run.sums for run in runs]), runs[0].score)


def _patients(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return [(row["site"], row["patient_id"]) for row in rows]


def _cider(rows: Sequence[Row]) -> PatientSums | None:
    return mean_score(_patients(rows), [row["cider"] for row in rows]) if rows else None


def _bleu(rows: Sequence[Row]) -> PatientSums | None:
    if not rows:
        return None
    columns = {name: np.asarray([row[name] for row in rows]) for name in LanguageStatistics.__dataclass_fields__}
    return bleu_score(_patients(rows), LanguageStatistics(**columns))


def _findings(names: Collection[str]) -> Callable[[Sequence[Row]], PatientSums | None]:
    def f1(rows: Sequence[Row]) -> PatientSums | None:
        known = [row for row in rows if row["findings"] is not None]
        if not known:
            return None
        there, named = ([set(row[key]) & set(names) for row in known] for key in ("findings", "findings_in_text"))
        hits = [len(a & b) for a, b in zip(there, named, strict=True)]
        return f1_score(_patients(known), hits, [len(one) for one in named], [len(one) for one in there])

    return f1


SCORES: dict[str, Callable[[Sequence[Row]], PatientSums | None]] = {
    "bleu_4": _bleu,
    "cider": _cider,
    "finding_f1_known": _findings(KNOWN_FINDINGS),
    "finding_f1_new": _findings(NEW_FINDINGS),
}
"""Scores that are compared, by their names in the registry."""
