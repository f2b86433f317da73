"""All scores of generated reports by name: how each is computed, shown and read."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

from fedtar_flare.data.minimum_cell import enough, round_loss, round_share, winsorised_mean
from fedtar_flare.metrics.alarms import identical_share, length_ratio, mismatched_share
from fedtar_flare.metrics.grades import Part
from fedtar_flare.metrics.label_scores import AVERAGES, METRICS, Average, Metric
from fedtar_flare.metrics.reports import Reports

LANGUAGE, FINDINGS, CONTENT = "Language", "Findings", "Classes, change and repetition"
GRADES = "Findings against the reference"


@dataclass(frozen=True)
class Score:
    """One score, by its name in records and its label for people."""

    name: str
    label: str
    function: Callable[[Reports], float | None]
    """From reports to the raw value; None where it is not defined for them."""
    unit: str = "x 100"
    """Of the value as it is shown: raw times ``scale``, with ``decimals``."""
    scale: float = 100.0
    most: float = 1.0
    """Largest raw value; none is below 0."""
    higher_is_better: bool | None = True
    """None: the nearer to 1, the better."""
    decimals: int = 1
    by_step: bool = False
    """Computed at each time step too, not over all steps alone."""
    needs: str = ""
    """What reports must have besides the texts: ``findings``, or the labels of the labeler of this name."""
    concerned: Callable[[Reports], AbstractSet[str]] | None = None
    """Patients on whose reports the value rests, where these are not all: without a minimum cell of them it is None."""
    rounding: Callable[[float, int, int], float] = round_share
    """Of the value as it is reported, given how many reports or patients it rests on, and the minimum cell."""
    curve: bool = False
    """A chart over rounds is drawn."""
    group: str = CONTENT
    """Scores of one group share a table, and are computed at each step, or none of them is."""


def _language(name: str, label: str, curve: bool = False, most: float = 1.0) -> Score:
    return Score(name, label, lambda r: r.language[name], by_step=True, curve=curve, group=LANGUAGE, most=most)


def _findings(name: str, label: str, curve: bool = True) -> Score:
    return Score(
        name, label, lambda r: r.finding_agreement[name], by_step=True, needs="findings", curve=curve, group=FINDINGS
    )


def _graded(name: str, part: Part) -> Score:
    concerned, of_part = partial(Reports.graded, part=part), partial(Reports.accuracy, part=part)
    return Score(name, f"{part} right", of_part, unit="% of findings", concerned=concerned, group=GRADES)


EFFICACY: dict[str, tuple[str, Average, Metric, bool]] = {
    f"{labeler}{how}_{average}_{metric}": (labeler, average, metric, how == "_uncertain_positive")
    for labeler, how in (("chexbert", "_uncertain_negative"), ("chexbert", "_uncertain_positive"), ("radbert", ""))
    for average in AVERAGES
    for metric in METRICS
}
"""Clinical efficacy by name: labeler, average, metric, and whether what is uncertain counts as positive (RadBERT labels
nothing as uncertain)."""


def _efficacy(name: str, labeler: str, average: Average, metric: Metric, uncertain: bool) -> Score:
    model = {"chexbert": "CheXbert", "radbert": "RadBERT"}[labeler]
    how = f" (uncertain is {'positive' if uncertain else 'negative'})" if "uncertain" in name else ""
    of = partial(Reports.efficacy, average=average, metric=metric, uncertain=uncertain)
    label, group = f"{model} {average} {metric.replace('f1', 'F1')}{how}", f"Clinical efficacy by {model}{how}"
    return Score(name, label, of, needs=labeler, group=group)


SCORES = {
    score.name: score
    for score in (
        _language("bleu_1", "BLEU-1"),
        _language("bleu_2", "BLEU-2"),
        _language("bleu_3", "BLEU-3"),
        _language("bleu_4", "BLEU-4", curve=True),
        _language("rouge_l", "ROUGE-L"),
        _language("cider", "CIDEr", curve=True, most=10.0),
        Score(
            "token_loss",
            "token loss",
            lambda r: winsorised_mean([*zip(r.patients, r.losses, strict=True)], r.least),
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
        Score(
            "presence_f1",
            "presence F1",
            lambda r: r.presence_f1,
            concerned=lambda r: r.graded("presence"),
            group=GRADES,
        ),
        _graded("side_accuracy", "side"),
        _graded("degree_accuracy", "degree"),
        _graded("change_accuracy", "change"),
        Score("chexpert_rules_f1", "CheXpert classes F1 (rules)", lambda r: r.class_f1, needs="chexpert-rules"),
        Score("ctrate_rules_f1", "CT-RATE classes F1 (rules)", lambda r: r.class_f1, needs="ctrate-rules"),
        *(_efficacy(name, *one) for name, one in EFFICACY.items()),
        Score(
            "finding_change_micro_f1",
            "changes named F1",
            lambda r: r.change_f1,
            concerned=Reports.changing,
            curve=True,
        ),
        Score(
            "contradictions",
            "contradictions between visits",
            Reports.contradictions,
            unit="% of claims",
            higher_is_better=False,
            concerned=Reports.claiming,
        ),
        Score(
            "identical_share",
            "identical reports",
            lambda r: identical_share(r.generated),
            unit="% of reports",
            higher_is_better=False,
        ),
        Score(
            "mismatched_share",
            "other references fit better",
            lambda r: mismatched_share(r.patients, r.references, r.generated),
            unit="% of references",
            higher_is_better=False,
        ),
        Score(
            "length_ratio",
            "length ratio",
            lambda r: length_ratio(r.references, r.generated) if r.has_words else None,
            unit="words per word",
            scale=1.0,
            most=1e4,
            higher_is_better=None,
            decimals=2,
        ),
    )
}
"""In the order in which they are shown."""


def scores_of(
    reports: Reports, *, min_cell: int = 1, by_step: bool = False, n: int | None = None
) -> dict[str, float | None]:
    """Every score that these reports can have, by name; None where one is not defined, or rests on too few patients.

    ``min_cell`` is the fewest distinct patients that a value may rest on, and decides how it is rounded
    (:attr:`Score.rounding`); ``by_step`` selects :attr:`Score.by_step`; ``n`` is the number of reports that
    is told, by default theirs.
    """
    available, found = {"", *reports.available}, {}
    for score in SCORES.values():
        if score.needs in available and (score.by_step or not by_step):
            concerned = reports.patients if score.concerned is None else score.concerned(reports)
            value = score.function(reports) if enough(concerned, min_cell) else None
            count = n if n is not None and score.concerned is None else len(concerned)
            found[score.name] = None if value is None else score.rounding(value, count, min_cell)
    return found
