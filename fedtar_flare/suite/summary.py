"""Results of a suite as rows: each arm's scores, mean over hospitals and seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.suite.results import Done

WHERE = {
    "members": "At the hospitals that took part",
    "generic": "The shared adapter alone, at the hospitals that took part",
    "outside": "The shared adapter alone, at hospitals outside",
}
"""Where a model is scored; tables come in this order."""


@dataclass(frozen=True)
class Summary:
    """One arm.

    Args:
        seeds: those that are done.
        before, after: by a place of :data:`WHERE` and score, one mean over hospitals for each seed.
        rounds: by score, (round, mean over members and seeds).
        scored: of each seed, the round whose scores are compared.
        seconds, bytes: mean of a run.
    """

    name: str
    label: str
    seeds: tuple[int, ...]
    before: dict[str, dict[str, list[float]]]
    after: dict[str, dict[str, list[float]]]
    rounds: dict[str, list[tuple[int, float]]]
    scored: tuple[int, ...]
    seconds: float
    bytes: float

    def mean(self, where: str, score: str) -> float | None:
        """Mean over seeds; None where it was not measured."""
        values = self.after.get(where, {}).get(score, [])
        return statistics.fmean(values) if values else None

    def spread(self, where: str, score: str) -> float | None:
        """Standard deviation over seeds; None for fewer than two."""
        values = self.after.get(where, {}).get(score, [])
        return statistics.stdev(values) if len(values) > 1 else None


def summaries(results: Sequence[Done]) -> list[Summary]:
    """The arms that have a result, in the suite's order."""
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        by_arm.setdefault(one.cell.name, []).append(one.result)
    return [_summary(name, several) for name, several in by_arm.items()]


def _summary(name: str, results: list[dict[str, Any]]) -> Summary:
    before: dict[str, dict[str, list[float]]] = {where: {} for where in WHERE}
    after: dict[str, dict[str, list[float]]] = {where: {} for where in WHERE}
    rounds: dict[str, dict[int, list[float]]] = {score: {} for score in SCORES}
    for result in results:
        evaluations = result["evaluations"]
        scored = next(event for event in evaluations if event["round"] == result["scored_round"])
        for values, event in ((before, evaluations[0]), (after, scored)):
            _add(values["members"], (site["all"] for site in event["sites"].values()))
            # without a personal part, the shared adapter alone is all there is
            shared = (event["generic"] or event["sites"]) if result["shares"] else {}
            _add(values["generic"], (site["all"] for site in shared.values()))
        for values, when in ((before, "start"), (after, "end")):
            _add(values["outside"], (hospital[when]["all"] for hospital in result["outside"].values()))
        for event in evaluations:
            for score, value in _means(site["all"] for site in event["sites"].values()).items():
                rounds[score].setdefault(event["round"], []).append(value)
    return Summary(
        name=name,
        label=results[0]["label"],
        seeds=tuple(result["seed"] for result in results),
        before=before,
        after=after,
        rounds={score: _curve(points) for score, points in rounds.items() if points},
        scored=tuple(result["scored_round"] for result in results),
        seconds=statistics.fmean(result["seconds"] for result in results),
        bytes=statistics.fmean(result["bytes"] for result in results),
    )


def _means(cells: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Mean over hospitals of each score that any of them has."""
    known = list(cells)
    columns = {score: [cell[score] for cell in known if cell.get(score) is not None] for score in SCORES}
    return {score: statistics.fmean(values) for score, values in columns.items() if values}


def _add(columns: dict[str, list[float]], cells: Iterable[Mapping[str, Any]]) -> None:
    for score, value in _means(cells).items():
        columns.setdefault(score, []).append(value)


def _curve(points: Mapping[int, list[float]]) -> list[tuple[int, float]]:
    return [(number, statistics.fmean(values)) for number, values in sorted(points.items())]
