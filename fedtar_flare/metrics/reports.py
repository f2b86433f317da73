"""Drafts with their references, the input of every score; parts that several scores share are computed once."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple, Self

from fedtar_flare.core.errors import DataError
from fedtar_flare.core.plugins import load
from fedtar_flare.data.minimum_cell import enough, full_cells
from fedtar_flare.metrics import agreement
from fedtar_flare.metrics.agreement import CERTAIN, CERTAIN_OR_NOT, Average, Findings, Metric, label_counts
from fedtar_flare.metrics.grades import Grade, claims, grade, statements
from fedtar_flare.metrics.labeler import NEURAL, RuleLabeler, RuleLabels, classes_of, rule_labeler
from fedtar_flare.metrics.labels import Labeler, Pair
from fedtar_flare.metrics.language import report_statistics
from fedtar_flare.metrics.sentences import as_read, readable


class TextLabeler(NamedTuple):
    """A labeler of texts, neural or by rules: its name, and from a text to its labels (:meth:`.Labeler.code`)."""

    labeler: str
    code: Callable[[str], str]

    @classmethod
    def named(cls, name: str) -> Self:
        """The labeler by rules of this name, or of another package."""
        return cls(name, rule_labeler(name).code if name in NEURAL.values() else load("labeler", name, Labeler).code)


@dataclass(frozen=True)
class Reports:
    """N drafts of one site with their references; every sequence has an entry for each draft."""

    patients: Sequence[str]
    times: Sequence[float]  # in any unit; they order a patient's visits
    references: Sequence[str]
    drafts: Sequence[str]
    rules: RuleLabels  # the labeler whose classes are usual for such images
    losses: Sequence[float]  # mean negative log-likelihood of the reference's tokens, nats
    changes: Findings  # since the visit before, (finding, direction): true, and by the draft
    draft_changes: Findings
    findings: Findings  # true, and by the draft
    draft_findings: Findings
    known: AbstractSet[str] | None = None
    """Findings that the warm start has seen; None where ``findings`` are those of the references, not the truth."""
    labeler: RuleLabeler | None = None
    """Its findings are graded and followed from visit to visit; by default that of ``rules``."""
    min_cell: int = 1
    """Fewest patients who must have a finding, a class or a change for it to count: drafts that all name a rare one
    would count those who have it."""
    text_labeler: TextLabeler | None = None  # the site's neural labeler
    _values: dict[Pair, list[float | None]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.patients:
            raise DataError("there is no report to score", reason="no-reports")
        columns = (self.times, self.references, self.drafts, self.losses, self.changes, self.draft_changes)
        if {*map(len, (*columns, self.findings, self.draft_findings))} != {len(self.patients)}:
            raise DataError("every report needs an entry in each sequence", reason="unequal-lengths")

    @property
    def reader(self) -> RuleLabeler:
        """The rules that read the findings of both texts."""
        return self.labeler or rule_labeler(self.rules)

    def common(self, truth: Findings) -> set[Any]:
        """What at least ``min_cell`` patients have."""
        pairs = zip(self.patients, truth, strict=True)
        return full_cells(((finding, patient) for patient, findings in pairs for finding in findings), self.min_cell)

    def counted(self, truth: Findings, named: Findings) -> tuple[Findings, Findings]:
        """Both sides without what too few patients have."""
        if self.min_cell == 1:
            return truth, named
        common = self.common(truth)
        return [findings & common for findings in truth], [findings & common for findings in named]

    def values(self, pair: Pair) -> list[float | None]:
        """What a function gives of each pair of reference and draft."""
        if pair not in self._values:
            self._values[pair] = [*map(pair, self.references, self.drafts)]
        return self._values[pair]

    @cached_property
    def language(self) -> dict[str, float]:
        """BLEU, ROUGE-L and CIDEr."""
        return report_statistics(self.references, self.drafts).scores()

    @cached_property
    def finding_agreement(self) -> dict[str, float | None]:
        """F1 of all, known and new findings, also as means of findings, and recall of new ones."""
        sides = self.counted(self.findings, self.draft_findings)
        return agreement.known_and_new(*sides, self.known or frozenset(), self.patients, self.min_cell)

    def labels(self, labeler: str) -> list[tuple[str, str]]:
        """Codes of each reference and draft (:meth:`.Labeler.code`) by a labeler."""
        site = self.text_labeler
        code = site.code if site and site.labeler == labeler else TextLabeler.named(labeler).code
        sides = self.as_read if labeler == self.rules else (self.references, self.drafts)
        return [(code(reference), code(draft)) for reference, draft in zip(*sides, strict=True)]

    @cached_property
    def efficacy(self) -> list[dict[Average, dict[Metric, float]] | None]:
        """Averages over the neural labeler's classes, uncertain ones negative and positive; None without any class."""
        assert self.text_labeler is not None
        name = self.text_labeler.labeler
        legible = [*map(readable, self.references)]
        codes, patients = [*compress(self.labels(name), legible)], [*compress(self.patients, legible)]
        if not enough(patients, self.min_cell):
            return [None, None]
        counts = [label_counts(classes_of(name), codes, kinds) for kinds in (CERTAIN, CERTAIN_OR_NOT)]
        guarded = [of_kind.guarded(patients, self.min_cell) for of_kind in counts]
        return [of_kind.averages(self.min_cell) if of_kind.classes else None for of_kind in guarded]

    @cached_property
    def as_read(self) -> tuple[list[str], list[str]]:
        """References and drafts for the rules (:func:`.as_read`)."""
        return as_read(self.references, self.drafts)

    @cached_property
    def grades(self) -> list[tuple[Grade, ...]]:
        """Of each report, the grades of all findings that it or its reference states."""
        pairs, counts = zip(*self.as_read, strict=True), self.counts
        return [
            tuple(g for g in grade(draft, reference, self.reader) if counts(g.finding)) for reference, draft in pairs
        ]

    def counts(self, finding: str) -> bool:
        """Whether references of ``min_cell`` patients state a finding; drafts that all name it would count them."""
        return self.min_cell == 1 or finding in self._stated

    @cached_property
    def _stated(self) -> set[str]:
        texts = [statements(reference, self.reader) for reference in self.as_read[0]]
        return self.common([{s.finding for s in of if not s.resolved} for of in texts])

    @cached_property
    def claims(self) -> list[tuple[str, bool]]:
        """Claims of change in drafts of patients' later visits, and whether they are contradicted (:func:`.claims`)."""
        return self._claims(self.as_read[1])

    @cached_property
    def reference_claims(self) -> list[tuple[str, bool]]:
        """The same of the references. Real reports leave things out, so some of their claims are contradicted too."""
        return self._claims(self.as_read[0])

    def _claims(self, texts: Sequence[str]) -> list[tuple[str, bool]]:
        every = zip(self.patients, self.times, self.references, texts, strict=True)
        visits = [visit for visit in every if readable(visit[2])]
        return [(patient, contrary) for patient, f, contrary in claims(visits, self.reader) if self.counts(f)]


def contradicted(claims: Sequence[tuple[str, bool]]) -> float | None:
    """Share of claims of change that the report before contradicts; None without any."""
    return sum(contrary for _, contrary in claims) / len(claims) if claims else None
