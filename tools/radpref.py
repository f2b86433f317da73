"""Measure the clinical score on radiologists' ratings: python tools/radpref.py CHECKOUT (of rajpurkarlab/CRIMSON).

Weights are fitted to one half of RadPref's studies and told on the other, too, to see whether fitting would help.
"""

import ast
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

from fedtar_flare.metrics.clinical import WEIGHTS, Weights, clinical_score
from fedtar_flare.metrics.language import report_statistics

GRID: dict[str, Sequence[Any]] = {
    "classes": [(b, o, 1.0, u) for b in (0, 0.15, 0.3) for o in (0.2, 0.4, 0.7) for u in (1.0, 1.5, 2.5)],
    "agreement": (0.25, 0.5, 1.0, 2.0),
    "invented": (0.5, 0.8, 1.2),
    "related": (0.3, 0.5, 0.7),
    "doubted": (0.5, 0.7, 1.0),
}
Array = NDArray[Any]


def years(age: str) -> float | None:
    """Read a DICOM age, such as 072Y or 019M."""
    return int(age[:3]) / {"Y": 1, "M": 12, "W": 52, "D": 365}[age[3]] if age else None


def scored(rows: Sequence[tuple[str, str, float | None, str]], weights: Weights = WEIGHTS) -> Array:
    """Score the drafts; NaN where the rules cannot read the report."""
    return np.array([clinical_score(*row, weights) for row in rows], dtype=float)


def tau(scores: Array, ratings: Array) -> float:
    """Kendall's tau-b."""
    return float(kendalltau(scores, ratings).statistic)


def better(scores: Array, ratings: Array) -> float:
    """How often the draft of a study that is rated better scores better; a tie of scores counts half."""
    rated, ours = (np.sign(np.diff(values.reshape(-1, 2))[:, 0]) for values in (ratings, scores))
    told = rated != 0
    return float(np.mean(1 - np.abs(ours - rated)[told] / 2))


def fitted(rows: Sequence[Any], ratings: Array) -> Weights:
    """Climb tau-b over the grid, one weight after the other, twice."""
    weights = WEIGHTS
    for name, values in [*GRID.items()] * 2:
        tried = [weights, *(replace(weights, **{name: value}) for value in values)]
        weights = max(tried, key=lambda of: tau(scored(rows, of), ratings))
    return weights


def interval(scores: Array, ratings: Array) -> str:
    """Both measures with 95 % bootstrap intervals over studies, each with its two drafts."""
    draw, studies, drawn = np.random.default_rng(0), np.arange(len(ratings)).reshape(-1, 2), []
    for _ in range(1000):
        rows = studies[draw.integers(0, len(studies), len(studies))].ravel()
        drawn.append((tau(scores[rows], ratings[rows]), better(scores[rows], ratings[rows])))
    (t0, b0), (t1, b1) = np.quantile(drawn, [0.025, 0.975], axis=0)
    values = tau(scores, ratings), t0, t1, better(scores, ratings), b0, b1
    return "tau-b {:.3f} ({:.3f} to {:.3f}), better draft {:.3f} ({:.3f} to {:.3f})".format(*values)


def rankings(checkout: Path) -> list[str]:
    """Names of RadJudge's cases that are ranked as wanted; equal is within .01, as its own suite has it."""
    tree = ast.parse((checkout / "RadJudge" / "test_cases.py").read_text(encoding="utf-8"))
    table = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    right = []
    for case in (case for category in ast.literal_eval(table) for case in category["tests"]):
        scores = {}
        for name, of in case["candidates"].items():
            context = of.get("context") or {}
            age = float(context["age"]) if context.get("age") else None
            value = clinical_score(case["ground_truth"], of["text"], age, context.get("indication", ""))
            scores[name] = float("nan") if value is None else value
        wanted = case["expected_ranking"]
        pairs = [pair.split() for pair in ([wanted] if isinstance(wanted, str) else wanted)]
        if all(scores[a] > scores[b] if sign == ">" else abs(scores[a] - scores[b]) < 0.01 for a, sign, b in pairs):
            right.append(case["id"])
    return right


def main(checkout: Path) -> None:
    """Print all measures."""
    folder = checkout / "RadPref"
    studies = json.loads((folder / "preference_data.json").read_text(encoding="utf-8"))
    users = [json.loads(file.read_text())["annotations"] for file in sorted(folder.glob("*annotations/user_*.json"))]
    rows, ratings = [], np.zeros(2 * len(studies))
    for i, study in enumerate(studies):
        for j, draft in enumerate(("C1", "C2")):
            age, why = years(study["PatientAge"]), study["Indication"] or ""
            rows.append((study["ground_truth_report"], study[f"{draft}_report"], age, why))
            ratings[2 * i + j] = statistics.fmean(user[study["id"]][draft]["rating"] for user in users)
    began = time.process_time()
    scores = scored(rows)
    took = (time.process_time() - began) / len(rows)
    print(f"clinical score: {interval(scores, ratings)}; {1000 * took:.1f} ms a draft")
    print(f"without age and indication: {interval(scored([(*row[:2], None, '') for row in rows]), ratings)}")
    rouge = report_statistics([row[0] for row in rows], [row[1] for row in rows]).rouge_l
    print(f"ROUGE-L: {interval(rouge, ratings)}")
    half = np.repeat(np.random.default_rng(0).permutation(len(studies)) % 2 == 0, 2)
    crossed = np.zeros(len(rows))
    for name, fit, rest in (("first", half, ~half), ("second", ~half, half)):
        weights = fitted([rows[i] for i in np.flatnonzero(fit)], ratings[fit])
        crossed[rest] = scored([rows[i] for i in np.flatnonzero(rest)], weights)
        print(f"fitted to the {name} half, on the other: {interval(crossed[rest], ratings[rest])}; {weights}")
        print(f"  as they are, on the other: {interval(scores[rest], ratings[rest])}")
    print(f"both halves: {interval(crossed, ratings)}")
    right = rankings(checkout)
    print(f"RadJudge: {len(right)} right: {', '.join(right)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
