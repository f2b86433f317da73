"""One line of the doctor's report."""

from dataclasses import dataclass

OK, WARN, FAIL = LEVELS = "OK", "WARN", "FAIL"
"""All is well; goes on, but look; a run cannot work."""


@dataclass(frozen=True)
class Finding:
    """What was looked at (``check``), what was found (``text``) and what to do (``cure``; empty when all is well)."""

    status: str
    check: str
    text: str
    cure: str = ""
