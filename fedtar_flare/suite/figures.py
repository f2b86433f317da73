"""Figures of the comparison page: what they show, and how matplotlib draws them, for the page and as SVG and PNG.

On the page a figure follows the light or dark theme: its colours are those of the style sheet. matplotlib is the extra
``figures``; without it the page has its tables alone.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

COLOURS = ("#0072b2", "#d55e00", "#00855f", "#b0508a", "#a87500", "#3590c9", "#6b7280")
"""Safe for colour-blind readers; in the style sheet ``--site-0`` to ``--site-6``."""
INK, MUTED, GRID, FADED = "#18212c", "#566273", "#e3e8ee", "#97a3b1"
_VARIABLES = {colour: f"var(--site-{i})" for i, colour in enumerate(COLOURS)}
_VARIABLES |= {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", FADED: "var(--muted)"}
OTHERS = "other methods"
"""Name of the faded lines, last in a legend."""
_MARKERS = "osD^vPX"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.titlesize": 9.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_PANEL = (3.6, 2.5)
"""Width and height of a panel, inches."""
_LETTER, _HANDLE = 0.063, 0.5
"""Mean width of a letter of a legend or a tick, and of what a legend has beside a name, inches."""
_TITLE = 44
"""Letters of a panel's title in one line."""


@dataclass(frozen=True)
class Line:
    """A series.

    Args:
        name: in the legend; empty: not in it.
        y: a value of nan breaks the line.
        low, high: of an interval at each point.
        colour: of :data:`COLOURS`, :data:`INK` or :data:`FADED`.
        kind: ``line`` with markers, ``guide`` (dashed, without) or ``points``.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    kind: str = "line"


@dataclass(frozen=True)
class Panel:
    """Axes with a title; labels include units. ``bars`` are (name, value) in place of lines, the first one on top."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    bars: Sequence[tuple[str, float]] = ()
    log_x: bool = False
    log_y: bool = False
    map: bool = False
    """Coordinates mean nothing by themselves: no ticks."""


@dataclass(frozen=True)
class Figure:
    """Panels under one title, with one legend; ``name`` is that of its files."""

    name: str
    title: str
    about: str
    panels: Sequence[Panel]
    columns: int = 3
    share_y: bool = False


@dataclass(frozen=True)
class Drawn:
    """A figure as the page shows it."""

    title: str
    about: str
    svg: Markup


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(figure: Figure, folder: Path) -> Drawn:
    """Write ``<name>.svg`` and ``<name>.png`` into a folder; returns the figure for the page."""
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    with rc_context({**_STYLE, "svg.hashsalt": figure.name}):
        canvas = _canvas(figure)
        text = io.StringIO()
        canvas.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        canvas.savefig(folder / f"{figure.name}.svg", facecolor="white", metadata={"Date": None})
        canvas.savefig(folder / f"{figure.name}.png", facecolor="white", dpi=160)
    widest = round(96 * _width(figure))
    return Drawn(figure.title, figure.about, _inline(text.getvalue(), figure.title, widest))


def _canvas(figure: Figure) -> Any:
    from matplotlib.figure import Figure as Canvas

    columns = min(figure.columns, len(figure.panels))
    rows = math.ceil(len(figure.panels) / columns)
    tallest = max(max(_PANEL[1], 0.8 + 0.21 * len(panel.bars)) for panel in figure.panels)
    named = {line.name: None for panel in figure.panels for line in panel.lines if line.name}
    names = sorted(named, key=lambda name: name == OTHERS)
    many = legend_columns(names, _width(figure))
    height = tallest * rows + 0.2 * math.ceil(len(names) / many)
    canvas = Canvas(figsize=(_width(figure), height), layout="constrained")
    grid = canvas.subplots(rows, columns, squeeze=False, sharey=figure.share_y).ravel()
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid, figure.panels, strict=False):
        _fill(axes, panel, handles)
    for axes in grid[len(figure.panels) :]:
        axes.set_axis_off()
    if handles:
        shown = [handles[name] for name in names]
        canvas.legend(shown, names, loc="outside lower center", ncols=many, fontsize=8.5)
    return canvas


