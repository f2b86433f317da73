"""A finding of the doctor."""

from collections.abc import Mapping
from dataclasses import dataclass, field

OK, WARN, FAIL = LEVELS = "OK", "WARN", "FAIL"
"""All is well; goes on, but look; a run cannot work."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report: a level, the name of the check, its result, and what to do (empty: nothing); its
    numbers for Prometheus, by name.
    """

    status: str
    check: str
    text: str
    cure: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
