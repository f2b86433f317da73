"""Results of a suite that nobody ran, for tests of its page: written where the command would write them."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from fedtar_flare.suite.plan import Experiment
from fedtar_flare.suite.results import RESULTS, result_file, rows_file

PATIENTS, ROUNDS = 6, 4
RIGHT = ["pneumothorax_left", "nodule_right"]


def write_results(folder: Path, experiments: list[Experiment]) -> None:
    """A result and rows per experiment; later arms are better."""
    names = list(dict.fromkeys(one.name for one in experiments))
    for one in experiments:
        draw = np.random.default_rng([one.seed, *one.file_name.encode()])
        shares, fedtar = one.arm.method != "local", one.arm.method == "fedtar"
        good = 0.3 + 0.05 * names.index(one.name) + 0.1 * shares
        rows = [_row(draw, site, i, True, "start", 0.1) for site in one.sites for i in range(PATIENTS)]
        for sites, personal in ((one.sites, True), (one.sites * fedtar, False), (one.suite.outside * shares, True)):
            level = good if personal else good / 2
            rows += [_row(draw, site, i, personal, "end", level) for site in sites for i in range(PATIENTS)]
        for site in one.suite.outside * shares:
            rows += [_row(draw, site, i, True, "start", 0.1) for i in range(PATIENTS)]
        keep(folder, one, _result(one, good, shares, fedtar, draw), rows)


def keep(folder: Path, one: Experiment, result: dict, rows: list[dict]) -> None:
    """Write an experiment's result and rows where a run writes them."""
    (folder / RESULTS).mkdir(parents=True, exist_ok=True)
    rows_file(folder, one).write_text("".join(json.dumps(row) + "\n" for row in rows))
    result_file(folder, one).write_text(json.dumps(result))


def parsed(path: Path) -> tuple[str, ElementTree.Element]:
    """A page's text, and its tree, which is well-formed."""
    text = path.read_text()
    return text, ElementTree.fromstring(text.replace("<!DOCTYPE html>", "").replace("&nbsp;", " "))


def _row(draw, site, patient, personal, when, level):
    named = RIGHT if draw.random() < level else RIGHT[1:] if draw.random() < 0.7 else []
    words = {"matches": [round(n * level) for n in (20, 15, 10, 8)], "guesses": [20, 19, 18, 17]}
    words |= {"hypothesis_length": 20, "reference_length": 20, "rouge_l": level, "token_loss": 2 - level}
    who = {"site": site, "patient_id": f"{site}-{patient}", "personal": personal, "when": when}
    return who | words | {"cider": 5 * level + draw.normal() / 5, "findings": RIGHT, "findings_in_text": named}


def _scores(good, r, draw):
    level = good * (1 - math.exp(-r)) + draw.normal() * 0.01
    shown = {"bleu_4": level, "cider": 5 * level, "token_loss": 2 - level, "finding_f1": 0.8, "finding_f1_new": level}
    steps = {"1": {"n": 6} | shown, "2": {"n": 4} | shown, "3": {"n": 1, "cider": 0.0}}
    return {"steps": steps, "all": {"n": 10} | shown}


def _result(one: Experiment, good, shares, fedtar, draw):
    evaluations, validation = [], []
    for r in range(ROUNDS + 1):
        sites = {site: _scores(good + 0.02 * i, r, draw) for i, site in enumerate(one.sites)}
        evaluations.append({"round": r, "sites": sites, "generic": sites if fedtar else {}})
        losses = {site: 2 / math.sqrt(max(r, 1)) - good + 0.1 * i for i, site in enumerate(one.sites)}
        parts = {site: {"validation_loss": loss, "n": 9} for site, loss in losses.items()}
        validation.append({"round": r, "loss": sum(losses.values()) / len(losses), "sites": parts})
    return {
        "label": one.arm.label or one.name,
        "seed": one.seed,
        "sites": list(one.sites),
        "versions": {"torch": "2"},
        "seconds": 60.0 + 10 * good,
        "shares": shares,
        "bytes": 3_000_000 * shares,
        "scored_round": ROUNDS,
        "validation": validation[1:],
        "evaluations": evaluations,
        "curves": {"alpha": [[r, 0.7, 0.6 + 0.02 * r, 0.5] for r in range(ROUNDS + 1)]} if fedtar else {},
        "outside": {
            site: {"start": _scores(0.1, 1, draw), "end": _scores(good, 3, draw)} for site in one.suite.outside * shares
        },
    }