def _width(figure: Figure) -> float:
    """Inches: panels side by side, and the names of bars before the first of them."""
    names = max((len(name) for panel in figure.panels for name, _ in panel.bars), default=0)
    return _PANEL[0] * min(figure.columns, len(figure.panels)) + _LETTER * names


def legend_columns(names: Sequence[str], width: float) -> int:
    """The most columns of a legend, filled one after the other, that fit into a width (inches)."""
    for many in range(len(names), 1, -1):
        rows, longer = divmod(len(names), many)
        ends = [rows * i + min(i, longer) for i in range(many + 1)]
        columns = [names[a:b] for a, b in pairwise(ends)]
        if sum(_HANDLE + _LETTER * max(map(len, column)) for column in columns) <= width:
            return many
    return 1


def _fill(axes: Any, panel: Panel, handles: dict[str, Any]) -> None:
    axes.set_title(textwrap.fill(panel.title, _TITLE), loc="left")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.bars:
        names, values = zip(*panel.bars, strict=True)
        axes.barh(range(len(names)), values, color=COLOURS[0], height=0.65)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(True, axis="x", linewidth=0.7)
        axes.set_axisbelow(True)
        return
    for line in sorted(panel.lines, key=lambda one: one.colour != FADED):  # what is faded lies behind
        handle = _line(axes, line)
        if line.name:
            handles.setdefault(line.name, handle)
    if panel.map:
        axes.set_xticks([])
        axes.set_yticks([])
        return
    axes.grid(True, linewidth=0.7)
    if panel.log_y:
        axes.set_yscale("log", subs=())
        axes.yaxis.get_major_locator().set_params(subs=(1, 3))
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}".replace("-", "−"))
    ticks = sorted({x for line in panel.lines if line.kind == "line" for x in line.x})
    if panel.log_x:
        axes.set_xscale("log")
    if len(ticks) <= 8:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)


def _line(axes: Any, line: Line) -> Any:
    if line.kind == "points":
        return axes.scatter(line.x, line.y, s=14, color=line.colour, linewidths=0)
    if line.kind == "guide":
        return axes.plot(line.x, line.y, color=line.colour, linestyle="--", linewidth=1)[0]
    faded = line.colour == FADED
    marker = _MARKERS[COLOURS.index(line.colour) if line.colour in COLOURS else 0]
    style: dict[str, Any] = {"linewidth": 1.6, "marker": marker, "markersize": 4}
    if faded:
        broken = any(map(math.isnan, line.y))
        style = {"linewidth": 1, "alpha": 0.45} | ({"marker": "o", "markersize": 2.5} if broken else {})
    (drawn,) = axes.plot(line.x, line.y, color=line.colour, **style)
    if line.low and not faded:
        axes.fill_between(line.x, line.low, line.high, color=line.colour, alpha=0.15, linewidth=0)
        alone = _alone(line.y)
        ends = [[values[i] for i in alone] for values in (line.low, line.high)]
        axes.vlines([line.x[i] for i in alone], *ends, color=line.colour, alpha=0.6, linewidth=1.6)
    return drawn


def _alone(values: Sequence[float]) -> list[int]:
    """Points without a neighbour, between which and themselves a shade could lie."""
    there = [False, *(not math.isnan(value) for value in values), False]
    return [i - 1 for i in range(1, len(there) - 1) if there[i] and not there[i - 1] and not there[i + 1]]


def _inline(svg: str, title: str, widest: int) -> Markup:
    """The drawing as a part of a page, at most ``widest`` px wide, in the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # nothing refers to groups, and other figures have the same ids
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    about = f'role="img" aria-label="{Markup.escape(title)}" style="max-width:{widest}px"'
    return Markup(svg.replace("<svg ", f"<svg {about} ", 1))
