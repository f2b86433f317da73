"""Results of a suite as rows: each arm's scores, mean over hospitals and seeds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.suite.results import Done, by_arm

WHERE = {
    "members": "At the hospitals that took part",
    "generic": "The shared adapter alone, at the hospitals that took part",
    "outside": "The shared adapter alone, at hospitals outside",
}
"""Where a model is scored; tables come in this order."""
Means = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Summary:
    """One arm; ``seconds`` and ``bytes`` are means of its runs."""

    name: str
    label: str
    before: Means
    after: Means
    """By a place of :data:`WHERE` and score, one mean over hospitals for each seed."""
    scored: tuple[int, ...]
    """Of each seed, the round whose scores are compared."""
    seconds: float
    seconds_range: tuple[float, float]
    bytes: float

    def mean(self, where: str, score: str) -> float | None:
        """Mean over seeds; None where it was not measured."""
        values = self.after[where].get(score, [])
        return statistics.fmean(values) if values else None

    def spread(self, where: str, score: str) -> float | None:
        """Standard deviation over seeds; None for fewer than two."""
        values = self.after[where].get(score, [])
        return statistics.stdev(values) if len(values) > 1 else None


def summaries(results: Sequence[Done]) -> list[Summary]:
    """The arms that have a result, in the suite's order."""
    return [_summary(name, [one.result for one in several]) for name, several in by_arm(results).items()]


def _summary(name: str, results: list[dict[str, Any]]) -> Summary:
    places: list[Means] = [{where: {} for where in WHERE} for _ in range(2)]
    for result in results:
        evaluations = result["evaluations"]
        scored = next(event for event in evaluations if event["round"] == result["scored_round"])
        for values, event, when in zip(places, (evaluations[0], scored), ("start", "end"), strict=True):
            # without a patient adapter, the shared adapter alone is all there is
            shared = (event["generic"] or event["sites"]) if result["shares"] else {}
            outside = {site: scores[when] for site, scores in result["outside"].items()}
            for where, sites in zip(WHERE, (event["sites"], shared, outside), strict=True):
                for score in SCORES:
                    if known := [v for one in sites.values() if (v := one["all"].get(score)) is not None]:
                        values[where].setdefault(score, []).append(statistics.fmean(known))
    seconds = [result["seconds"] for result in results]
    return Summary(
        name=name,
        label=results[0]["label"],
        before=places[0],
        after=places[1],
        scored=tuple(result["scored_round"] for result in results),
        seconds=statistics.fmean(seconds),
        seconds_range=(min(seconds), max(seconds)),
        bytes=statistics.fmean(result["bytes"] for result in results),
    )
