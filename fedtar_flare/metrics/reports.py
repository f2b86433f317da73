"""Generated reports with their references: what every score is computed on, each shared part once."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

from fedtar_flare.errors import DataError
from fedtar_flare.metrics.clinical import known_and_new
from fedtar_flare.metrics.label_scores import label_counts_of_texts
from fedtar_flare.metrics.language import clean, language_scores
from fedtar_flare.metrics.report_labels import RuleLabels, rule_labeler
from fedtar_flare.metrics.temporal import VisitReport, change_word_f1, claimants, contradictions, finding_change_f1


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

    def __post_init__(self) -> None:
        if not self.patients:
            raise DataError("there is no report to score", reason="no-reports")
        given = {name: len(column) for name, column in vars(self).items() if name not in ("rules", "known")}
        if len(set(given.values())) > 1:
            raise DataError(f"reports need an entry each of everything, not {given}", reason="unequal-lengths")

    @property
    def available(self) -> set[str]:
        """What a score of the registry may need besides the texts."""
        return {self.rules} if self.known is None else {self.rules, "findings"}

    @cached_property
    def language(self) -> dict[str, float]:
        return language_scores(self.references, self.generated)

    @cached_property
    def finding_agreement(self) -> dict[str, float | None]:
        return known_and_new(self.findings, self.named, self.known or frozenset())

    @cached_property
    def class_f1(self) -> float | None:
        """Micro F1 of the classes that the rules read off both texts."""
        return label_counts_of_texts(rule_labeler(self.rules), self.references, self.generated).micro_f1()

    @cached_property
    def change_agreement(self) -> dict[str, float | None]:
        return finding_change_f1(self.changes, self.claimed)

    @cached_property
    def change_words(self) -> float:
        """Mean F1 of the words of change."""
        scores = change_word_f1(self.references, self.generated)
        return sum(scores) / len(scores)

    @cached_property
    def contradictions(self) -> float | None:
        """Share of claims of change that the patient's generated report before contradicts; None without any."""
        found, claims = contradictions(self._visits, rule_labeler(self.rules))
        return len(found) / claims if claims else None

    @property
    def has_words(self) -> bool:
        return any(map(clean, self.references))

    def claiming(self) -> set[str]:
        """Patients one of whose generated reports claims a change that the one before could contradict."""
        return claimants(self._visits, rule_labeler(self.rules))

    def changing(self) -> set[str]:
        """Patients of whom either side names a change."""
        return {one for one, *both in zip(self.patients, self.changes, self.claimed, strict=True) if any(both)}

    @cached_property
    def _visits(self) -> list[VisitReport]:
        return [*map(VisitReport, self.patients, self.times, self.references, self.generated)]
