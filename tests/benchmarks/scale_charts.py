"""The charts and tables of :mod:`tests.benchmarks.scale`: time and memory side by side, against what grows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedtar_flare.reporting.plots import Chart, Figure, Series
from tests.benchmarks.result import short

Places = Mapping[str, Sequence[Mapping[str, float]]]
"""Place on an axis to the measurements there."""
Measured = Mapping[str, Places]
"""By axis."""
LEAST_MB = 0.01
"""What is less is drawn as this: pages of memory are counted, and a logarithmic axis has no zero."""


@dataclass(frozen=True)
class Axis:
    """One chart.

    Args:
        title: of the chart.
        label: of what grows.
        seconds, megabytes: line to the field of a measurement.
        x: field of a measurement and its divisor, where the place's name is no number.
    """

    title: str
    label: str
    seconds: Mapping[str, str]
    megabytes: Mapping[str, str]
    x: tuple[str, float] | None = None


AXES: Mapping[str, Axis] = {
    "patients": Axis(
        "patients",
        "patients, two visits each",
        {
            "opening": "opening.seconds",
            "training task": "task.seconds",
            "closing": "closing.seconds",
            "closing with scores": "scored closing.seconds",
            "first opening": "first opening.seconds",
            "mixture": "mixture.seconds",
        },
        {
            "opening": "opening.bytes",
            "training task": "task.bytes",
            "closing": "closing.bytes",
            "closing with scores": "scored closing.bytes",
        },
    ),
    "visits": Axis(
        "visits",
        "visits of each of 200 patients, and time steps T",
        {
            "opening": "opening.seconds",
            "training task": "task.seconds",
            "closing": "closing.seconds",
            "closing with scores": "scored closing.seconds",
            "round without scores": "round.seconds",
        },
        {
            "opening": "opening.bytes",
            "training task": "task.bytes",
            "closing": "closing.bytes",
            "closing with scores": "scored closing.bytes",
            "state on disk": "state.bytes",
        },
    ),
    "rank": Axis(
        "rank",
        "rank",
        {"local update": "update.seconds", "training task": "task.seconds"},
        {
            "exchange, one way": "exchange.bytes",
            "private state": "private.bytes",
            "training task": "task.bytes",
        },
    ),
    "model": Axis(
        "model size",
        "parameters, millions",
        {
            "local update": "update.seconds",
            "handshake, builds the model": "handshake.seconds",
            "closing": "closing.seconds",
        },
        {
            "exchange, one way": "exchange.bytes",
            "private state": "private.bytes",
            "process beyond its start": "whole.bytes",
        },
        x=("parameters", 1e6),
    ),
    "sites": Axis(
        "sites",
        "sites",
        {"time step": "step.seconds"},
        {"whole run": "run.bytes"},
    ),
}


def at(axis: Axis, places: Places) -> list[tuple[float, dict[str, float]]]:
    """What grows, and the median of each field there, in order."""
    rows = []
    for place, measured in places.items():
        fields = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
        rows.append((float(place) if axis.x is None else float(f"{fields[axis.x[0]] / axis.x[1]:.3g}"), fields))
    return sorted(rows, key=lambda row: row[0])


def tables(measured: Measured) -> str:
    """One Markdown table for each axis that was measured."""
    return "\n\n".join(_table(AXES[name], measured[name]) for name in AXES if name in measured)


def _table(axis: Axis, places: Places) -> str:
    columns = {f"{line}, s": (name, 1.0) for line, name in axis.seconds.items()}
    columns |= {f"{line}, MB": (name, 1e6) for line, name in axis.megabytes.items()}
    lines = [f"| {axis.label} | {' | '.join(columns)} |", "|---:" * (len(columns) + 1) + "|"]
    for x, fields in at(axis, places):
        cells = [short(fields[name] / unit) for name, unit in columns.values()]
        lines.append(f"| {short(x)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_charts(measured: Measured, folder: Path) -> None:
    """Write ``scale-<axis>.svg`` for each axis that was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (name for name in AXES if name in measured):
        _figure(name, AXES[name], measured[name]).write(folder, columns=2)


def _figure(name: str, axis: Axis, places: Places) -> Figure:
    rows = at(axis, places)
    colours = {line: i for i, line in enumerate(dict.fromkeys([*axis.seconds, *axis.megabytes]))}
    charts = [
        Chart(f"{what} against {axis.title}", _lines(rows, fields, unit, colours), (), axis.label, label, log="xy")
        for what, fields, unit, label in (
            ("Time", axis.seconds, 1.0, "processor seconds"),
            ("Memory and bytes", axis.megabytes, 1e6, "MB"),
        )
    ]
    return Figure(f"scale-{name}", "", "", charts)


def _lines(
    rows: Sequence[tuple[float, Mapping[str, float]]],
    fields: Mapping[str, str],
    unit: float,
    colours: Mapping[str, int],
) -> list[Series]:
    """One for each field, and what grows in proportion, ending at the largest of them."""
    least = LEAST_MB if unit > 1 else 0.0
    made = [
        Series(line, [(x, max(values[key] / unit, least), "") for x, values in rows], index=colours[line])
        for line, key in fields.items()
    ]
    last, end = rows[-1][0], max(one.points[-1][1] or 0.0 for one in made)
    return [*made, Series("in proportion", [(x, end * x / last, "") for x, _ in rows], "faded", dashed=True)]
