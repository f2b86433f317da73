"""What each patient adds to the scores that need no more than texts, so that these have intervals and tests."""

from collections import Counter
from collections.abc import Sequence

from fedtar_flare.metrics.agreement import LabelCounts, label_counts
from fedtar_flare.metrics.grades import Grade, Part, finding_changes, marks
from fedtar_flare.metrics.labeler import RuleLabels, classes_of, rule_labeler
from fedtar_flare.metrics.language import clean, report_statistics
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.reports import Reports, TextLabeler
from fedtar_flare.metrics.score import Pair
from fedtar_flare.metrics.sentences import as_read
from fedtar_flare.metrics.significance import (
    PatientSums,
    bleu_score,
    label_score,
    mean_score,
    patient_sums,
    share_of_sums,
)

PARTS: tuple[Part, ...] = ("side", "degree", "change")


def reports_of_texts(
    patients: Sequence[str], references: Sequence[str], drafts: Sequence[str], rules: RuleLabels
) -> Reports:
    """Reports of which texts alone are known, each patient's in the order of time."""
    n, nothing = len(patients), [frozenset[str]()] * len(patients)
    changes = ([finding_changes(text, rule_labeler(rules)) for text in side] for side in as_read(references, drafts))
    return Reports(patients, range(n), references, drafts, rules, [0.0] * n, *changes, nothing, nothing)


def text_sums(reports: Reports) -> dict[str, PatientSums]:
    """By a score's name in the registry and in its order; a score that is no sum over patients is left out."""
    patients, statistics = reports.patients, report_statistics(reports.references, reports.drafts)
    drafts, references = ([clean(text) for text in side] for side in (reports.drafts, reports.references))
    often, code = Counter(drafts), TextLabeler.named(reports.rules).code
    codes = [(code(reference), code(draft)) for reference, draft in zip(*reports.as_read, strict=True)]
    labels, classes = label_counts(classes_of(reports.rules), codes), reports.rules.replace("-", "_")
    every = frozenset[tuple[str, str]]().union(*reports.changes, *reports.draft_changes)
    changes = LabelCounts.of_findings(reports.changes, reports.draft_changes, sorted(every))
    claims = [(patient, contrary, 1) for patient, contrary in reports.claims] + [(p, False, 0) for p in patients]
    shares: dict[str, list[tuple[float, float]]] = {
        "presence_f1": [_presence(grades) for grades in reports.grades],
        **{f"{part}_accuracy": [_right(grades, part) for grades in reports.grades] for part in PARTS},
        "change_coverage": [_claimed(grades) for grades in reports.grades],
        "identical_share": [(often[draft] > 1, 1) for draft in drafts],
        "length_ratio": [(len(d.split()), len(r.split())) for d, r in zip(drafts, references, strict=True)],
        **{name: _values(reports, score.pair) for name, score in SCORES.items() if score.pair},
    }
    sums = {f"bleu_{n}": bleu_score(patients, statistics, n) for n in (1, 2, 3, 4)}
    sums |= {name: mean_score(patients, getattr(statistics, name)) for name in ("rouge_l", "cider")}
    sums |= {name: patient_sums(patients, rows, share_of_sums) for name, rows in shares.items()}
    sums[f"{classes}_f1"] = label_score(patients, labels, "micro", "f1")
    sums["contradictions"] = patient_sums([p for p, *_ in claims], [row for _, *row in claims], share_of_sums)
    if every:
        sums["finding_change_micro_f1"] = label_score(patients, changes, "micro", "f1")
    return {name: sums[name] for name in SCORES if name in sums}


def _presence(grades: Sequence[Grade]) -> tuple[float, float]:
    right = sum(grade.presence == "right" for grade in grades)
    return 2 * right, len(grades) + right


def _right(grades: Sequence[Grade], part: Part) -> tuple[float, float]:
    return sum(right := marks(grades, part)), len(right)


def _claimed(grades: Sequence[Grade]) -> tuple[float, float]:
    graded = [grade for grade in grades if grade.change is not None]
    return sum(bool(grade.words["change"][1]) for grade in graded), len(graded)


def _values(reports: Reports, pair: Pair) -> list[tuple[float, float]]:
    return [(value or 0.0, value is not None) for value in reports.values(pair)]
