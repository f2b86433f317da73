"""One line of the doctor's."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "OK", "WARN", "FAIL"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        status: ``OK``, ``WARN`` (goes on, but look) or ``FAIL`` (a run cannot work).
        check: what was looked at, in two or three words.
        text: what was found.
        cure: what to do; empty when all is well.
    """

    status: str
    check: str
    text: str
    cure: str = ""
