"""Scale: ``python -m tests.benchmarks.scale`` measures time and memory against what grows, and draws a chart of each.

    python -m tests.benchmarks.scale --json FILE [--charts FOLDER] [--only AXIS ...] [--repeat N] [--quick]

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

from fedtar_flare.reporting.plots import Chart, Figure, Series
from tests.benchmarks.harness import machine, short

Found = dict[str, float]
Measured = Mapping[str, Mapping[str, Sequence[Found]]]
"""By axis and place on it, the measurements there."""
LEAST_MB = 0.01
"""What is less is drawn as this: pages of memory are counted, and a logarithmic axis has no zero."""
LINES = {
    "task": "training task",
    "scored closing": "closing with scores",
    "update": "local update",
    "exchange": "exchange, one way",
    "private": "private state",
    "step": "time step",
    "run": "whole run",
}
"""What is measured, in a legend; by its own name otherwise."""


@dataclass(frozen=True)
class Axis:
    """What grows, and what is drawn against it: ``<name>.seconds`` and ``<name>.bytes`` of the names given."""

    label: str
    values: Sequence[int]
    quick: Sequence[int]
    seconds: Sequence[str]
    megabytes: Sequence[str]
    hospital: Mapping[str, Any] | None = None
    """Other settings of the hospital, whose setting of the axis' name grows; None where the server's sites do."""


PHASES = ("opening", "task", "closing", "scored closing")
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
        ("update", "task"),
        ("exchange", "private", "task"),
        {"patients": 48, "visits": 1, "preset": "small", "scored": False},
    ),
    "sites": Axis("sites", (10, 50, 100, 250, 500), (2, 4), ("step",), ("run",)),
}


def measure(name: str, value: int, folder: Path, quick: bool) -> Found:
    """What is found at one place of an axis, in an empty folder."""
    from tests.benchmarks.scale_points import apart, controller, hospital

    settings = AXES[name].hospital
    if settings is None:
        return apart(controller, value, 1 if quick else 3, folder)
    return hospital({**settings, name: value}, folder, quick)


def at(places: Mapping[str, Sequence[Found]]) -> list[tuple[float, Found]]:
    """What grows, and the median of each field there, in order."""
    medians = {
        float(place): {name: median(one[name] for one in measured) for name in measured[0]}
        for place, measured in places.items()
    }
    return sorted(medians.items())


def tables(measured: Measured) -> str:
    """One Markdown table for each axis that was measured."""
    made = []
    for axis, places in ((AXES[name], measured[name]) for name in AXES if name in measured):
        columns = {f"{LINES.get(name, name)}, s": (f"{name}.seconds", 1.0) for name in axis.seconds}
        columns |= {f"{LINES.get(name, name)}, MB": (f"{name}.bytes", 1e6) for name in axis.megabytes}
        lines = [f"| {axis.label} | {' | '.join(columns)} |", "|---:" * (len(columns) + 1) + "|"]
        for x, fields in at(places):
            cells = [short(x), *(short(fields[name] / unit) for name, unit in columns.values())]
            lines.append(f"| {' | '.join(cells)} |")
        made.append("\n".join(lines))
    return "\n\n".join(made)


def draw_charts(measured: Measured, folder: Path) -> None:
    """Write ``scale-<axis>.svg``, time and memory side by side, for each axis that was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, axis in ((name, AXES[name]) for name in AXES if name in measured):
        rows = at(measured[name])
        charts = [
            Chart(f"Time against {name}", _lines(rows, axis, "seconds", 1.0, 0.0), (), axis.label,
                  "processor seconds", log="xy"),
            Chart(f"Memory and bytes against {name}", _lines(rows, axis, "bytes", 1e6, LEAST_MB), (), axis.label,
                  "MB", log="xy"),
        ]  # fmt: skip
        Figure(f"scale-{name}", "", "", charts).write(folder, columns=2)


def _lines(rows: list[tuple[float, Found]], axis: Axis, kind: str, unit: float, least: float) -> list[Series]:
    """One for each name, and what grows in proportion, ending at the largest of them."""
    colours = list(dict.fromkeys([*axis.seconds, *axis.megabytes]))
    made = [
        Series(
            LINES.get(name, name),
            [(x, max(fields[f"{name}.{kind}"] / unit, least), "") for x, fields in rows],
            index=colours.index(name),
        )
        for name in (axis.seconds if kind == "seconds" else axis.megabytes)
    ]
    last, end = rows[-1][0], max(one.points[-1][1] or 0.0 for one in made)
    return [*made, Series("in proportion", [(x, end * x / last, "") for x, _ in rows], "faded", dashed=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(AXES), help="this axis alone; may be repeated")
    parser.add_argument("--json", type=Path, help="results, with hardware and versions; goes on where it was stopped")
    parser.add_argument("--charts", type=Path, help="folder of the charts, scale-<axis>.svg")
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
    if options.charts:
        draw_charts(found, options.charts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
