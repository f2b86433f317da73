"""The results of a suite that are there, read for its page."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from fedtar_flare.core.files import read_json
from fedtar_flare.suite.plan import Experiment
from fedtar_flare.suite.run import result_file, rows_file

T = TypeVar("T")
Row = dict[str, Any]
"""Scores of one report, as :func:`fedtar_flare.learning.evaluation.report_rows` gives them, with its ``site`` and
``when``: ``start`` before training, ``end`` at the scored round. Of a method that classifies, scores of one test image
in a task (:mod:`fedtar_flare.suite.collect`)."""


@dataclass(frozen=True)
class Done:
    """An experiment that has a result."""

    experiment: Experiment
    result: dict[str, Any]
    rows_path: Path

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
        if not self.result["shares"]:
            return []
        return self.members(when, personal=False) or self.members(when)

    def outside(self, when: str = "end") -> list[Row]:
        """Of the shared adapter alone at hospitals outside."""
        sites = set(self.experiment.variant.outside)
        return [row for row in self.rows if row["site"] in sites and row["when"] == when]


def done(folder: Path, experiments: Sequence[Experiment]) -> list[Done]:
    """The experiments that have a result, in the suite's order."""
    return [
        Done(one, read_json(file), rows_file(folder, one))
        for one in experiments
        if (file := result_file(folder, one)).is_file()
    ]


def by_arm(results: Sequence[Done]) -> dict[str, list[Done]]:
    """The results of each arm, in the suite's order."""
    return grouped(results, lambda one: one.experiment.name)


def grouped(values: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """The values by key, in the order in which the keys come first."""
    groups: dict[Any, list[T]] = {}
    for one in values:
        groups.setdefault(key(one), []).append(one)
    return groups


def at_sites(rows: Iterable[Row], sites: Collection[str]) -> list[Row]:
    """The rows of these hospitals."""
    return [row for row in rows if row["site"] in sites]
