"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "OK", "WARN", "FAIL"


@dataclass(frozen=True)
class Finding:
    """What was looked at (``check``), what was found (``text``) and what to do (``cure``; empty when all is well).

    ``status`` is ``OK``, ``WARN`` (goes on, but look) or ``FAIL`` (a run cannot work).
    """

    status: str
    check: str
    text: str
    cure: str = ""
