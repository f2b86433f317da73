"""Progress lines of long work: how far, how fast, how much longer."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_SECONDS = 15.0


class Progress:
    """Reports how far a piece of work is, at most once every ``every`` seconds; shorter work reports nothing.

    Args:
        what: name of the work and its unit, such as ``round 1, step 2: update``.
        total: number of units.
        say: takes a line, such as a logger's ``info``.
        clock: monotonic time in seconds.

    >>> ticks = iter([0.0, 10.0, 20.0])
    >>> progress = Progress("image", 4, print, every=15, clock=lambda: next(ticks))
    >>> progress(1)
    >>> progress(2)
    image 2 of 4, 0.1/s, 20 s left
    """

    def __init__(
        self,
        what: str,
        total: int,
        say: Callable[[str], object],
        every: float = EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._what, self._total, self._say, self._every, self._clock = what, total, say, every, clock
        self._start = self._last = clock()

    def __call__(self, done: int) -> None:
        """Report that ``done`` units are finished."""
        now = self._clock()
        if now - self._last < self._every:
            return
        self._last = now
        rate = done / (now - self._start)
        self._say(f"{self._what} {done} of {self._total}, {_rate(rate)}, {_duration((self._total - done) / rate)} left")


def _rate(per_second: float) -> str:
    return f"{per_second:.1f}/s" if per_second >= 0.1 else f"{per_second * 60:.1f}/min"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
