"""The head of a comparison: which arm is best, by how much, and whether that is beyond chance; and the arms' order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import Interval
from fedtar_flare.reporting.format import number, score
from fedtar_flare.suite.compare import COMPARED, SUMS, Difference, interval_of
from fedtar_flare.suite.joining import Gain
from fedtar_flare.suite.results import Result, by_arm

MAIN = COMPARED[0]
"""The score by which arms are ordered; higher is better, as in all of :data:`COMPARED`."""


def arm_means(results: Sequence[Result], name: str) -> dict[str, float]:
    """A score at the hospitals that took part, mean over seeds, by arm, best first; arms without it are left out."""
    means = {}
    for arm, runs in by_arm(results).items():
        sums = [of_run for run in runs if (of_run := SUMS[name](run.members())) is not None]
        if sums and math.isfinite(mean := fmean(of_run.value() for of_run in sums)):
            means[arm] = mean
    return dict(sorted(means.items(), key=lambda pair: -pair[1]))


def ranked(results: Sequence[Result]) -> list[Result]:
    """The results, those of the arm with the best main score first."""
    rank = {arm: i for i, arm in enumerate(arm_means(results, MAIN))}
    return sorted(results, key=lambda result: rank.get(result.arm, len(rank)))


def arm_verdict(
    results: Sequence[Result], tests: Sequence[Difference], labels: Mapping[str, str], reference: str
) -> list[str]:
    """The verdict on the main score against the arm ``reference``, and which arms are best in the other scores."""
    best = {name: means for name in COMPARED if (means := arm_means(results, name))}
    if MAIN not in best:
        return ["No arm has a score that arms are compared by."]
    less = {test.arm: (test.difference, test.p) for test in tests if test.score == MAIN}
    order = [*best[MAIN]]
    interval = interval_of(MAIN, [run.members() for run in by_arm(results)[order[0]]])
    text = verdict(SCORES[MAIN].label, order, interval, less, reference, labels, partial(score, MAIN), " points")
    others = [f"{SCORES[name].label}: {labels[next(iter(best[name]))]}" for name in best if name != MAIN]
    return [text, *([f"Best in other scores: {'; '.join(others)}."] if others else [])]


def verdict(
    what: str,
    order: Sequence[str],
    best: Interval | None,
    less: Mapping[str, tuple[Interval, float | None]],
    reference: str,
    labels: Mapping[str, str],
    shown: Callable[[float], str],
    unit: str = "",
) -> str:
    """``FedTAR has the best BLEU-4, 81.3 (95 % interval 78.0 to 84.1); its difference to FedAvg is 0.4 points (-1.2 to
    2.0, p 0.412): not beyond chance.``

    ``order`` lists the arms, the best first; ``less`` has their differences to the reference, each with its p.
    """
    text = f"{labels[order[0]]} has the best {what}"
    text += f", {shown(best.value)} (95 % interval {shown(best.low)} to {shown(best.high)})" if best else ""
    arm = next((name for name in order[: 1 if order[0] != reference else None] if name in less), None)
    if arm is None:
        return f"{text}."
    gap, p = less[arm]
    tested = p is not None and math.isfinite(p)
    beyond = p < 0.05 if p is not None and tested else not gap.low <= 0 <= gap.high
    whose = "its difference" if arm == order[0] else f"next is {labels[arm]}, whose difference"
    inside = f"{shown(gap.low)} to {shown(gap.high)}{f', p {number(p)}' if tested else ''}"
    chance = "beyond chance" if beyond else "not beyond chance"
    return f"{text}; {whose} to {labels[reference]} is {shown(gap.value)}{unit} ({inside}): {chance}."


def gain_verdict(gains: Sequence[Gain], reference: str) -> str:
    """In how many scenarios and points the arms are better than the reference, by the interval of the main score."""
    shown = [gain.gain for gain in gains if gain.score == MAIN]
    if not shown:
        return f"No arm can be compared with '{reference}' yet."
    more, fewer = sum(gain.low > 0 for gain in shown), sum(gain.high < 0 for gain in shown)
    text = f"Against '{reference}', {SCORES[MAIN].label} is better in {more} of {len(shown)} settings, worse in {fewer}"
    return f"{text}, and not beyond chance in {len(shown) - more - fewer}."
