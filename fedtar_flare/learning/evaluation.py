"""Scores of drafts: of a site by time step, which may leave it, and of single reports, which stay."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import PRIVATE, write_text
from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.data.minimum_cell import enough, full_cells, round_share, round_to_cell
from fedtar_flare.learning.labels import labeler_of
from fedtar_flare.metrics.agreement import LabelCounts
from fedtar_flare.metrics.clinical import clinical_score
from fedtar_flare.metrics.grades import contrary_claims, later_visits, marks
from fedtar_flare.metrics.labeler import rules_for
from fedtar_flare.metrics.language import bleu_of_sums, identical_share, report_statistics
from fedtar_flare.metrics.registry import scores_of
from fedtar_flare.metrics.reports import Reports, TextLabeler, contradicted
from fedtar_flare.metrics.sentences import as_read, readable

REPORT_SCORES = "report-scores-"
"""Prefix of the files with scores of single reports."""
TEXTS = ("text", "reference")
"""Columns of a row that are patients' reports: these stay in the site's own state."""


@dataclass(frozen=True)
class Evaluated:
    """Scores, and drafts by visit, with the patient adapter; ``scores_generic`` without it, where a method has one."""

    scores: dict[str, Any]
    scores_generic: dict[str, Any] | None
    rows: list[dict[str, Any]]
    samples: list[Sample]
    drafts: Mapping[Visit, str]  # also of the visits before, where these stand for their reports

    @property
    def texts(self) -> list[str]:
        """The draft of each sample."""
        return [self.drafts[sample.visit] for sample in self.samples]


def site_scores(
    samples: Sequence[Sample],
    drafts: Sequence[str],
    losses: Sequence[float],
    time_steps: int,
    min_cell: int,
    text_labeler: TextLabeler | None = None,
    admitted: Collection[str] = (),
) -> dict[str, Any]:
    """Score a site's drafts, per time step and over all steps, also by the ``admitted`` scores of other packages.

    A cell (the reports of a step) of fewer than ``min_cell`` patients gets no scores, and its reports do not count in
    ``all``, else subtraction would reveal them. Every n is rounded down to a multiple of ``min_cell``.
    """
    steps: dict[str, dict[str, Any]] = {str(t): {"n": 0} for t in range(1, time_steps + 1)}
    counted, n = list[int](), 0
    for t in sorted(full_cells([(sample.time_step, sample.visit.patient_id) for sample in samples], min_cell)):
        chosen = [i for i, sample in enumerate(samples) if sample.time_step == t]
        rounded = round_to_cell(len(chosen), min_cell)
        reports = reports_of(samples, drafts, losses, chosen, min_cell)
        steps[str(t)] = {"n": rounded, **scores_of(reports, by_step=True, n=rounded, admitted=admitted)}
        counted += chosen
        n += rounded
    if not counted:
        return {"steps": steps, "all": {"n": n}}
    reports = replace(reports_of(samples, drafts, losses, counted, min_cell), text_labeler=text_labeler)
    claimants = set(map(itemgetter(0), reports.reference_claims))
    contradictions = contradicted(reports.reference_claims) if enough(claimants, min_cell) else None
    return {
        "steps": steps,
        "all": {"n": n, **scores_of(reports, n=n, admitted=admitted)},
        "findings": finding_scores(reports),
        "references": {
            "identical_share": round_share(identical_share(reports.references), n, min_cell),
            "contradictions": contradictions and round_share(contradictions, len(claimants), min_cell),
        },
    }


def reports_of(
    samples: Sequence[Sample], drafts: Sequence[str], losses: Sequence[float], chosen: Sequence[int], min_cell: int
) -> Reports:
    """The ``chosen`` visits' reports; the truth is what was planted where the source knows it, else the references'."""
    visits, texts = [samples[i].visit for i in chosen], [drafts[i] for i in chosen]
    reader, references = labeler_of(visits), [visit.report for visit in visits]
    of_references, of_drafts = as_read(references, texts)
    findings = [visit.findings for visit in visits if visit.findings is not None]
    changes = [visit.changes for visit in visits if visit.changes is not None]
    return Reports(
        patients=[visit.patient_id for visit in visits],
        times=[visit.acquired.timestamp() for visit in visits],
        references=references,
        drafts=texts,
        rules=rules_for(visits[0].modality),
        losses=[losses[i] for i in chosen],
        changes=changes if len(changes) == len(visits) else list(map(reader.changes, of_references)),
        draft_changes=list(map(reader.changes, of_drafts)),
        findings=findings if reader.known is not None else list(map(reader.stated, of_references)),
        draft_findings=list(map(reader.stated, of_drafts)),
        known=reader.known,
        labeler=reader.rules,
        min_cell=min_cell,
    )


def finding_scores(reports: Reports) -> dict[str, dict[str, dict[str, float]]]:
    """Per finding its ``n`` and ``recall``, and where enough drafts name it, ``named`` and ``precision``.

    They are under ``known`` and ``new`` (to the warm start) where the truth is known, else under ``stated``. A finding
    of fewer than ``min_cell`` patients is left out (with a cell of 1, only if no draft names it either).
    """
    min_cell, known = reports.min_cell, reports.known
    having, naming = reports.common(reports.findings), reports.common(reports.draft_findings)
    scores: dict[str, dict[str, dict[str, float]]] = {"stated": {}} if known is None else {"known": {}, "new": {}}
    every = sorted({*chain(*reports.findings, *reports.draft_findings)})
    counts = LabelCounts.of_findings(reports.findings, reports.draft_findings, every)
    sums = (side.sum(axis=0).astype(int).tolist() for side in (counts.actual, counts.named, counts.hits))
    for name, actual, named, hits in zip(counts.classes, *sums, strict=True):
        # the precision of a finding that too few patients have would reveal how many of them have it
        if name in having or (min_cell == 1 and name in naming):
            finding: dict[str, float] = {"n": round_to_cell(actual, min_cell)}
            if actual:
                finding["recall"] = round_share(hits / actual, actual, min_cell)
            if name in naming:
                finding["named"] = round_to_cell(named, min_cell)
                finding["precision"] = round_share(hits / named, named, min_cell)
            kind = "stated" if known is None else "known" if name in known else "new"
            scores[kind][name.replace(" ", "_")] = finding
    return scores


def report_rows(
    samples: Sequence[Sample],
    drafts: Sequence[str],
    losses: Sequence[float],
    *,
    personal: bool,
    labels: TextLabeler | None = None,
) -> list[dict[str, Any]]:
    """List each draft with its reference, its own scores, and what it adds to the scores of a corpus."""
    if not samples:
        return []
    rules = TextLabeler.named(rules_for(samples[0].visit.modality))
    statistics = report_statistics([sample.visit.report for sample in samples], drafts)
    columns: dict[str, Any] = {name: values.tolist() for name, values in vars(statistics).items()}
    lengths = statistics.hypothesis_length, statistics.reference_length
    bleu = bleu_of_sums(statistics.matches, statistics.guesses, *lengths).tolist()
    reports = reports_of(samples, drafts, losses, range(len(samples)), 1)
    claimed, clinical = _claims(reports), reports.values(clinical_score)
    rows = []
    for i, (sample, text, loss) in enumerate(zip(samples, drafts, losses, strict=True)):
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
                "clinical_score": clinical[i],
                "degree_accuracy": [sum(degrees := marks(reports.grades[i], "degree")), len(degrees)],
                "change_accuracy": [sum(changes := marks(reports.grades[i], "change")), len(changes)],
                "contradictions": claimed[i],
                "labels": {
                    kind: [code(visit.report), code(text)]
                    for kind, code in filter(None, (rules, labels))
                    if readable(visit.report)
                },
            }
        )
    return rows


def _claims(reports: Reports) -> list[list[int]]:
    """Of each draft how many claims of change the patient's report before contradicts, and how many it makes."""
    references, drafts = reports.as_read
    later = later_visits(zip(reports.patients, reports.times, references, range(len(drafts)), strict=True))
    claimed = {i: contrary_claims(drafts[i], before, reports.reader) for _, i, before in later if before}
    return [[sum(wrong for _, wrong in told), len(told)] for told in (claimed.get(i, []) for i in range(len(drafts)))]


