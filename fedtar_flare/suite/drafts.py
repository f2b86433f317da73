"""Drafts of any system, from files: matched with reports by study, scored with intervals, compared.

RadEval takes pairs as lists ``refs`` and ``hyps``, ReXrank as ``study_id``, ``report`` and ``prediction``.
"""

import csv
import hmac
import io
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import PRIVATE, write_json, write_text
from fedtar_flare.core.text import columns
from fedtar_flare.data.cells import read_key
from fedtar_flare.data.draft_files import Text
from fedtar_flare.metrics.labeler import RuleLabels
from fedtar_flare.metrics.radeval import RadEvalMetrics
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import Interval, compare, over_seeds
from fedtar_flare.metrics.text_sums import reports_of_texts, text_sums
from fedtar_flare.reporting.format import heading, p_value
from fedtar_flare.reporting.render import render
from fedtar_flare.suite.results import Difference, corrected
from fedtar_flare.suite.tables import Table, interval_cell, metric_table, score_cell

EXPORT_KEY = "export.key"  # file in a state with the secret from which exported ids are made

Texts = Mapping[str, Text]  # by study


class Scored(NamedTuple):
    """Scores of drafts by name: of each file its values with intervals, and how the first differs from the second."""

    studies: int
    patients: int
    values: dict[str, dict[str, Interval]]
    tests: list[Difference]
    models: str  # RadEval's version, and the digests of its metrics' weights; empty without


def matched(reports: Texts, drafts: Texts, where: str) -> list[str]:
    """Drafts in the reports' order; ConfigError unless both are of the same studies."""
    for left, what in ((reports.keys() - drafts.keys(), "no draft"), (drafts.keys() - reports.keys(), "no report")):
        if left:
            names = ", ".join(f"'{name}'" for name in sorted(left)[:5])
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise ConfigError(f"{where}: there is {what} of study {names}{more}: both sides must have the same studies")
    return [drafts[study].text for study in reports]


def run_texts(rows: Sequence[Mapping[str, Any]], side: str) -> dict[str, Text]:
    """A run's texts of a column by visit, in the order of time."""
    texts = {}
    for row in sorted(rows, key=itemgetter("time_step")):
        patient = f"{row.get('site', '')} {row['patient_id']}".strip()
        texts[f"{patient} {row['visit_id']}"] = Text(row[side], patient)
    return texts


def case_rows(texts: Texts, drafts: Texts, where: str) -> list[dict[str, Any]]:
    """Reports with a system's drafts, as a run's rows have them."""
    cases = zip(texts.items(), matched(texts, drafts, where), strict=True)
    return [{"patient_id": of.patient, "visit_id": s, "reference": of.text, "text": d} for (s, of), d in cases]


def score_drafts(texts: Texts, drafts: Mapping[str, Texts], rules: RuleLabels, models: RadEvalMetrics | None) -> Scored:
    """Score each system's drafts by the scores that need no model, and by ``models``; a second one is compared."""
    patients, references = [of.patient for of in texts.values()], [of.text for of in texts.values()]
    values, sums = {}, []
    for name, of_system in drafts.items():
        written = matched(texts, of_system, name)
        by_model = models.values(references, written) if models else None
        sums.append(text_sums(reports_of_texts(patients, references, written, rules), by_model))
        values[name] = {s: over_seeds([of], share=SCORES[s].most == 1) for s, of in sums[-1].items()}
    tests = []
    if len(sums) == 2:
        for name in (name for name in sums[0] if name in sums[1] and SCORES[name].higher_is_better is not None):
            better = bool(SCORES[name].higher_is_better)
            test = compare([sums[0][name]], [sums[1][name]], higher_is_better=better, tie=SCORES[name].tie)
            tests.append(Difference(next(iter(drafts)), name, *test))
    tests = corrected([test for test in tests if math.isfinite(test.p)])
    return Scored(len(texts), len(set(patients)), values, tests, models.about if models else "")


