"""Generated reports with their references: what every score is computed on, each shared part once."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.minimum_cell import full_cells
from fedtar_flare.metrics.clinical import finding_f1, known_and_new
from fedtar_flare.metrics.grades import Grade, Part, grade
from fedtar_flare.metrics.label_scores import (
    CERTAIN,
    CERTAIN_OR_NOT,
    Average,
    LabelCounts,
    Metric,
    label_code,
    label_counts,
)
from fedtar_flare.metrics.labeler import RuleLabeler
from fedtar_flare.metrics.language import clean, language_scores
from fedtar_flare.metrics.report_labels import RuleLabels, classes_of, rule_labeler
from fedtar_flare.metrics.temporal import VisitReport, claims

_SIDES = (("right", "missed"), ("right", "missed", "invented"))
"""How findings are graded that the reference states, and that either text states."""


class Labelled(NamedTuple):
    """What a labeler of this name reads off texts: ``code`` is a text's, as :func:`.label_code` writes it."""

    labeler: str
    code: Callable[[str], str]

    @classmethod
    def by_rules(cls, name: RuleLabels) -> Self:
        """By the rules of this name."""
        return cls(name, lambda text: label_code(rule_labeler(name)(text)))

    def counts(self, references: Sequence[str], drafts: Sequence[str], positive: AbstractSet[str]) -> LabelCounts:
        """Agreement of drafts with their references."""
        codes = [(self.code(one), self.code(other)) for one, other in zip(references, drafts, strict=True)]
        return label_counts(classes_of(self.labeler), codes, positive)


