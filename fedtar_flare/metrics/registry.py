"""All scores of drafts by name: how each is computed, rounded and shown."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Literal

from fedtar_flare.data.minimum_cell import enough, round_loss, round_share, winsorised_mean
from fedtar_flare.metrics.agreement import AVERAGES, METRICS, Average, Metric, finding_f1
from fedtar_flare.metrics.grades import Part, marks
from fedtar_flare.metrics.labeler import rule_labeler
from fedtar_flare.metrics.language import identical_share, length_ratio, mismatched_share
from fedtar_flare.metrics.reports import Reports, contradicted

LANGUAGE, FINDINGS, CONTENT = "Language", "Findings", "Classes and repetition"
CHANGE, GRADES = "Degree and change between visits", "Findings against the reference"


@dataclass(frozen=True)
class Score:
    """A score: its name in records, its label for people, and how it is computed and shown."""

    name: str
    label: str
    function: Callable[[Reports], float | None]  # the raw value; None where it is undefined
    unit: str = "x 100"
    scale: float = 100.0  # people see the raw value times ``scale``, in ``unit``
    most: float = 1.0  # largest raw value; none is below 0
    higher_is_better: bool | None = True  # None: the nearer to 1, the better
    decimals: int = 1
    by_step: bool = False  # computed at each time step too, and not only over all steps
    needs: str = ""  # what reports must have besides the texts: "findings", or labels of the labeler of this name
    concerned: Callable[[Reports], AbstractSet[str]] | None = None
    """The patients that the value rests on, where these are not all; with fewer than a minimum cell it is None."""
    rounding: Callable[[float, int, int], float] = round_share
    """Rounds the value, given the number of reports or patients that it rests on, and the minimum cell."""
    curve: bool = False  # whether a chart over rounds is drawn
    group: str = CONTENT  # scores of a group share a table; all of them are computed at each step, or none is


def change_f1(reports: Reports) -> float | None:
    """Micro F1 of the changes."""
    return finding_f1(*reports.counted(reports.changes, reports.draft_changes))["finding_f1"]


def class_f1(reports: Reports) -> float | None:
    """Micro F1 of the classes that the rules find in both texts."""
    labeler = rule_labeler(reports.rules)

    def classes(text: str) -> set[str]:
        return {name for name, label in labeler(text).items() if label == "positive"}

    sides = ([*map(classes, texts)] for texts in (reports.references, reports.drafts))
    return finding_f1(*reports.counted(*sides))["finding_f1"]


def presence_f1(reports: Reports) -> float | None:
    """Micro F1 of the findings that both texts state; None where neither states any."""
    presences = [grade.presence for grades in reports.grades for grade in grades]
    right = presences.count("right")
    return 2 * right / (len(presences) + right) if presences else None


def accuracy(reports: Reports, part: Part) -> float | None:
    """Share right in this part, of the findings for which it is graded; None without any."""
    right = marks(chain.from_iterable(reports.grades), part)
    return sum(right) / len(right) if right else None


def claimed(reports: Reports) -> float | None:
    """Share of which the draft states a change, right or wrong, of the findings for which it is graded."""
    grades = [grade for grade in chain.from_iterable(reports.grades) if grade.change is not None]
    return sum(bool(grade.words["change"][1]) for grade in grades) / len(grades) if grades else None


def graded(reports: Reports, part: Part | Literal["presence"]) -> set[str]:
    """Patients with a finding for which this part is graded."""
    pairs = zip(reports.patients, reports.grades, strict=True)
    return {patient for patient, grades in pairs if any(getattr(g, part) is not None for g in grades)}


def changing(reports: Reports) -> set[str]:
    """Patients with a change, true or by the draft."""
    changes = zip(reports.patients, reports.changes, reports.draft_changes, strict=True)
    return {patient for patient, true, drafted in changes if true or drafted}


def _language(name: str, label: str, curve: bool = False, most: float = 1.0) -> Score:
    return Score(name, label, lambda r: r.language[name], by_step=True, curve=curve, group=LANGUAGE, most=most)


def _findings(name: str, label: str, curve: bool = True) -> Score:
    return Score(
        name, label, lambda r: r.finding_agreement[name], by_step=True, needs="findings", curve=curve, group=FINDINGS
    )


def _graded(part: Part) -> Score:
    concerned, of_part = partial(graded, part=part), partial(accuracy, part=part)
    label, unit = f"{part} right", "% of findings"
    group = GRADES if part == "side" else CHANGE
    return Score(f"{part}_accuracy", label, of_part, unit=unit, concerned=concerned, group=group)


EFFICACY: dict[str, tuple[str, Average, Metric, bool]] = {
    f"{labeler}{how}_{average}_{metric}": (labeler, average, metric, how == "_uncertain_positive")
    for labeler, how in (("chexbert", "_uncertain_negative"), ("chexbert", "_uncertain_positive"), ("radbert", ""))
    for average in AVERAGES
    for metric in METRICS
}
"""Scores of clinical efficacy: name to labeler, average, metric, and whether uncertain labels count as positive
(RadBERT gives none)."""


def _efficacy(name: str, labeler: str, average: Average, metric: Metric, uncertain: bool) -> Score:
    model = {"chexbert": "CheXbert", "radbert": "RadBERT"}[labeler]
    how = f" (uncertain is {'positive' if uncertain else 'negative'})" if "uncertain" in name else ""
    label, group = f"{model} {average} {metric.replace('f1', 'F1')}{how}", f"Clinical efficacy by {model}{how}"

    def efficacy(reports: Reports) -> float | None:
        means = reports.efficacy[uncertain]
        return means[average][metric] if means else None

    return Score(name, label, efficacy, needs=labeler, group=group)


SCORES = {
    score.name: score
    for score in (
        _graded("degree"),
        _graded("change"),
        replace(_graded("change"), name="change_coverage", label="change claimed", function=claimed),
        Score("finding_change_micro_f1", "changes named F1", change_f1, concerned=changing, curve=True, group=CHANGE),
        Score(
            "contradictions",
            "contradictions between visits",
            lambda r: contradicted(r.claims),
            unit="% of claims",
            higher_is_better=False,
            concerned=lambda r: set(map(itemgetter(0), r.claims)),
            group=CHANGE,
        ),
        *(_language(f"bleu_{n}", f"BLEU-{n}", curve=n == 4) for n in (1, 2, 3, 4)),
        _language("rouge_l", "ROUGE-L"),
        _language("cider", "CIDEr", curve=True, most=10.0),
        Score(
            "token_loss",
            "token loss",
            lambda r: winsorised_mean([*zip(r.patients, r.losses, strict=True)], r.min_cell),
            unit="nats per token",
            scale=1.0,
            most=1e4,
            higher_is_better=False,
            decimals=3,
            by_step=True,
            rounding=round_loss,
            curve=True,
            group=LANGUAGE,
        ),
        _findings("finding_f1", "finding F1"),
        _findings("finding_f1_known", "known findings F1"),
        _findings("finding_f1_new", "new findings F1"),
        _findings("finding_recall_new", "new findings recall", curve=False),
        _findings("finding_f1_macro", "finding F1 (mean of kinds)", curve=False),
        _findings("finding_f1_known_macro", "known findings F1 (mean of kinds)", curve=False),
        _findings("finding_f1_new_macro", "new findings F1 (mean of kinds)", curve=False),
        Score("presence_f1", "presence F1", presence_f1, concerned=partial(graded, part="presence"), group=GRADES),
        _graded("side"),
        Score("chexpert_rules_f1", "CheXpert classes F1 (rules)", class_f1, needs="chexpert-rules"),
        Score("ctrate_rules_f1", "CT-RATE classes F1 (rules)", class_f1, needs="ctrate-rules"),
        *(_efficacy(name, *of) for name, of in EFFICACY.items()),
        Score(
            "identical_share",
            "identical reports",
            lambda r: identical_share(r.drafts),
            unit="% of reports",
            higher_is_better=False,
        ),
        Score(
            "mismatched_share",
            "other references fit better",
            lambda r: mismatched_share(r.patients, r.references, r.drafts),
            unit="% of references",
            higher_is_better=False,
        ),
        Score(
            "length_ratio",
            "length ratio",
            lambda r: length_ratio(r.references, r.drafts),
            unit="words per word",
            scale=1.0,
            most=1e4,
            higher_is_better=None,
            decimals=2,
        ),
    )
}
"""In the order in which they are shown."""


def scores_of(reports: Reports, *, by_step: bool = False, n: int | None = None) -> dict[str, float | None]:
    """Compute every score that these reports can have."""
    available, scores = {"", *reports.available}, {}
    for score in SCORES.values():
        if score.needs in available and (score.by_step or not by_step):
            concerned = reports.patients if score.concerned is None else score.concerned(reports)
            value = score.function(reports) if enough(concerned, reports.min_cell) else None
            count = n if n is not None and score.concerned is None else len(concerned)
            scores[score.name] = None if value is None else score.rounding(value, count, reports.min_cell)
    return scores