def report_texts(folder: Path, round_: int | None = None, *, personal: bool = True) -> list[dict[str, Any]]:
    """Read the rows that :func:`write_report_scores` wrote."""
    name = f"{REPORT_SCORES}{'*' if round_ is None else f'{round_:04d}'}.jsonl"
    sites = [folder] if any(folder.glob(name)) else sorted({file.parent for file in folder.glob(f"*/{name}")})
    rows, kinds, where = [], set(), str(folder)
    try:
        for site in sites:
            file = max(site.glob(name))
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
                where = f"{file}, line {number}"
                rows.append(({"site": site.name} if site != folder else {}) | json.loads(line))
                for key in ("patient_id", "visit_id", *TEXTS):
                    if not isinstance(rows[-1].get(key), str):
                        raise ValueError(f"without {key}")
                kinds.add(rows[-1]["personal"])
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: it was changed or cut short ({error!r}); score the round again") from error
    if not rows:
        of = "" if round_ is None else f" of round {round_}"
        cure = "name a site's state of a run, <state>/<run id>/<site>, or a run of a comparison, <folder>/runs/<run>"
        why = "no patient there is in the test split, or too few for data.min_cell" if sites else cure
        raise ConfigError(f"{folder} holds no reports{of}: {why}")
    return [row for row in rows if row["personal"] == personal or len(kinds) == 1]


def write_report_scores(folder: Path, number: int, rows: Iterable[Mapping[str, Any]], of: str = REPORT_SCORES) -> Path:
    """Write rows of single reports as JSON lines, atomically, readable by the owner alone."""
    path = folder / f"{of}{number:04d}.jsonl"
    return write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows), PRIVATE)
