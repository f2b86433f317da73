"""Advice on the time limit of a step, from how long the answers took."""

from __future__ import annotations

import math

CLOSE = 0.8
"""A slowest answer above this share of the limit is close to being lost."""
ROOM = 3.0
"""Advised limit, as a multiple of the slowest answer."""
WASTEFUL = 20.0
"""A limit above this multiple of the slowest answer makes a lost site needlessly expensive."""


def advice(limit: float, slowest: float | None, missed: int) -> str | None:
    """One line for the log, or None when the limit (seconds; 0 waits for ever) is fine.

    ``slowest`` is the time to the slowest answer to this kind of task so far, None without any; ``missed`` is how many
    sites did not answer in time.

    >>> advice(60, 55.0, 0)
    'the slowest answer took 55 s of step_time_limit = 60 s; 165 s would be safe'
    >>> advice(60, 20.0, 0)
    """
    if not limit:
        return None
    known = f"; the slowest answer took {slowest:.0f} s" if slowest is not None else ""
    if missed:
        better = math.ceil(max(2 * limit, ROOM * (slowest or 0)))
        return (
            f"{missed} site(s) did not answer within step_time_limit = {limit:g} s{known}. If such a site only works "
            f"slowly, try {better} s"
        )
    if slowest is None:
        return None
    better = math.ceil(ROOM * slowest)
    if slowest > CLOSE * limit:
        return f"the slowest answer took {slowest:.0f} s of step_time_limit = {limit:g} s; {better} s would be safe"
    if limit > WASTEFUL * max(slowest, 1):
        return (
            f"the slowest answer took {slowest:.0f} s of step_time_limit = {limit:g} s; with {max(better, 60)} s a "
            "lost site would cost less"
        )
    return None
