"""Results of a suite that nobody ran, for tests of its page: written where the command would write them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from fedtar_flare.suite.plan import Cell
from fedtar_flare.suite.run import RESULTS, result_file, rows_file
from fedtar_flare.suite.texts import texts_file

PATIENTS, ROUNDS = 6, 4


def write_results(folder: Path, cells: list[Cell]) -> None:
    """A result and rows per cell, and the texts of their hospitals."""
    (folder / RESULTS).mkdir(parents=True, exist_ok=True)
    quality = {name: 0.3 + 0.05 * i for i, name in enumerate(dict.fromkeys(cell.name for cell in cells))}
    for cell in cells:
        draw = np.random.default_rng([cell.seed, *cell.file_name.encode()])
        good = quality[cell.name] + (0.1 if cell.arm.method != "local" else 0.0)
        outside = () if cell.arm.method == "local" else cell.variant.outside
        rows = [
            row
            for when, level in (("start", 0.1), ("end", good))
            for sites, personal in (
                (cell.sites, True),
                (cell.sites, False),
                (outside, True),
            )
            if personal or cell.arm.method == "fedtar"
            for site in sites
            for patient in range(PATIENTS)
            if when == "end" or personal
            for row in [_row(draw, site, patient, personal, when, level * (1 if personal else 0.5))]
        ]
        rows_file(folder, cell).write_text("".join(json.dumps(row) + "\n" for row in rows))
        result_file(folder, cell).write_text(json.dumps(_result(cell, good, draw)))
        texts = {
            "drift": {site: [[t, 0.1 * (t - 1) + 0.02 * i] for t in (1, 2, 3)] for i, site in enumerate(cell.sites)},
            "clusters": {s: (draw.normal(size=(20, 2)) + 5 * i).round(2).tolist() for i, s in enumerate(cell.sites)},
        }
        texts_file(folder / RESULTS, cell).write_text(json.dumps(texts))


def _row(draw, site, patient, personal, when, level):
    right = ["pneumothorax_left", "nodule_right"]
    named = right if draw.random() < level else right[1:] if draw.random() < 0.7 else []
    return {
        "site": site,
        "patient_id": f"{site}-{patient}",
        "personal": personal,
        "when": when,
        "matches": [round(20 * level), round(15 * level), round(10 * level), round(8 * level)],
        "guesses": [20, 19, 18, 17],
        "hypothesis_length": 20,
        "reference_length": 20,
        "rouge_l": level,
        "cider": level * 5 + draw.normal() * 0.2,
        "token_loss": 2 - level,
        "findings": right,
        "findings_in_text": named,
    }


def _cell_of(good, r, draw):
    level = good * (1 - math.exp(-r)) + draw.normal() * 0.01
    return {
        "n": 10,
        "bleu_4": level,
        "cider": 5 * level,
        "token_loss": 2 - level,
        "finding_f1": 0.8,
        "finding_f1_new": level,
    }


def _result(cell: Cell, good, draw):
    fedtar = cell.arm.method == "fedtar"
    evaluations = []
    for r in range(ROUNDS + 1):
        sites = {
            site: {"steps": {}, "all": _cell_of(good + 0.02 * i, r, draw)}
            for i, site in enumerate(cell.sites)
            if r or site not in cell.variant.joins
        }
        evaluations.append({"round": r, "sites": sites, "generic": sites if fedtar else {}})
    losses = [
        {s: {"validation_loss": 2 / math.sqrt(r) - good + 0.1 * i, "n": 9} for i, s in enumerate(cell.sites)}
        for r in range(1, ROUNDS + 1)
    ]
    return {
        "arm": cell.name,
        "label": cell.arm.label or cell.name,
        "method": cell.arm.method,
        "seed": cell.seed,
        "settings": cell.recipe,
        "sites": list(cell.sites),
        "variant": cell.variant.values,
        "joins": cell.variant.joins,
        "cohort": cell.variant.cohort,
        "versions": {"torch": "2"},
        "torch_threads": 1,
        "seconds": 60.0 + 10 * good,
        "shares": cell.arm.method != "local",
        "bytes": 0 if cell.arm.method == "local" else 3_000_000,
        "counts": {},
        "scored_round": ROUNDS,
        "rounds": ROUNDS,
        "validation": [
            {"round": r, "loss": sum(s["validation_loss"] for s in sites.values()) / len(sites), "sites": sites}
            for r, sites in enumerate(losses, 1)
        ],
        "alphas": [[r, 0.7, 0.6 + 0.02 * r, 0.5] for r in range(ROUNDS + 1)] if fedtar else [],
        "evaluations": evaluations,
        "outside": {
            s: {"start": {"all": _cell_of(0.1, 1, draw)}, "end": {"all": _cell_of(good, 3, draw)}}
            for s in cell.variant.outside
            if cell.arm.method != "local"
        },
        "embedding": [
            {"site": s, "x": float(draw.normal()), "y": float(draw.normal()), "age": age, "sex": "FM"[age // 2 % 2]}
            for s in cell.sites
            for age in range(40, 90, 2)
        ]
        if fedtar
        else [],
    }