def tables(scored: Scored) -> list[Table]:
    """The scores, a row for each, and the comparison of two files."""
    names = dict.fromkeys(name for of_file in scored.values.values() for name in of_file)
    rows = [[heading(name), *(score_cell(name, of.get(name)) for of in scored.values.values())] for name in names]
    about = f"{scored.studies} studies of {scored.patients} patients, with 95 % intervals over patients."
    made = [Table("Scores", f"{about} {scored.models}".strip(), ["score", *scored.values], rows)]
    if scored.tests:
        made.append(metric_table(scored.tests, {name: name for name in scored.values}, [*scored.values][1], "patients"))
    return made


def reading_tables(results: Mapping[str, Any]) -> list[Table]:
    """What readers answered (:func:`.reading_results`), and how they agree, with one another and with each score."""
    counts = ", ".join(f"{name} {count}" for name, count in results["answers"].items())
    about = f"{results['cases']} cases of {results['patients']} patients; answers: {counts}"
    rows = [[name, *(interval_cell(side) for side in of.values())] for name, of in results["scores"].items()]
    rows = [[*row, p_value(results["p"][row[0]])] for row in rows]
    whose = f"{'Cohen' if len(results['answers']) == 2 else 'Fleiss'}'s kappa of {results['read_by_all']} cases"
    agreed = [[f"readers, {name}", interval_cell(kappa), whose] for name, kappa in results["agreement"].items()]
    for name, (tau, drafts) in results["tau"].items():
        agreed.append([SCORES[name].label, interval_cell(tau), f"Kendall's tau-b, {drafts} drafts"])
    of_scores = f"Of readers, and of scores with their answers. {results['models']}".strip()
    answered = Table("Answers", about, ["", "draft", "reference", "difference", "p"], rows)
    return [answered, Table("Agreement", of_scores, ["", "coefficient", ""], agreed)]


def lines(shown: Sequence[Table]) -> list[str]:
    """Tables as text, with each interval in brackets behind its value."""
    text = []
    for table in shown:
        rows = [[str(cell).replace("<small>", " (").replace("</small>", ")") for cell in row] for row in table.rows]
        text += [table.about, *columns([table.head, *rows])]
    return text


def write_page(shown: Sequence[Table], out: Path, read: bool = False) -> Path:
    """Write tables as a page, for its owner alone; ``read``: they are :func:`reading_tables`."""
    return write_text(out, render("drafts.html", tables=shown, read=read), PRIVATE)


def export_pairs(state: Path, rows: Sequence[Mapping[str, Any]], out: Path, visit_ids: bool) -> Path:
    """Write a run's pairs for RadEval (``.json``) or ReXrank (``.csv``), their ids keyed unless ``visit_ids``."""
    if out.suffix.lower() not in (".csv", ".json"):
        raise ConfigError(f"{out}: --export writes .csv (ReXrank) or .json (RadEval): name the file so")
    if not visit_ids and not (state / EXPORT_KEY).is_file():
        write_text(state / EXPORT_KEY, secrets.token_hex(32), PRIVATE)
    key = b"" if visit_ids else read_key(state / EXPORT_KEY)

    def named(row: Mapping[str, Any], *columns: str) -> str:
        text = "/".join(str(row[name]) for name in ("site", *columns) if name in row)
        return text if visit_ids else hmac.digest(key, text.encode(), "sha256")[:8].hex()

    ids = [(named(row, "patient_id", "visit_id"), named(row, "patient_id")) for row in rows]
    if out.suffix.lower() == ".json":
        texts = {"refs": [row["reference"] for row in rows], "hyps": [row["text"] for row in rows]}
        return write_json(out, texts | {"study_ids": [study for study, _ in ids]}, PRIVATE)
    pairs = [(s, row["reference"], row["text"], p) for (s, p), row in zip(ids, rows, strict=True)]
    return write_table(out, ["study_id", "report", "prediction", "patient_id"], pairs)


def write_table(out: Path, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Path:
    """Write texts of patients as CSV, for its owner alone."""
    csv.writer(table := io.StringIO(), lineterminator="\n").writerows([head, *rows])
    return write_text(out, table.getvalue(), PRIVATE)
