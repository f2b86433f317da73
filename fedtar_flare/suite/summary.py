"""Results of a suite as rows: each arm's scores, mean over hospitals and seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True)
class Summary:
    """One arm.

    Parameters
    ----------
    seeds : tuple of int
        Those that are done.
    before, after : dict
        By a place of :data:`WHERE` and score, one mean over hospitals for each seed.
    scored : tuple of int
        Of each seed, the round whose scores are compared.
    seconds, bytes : float
        Mean of a run.
    seconds_range : (float, float)
        Over seeds.
    """

    name: str
    label: str
    seeds: tuple[int, ...]
    before: dict[str, dict[str, list[float]]]
    after: dict[str, dict[str, list[float]]]
    scored: tuple[int, ...]
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
    before: dict[str, dict[str, list[float]]] = {where: {} for where in WHERE}
    after: dict[str, dict[str, list[float]]] = {where: {} for where in WHERE}
    for result in results:
        evaluations = result["evaluations"]
        scored = next(event for event in evaluations if event["round"] == result["scored_round"])
        for values, event, when in ((before, evaluations[0], "start"), (after, scored, "end")):
            _add(values["members"], (site["all"] for site in event["sites"].values()))
            # without a patient adapter, the shared adapter alone is all there is
            shared = (event["generic"] or event["sites"]) if result["shares"] else {}
            _add(values["generic"], (site["all"] for site in shared.values()))
            _add(values["outside"], (hospital[when]["all"] for hospital in result["outside"].values()))
    seconds = [result["seconds"] for result in results]
    return Summary(
        name=name,
        label=results[0]["label"],
        seeds=tuple(result["seed"] for result in results),
        before=before,
        after=after,
        scored=tuple(result["scored_round"] for result in results),
        seconds=statistics.fmean(seconds),
        seconds_range=(min(seconds), max(seconds)),
        bytes=statistics.fmean(result["bytes"] for result in results),
    )


def _add(columns: dict[str, list[float]], hospitals: Iterable[Mapping[str, Any]]) -> None:
    """Add the mean over hospitals of each score that any of them has."""
    known = list(hospitals)
    for score in SCORES:
        if values := [one[score] for one in known if one.get(score) is not None]:
            columns.setdefault(score, []).append(statistics.fmean(values))
