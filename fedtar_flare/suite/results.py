"""The finished runs of a suite: what was scored in each, with intervals, and each arm against the reference."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import read_json
from fedtar_flare.metrics import significance
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import Interval, SumsOf, Units, compare, finding_f1, holm, over_seeds
from fedtar_flare.reporting.scores import SEEN
from fedtar_flare.suite.plan import Experiment
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS, NEW_FINDINGS

T = TypeVar("T")
Row = dict[str, Any]
"""Scores of a report or test image, with its ``site`` and ``when``: ``start``, or ``end`` (the scored round)."""
RESULTS = "results"  # folder of a comparison's results
WHERE = {
    "members": "At the hospitals that took part",
    "generic": "The shared adapter alone, at the hospitals that took part",
    "outside": "The shared adapter alone, at hospitals outside",
}
"""Where a model is scored, in the order of the page's tables."""


def result_file(folder: Path, experiment: Experiment) -> Path:
    """``<folder>/results/<arm>-<seed>-<digest>.json``."""
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
        return self.experiment.name

    @property
    def label(self) -> str:
        return str(self.content["label"])

    @cached_property
    def rows(self) -> list[Row]:
        """Scores of single reports or images, of all hospitals."""
        try:
            return [json.loads(line) for line in self.rows_path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            text = f"{self.rows_path}: it is missing, changed or cut short ({error}): remove the .json file beside it"
            raise ConfigError(f"{text}, and fedtar compare makes the run again") from error

    def members(self, when: str = "end", personal: bool = True) -> list[Row]:
        """Of the hospitals that took part, with the patient adapter where there is one, or without it."""
        sites = set(self.experiment.suite.sites)
        return [r for r in self.rows if r["site"] in sites and r["when"] == when and r["personal"] is personal]

    def generic(self, when: str = "end") -> list[Row]:
        """Of the shared adapter alone at the hospitals that took part; empty for a method that shares nothing."""
        if not self.content["shares"]:
            return []
        return self.members(when, personal=False) or self.members(when)

    def outside(self, when: str = "end") -> list[Row]:
        """Of the shared adapter alone at hospitals outside."""
        sites = set(self.experiment.suite.outside)
        return [row for row in self.rows if row["site"] in sites and row["when"] == when]

    def hospital_mean(self, where: str, score: str, when: str = "end") -> float | None:
        """Mean of a score over the hospitals of an entry of :data:`WHERE`, from the run's evaluations."""
        if where == "outside":
            sites = {site: scores[when] for site, scores in self.content["outside"].items()}
        else:
            number = self.content["scored_round"] if when == "end" else 0
            event = next((event for event in self.content["evaluations"] if event["round"] == number), None)
            if event is None:  # of an evaluation, which has no start
                return None
            sites = event["sites"]
            if where == "generic":  # without a patient adapter, the shared adapter alone is all that exists
                sites = (event["generic"] or sites) if self.content["shares"] else {}
        values = [value for scores in sites.values() if (value := scores["all"].get(score)) is not None]
        return fmean(values) if values else None


def read_results(folder: Path, experiments: Sequence[Experiment]) -> list[Result]:
    """The experiments that have a result, in the suite's order."""
    files = [(experiment, result_file(folder, experiment)) for experiment in experiments]
    return [Result(run, read_json(file), rows_file(folder, run)) for run, file in files if file.is_file()]


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


Pair = tuple[list[Row], list[Row]]  # reports of two runs with the same seed
_FINDING_F1 = partial(finding_f1, "findings", "findings_in_text")
SUMS: dict[str, SumsOf] = {
    **significance.SUMS,
    "finding_f1_known": partial(_FINDING_F1, findings=KNOWN_FINDINGS),
    "finding_f1_new": partial(_FINDING_F1, findings=NEW_FINDINGS),
    "finding_f1_macro": partial(_FINDING_F1, findings=FINDINGS, average="macro"),
    "finding_f1_known_macro": partial(_FINDING_F1, findings=KNOWN_FINDINGS, average="macro"),
    "finding_f1_new_macro": partial(_FINDING_F1, findings=NEW_FINDINGS, average="macro"),
}
"""By a score's name in the registry what each patient adds to it, for scores with an interval."""

VALUE_REPLICATES = 1_000  # of a value; differences, on which a decision may rest, have five times as many
MAIN = "bleu_4"  # orders the arms
COMPARED = ("clinical_score", *SEEN, MAIN, "cider", "finding_f1_known", "finding_f1_new", "finding_f1_new_macro")


class Difference(NamedTuple):
    """An arm's score minus the reference's (see :class:`.Comparison`), with p corrected after Holm."""

    arm: str
    score: str
    difference: Interval
    p: float
    win_rate: float
    replicates_won: float


def differences(results: Sequence[Result], reference: str) -> list[Difference]:
    """All arms against the reference in :data:`COMPARED`, on the seeds that both have; Holm over the arms."""
    arms = [name for name in dict.fromkeys(result.arm for result in results) if name != reference]
    pairs = {arm: paired_runs(results, arm, reference) for arm in arms}
    out = []
    for score in COMPARED:
        out += corrected([test for arm in arms if (test := difference(arm, score, pairs[arm]))])
    return out


def compare_scores(arm: str, runs: Sequence[Pair], units: Units) -> list[Difference]:
    """Compare an arm with another in every score of :data:`SUMS` (FedTAR, Table 5)."""
    return corrected([test for score in SUMS if (test := difference(arm, score, runs, units))])


def paired_runs(results: Sequence[Result], arm: str, reference: str) -> list[Pair]:
    """Report rows of an arm's runs and the reference's, on the seeds and test visits that both have."""
    runs: dict[tuple[str, int], dict[Any, Row]] = {}
    for result in (result for result in results if result.arm in (arm, reference)):
        rows = {(row["site"], row["patient_id"], row.get("visit_id")): row for row in result.members()}
        runs[result.arm, result.experiment.seed] = rows
    pairs = [(runs[arm, seed], runs[reference, seed]) for n, seed in runs if n == arm and (reference, seed) in runs]
    return [([a[key] for key in a if key in b], [b[key] for key in b if key in a]) for a, b in pairs]


def difference(arm: str, score: str, runs: Sequence[Pair], units: Units = "patients") -> Difference | None:
    """The difference in a score, over seeds and patients or studies; None where no pair of runs has a number."""
    sums = [(SUMS[score](a, units), SUMS[score](b, units)) for a, b in runs]
    pairs = [(a, b) for a, b in sums if a is not None and b is not None]
    if not pairs:
        return None
    higher, tie = SCORES[score].higher_is_better is not False, SCORES[score].tie
    test = Difference(arm, score, *compare(*zip(*pairs, strict=True), higher_is_better=higher, tie=tie))
    return test if np.isfinite(test.difference.value) else None


def corrected(tests: Sequence[Difference]) -> list[Difference]:
    """The same tests with p corrected after Holm for their number."""
    p = holm({i: test.p for i, test in enumerate(tests) if np.isfinite(test.p)})
    return [test._replace(p=p.get(i, test.p)) for i, test in enumerate(tests)]


def interval_of(score: str, runs: Iterable[list[Row]]) -> Interval | None:
    """A score's mean over seeds with its interval over patients and seeds; None where no run has it."""
    sums = [of_run for rows in runs if (of_run := SUMS[score](rows)) is not None]
    return over_seeds(sums, replicates=VALUE_REPLICATES, share=SCORES[score].most == 1) if sums else None
