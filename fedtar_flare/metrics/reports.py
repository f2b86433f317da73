"""Drafts with their references, the input of every score; parts that several scores share are computed once."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.minimum_cell import full_cells
from fedtar_flare.metrics.agreement import (
    CERTAIN,
    CERTAIN_OR_NOT,
    Average,
    Findings,
    Metric,
    finding_f1,
    known_and_new,
    label_code,
    label_counts,
)
from fedtar_flare.metrics.grades import Grade, Part, grade
from fedtar_flare.metrics.labeler import RuleLabeler, RuleLabels, classes_of, rule_labeler
from fedtar_flare.metrics.language import language_scores
from fedtar_flare.metrics.qualifiers import claims


class TextLabeler(NamedTuple):
    """A labeler of texts, neural or by rules.

    Attributes
    ----------
    labeler : str
        Its name.
    code : callable
        From a text to its labels, a letter for each class (:func:`.label_code`).
    """

    labeler: str
    code: Callable[[str], str]

    @classmethod
    def by_rules(cls, name: RuleLabels) -> Self:
        """Label by rules."""
        return cls(name, lambda text: label_code(rule_labeler(name)(text)))


@dataclass(frozen=True)
class Reports:
    """N drafts of one site with their references; every sequence has an entry for each draft.

    Attributes
    ----------
    patients, times : sequence of str, sequence of float
        Whose visit it is, and its moment in any unit, which orders a patient's visits.
    references, drafts : sequence of str
    rules : {"chexpert-rules", "ctrate-rules"}
        The labeler whose classes are usual for such images.
    losses : sequence of float
        Mean negative log-likelihood of the reference's tokens, nats.
    changes, draft_changes : sequence of set of (finding, direction)
        Changes since the visit before, true and by the draft.
    findings, draft_findings : sequence of set of str
        Findings, true and by the draft.
    known : set of str, optional
        Findings that the warm start has seen; None where ``findings`` are those of the references, not the truth.
    labeler : RuleLabeler, optional
        Its findings are graded and followed from visit to visit; by default that of ``rules``.
    min_cell : int
        Fewest patients who must have a finding, a class or a change for it to count: drafts that all name a rare one
        would count those who have it.
    text_labeler : TextLabeler, optional
        The site's neural labeler.

    Raises
    ------
    DataError
        ``no-reports``, or ``unequal-lengths``.
    """

    patients: Sequence[str]
    times: Sequence[float]
    references: Sequence[str]
    drafts: Sequence[str]
    rules: RuleLabels
    losses: Sequence[float]
    changes: Findings
    draft_changes: Findings
    findings: Findings
    draft_findings: Findings
    known: AbstractSet[str] | None = None
    labeler: RuleLabeler | None = None
    min_cell: int = 1
    text_labeler: TextLabeler | None = None

    def __post_init__(self) -> None:
        if not self.patients:
            raise DataError("there is no report to score", reason="no-reports")
        columns = (self.times, self.references, self.drafts, self.losses, self.changes, self.draft_changes)
        if {*map(len, (*columns, self.findings, self.draft_findings))} != {len(self.patients)}:
            raise DataError("every report needs an entry in each sequence", reason="unequal-lengths")

    @property
    def available(self) -> set[str]:
        """What a score may need besides the texts: ``findings`` that are true, and names of labelers."""
        neural = {self.text_labeler.labeler} if self.text_labeler else set()
        return {self.rules, *neural} if self.known is None else {self.rules, *neural, "findings"}

    @property
    def reader(self) -> RuleLabeler:
        """The rules that read the findings of both texts."""
        return self.labeler or rule_labeler(self.rules)

    def common(self, truth: Findings) -> set[Any]:
        """Find what at least ``min_cell`` patients have."""
        pairs = []
        for patient, findings in zip(self.patients, truth, strict=True):
            pairs += [(finding, patient) for finding in findings]
        return full_cells(pairs, self.min_cell)

    def _counted(self, truth: Findings, named: Findings) -> tuple[Findings, Findings]:
        """Both sides without what too few patients have."""
        if self.min_cell == 1:
            return truth, named
        common = self.common(truth)
        return [found & common for found in truth], [found & common for found in named]

    @cached_property
    def language(self) -> dict[str, float]:
        """BLEU, ROUGE-L and CIDEr."""
        return language_scores(self.references, self.drafts)

    @cached_property
    def finding_agreement(self) -> dict[str, float | None]:
        """F1 and recall of known and new findings."""
        return known_and_new(*self._counted(self.findings, self.draft_findings), self.known or frozenset())

    @property
    def change_f1(self) -> float | None:
        """Micro F1 of the changes."""
        return finding_f1(*self._counted(self.changes, self.draft_changes))["finding_f1"]

    @property
    def class_f1(self) -> float | None:
        """Micro F1 of the classes that the rules find in both texts."""
        labeler, sides = rule_labeler(self.rules), ([], [])  # type: tuple[RuleLabeler, tuple[list[set[str]], ...]]
        for side, texts in zip(sides, (self.references, self.drafts), strict=True):
            for text in texts:
                side.append({name for name, label in labeler(text).items() if label == "positive"})
        return finding_f1(*self._counted(*sides))["finding_f1"]

    @cached_property
    def efficacy(self) -> list[dict[Average, dict[Metric, float]] | None]:
        """Averages over the neural labeler's classes, with uncertain labels as negative and as positive.

        None where no class has enough patients.
        """
        assert self.text_labeler is not None
        name, code = self.text_labeler
        codes = [(code(reference), code(draft)) for reference, draft in zip(self.references, self.drafts, strict=True)]
        counts = [label_counts(classes_of(name), codes, positive) for positive in (CERTAIN, CERTAIN_OR_NOT)]
        guarded = [one.guarded(self.patients, self.min_cell) for one in counts]
        return [one.averages(self.min_cell) if one.classes else None for one in guarded]

    @cached_property
    def grades(self) -> list[tuple[Grade, ...]]:
        """Of each report, the grades of all findings that it or its reference states."""
        grades = [grade(*texts, self.reader) for texts in zip(self.drafts, self.references, strict=True)]
        if self.min_cell == 1:
            return grades
        common = self.common([{g.finding for g in of if g.presence != "invented"} for of in grades])
        return [tuple(g for g in of if g.finding in common) for of in grades]

    @property
    def presence_f1(self) -> float | None:
        """Micro F1 of the findings that both texts state; None where neither states any."""
        right, total = 0, 0
        for grades in self.grades:
            for one in grades:
                right += one.presence == "right"
            total += len(grades)
        return 2 * right / (total + right) if total else None

    @cached_property
    def claims(self) -> list[tuple[str, bool]]:
        """Claims of change in drafts that follow a draft of the same patient (:func:`.qualifiers.claims`)."""
        return claims(zip(self.patients, self.times, self.drafts, strict=True), self.reader)

    @cached_property
    def reference_claims(self) -> list[tuple[str, bool]]:
        """The same of the references. Real reports leave things out, so some of their claims are contradicted too."""
        return claims(zip(self.patients, self.times, self.references, strict=True), self.reader)

    @property
    def contradictions(self) -> float | None:
        """Share of the drafts' claims that the draft before contradicts; None without any."""
        return _share([contrary for _, contrary in self.claims])

    @property
    def reference_contradictions(self) -> float | None:
        """The same of the references."""
        return _share([contrary for _, contrary in self.reference_claims])


def efficacy(reports: Reports, average: Average, metric: Metric, uncertain: bool) -> float | None:
    """Clinical efficacy by the neural labeler; None where no class has enough patients."""
    return means[average][metric] if (means := reports.efficacy[uncertain]) else None


def accuracy(reports: Reports, part: Part) -> float | None:
    """Share right in this part, of the findings for which it is graded; None without any."""
    return _share([right for grades in reports.grades for g in grades if (right := getattr(g, part)) is not None])


def graded(reports: Reports, part: Part | Literal["presence"]) -> set[str]:
    """Patients with a finding for which this part is graded."""
    found = set()
    for patient, grades in zip(reports.patients, reports.grades, strict=True):
        for one in grades:
            if getattr(one, part) is not None:
                found.add(patient)
    return found


def changing(reports: Reports) -> set[str]:
    """Patients with a change, true or by the draft."""
    found = set()
    for patient, *both in zip(reports.patients, reports.changes, reports.draft_changes, strict=True):
        if any(both):
            found.add(patient)
    return found


def _share(verdicts: Sequence[bool]) -> float | None:
    return sum(verdicts) / len(verdicts) if verdicts else None
