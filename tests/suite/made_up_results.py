"""Results of a suite that nobody ran, for tests of its page: written where the command would write them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from fedtar_flare.suite.plan import Experiment
from fedtar_flare.suite.run import RESULTS, result_file, rows_file

PATIENTS, ROUNDS = 6, 4


def write_results(folder: Path, experiments: list[Experiment]) -> None:
    """A result and rows per experiment, and the texts of their hospitals."""
    (folder / RESULTS).mkdir(parents=True, exist_ok=True)
    quality = {
        name: 0.3 + 0.05 * i for i, name in enumerate(dict.fromkeys(experiment.name for experiment in experiments))
    }
    for experiment in experiments:
        draw = np.random.default_rng([experiment.seed, *experiment.file_name.encode()])
        good = quality[experiment.name] + (0.1 if experiment.arm.method != "local" else 0.0)
        outside = () if experiment.arm.method == "local" else experiment.variant.outside
        rows = [
            row
            for when, level in (("start", 0.1), ("end", good))
            for sites, personal in (
                (experiment.sites, True),
                (experiment.sites, False),
                (outside, True),
            )
            if personal or experiment.arm.method == "fedtar"
            for site in sites
            for patient in range(PATIENTS)
            if when == "end" or personal
            for row in [_row(draw, site, patient, personal, when, level * (1 if personal else 0.5))]
        ]
        rows_file(folder, experiment).write_text("".join(json.dumps(row) + "\n" for row in rows))
        result_file(folder, experiment).write_text(json.dumps(_result(experiment, good, draw)))


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


def _result(experiment: Experiment, good, draw):
    fedtar = experiment.arm.method == "fedtar"
    evaluations = []
    for r in range(ROUNDS + 1):
        sites = {
            site: {"steps": {}, "all": _cell_of(good + 0.02 * i, r, draw)}
            for i, site in enumerate(experiment.sites)
            if r or site not in experiment.variant.joins
        }
        evaluations.append({"round": r, "sites": sites, "generic": sites if fedtar else {}})
    losses = [
        {s: {"validation_loss": 2 / math.sqrt(r) - good + 0.1 * i, "n": 9} for i, s in enumerate(experiment.sites)}
        for r in range(1, ROUNDS + 1)
    ]
    return {
        "arm": experiment.name,
        "label": experiment.arm.label or experiment.name,
        "method": experiment.arm.method,
        "seed": experiment.seed,
        "settings": experiment.recipe,
        "sites": list(experiment.sites),
        "variant": experiment.variant.point,
        "joins": experiment.variant.joins,
        "cohort": experiment.variant.cohort,
        "versions": {"torch": "2"},
        "torch_threads": 1,
        "seconds": 60.0 + 10 * good,
        "shares": experiment.arm.method != "local",
        "bytes": 0 if experiment.arm.method == "local" else 3_000_000,
        "counts": {},
        "scored_round": ROUNDS,
        "rounds": ROUNDS,
        "validation": [
            {"round": r, "loss": sum(s["validation_loss"] for s in sites.values()) / len(sites), "sites": sites}
            for r, sites in enumerate(losses, 1)
        ],
        "curves": {"alpha": [[r, 0.7, 0.6 + 0.02 * r, 0.5] for r in range(ROUNDS + 1)]} if fedtar else {},
        "evaluations": evaluations,
        "outside": {
            s: {"start": {"all": _cell_of(0.1, 1, draw)}, "end": {"all": _cell_of(good, 3, draw)}}
            for s in experiment.variant.outside
            if experiment.arm.method != "local"
        },
    }