@dataclass(frozen=True)
class Reports:
    """N reports of one site; every sequence has an entry for each (DataError: ``no-reports``, ``unequal-lengths``)."""

    patients: Sequence[str]
    times: Sequence[float]
    """Moment of the visit, in any unit; orders a patient's visits."""
    references: Sequence[str]
    generated: Sequence[str]
    rules: RuleLabels
    """The rule-based labeler whose classes are usual for such images."""
    losses: Sequence[float]
    """Mean negative log-likelihood of the reference's tokens, nats."""
    changes: Sequence[AbstractSet[tuple[str, str]]]
    claimed: Sequence[AbstractSet[tuple[str, str]]]
    """Pairs of a finding and a direction since the visit before: true, and in the generated text."""
    findings: Sequence[AbstractSet[str]]
    named: Sequence[AbstractSet[str]]
    """Findings that are there, and that the generated text states."""
    known: AbstractSet[str] | None = None
    """Findings that the warm start has seen; None where ``findings`` are what the references state, not the truth."""
    labeler: RuleLabeler | None = None
    """Whose findings are graded and followed from visit to visit; by default that of ``rules``."""
    least: int = 1
    """Fewest patients who must have a finding, a class or a change for it to count in a score of these: reports that
    all name a rare one would count those who have it."""
    labelled: Labelled | None = None

    def __post_init__(self) -> None:
        if not self.patients:
            raise DataError("there is no report to score", reason="no-reports")
        others = ("rules", "known", "labeler", "least", "labelled")
        given = {name: len(column) for name, column in vars(self).items() if name not in others}
        if len(set(given.values())) > 1:
            raise DataError(f"reports need an entry each of everything, not {given}", reason="unequal-lengths")

    @property
    def available(self) -> set[str]:
        """What a score of the registry may need besides the texts."""
        neural = {self.labelled.labeler} if self.labelled else set()
        return {self.rules, *neural} if self.known is None else {self.rules, *neural, "findings"}

    @cached_property
    def language(self) -> dict[str, float]:
        return language_scores(self.references, self.generated)

    @cached_property
    def finding_agreement(self) -> dict[str, float | None]:
        return known_and_new(*self.counted(self.findings, self.named), self.known or frozenset())

    @cached_property
    def class_f1(self) -> float | None:
        """Micro F1 of the classes that the rules read off both texts."""
        counts = Labelled.by_rules(self.rules).counts(self.references, self.generated, CERTAIN)
        sides = ([{*np.flatnonzero(row).tolist()} for row in side] for side in (counts.there, counts.named))
        return finding_f1(*self.counted(*sides))["finding_f1"]

    @cached_property
    def _efficacy(self) -> list[dict[Average, dict[Metric, float]] | None]:
        """Averages of the neural labeler's classes, with what is uncertain as negative and as positive."""
        assert self.labelled is not None
        found = [self.labelled.counts(self.references, self.generated, one) for one in (CERTAIN, CERTAIN_OR_NOT)]
        guarded = [counts.guarded(self.patients, self.least) for counts in found]
        return [counts.averages(self.least) if counts.classes else None for counts in guarded]

    def efficacy(self, average: Average, metric: Metric, uncertain: bool) -> float | None:
        """Clinical efficacy by the neural labeler; None where no class is of enough patients."""
        return means[average][metric] if (means := self._efficacy[uncertain]) else None

    @property
    def change_f1(self) -> float | None:
        """Micro F1 of the pairs of a finding and a direction."""
        return finding_f1(*self.counted(self.changes, self.claimed))["finding_f1"]

    def counted(
        self, there: Sequence[AbstractSet[Any]], named: Sequence[AbstractSet[Any]]
    ) -> tuple[Sequence[AbstractSet[Any]], Sequence[AbstractSet[Any]]]:
        """What is there and what is named, by report, of all that at least ``least`` patients have."""
        if self.least == 1:
            return there, named
        full = full_cells(
            ((one, patient) for patient, found in zip(self.patients, there, strict=True) for one in found), self.least
        )
        return [found & full for found in there], [found & full for found in named]

    @cached_property
    def grades(self) -> list[tuple[Grade, ...]]:
        """Of each report, the grades of all findings that it or its reference states."""
        found = [grade(*texts, self._labeler) for texts in zip(self.generated, self.references, strict=True)]
        there, every = ([{g.finding for g in of if g.presence in kinds} for of in found] for kinds in _SIDES)
        kept = self.counted(there, every)[1]
        return [tuple(g for g in of if g.finding in names) for of, names in zip(found, kept, strict=True)]

    @cached_property
    def presence_f1(self) -> float | None:
        """Micro F1 of the findings that both texts state; None where neither states any."""
        found = [one.presence == "right" for grades in self.grades for one in grades]
        return 2 * sum(found) / (len(found) + sum(found)) if found else None

    def accuracy(self, part: Part) -> float | None:
        """Share right in this part, of the findings of which it is graded; None without any."""
        verdicts = [right for grades in self.grades for one in grades if (right := getattr(one, part)) is not None]
        return sum(verdicts) / len(verdicts) if verdicts else None

    def graded(self, part: Part | Literal["presence"]) -> set[str]:
        """Patients of whom a finding is graded in this part."""
        both = zip(self.patients, self.grades, strict=True)
        return {patient for patient, grades in both if any(getattr(one, part) is not None for one in grades)}

    def contradictions(self, *, references: bool = False) -> float | None:
        """Share of claims of change that the patient's report before contradicts; None without any."""
        found = [contradicted for _, contradicted in claims(self._visits, self._labeler, references=references)]
        return sum(found) / len(found) if found else None

    @property
    def has_words(self) -> bool:
        return any(map(clean, self.references))

    def claiming(self, *, references: bool = False) -> set[str]:
        """Patients one of whose reports claims a change that the one before could contradict."""
        return {patient for patient, _ in claims(self._visits, self._labeler, references=references)}

    def changing(self) -> set[str]:
        """Patients of whom either side names a change."""
        return {one for one, *both in zip(self.patients, self.changes, self.claimed, strict=True) if any(both)}

    @property
    def _labeler(self) -> RuleLabeler:
        return self.labeler or rule_labeler(self.rules)

    @cached_property
    def _visits(self) -> list[VisitReport]:
        return [*map(VisitReport, self.patients, self.times, self.references, self.generated)]
