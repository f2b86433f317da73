"""A sample of cases that staff label, and how right a labeler is by what they said (:mod:`.label_noise`)."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.sources.tables import rows_of
from fedtar_flare.metrics.agreement import Array, label_counts
from fedtar_flare.metrics.label_noise import LabelNoise, label_noise
from fedtar_flare.metrics.labeler import classes_of
from fedtar_flare.reporting.format import NOTHING
from fedtar_flare.suite.drafts import write_table
from fedtar_flare.suite.tables import Table, interval_cell

Rows = Sequence[Mapping[str, Any]]
"""Of each case its ``patient_id``, ``visit_id``, ``reference`` and ``text``, a ``site`` where there are several, and
``labels`` by labeler."""
SIDES, FEWEST = ("reference", "text"), 10  # texts of a case; checked cases that a correction is made from


def write_sample(rows: Rows, labeler: str, cases: int, out: Path) -> Path:
    """Write both texts of cases drawn at random, in random order and without labels, with a column for each class."""
    if out.exists():
        raise ConfigError(f"{out} is there already, maybe with labels: name a new file")
    if min(cases, len(rows)) < FEWEST:
        raise ConfigError(f"a sample needs at least {FEWEST} cases; --cases is {cases}, and there are {len(rows)}")
    chance, classes = secrets.SystemRandom(), classes_of(labeler)
    texts = [(_id(row, side), row[side]) for row in chance.sample(rows, min(cases, len(rows))) for side in SIDES]
    chance.shuffle(texts)
    return write_table(out, ["id", "report", *classes], [[*text, *[""] * len(classes)] for text in texts])


def noise_of(rows: Rows, labeler: str, file: Path) -> dict[str, LabelNoise]:
    """How right a labeler is by the labels of a file that :func:`write_sample` wrote and staff filled in."""
    classes, patients = classes_of(labeler), [f"{row.get('site', '')} {row['patient_id']}" for row in rows]
    checked = _labels(rows, classes, file)
    if (cases := np.isfinite(checked).all(axis=(1, 2)).sum()) < FEWEST:
        raise ConfigError(f"{file}: both texts of {cases} cases are checked, {FEWEST} are needed")
    return label_noise(patients, label_counts(classes, [row["labels"][labeler] for row in rows]), checked)


def _labels(rows: Rows, classes: Sequence[str], file: Path) -> Array:
    """Labels (N, 2, K); nan in rows of the file without any."""
    labels = np.full((len(rows), len(SIDES), len(classes)), np.nan)
    places = {_id(row, side): (i, j) for i, row in enumerate(rows) for j, side in enumerate(SIDES)}
    for number, entry in enumerate(rows_of(file, ["id", *classes]), start=1):
        if entry["id"] not in places:
            text = f"no report or draft has the id '{entry['id']:.40}': name what the sample was drawn from, as it was"
            raise ConfigError(f"{file}, text {number}: {text}")
        given = [entry[name] for name in classes]
        if not {*given} <= {"", "0", "1"}:
            raise ConfigError(f"{file}, text {number}: a label is 1, 0 or empty, not '{max(given, key=len):.40}'")
        if any(given):
            if np.isfinite(labels[places[entry["id"]]]).any():
                raise ConfigError(f"{file}, text {number}: this text is labelled twice: keep one row of it")
            labels[places[entry["id"]]] = [label == "1" for label in given]
    return labels


def _id(row: Mapping[str, Any], side: str) -> str:
    """An id of a text, which changes with the text: a digest, so that the file has no patient's id."""
    of = [str(row.get(name, "")) for name in ("site", "patient_id", "visit_id", side)]
    return hashlib.sha256("\0".join([side, *of]).encode()).hexdigest()[:16]


def noise_tables(noise: Mapping[str, LabelNoise], labeler: str) -> list[Table]:
    """A row for each class that staff or the labeler found, the first for all together; no table of nothing."""
    if not noise:
        return []
    about = (
        f"{next(iter(noise.values())).checked} cases that staff checked. Precision and recall are those of "
        f"{labeler}, against staff. F1 is that of the drafts, by its labels and corrected by the sample, with 95 % "
        "intervals: the corrected one has the labeler's errors in it."
    )
    heads = ["", "precision", "recall", "F1, its labels", "F1, corrected"]
    rows = [[name, *map(interval_cell, of[1:])] for name, of in noise.items()]
    return [Table("Label noise", about, heads, [row for row in rows if {*row[1:]} != {NOTHING}])]
