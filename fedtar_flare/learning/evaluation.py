"""Scores of generated reports: by time step for everyone, and by report for the site alone."""

import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import PRIVATE, write_text
from fedtar_flare.data.cohort import Sample
from fedtar_flare.data.minimum_cell import enough, full_cells, round_share, round_to_cell
from fedtar_flare.learning.labels import labeler_of
from fedtar_flare.metrics.alarms import identical_share
from fedtar_flare.metrics.clinical import finding_counts
from fedtar_flare.metrics.language import bleu_of_sums, clean, language_statistics
from fedtar_flare.metrics.registry import scores_of
from fedtar_flare.metrics.report_labels import rules_for
from fedtar_flare.metrics.reports import Labelled, Reports

REPORT_SCORES = "report-scores-"
"""How the files begin that hold scores of single reports."""
Texts = Sequence[str]
Losses = Sequence[float]
Labels = Labelled | None
"""What the site's neural labeler reads off both texts."""


@dataclass(frozen=True)
class Evaluated:
    """What one evaluation gave; rows, samples and texts stay at the site."""

    scores: dict[str, Any]  # of :func:`cells`; with the patient adapter, as are the texts
    scores_generic: dict[str, Any] | None  # the same without it; None for a method that has none
    rows: list[dict[str, Any]]  # of :func:`report_rows`; one per report, and one more without the patient adapter
    samples: list[Sample]
    texts: list[str]


def cells(
    samples: Sequence[Sample], texts: Texts, losses: Losses, time_steps: int, min_cell: int, labels: Labels = None
) -> dict[str, Any]:
    """Scores per time step and over all steps.

    A cell with fewer than ``min_cell`` distinct patients holds an n of 0 alone, and its reports do not count in ``all``
    either: otherwise subtraction would reveal its scores. Every n is rounded down to a multiple of ``min_cell``, scores
    accordingly.

    ``texts`` are the reports generated for the visits ``samples``, ``losses`` the mean token loss of each reference,
    nats. Gives ``{"steps": {"1": cell, ...}, "all": cell}``; a cell has ``n`` and the scores of
    :func:`~fedtar_flare.metrics.registry.scores_of`, at a step those that are by step. With them come ``findings``
    (:func:`finding_scores`) and ``references``, their own ``identical_share`` and ``contradictions``, with which alarms
    about the generated reports are compared; both over the visits that count in ``all``.
    """
    at = {str(t): [i for i, s in enumerate(samples) if s.time_step == t] for t in range(1, time_steps + 1)}
    cells_ = full_cells(((str(s.time_step), s.visit.patient_id) for s in samples), min_cell)
    full = {t: chosen for t, chosen in at.items() if t in cells_}
    reports = {t: reports_of(samples, texts, losses, chosen, min_cell) for t, chosen in full.items()}
    steps: dict[str, dict[str, Any]] = {t: {"n": round_to_cell(len(full.get(t, ())), min_cell)} for t in at}
    for t, at_step in reports.items():
        steps[t] |= scores_of(at_step, min_cell=min_cell, by_step=True, n=steps[t]["n"])
    shown = [i for chosen in full.values() for i in chosen]
    scores: dict[str, Any] = {"steps": steps, "all": {"n": sum(step["n"] for step in steps.values())}}
    if shown:
        over_all = replace(reports_of(samples, texts, losses, shown, min_cell), labelled=labels)
        n = scores["all"]["n"]
        scores["all"] |= scores_of(over_all, min_cell=min_cell, n=n)
        scores["findings"] = finding_scores(over_all, min_cell)
        claimants = over_all.claiming(references=True)
        contradicted = over_all.contradictions(references=True) if enough(claimants, min_cell) else None
        scores["references"] = {
            "identical_share": round_share(identical_share(over_all.references), n, min_cell),
            "contradictions": contradicted and round_share(contradicted, len(claimants), min_cell),
        }
    return scores


def reports_of(
    samples: Sequence[Sample], texts: Texts, losses: Losses, chosen: Sequence[int], least: int = 1
) -> Reports:
    """The ``chosen`` visits' reports; the truth is what was planted where the source knows it, else the references'."""
    visits, generated = [samples[i].visit for i in chosen], [texts[i] for i in chosen]
    reader, references = labeler_of(visits), [visit.report for visit in visits]
    findings = [visit.findings for visit in visits if visit.findings is not None]
    changes = [visit.changes for visit in visits if visit.changes is not None]
    return Reports(
        patients=[visit.patient_id for visit in visits],
        times=[visit.acquired.timestamp() for visit in visits],
        references=references,
        generated=generated,
        rules=rules_for(visits[0].modality),
        losses=[losses[i] for i in chosen],
        changes=changes if len(changes) == len(visits) else [reader.changes(text) for text in references],
        claimed=[reader.changes(text) for text in generated],
        findings=findings if reader.known is not None else [reader.stated(text) for text in references],
        named=[reader.stated(text) for text in generated],
        known=reader.known,
        labeler=reader.rules,
        least=least,
    )


