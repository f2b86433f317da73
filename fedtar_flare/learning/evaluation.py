"""Scores of generated reports: by time step for everyone, and by report for the site alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtar_flare.data.cohort import Sample, told
from fedtar_flare.files import PRIVATE, write_text
from fedtar_flare.learning.content import content_scores, finding_recalls, reference_scores
from fedtar_flare.learning.labels import labeler_of
from fedtar_flare.metrics.clinical import known_and_new
from fedtar_flare.metrics.language import bleu_of_sums, clean, language_scores, language_statistics


@dataclass(frozen=True)
class Evaluated:
    """What one evaluation gave; rows, samples and texts stay at the site.

    Args:
        scores: see :func:`cells`; with the personal part, as are the texts.
        scores_generic: the same without it; None for a method that has none.
        rows: see :func:`report_rows`; one per report, and one more without the personal part.
    """

    scores: dict[str, Any]
    scores_generic: dict[str, Any] | None
    rows: list[dict[str, Any]]
    samples: list[Sample]
    texts: list[str]


def cells(
    samples: Sequence[Sample], texts: Sequence[str], losses: Sequence[float], time_steps: int, min_cell: int
) -> dict[str, Any]:
    """Scores per time step and over all; ``losses`` are the mean token losses of the reports.

    A cell with fewer than ``min_cell`` distinct patients holds an n of 0 alone, and its reports do not count in ``all``
    either: otherwise subtraction would reveal its scores. Every n is told down to a multiple of ``min_cell``.

    Returns:
        ``{"steps": {"1": cell, ...}, "all": cell}``; a cell has n, bleu_1..bleu_4, rouge_l, cider, token_loss, and
        where the truth is known, F1 of all, known and new findings, and the recall of new ones. ``all`` has the scores
        of :func:`.content_scores` too; beside it are ``findings`` (:func:`.finding_recalls`) and ``references``
        (:func:`.reference_scores`). All three are over the visits that count in ``all``.
    """
    at = {str(t): [i for i, s in enumerate(samples) if s.time_step == t] for t in range(1, time_steps + 1)}
    full = {t: chosen for t, chosen in at.items() if len({samples[i].visit.patient_id for i in chosen}) >= min_cell}
    shown = [i for chosen in full.values() for i in chosen]
    scores: dict[str, Any] = {"steps": {t: _cell(samples, texts, losses, full.get(t, []), min_cell) for t in at}}
    scores["all"] = _cell(samples, texts, losses, shown, min_cell) | {
        "n": sum(c["n"] for c in scores["steps"].values())
    }
    if shown:
        visits, said = [samples[i] for i in shown], [texts[i] for i in shown]
        scores["all"] |= content_scores(visits, said, min_cell)
        scores["findings"] = finding_recalls(visits, said, min_cell)
        scores["references"] = reference_scores(visits)
    return scores


def _cell(
    samples: Sequence[Sample], texts: Sequence[str], losses: Sequence[float], chosen: Sequence[int], min_cell: int
) -> dict[str, Any]:
    scores: dict[str, Any] = {"n": told(len(chosen), min_cell)}
    if not chosen:
        return scores
    scores |= language_scores([samples[i].visit.report for i in chosen], [texts[i] for i in chosen])
    scores["token_loss"] = sum(losses[i] for i in chosen) / len(chosen)
    known = [i for i in chosen if samples[i].visit.findings is not None]
    if known:
        truth = [samples[i].visit.findings or frozenset() for i in known]
        reader = labeler_of([samples[i].visit for i in known])
        scores |= known_and_new(truth, [reader.stated(texts[i]) for i in known], reader.known)
    return scores


def report_rows(
    samples: Sequence[Sample], texts: Sequence[str], losses: Sequence[float], *, personal: bool
) -> list[dict[str, Any]]:
    """Scores of each report by itself, and what it adds to the scores of a corpus.

    Returns:
        rows of ``patient_id``, ``visit_id``, ``time_step``, ``split``, ``personal`` (whether the personal part was on),
        ``token_loss``; ``bleu_1`` to ``bleu_4`` of the report by itself; the fields of one report in
        :class:`~fedtar_flare.metrics.language.LanguageStatistics` (``cider`` with the document frequencies of these
        references); ``findings`` (the truth) and ``findings_in_text``, sorted, and ``changes`` and ``changes_in_text``,
        pairs of a finding and what became of it since the visit before; None where the truth is not known.
    """
    if not samples:
        return []
    statistics = language_statistics(
        [[clean(sample.visit.report).split()] for sample in samples], [clean(text).split() for text in texts]
    )
    columns: dict[str, Any] = {name: values.tolist() for name, values in vars(statistics).items()}
    lengths = statistics.hypothesis_length, statistics.reference_length
    bleu = bleu_of_sums(statistics.matches, statistics.guesses, *lengths).tolist()
    rows = []
    for i, (sample, text, loss) in enumerate(zip(samples, texts, losses, strict=True)):
        visit = sample.visit
        reader = labeler_of([visit])
        rows.append(
            {
                "patient_id": visit.patient_id,
                "visit_id": visit.visit_id,
                "time_step": sample.time_step,
                "split": sample.split,
                "personal": personal,
                "token_loss": loss,
                **{f"bleu_{n}": score for n, score in enumerate(bleu[i], start=1)},
                **{name: values[i] for name, values in columns.items()},
                "findings": None if visit.findings is None else sorted(visit.findings),
                "findings_in_text": None if visit.findings is None else sorted(reader.stated(text)),
                "changes": None if visit.changes is None else sorted(map(list, visit.changes)),
                "changes_in_text": None if visit.changes is None else sorted(map(list, reader.changes(text))),
            }
        )
    return rows


def write_report_scores(folder: Path, round_: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the rows as ``report-scores-<round>.jsonl``, atomically, readable by the owner alone.

    They name patients: ``folder`` is the site's state of the run, which never leaves the site.
    """
    path = folder / f"report-scores-{round_:04d}.jsonl"
    return write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows), PRIVATE)
