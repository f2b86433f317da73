"""What a comparison measures, and how: ours and the rival in turn, in one process, each repetition giving one ratio."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

Goal = tuple[Literal["at most", "at least", ""], float]
Measured = Mapping[str, list[float]]
"""``ours`` and ``theirs`` by repetition; the two of a repetition were measured one after the other."""
PACKAGES = ("fedtar_flare", "torch", "transformers", "peft", "nvflare", "monai", "scikit-learn", "numpy")


class Absent(Exception):
    """A comparison cannot be made here; says why."""


@dataclass(frozen=True)
class Comparison:
    """One row of the table; see :func:`comparison`."""

    name: str
    make: Callable[[bool, Path], tuple[Any, Any]]
    what: str
    rival: str
    goal: Goal = ("", 0.0)
    note: str = ""
    unit: str = "s"
    repetitions: int = 3
    warm: int = 1  # rounds before that do not count

    def measure(self, quick: bool) -> Measured:
        """Processor seconds of this process, so that what runs beside it counts little; or the numbers of ``make``."""
        with tempfile.TemporaryDirectory() as folder:
            cases = dict(zip(("ours", "theirs"), self.make(quick, Path(folder)), strict=True))
            if callable(cases["ours"]):
                cases = alternated(cases, 2 if quick else self.repetitions, warm=self.warm)
        return cases

    def row(self, measured: Measured) -> str:
        """The goal, the median ratio with the smallest and the largest, and both in their unit."""
        ours, theirs = measured["ours"], measured["theirs"]
        kind, limit = self.goal
        ratios = [b / a if kind == "at least" else a / b for a, b in zip(ours, theirs, strict=True)]
        middle = median(ratios)
        missed = {"at most": middle > limit, "at least": middle < limit, "": False}[kind]
        cells = (
            self.what + (f" ({self.note})" if self.note else ""),
            self.rival,
            f"{kind} {short(limit)}x" if kind else "reported",
            f"{short(middle)}x ({short(min(ratios))} to {short(max(ratios))}){' **missed**' * missed}",
            f"{short(median(ours))} {self.unit}",
            f"{short(median(theirs))} {self.unit}",
        )
        return f"| {' | '.join(cells)} |"


HEAD = "| what | against | asked | measured (smallest to largest) | ours | theirs |\n|---|---|---|---|---:|---:|"
ROWS: dict[str, Comparison] = {}


def comparison(name: str, rival: str, goal: Goal = ("", 0.0), what: str = "", **more: Any) -> Callable[[Any], Any]:
    """Add a comparison to :data:`ROWS`: a function from ``quick`` and an empty folder to ours and theirs.

    Both are functions to be timed, or numbers by repetition. ``what`` is measured: the function's docstring by default.
    The goal is for ours / theirs (``at most``) or theirs / ours (``at least``); ``more`` are fields of
    :class:`Comparison`.
    """

    def add(make: Any) -> Any:
        ROWS[name] = Comparison(name, make, what or make.__doc__.strip().rstrip("."), rival, goal, **more)
        return make

    return add


def alternated(
    cases: Mapping[str, Callable[[], Any]],
    repetitions: int,
    clock: Callable[[], float] = time.process_time,
    warm: int = 1,
) -> dict[str, list[float]]:
    """Seconds of each case by repetition, the cases in turn, after ``warm`` rounds that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(warm + repetitions):
        for name, run in cases.items():
            gc.collect()
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: values[warm:] for name, values in seconds.items()}


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


def machine(threads: int) -> dict[str, Any]:
    """What it ran on."""
    import psutil
    import torch

    versions = {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}
    file = Path("/proc/cpuinfo")
    processor = re.search(r"model name\s*:\s*(.+)", file.read_text() if file.exists() else "")
    return {
        "processor": processor[1] if processor else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": threads,
        "load_before": os.getloadavg()[0],
        "date": date.today().isoformat(),
        "versions": versions,
    }


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
