"""Text for people: any value on one printable line, and lines that report the progress of long work."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

EVERY_SECONDS = 15.0
"""Least time between two lines."""
UNFIT_IN_ID = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd]")
"""Control characters, and what stands for bytes of another character set: no identifier has them."""


def plain(value: Any) -> str:
    """Write any value as one printable line; control characters and lone surrogates become U+FFFD."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out rows of cells as lines whose columns stand under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def gauges(values: Mapping[str, float]) -> str:
    """Write numbers for Prometheus, by name with labels, such as ``fedtar_doctor_status{check="server"}``."""
    lines = []
    for name, series in groupby(sorted(values), lambda one: one.partition("{")[0]):
        lines += [f"# TYPE {name} gauge", *(f"{one} {values[one]:.15g}" for one in series)]
    return "\n".join(lines) + "\n"


def quoted(value: Any) -> str:
    """Write a label's value for :func:`gauges`, with the escapes of Prometheus' text format."""
    text = str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{plain(text)}"'


class Progress:
    """Reports how far work is, how fast, and how much longer it takes, at most every ``every`` seconds."""

    def __init__(self, what: str, total: int, say: Callable[[str], object], every: float = EVERY_SECONDS):
        self._what, self._total, self._say, self._every = what, total, say, every
        self._last, self._first = time.monotonic(), (0, 0.0)

    def __call__(self, done: int) -> None:
        """Report that ``done`` of all units are finished. The first pays for the start: the speed is the others'."""
        now = time.monotonic()
        first, start = self._first = self._first if self._first[0] else (done, now)
        if now - self._last < self._every:
            return
        self._last, line = now, f"{self._what} {done} of {self._total}"
        if rate := (done - first) / max(now - start, 1e-9):
            line += f", {rate:.1f}/s" if rate >= 0.1 else f", {rate * 60:.1f}/min"
            if 10 * done >= self._total:
                left = (self._total - done) / rate
                minutes = f"{left / 60:.0f} min" if left < 5400 else f"{left / 3600:.1f} h"
                line += f", {minutes if left >= 90 else f'{left:.0f} s'} left"
        self._say(line)
