"""All scores of drafts by name: how each is computed, rounded and shown."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Literal

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.plugins import announced, load
from fedtar_flare.data.minimum_cell import enough, round_loss, round_share, winsorised_mean
from fedtar_flare.metrics.agreement import AVERAGES, METRICS, Average, Metric, finding_f1
from fedtar_flare.metrics.clinical import abnormal, clinical_score
from fedtar_flare.metrics.grades import Grade, Part, marks
from fedtar_flare.metrics.language import identical_share, length_ratio, mismatched_share
from fedtar_flare.metrics.reports import Reports, contradicted
from fedtar_flare.metrics.score import Score, raw_value

logger = logging.getLogger(__name__)

LANGUAGE, FINDINGS = "Language", "Findings"
CHANGE, GRADES = "Degree and change between visits", "Findings against the reference"


def clinical(reports: Reports) -> float | None:
    """Mean clinical score, by the findings that references of a minimum cell of patients state."""
    named = [frozenset(abnormal(reference)) for reference in reports.references]
    counted = None if reports.min_cell == 1 else reports.common(named)
    values = map(partial(clinical_score, counted=counted), reports.references, reports.drafts)
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def presence_f1(reports: Reports) -> float | None:
    """Micro F1 of the findings that both texts state; None where neither states any."""
    presences = [grade.presence for grades in reports.grades for grade in grades]
    right = presences.count("right")
    return 2 * right / (len(presences) + right) if presences else None


def accuracy(reports: Reports, part: Part) -> float | None:
    """Share right in this part, of the findings for which it is graded; None without any."""
    right = marks(chain.from_iterable(reports.grades), part)
    return sum(right) / len(right) if right else None


def claims_of(grades: Iterable[Grade]) -> tuple[int, int]:
    """Of how many findings the draft states a change, right or wrong, and for how many it is graded."""
    graded = [bool(grade.words["change"][1]) for grade in grades if grade.change is not None]
    return sum(graded), len(graded)


def claimed(reports: Reports) -> float | None:
    """Share of findings of which the draft states a change, of those for which it is graded."""
    claims, graded = claims_of(chain.from_iterable(reports.grades))
    return claims / graded if graded else None


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


OWN = {
    score.name: score
    for score in (
        Score("clinical_score", "clinical score", clinical, pair=clinical_score, curve=True, group=GRADES),
        _graded("degree"),
        _graded("change"),
        replace(_graded("change"), name="change_coverage", label="change claimed", function=claimed),
        Score(
            "finding_change_micro_f1",
            "changes named F1",
            lambda r: finding_f1(*r.counted(r.changes, r.draft_changes))["finding_f1"],
            concerned=changing,
            curve=True,
            group=CHANGE,
        ),
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
        Score("chexpert_rules_f1", "CheXpert classes F1 (rules)", needs="chexpert-rules"),
        Score("ctrate_rules_f1", "CT-RATE classes F1 (rules)", needs="ctrate-rules"),
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

AT_SITE = {
    score.name: score
    for score in (
        *(Score(f"radgraph_{level}", f"RadGraph F1 ({level})") for level in ("simple", "partial", "complete")),
        Score("ratescore", "RaTEScore"),
        Score("green", "GREEN"),
        Score("radcliq_v1", "RadCliQ-v1", unit="points", scale=1.0, higher_is_better=False, decimals=3),
        Score("bertscore", "BERTScore"),
        Score("semb_score", "SembScore"),
        Score("crimson", "CRIMSON"),
    )
}
"""RadEval's by its keys, for a site's own tables: looked up, not listed, so that no run has them and none leaves."""


class _Scores(Mapping[str, Score]):
    """This package's own scores, then those of other packages, which are imported when they are looked up."""

    def __getitem__(self, name: str) -> Score:
        return OWN.get(name) or AT_SITE.get(name) or load("score", name, Score)

    def __contains__(self, name: object) -> bool:
        return name in OWN or name in foreign()

    def __iter__(self) -> Iterator[str]:
        return iter([*OWN, *foreign()])

    def __len__(self) -> int:
        return sum(1 for _ in self)


SCORES = _Scores()


def foreign() -> list[str]:
    """Names of the scores of other packages, without those that cannot be loaded; none replaces an own one."""
    names = []
    for name in announced("score"):
        if name not in OWN:
            try:
                load("score", name, Score)
                names.append(name)
            except ConfigError as error:
                logger.warning("%s", error)
    return names


def scores_of(
    reports: Reports, *, by_step: bool = False, n: int | None = None, admitted: Collection[str] = ()
) -> dict[str, float | None]:
    """Compute every own score that these reports can have, and those of other packages that the site has admitted."""
    available, scores = {"", reports.rules}, {}
    if reports.known is not None:
        available.add("findings")
    if reports.text_labeler:
        available.add(reports.text_labeler.labeler)
    for score in (*OWN.values(), *map(SCORES.__getitem__, admitted)):
        others = {} if score.name in OWN else announced("labeler")
        if (score.needs in available or score.needs in others) and (score.by_step or not by_step):
            compute = _compute if score.name in OWN else _compute_foreign
            scores[score.name] = compute(score, reports, n)
    return scores


def _compute(score: Score, reports: Reports, n: int | None) -> float | None:
    concerned = reports.patients if score.concerned is None else score.concerned(reports)
    value = raw_value(score, reports) if enough(concerned, reports.min_cell) else None
    count = n if n is not None and score.concerned is None else len(concerned)
    return None if value is None else score.rounding(value, count, reports.min_cell)


def _compute_foreign(score: Score, reports: Reports, n: int | None) -> float | None:
    """The same of a score that may fail, leave its bounds, name patients who are none, or round as it likes."""

    def rounding(value: float, count: int, least: int) -> float:
        if not 0 <= value <= score.most:
            raise ValueError(f"not within 0 to {score.most:g}")
        return score.most * round_share(float(value) / score.most, count, least)

    def concerned(reports: Reports) -> set[str]:
        return {*reports.patients} & (score.concerned(reports) if score.concerned else {*reports.patients})

    try:
        return _compute(replace(score, rounding=rounding, concerned=concerned), reports, n)
    except Exception as error:
        logger.warning("score '%s' of another package has no value here: %s", score.name, type(error).__name__)
        return None
