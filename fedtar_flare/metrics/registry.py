"""All scores of drafts by name: how each is computed, rounded and shown."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter

from fedtar_flare.data.minimum_cell import enough, round_loss, round_share, winsorised_mean
from fedtar_flare.metrics.agreement import AVERAGES, METRICS, Average, Metric
from fedtar_flare.metrics.grades import Part
from fedtar_flare.metrics.language import identical_share, length_ratio, mismatched_share
from fedtar_flare.metrics.reports import Reports, accuracy, changing, efficacy, graded

LANGUAGE, FINDINGS, CONTENT = "Language", "Findings", "Classes, change and repetition"
GRADES = "Findings against the reference"


@dataclass(frozen=True)
class Score:
    """A score: its name in records, its label for people, and how it is computed and shown.

    Attributes
    ----------
    name, label : str
    function : callable
        From :class:`Reports` to the raw value; None where it is undefined.
    unit, scale, decimals : str, float, int
        Of the value that people see, raw times ``scale``.
    most : float
        Largest raw value; none is below 0.
    higher_is_better : bool, optional
        None: the nearer to 1, the better.
    by_step : bool
        Whether it is computed at each time step too, and not only over all steps.
    needs : str
        What reports must have besides the texts: ``findings``, or the labels of the labeler of this name.
    concerned : callable, optional
        The patients that the value rests on, where these are not all. With fewer than a minimum cell it is None.
    rounding : callable
        Rounds the value, given the number of reports or patients that it rests on, and the minimum cell.
    curve : bool
        Whether a chart over rounds is drawn.
    group : str
        Scores of a group share a table; all of them are computed at each step, or none is.
    """

    name: str
    label: str
    function: Callable[[Reports], float | None]
    unit: str = "x 100"
    scale: float = 100.0
    most: float = 1.0
    higher_is_better: bool | None = True
    decimals: int = 1
    by_step: bool = False
    needs: str = ""
    concerned: Callable[[Reports], AbstractSet[str]] | None = None
    rounding: Callable[[float, int, int], float] = round_share
    curve: bool = False
    group: str = CONTENT


def _language(name: str, label: str, curve: bool = False, most: float = 1.0) -> Score:
    return Score(name, label, lambda r: r.language[name], by_step=True, curve=curve, group=LANGUAGE, most=most)


def _findings(name: str, label: str, curve: bool = True) -> Score:
    return Score(
        name, label, lambda r: r.finding_agreement[name], by_step=True, needs="findings", curve=curve, group=FINDINGS
    )


def _graded(name: str, part: Part) -> Score:
    concerned, of_part = partial(graded, part=part), partial(accuracy, part=part)
    return Score(name, f"{part} right", of_part, unit="% of findings", concerned=concerned, group=GRADES)


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
    of = partial(efficacy, average=average, metric=metric, uncertain=uncertain)
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
        Score(
            "presence_f1",
            "presence F1",
            attrgetter("presence_f1"),
            concerned=partial(graded, part="presence"),
            group=GRADES,
        ),
        _graded("side_accuracy", "side"),
        _graded("degree_accuracy", "degree"),
        _graded("change_accuracy", "change"),
        Score("chexpert_rules_f1", "CheXpert classes F1 (rules)", attrgetter("class_f1"), needs="chexpert-rules"),
        Score("ctrate_rules_f1", "CT-RATE classes F1 (rules)", attrgetter("class_f1"), needs="ctrate-rules"),
        *(_efficacy(name, *one) for name, one in EFFICACY.items()),
        Score("finding_change_micro_f1", "changes named F1", attrgetter("change_f1"), concerned=changing, curve=True),
        Score(
            "contradictions",
            "contradictions between visits",
            attrgetter("contradictions"),
            unit="% of claims",
            higher_is_better=False,
            concerned=lambda r: set(map(itemgetter(0), r.claims)),
        ),
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
"""All scores by name, in the order in which they are shown."""


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
