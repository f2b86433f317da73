"""The finished runs of a suite, read for its page."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from fedtar_flare.core.files import read_json
from fedtar_flare.suite.plan import Experiment

T = TypeVar("T")
Row = dict[str, Any]
"""Scores of one report, as :func:`fedtar_flare.learning.evaluation.report_rows` gives them, with its ``site`` and
``when``: ``start`` before training, ``end`` at the scored round. Of a method that classifies, scores of one test image
in a task (:mod:`fedtar_flare.suite.collect`)."""

RESULTS = "results"
"""Folder of a comparison's results."""

WHERE = {
    "members": "At the hospitals that took part",
    "generic": "The shared adapter alone, at the hospitals that took part",
    "outside": "The shared adapter alone, at hospitals outside",
}
"""Where a model is scored, in the order of the page's tables."""


def result_file(folder: Path, experiment: Experiment) -> Path:
    """``<folder>/results/<arm>[-<variant>]-<seed>-<digest>.json``."""
    return folder / RESULTS / f"{experiment.file_name}.json"


def rows_file(folder: Path, experiment: Experiment) -> Path:
    """The scores of single reports that belong to a result."""
    return result_file(folder, experiment).with_suffix(".rows.jsonl")


@dataclass(frozen=True)
class Result:
    """An experiment with the content of its result file."""

    experiment: Experiment
    content: dict[str, Any]
    rows_path: Path

    @property
    def arm(self) -> str:
        """Name of the arm."""
        return self.experiment.name

    @property
    def label(self) -> str:
        """The arm's name for people."""
        return str(self.content["label"])

    @cached_property
    def rows(self) -> list[Row]:
        """Scores of single reports or images, of all hospitals."""
        return [json.loads(line) for line in self.rows_path.read_text(encoding="utf-8").splitlines()]

    def members(self, when: str = "end", personal: bool = True) -> list[Row]:
        """Of the hospitals that took part, with the patient adapter where there is one, or without it."""
        sites = set(self.experiment.sites)
        return [r for r in self.rows if r["site"] in sites and r["when"] == when and r["personal"] is personal]

    def generic(self, when: str = "end") -> list[Row]:
        """Of the shared adapter alone at the hospitals that took part; empty for a method that shares nothing."""
        if not self.content["shares"]:
            return []
        return self.members(when, personal=False) or self.members(when)

    def outside(self, when: str = "end") -> list[Row]:
        """Of the shared adapter alone at hospitals outside."""
        sites = set(self.experiment.variant.outside)
        return [row for row in self.rows if row["site"] in sites and row["when"] == when]

    def hospital_mean(self, where: str, score: str, when: str = "end") -> float | None:
        """Mean of a score over the hospitals of a place in :data:`WHERE`, from the run's evaluations."""
        if where == "outside":
            sites = {site: scores[when] for site, scores in self.content["outside"].items()}
        else:
            number = self.content["scored_round"] if when == "end" else self.content["evaluations"][0]["round"]
            event = next(event for event in self.content["evaluations"] if event["round"] == number)
            sites = event["sites"]
            if where == "generic":  # without a patient adapter, the shared adapter alone is all that exists
                sites = (event["generic"] or sites) if self.content["shares"] else {}
        values = [value for scores in sites.values() if (value := scores["all"].get(score)) is not None]
        return fmean(values) if values else None


def read_results(folder: Path, experiments: Sequence[Experiment]) -> list[Result]:
    """The experiments that have a result, in the suite's order."""
    files = [(experiment, result_file(folder, experiment)) for experiment in experiments]
    return [Result(one, read_json(file), rows_file(folder, one)) for one, file in files if file.is_file()]


def by_arm(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each arm, in the suite's order."""
    return grouped(results, lambda result: result.arm)


def seed_means(results: Sequence[Result], where: str, score: str, when: str = "end") -> list[float]:
    """:meth:`Result.hospital_mean` of each run that has it."""
    means = [result.hospital_mean(where, score, when) for result in results]
    return [mean for mean in means if mean is not None]


def grouped(values: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """The values by key, keys in the order of their first value."""
    groups: dict[Any, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def at_sites(rows: Iterable[Row], sites: Collection[str]) -> list[Row]:
    """The rows of these hospitals."""
    return [row for row in rows if row["site"] in sites]
