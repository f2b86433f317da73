"""The head of a comparison: which arm is best, by how much, and whether that is beyond chance; and the arms' order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import Interval
from fedtar_flare.reporting.format import number, score
from fedtar_flare.suite.against import COMPARED, SUMS, Difference, value
from fedtar_flare.suite.joining import Gain
from fedtar_flare.suite.results import Done, by_arm

MAIN = COMPARED[0]
"""The score by which arms are ordered; of COMPARED, of which higher values are better."""


def means(results: Sequence[Done], name: str) -> dict[str, float]:
    """By arm, a score of the hospitals that took part, mean over seeds, best first; arms without it are left out."""
    found = {}
    for arm, runs in by_arm(results).items():
        sums = [one for run in runs if (one := SUMS[name](run.members())) is not None]
        if sums and math.isfinite(mean := fmean(one.value() for one in sums)):
            found[arm] = mean
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def ranked(results: Sequence[Done]) -> list[Done]:
    """The results, those of the arm with the best main score first."""
    place = {arm: i for i, arm in enumerate(means(results, MAIN))}
    return sorted(results, key=lambda one: place.get(one.experiment.name, len(place)))


def families(results: Sequence[Done]) -> dict[str, str]:
    """By the label of an arm, its method."""
    return {one.result["label"]: one.experiment.arm.method for one in results}


def of_reports(
    results: Sequence[Done], against: Sequence[Difference], labels: Mapping[str, str], first: str
) -> list[str]:
    """The verdict on the main score against the arm ``first``, and which arms are best in the others."""
    best = {name: found for name in COMPARED if (found := means(results, name))}
    if MAIN not in best:
        return ["No arm has a score that arms are compared by."]
    less = {one.arm: (one.difference, one.p) for one in against if one.score == MAIN}
    arm = next(iter(best[MAIN]))
    of_best, shown = value(MAIN, [one.members() for one in by_arm(results)[arm]]), partial(score, MAIN)
    text = verdict(SCORES[MAIN].label, [*best[MAIN]], of_best, less, first, labels, shown, " points")
    others = [f"{SCORES[name].label}: {labels[next(iter(best[name]))]}" for name in best if name != MAIN]
    return [text, *([f"Best in other scores: {'; '.join(others)}."] if others else [])]


def verdict(
    what: str,
    order: Sequence[str],
    best: Interval | None,
    less: Mapping[str, tuple[Interval, float | None]],
    first: str,
    labels: Mapping[str, str],
    shown: Callable[[float], str],
    unit: str = "",
) -> str:
    """``FedTAR has the best BLEU-4, 81.3 (95 % interval 78.0 to 84.1); its difference to FedAvg is 0.4 points (-1.2 to
    2.0, p 0.412): not beyond chance.``

    ``order`` are arms, the best first; ``less`` has their differences to the arm ``first``, each with its p.
    """
    text = f"{labels[order[0]]} has the best {what}"
    text += f", {shown(best.value)} (95 % interval {shown(best.low)} to {shown(best.high)})" if best else ""
    arm = next((name for name in order[: 1 if order[0] != first else None] if name in less), None)
    if arm is None:
        return f"{text}."
    gap, p = less[arm]
    tested = p is not None and math.isfinite(p)
    beyond = p < 0.05 if p is not None and tested else not gap.low <= 0 <= gap.high
    whose = "its difference" if arm == order[0] else f"next is {labels[arm]}, whose difference"
    inside = f"{shown(gap.low)} to {shown(gap.high)}{f', p {number(p)}' if tested else ''}"
    chance = "beyond chance" if beyond else "not beyond chance"
    return f"{text}; {whose} to {labels[first]} is {shown(gap.value)}{unit} ({inside}): {chance}."


def of_gains(found: Sequence[Gain], reference: str, alone: bool) -> list[str]:
    """In how many scenarios and points the arms are better than the reference, by the interval of the main score.

    It says whether joining pays where in the reference each hospital trains ``alone``.
    """
    gains = [one for one in found if one.score == MAIN]
    if not gains:
        return [f"No arm can be compared with '{reference}' yet."]
    more, fewer = sum(one.gain.low > 0 for one in gains), sum(one.gain.high < 0 for one in gains)
    arms, label = {one.label for one in gains}, SCORES[MAIN].label
    chance, of = len(gains) - more - fewer, f"in {more} of {len(gains)} settings"
    if alone:
        text = f"Joining pays in {label} over '{reference}' {of}, costs in {fewer}, and is"
    else:
        who = f"'{arms.pop()}'" if len(arms) == 1 else "Another arm"
        text = f"{who} is better than '{reference}' on {label} {of}, worse in {fewer}, and"
    return [f"{text} not beyond chance in {chance}."]
