"""Signs that drafts do not come from the image: each has a value, its limits, and a meaning.

They are computed from scores that left the site; texts stay there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

IDENTICAL_EXCESS = 0.25
"""By how much the share of identical drafts may exceed that of the references: normal studies do read alike."""
MISMATCHED = 0.4
"""A draft that does not depend on its patient fits half of the other patients' references better than its own (0.5)."""
LENGTH_RATIO = (0.6, 1.5)
"""Below, drafts are cut short or leave things out; above, they repeat themselves."""
FINDINGS_LOSS = 0.02
"""A rise of missed or invented findings since the warm start that exceeds rounding and chance in a small test set."""
CONTRADICTIONS_EXCESS = 0.1
"""By how much the share of contradicted claims may exceed that of the references, which leave things out too."""

_MEANING = {
    "identical_share": "reports repeat each other word for word",
    "mismatched_share": "reports fit other patients nearly as well as their own",
    "length_ratio": "reports are much shorter or longer than the references",
    "finding_recall": "findings that the warm start reported are missed now",
    "invented_findings": "findings are named that are not there, more often than by the warm start",
    "contradictions": "claims of change do not follow from the patient's report before",
}


@dataclass(frozen=True)
class Alarm:
    """A value against its limits.

    Attributes
    ----------
    name, value, limits, meaning : str, float, tuple of float, str
        ``limits`` are the lowest and highest value that raise nothing; ``meaning`` explains a raised alarm.
    """

    name: str
    value: float
    limits: tuple[float, float]
    meaning: str

    @property
    def raised(self) -> bool:
        """Whether the value is outside the limits."""
        return not self.limits[0] <= self.value <= self.limits[1]


def alarms(
    scores: Mapping[str, float | None],
    references: Mapping[str, float | None],
    *,
    recall: tuple[float | None, float | None] = (None, None),
    invented: tuple[float | None, float | None] = (None, None),
) -> list[Alarm]:
    """List the alarms about one site's test reports, raised or not."""

    def above(natural: float | None, excess: float) -> tuple[float, float] | None:
        return None if natural is None else (0.0, min(1.0, natural + excess))

    limits = {
        "identical_share": above(references.get("identical_share"), IDENTICAL_EXCESS),
        "mismatched_share": (0.0, MISMATCHED),
        "length_ratio": LENGTH_RATIO,
        "finding_recall": None if recall[0] is None else (max(0.0, recall[0] - FINDINGS_LOSS), 1.0),
        "invented_findings": above(invented[0], FINDINGS_LOSS),
        "contradictions": above(references.get("contradictions"), CONTRADICTIONS_EXCESS),
    }
    values = {**scores, "finding_recall": recall[1], "invented_findings": invented[1]}
    return [
        Alarm(name, value, limit, _MEANING[name])
        for name, limit in limits.items()
        if limit and (value := values.get(name)) is not None
    ]
