"""What each patient adds to the scores that need no more than texts, so that these have intervals and tests."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedtar_flare.metrics import significance
from fedtar_flare.metrics.agreement import LabelCounts, label_counts
from fedtar_flare.metrics.grades import PARTS, finding_changes, marks
from fedtar_flare.metrics.labeler import NEURAL, RuleLabels, classes_of, rule_labeler
from fedtar_flare.metrics.language import clean, report_statistics
from fedtar_flare.metrics.registry import SCORES, claims_of
from fedtar_flare.metrics.reports import Reports
from fedtar_flare.metrics.sentences import as_read
from fedtar_flare.metrics.significance import PatientSums, label_score, mean_score, patient_sums, share_of_sums


def reports_of_texts(
    patients: Sequence[str], references: Sequence[str], drafts: Sequence[str], rules: RuleLabels
) -> Reports:
    """Reports of which texts alone are known, each patient's in the order of time."""
    n, nothing = len(patients), [frozenset[str]()] * len(patients)
    true, drafted = ([finding_changes(t, rule_labeler(rules)) for t in side] for side in as_read(references, drafts))
    return Reports(patients, range(n), references, drafts, rules, [0.0] * n, true, drafted, nothing, nothing)


def rules_of(rows: Iterable[Mapping[str, Any]]) -> RuleLabels:
    """The labeler by rules whose labels a run kept with its reports."""
    kept = {name for row in rows for name in row.get("labels", ())}
    return next((rules for rules in NEURAL.values() if rules in kept), "chexpert-rules")


def text_sums(reports: Reports, values: Mapping[str, Sequence[float | None]] | None = None) -> dict[str, PatientSums]:
    """By a score's name in the registry and in its order; a score that is no sum over patients is left out.

    ``values`` are those of each draft in scores of other tools, which come last, as means.
    """
    patients, statistics = reports.patients, report_statistics(reports.references, reports.drafts)
    drafts, references = ([clean(text) for text in side] for side in (reports.drafts, reports.references))
    often, classes = Counter(drafts), reports.rules.replace("-", "_")
    labels = label_counts(classes_of(reports.rules), reports.labels(reports.rules))
    every = frozenset[tuple[str, str]]().union(*reports.changes, *reports.draft_changes)
    changes = LabelCounts.of_findings(reports.changes, reports.draft_changes, sorted(every))
    claims = [(patient, contrary, 1) for patient, contrary in reports.claims] + [(p, False, 0) for p in patients]
    shares: dict[str, list[tuple[float, float]]] = {
        "presence_f1": [(2 * (n := [g.presence for g in of].count("right")), len(of) + n) for of in reports.grades],
        **{f"{part}_accuracy": [(sum(m := marks(of, part)), len(m)) for of in reports.grades] for part in PARTS},
        "change_coverage": [claims_of(grades) for grades in reports.grades],
        "identical_share": [(often[draft] > 1, 1) for draft in drafts],
        "length_ratio": [(len(d.split()), len(r.split())) for d, r in zip(drafts, references, strict=True)],
    }
    of_pairs = {name: reports.values(score.pair) for name, score in SCORES.items() if score.pair}
    for name, each in (of_pairs | dict(values or {})).items():
        shares[name] = [(value or 0.0, value is not None) for value in each]
    sums = {f"bleu_{n}": significance.bleu_score(patients, statistics, n) for n in (1, 2, 3, 4)}
    sums |= {name: mean_score(patients, getattr(statistics, name)) for name in ("rouge_l", "cider")}
    sums |= {name: patient_sums(patients, rows, share_of_sums) for name, rows in shares.items()}
    sums[f"{classes}_f1"] = label_score(patients, labels, "micro", "f1")
    sums["contradictions"] = patient_sums([p for p, *_ in claims], [row for _, *row in claims], share_of_sums)
    if every:
        sums["finding_change_micro_f1"] = label_score(patients, changes, "micro", "f1")
    return {name: sums[name] for name in (*SCORES, *(values or ())) if name in sums}