def finding_scores(reports: Reports, min_cell: int) -> dict[str, dict[str, dict[str, float]]]:
    """Per finding ``n``, the reports that have it, and ``recall``, the share of those that name it.

    Where at least ``min_cell`` distinct patients' reports name it, also ``named``, how many do, and ``precision``, the
    share of those that have it. They are under ``known`` and ``new`` (to the warm start) where the truth is known;
    elsewhere under ``stated``: classes that the rule-based labeler finds in the references. A finding of fewer than
    ``min_cell`` distinct patients is left out (with a cell of 1, only if no report names it either); ``n`` and
    ``named`` are rounded down to a multiple of ``min_cell``.
    """

    def full(side: Sequence[AbstractSet[str]]) -> set[str]:
        return full_cells(
            ((name, one) for one, names in zip(reports.patients, side, strict=True) for name in names), min_cell
        )

    having, naming, known = full(reports.findings), full(reports.named), reports.known
    found: dict[str, dict[str, dict[str, float]]] = {"stated": {}} if known is None else {"known": {}, "new": {}}
    for name, (there, named, right) in finding_counts(reports.findings, reports.named).items():
        # a precision of what too few have would tell how many of them have it
        if name in having or (min_cell == 1 and name in naming):
            one: dict[str, float] = {"n": round_to_cell(there, min_cell)}
            if there:
                one["recall"] = round_share(right / there, there, min_cell)
            if name in naming:
                precision = round_share(right / named, named, min_cell)
                one |= {"named": round_to_cell(named, min_cell), "precision": precision}
            kind = "stated" if known is None else "known" if name in known else "new"
            found[kind][name.replace(" ", "_")] = one
    return found


def report_rows(
    samples: Sequence[Sample], texts: Texts, losses: Losses, *, personal: bool, labels: Labels = None
) -> list[dict[str, Any]]:
    """Each report with its reference, its scores by itself, and what it adds to the scores of a corpus.

    A row has ``text`` and ``reference``, ``patient_id``, ``visit_id``, ``time_step``, ``split``, ``personal`` (whether
    with the patient adapter), ``token_loss``; ``bleu_1`` to ``bleu_4`` of the report by itself; the fields of one
    report in :class:`~fedtar_flare.metrics.language.LanguageStatistics` (``cider`` with the document frequencies of
    these references); ``findings`` (the truth) and ``findings_in_text``, sorted, and ``changes`` and
    ``changes_in_text``, pairs of a finding and what became of it since the visit before; None where the truth is not
    known; and ``labels``, by labeler what is read off the reference and off the text (:func:`.label_code`).
    """
    if not samples:
        return []
    readers = [Labelled.by_rules(rules_for(samples[0].visit.modality)), *filter(None, [labels])]
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
                "text": text,
                "reference": visit.report,
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
                "labels": {one.labeler: [one.code(visit.report), one.code(text)] for one in readers},
            }
        )
    return rows


TEXTS = ("text", "reference")
"""Of a row; reports of patients, which stay in the site's own state."""


def report_texts(folder: Path, round_: int | None = None, *, personal: bool = True) -> list[dict[str, Any]]:
    """The rows that :func:`write_report_scores` kept, of one round (None: the last), with the patient adapter or not.

    ``folder`` is a site's state of a run, or holds such folders of several sites: rows then tell their ``site``. A
    method without a patient adapter has the same reports in both. Raises ConfigError where the folder has none.
    """
    name = f"{REPORT_SCORES}{'*' if round_ is None else f'{round_:04d}'}.jsonl"
    places = [folder] if any(folder.glob(name)) else sorted({file.parent for file in folder.glob(f"*/{name}")})
    try:
        rows = [
            ({"site": place.name} if place != folder else {}) | json.loads(line)
            for place in places
            for line in max(place.glob(name)).read_text(encoding="utf-8").splitlines()
        ]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{folder}: {name} was changed or cut short ({error}); score the round again") from error
    if not rows or not all(isinstance(row.get(key), str) for row in rows for key in TEXTS):
        of = "" if round_ is None else f" of round {round_}"
        raise ConfigError(
            f"{folder} holds no reports{of}: name a site's state of a run, <state>/<run id>/<site>, or a run of a "
            "comparison, <folder>/runs/<run>"
        )
    kinds = {row["personal"] for row in rows}
    return [row for row in rows if row["personal"] == personal or len(kinds) == 1]


def write_report_scores(folder: Path, number: int, rows: Iterable[Mapping[str, Any]], of: str = REPORT_SCORES) -> Path:
    """Write the rows as ``report-scores-<round>.jsonl``, atomically, readable by the owner alone.

    They name patients: ``folder`` is the site's state of the run, which never leaves the site.
    """
    path = folder / f"{of}{number:04d}.jsonl"
    return write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows), PRIVATE)
