"""Scale: ``python -m tests.benchmarks.scale`` measures time and memory against what grows.

    python -m tests.benchmarks.scale --json FILE [--only AXIS ...] [--repeat N] [--quick]

Each point is measured in a process of its own, ``--repeat`` times; results that the file holds are not measured
again. Tables are printed. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.harness import machine, short

Found = dict[str, float]
Measured = Mapping[str, Mapping[str, Sequence[Found]]]
"""By axis and place on it, the measurements there."""


@dataclass(frozen=True)
class Axis:
    """What grows, and what is measured against it: ``<name>.seconds`` and ``<name>.bytes`` of the names given."""

    label: str
    values: Sequence[int]
    quick: Sequence[int]
    seconds: Sequence[str]
    megabytes: Sequence[str]
    hospital: Mapping[str, Any] | None = None
    """Other settings of the hospital, whose setting of the axis' name grows; None where the server's sites do."""


PHASES = ("opening", "training task", "closing", "closing with scores")
AXES: Mapping[str, Axis] = {
    "patients": Axis(
        "patients, two visits each",
        (50, 200, 800, 3200),
        (30, 40),
        (*PHASES, "first opening", "mixture"),
        PHASES,
        {},
    ),
    "rank": Axis(
        "rank",
        (1, 2, 4, 8, 16, 32),
        (2,),
        ("local update", "training task"),
        ("exchange, one way", "private state", "training task"),
        {"patients": 48, "preset": "small", "scored": False},
    ),
    "sites": Axis("sites", (10, 50, 100, 250, 500), (2, 4), ("time step",), ("whole run",)),
}


def measure(name: str, value: int, folder: Path, quick: bool) -> Found:
    """What is found at one place of an axis, in an empty folder."""
    from tests.benchmarks.scale_points import apart, controller, hospital

    settings = AXES[name].hospital
    if settings is None:
        return apart(controller, value, 1 if quick else 3, folder)
    return hospital({**settings, name: value}, folder, quick)


def tables(measured: Measured) -> str:
    """One Markdown table for each axis that was measured, with medians."""
    made = []
    for axis, places in ((AXES[name], measured[name]) for name in AXES if name in measured):
        columns = {f"{name}, s": (f"{name}.seconds", 1.0) for name in axis.seconds}
        columns |= {f"{name}, MB": (f"{name}.bytes", 1e6) for name in axis.megabytes}
        lines = [f"| {axis.label} | {' | '.join(columns)} |", "|---:" * (len(columns) + 1) + "|"]
        for place in sorted(places, key=int):
            cells = [short(median(one[name] for one in places[place]) / unit) for name, unit in columns.values()]
            lines.append(f"| {int(place):,} | {' | '.join(cells)} |")
        made.append("\n".join(lines))
    return "\n\n".join(made)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(AXES), help="this axis alone; may be repeated")
    parser.add_argument("--json", type=Path, help="results, with hardware and versions; goes on where it was stopped")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each point (default 3)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, once: shows that it runs, measures nothing")
    options = parser.parse_args(arguments)
    if sys.platform != "linux":
        parser.error("memory is read from Linux' /proc, which is not here")
    os.environ["OMP_NUM_THREADS"] = "1"  # before numpy and torch are imported
    stored: dict[str, Any] = {}
    if options.json and options.json.is_file():
        stored = json.loads(options.json.read_text(encoding="utf-8"))
    found: dict[str, dict[str, list[Found]]] = stored.get("measured", {})
    about = {"machine": stored.get("machine") or machine(1), "quick": options.quick}
    for turn in range(1 if options.quick else options.repeat):
        for name in options.only or AXES:
            for value in AXES[name].quick if options.quick else AXES[name].values:
                measured = found.setdefault(name, {}).setdefault(str(value), [])
                if len(measured) > turn:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    measured.append(measure(name, value, Path(folder), options.quick))
                print(f"{name} {value}: {len(measured)}", file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps(about | {"measured": found}, indent=1), encoding="utf-8")
    print(tables(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
