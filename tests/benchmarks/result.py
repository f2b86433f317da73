"""What a comparison measures, and how: the cases in turn, in one process, each repetition giving one ratio."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Asked = tuple[Literal["at most", "at least", ""], float]


class Absent(Exception):
    """A comparison cannot be made here; says why."""


@dataclass(frozen=True)
class Result:
    """One comparison.

    Args:
        name: as ``--only`` takes it.
        what, rival: what is measured, and against what; without a rival the goal is one for ``ours`` itself.
        unit: of ``ours`` and ``theirs``.
        ours, theirs: by repetition; the two of a repetition were measured one after the other.
        asked: the goal. ``at most`` is for ours / theirs, ``at least`` for theirs / ours.
        note: what a reader must know.
    """

    name: str
    what: str
    rival: str
    unit: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...] = ()
    asked: Asked = ("", 0.0)
    note: str = ""

    @property
    def ratios(self) -> tuple[float, ...]:
        """One per repetition, in the direction of the goal."""
        if not self.theirs:
            return self.ours
        pairs = list(zip(self.ours, self.theirs, strict=True))
        return tuple(b / a if self.asked[0] == "at least" else a / b for a, b in pairs)

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest ratio."""
        return min(self.ratios), max(self.ratios)

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the goal; None without one."""
        kind, limit = self.asked
        if not kind:
            return None
        return self.median <= limit if kind == "at most" else self.median >= limit

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratios": self.ratios, "median": self.median, "spread": self.spread, "met": self.met}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        own = {name: values[name] for name in cls.__dataclass_fields__}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in own.items()})


def alternated(
    cases: Mapping[str, Callable[[], Any]],
    repetitions: int,
    clock: Callable[[], float] = time.process_time,
    warm: int = 1,
) -> dict[str, tuple[float, ...]]:
    """Seconds of each case by repetition, the cases in turn, after ``warm`` rounds that do not count.

    The clock is by default the processor's for this process, so that what runs beside it counts little.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(warm + repetitions):
        for name, run in cases.items():
            gc.collect()
            start = clock()
            run()
            taken = clock() - start
            if repetition >= warm:
                seconds[name].append(taken)
    return {name: tuple(values) for name, values in seconds.items()}


def peak_bytes(run: Callable[[], Any]) -> float:
    """Largest memory of this process while ``run`` ran, beyond what it held before; needs Linux' /proc."""
    before = settled_bytes()
    run()
    return float(max(memory("VmHWM") - before, 1))


def settled_bytes() -> int:
    """Memory of this process without what it can give back; its peak (``VmHWM``) begins anew."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        raise Absent("memory is read from Linux' /proc, which is not here")
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    clear.write_text("5")
    return memory("VmRSS")


def memory(field: str) -> int:
    """Bytes of a field of Linux' ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def table(results: Sequence[Result], absent: Mapping[str, str]) -> str:
    """One Markdown table: what, against what, the goal, the median ratio with its spread, and both in their unit."""
    lines = [
        "| what | against | asked | measured (smallest to largest) | ours | theirs |",
        "|---|---|---|---|---:|---:|",
    ]
    for one in results:
        kind, limit = one.asked
        low, high = one.spread
        sign = "" if one.theirs else f" {one.unit}"
        measured = f"{short(one.median)}{'x' if one.theirs else sign} ({short(low)} to {short(high)})"
        if one.met is not None:
            measured += "" if one.met else " **missed**"
        goal = f"{kind} {short(limit)}{'x' if one.theirs else sign}" if kind else "reported"
        theirs = f"{short(statistics.median(one.theirs))} {one.unit}" if one.theirs else ""
        ours = f"{short(statistics.median(one.ours))} {one.unit}"
        note = f" ({one.note})" if one.note else ""
        lines.append(f"| {one.what}{note} | {one.rival} | {goal} | {measured} | {ours} | {theirs} |")
    lines += [f"| {name} | | | not measured: {reason} | | |" for name, reason in absent.items()]
    return "\n".join(lines)


def short(value: float) -> str:
    """Three digits that count.

    >>> short(0.012345), short(1234567.0), short(2.5)
    ('0.0123', '1,234,567', '2.5')
    """
    if value and abs(value) < 100:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:,.0f}"
