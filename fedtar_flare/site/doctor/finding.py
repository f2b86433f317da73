"""A finding of the doctor."""

from dataclasses import dataclass

OK, WARN, FAIL = LEVELS = "OK", "WARN", "FAIL"
"""All is well; goes on, but look; a run cannot work."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes
    ----------
    status : a value of :data:`LEVELS`
    check : name of the check
    text : its result
    cure : what to do; empty when all is well
    """

    status: str
    check: str
    text: str
    cure: str = ""
