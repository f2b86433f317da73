"""Charts as small SVG (2 to 10 kB) without a plotting package; colours are CSS variables that follow the page's theme.

Every series has its own marker shape, so that it can be told without colour. ``site`` is a palette safe for
colour-blind readers (after Okabe and Ito); ``step`` is a ramp from early to late that also falls in lightness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

from markupsafe import Markup

from fedtar_flare.reporting.render import render

SITE_COLOURS = 7
"""How many site colours the style sheet has; further sites take them again with another marker."""

_MARKERS = (
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0Z",  # circle
    "M-2.7-2.7H2.7V2.7H-2.7Z",  # square
    "M0-3.6L3.5 2.6H-3.5Z",  # triangle
    "M0-3.9L3.3 0L0 3.9L-3.3 0Z",  # diamond
    "M0 3.6L3.5-2.6H-3.5Z",  # triangle downwards
    "M-1.2-3.4H1.2V-1.2H3.4V1.2H1.2V3.4H-1.2V1.2H-3.4V-1.2H-1.2Z",  # cross
)
_RIGHT, _TOP, _BOTTOM = 10, 8, 34  # room around the plot; on the left, as much as the tick labels take

Palette = Literal["site", "step", "ink"]


@dataclass(frozen=True)
class Series:
    """One line through (x, y, tooltip); a y of None breaks it.

    The palette ``ink`` is for pooled values and means (thicker). ``index`` is the place in the palette, from 0.
    ``band`` is shaded behind the line: (x, low, high).
    """

    name: str
    points: Sequence[tuple[float, float | None, str]]
    palette: Palette = "site"
    index: int = 0
    band: Sequence[tuple[float, float, float]] = ()

    @property
    def mean(self) -> bool:
        return self.palette == "ink"

    @property
    def colour(self) -> str:
        if self.mean:
            return "var(--ink)"
        return f"var(--{self.palette}-{self.index % SITE_COLOURS if self.palette == 'site' else self.index})"

    @property
    def stroke(self) -> str:
        return "line thick" if self.mean else "line"

    @property
    def marker(self) -> str:
        return _MARKERS[self.index % len(_MARKERS)]


@dataclass(frozen=True)
class Guide:
    """A dashed horizontal line with a word on it."""

    y: float
    name: str


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,
    x_range: tuple[float, float] | None = None,
    guides: Sequence[Guide] = (),
    crosses: Sequence[tuple[float, str]] = (),
    legend: bool = True,
    size: tuple[int, int] = (420, 240),
) -> Markup:
    """A chart with title, axes and legend as an HTML ``figure``; where no series has a value, one that says so.

    Labels include units. Axis ranges come from the data when None. ``crosses`` are (x, tooltip) of events marked on the
    x axis. ``size`` is in px; the drawing scales with the page.
    """
    drawn = [one for one in series if any(y is not None for _, y, _ in one.points)]
    if not drawn:
        return render("chart.html", title=title, series=())
    xs = [x for one in drawn for x, _, _ in one.points] + [x for x, _ in crosses]
    ys = [y for one in drawn for _, y, _ in one.points if y is not None] + [guide.y for guide in guides]
    ys += [y for one in drawn for _, *ends in one.band for y in ends]
    x_low, x_high = x_range or (min(xs), max(xs))
    y_low, y_high = y_range or _padded(min(ys), max(ys))
    labels = _tick_labels(ticks(y_low, y_high, 5 if size[1] > 200 else 4))
    left = 22 + 6.4 * max(map(len, labels.values()), default=0)
    right = _RIGHT + 6.4 * max((len(guide.name) for guide in guides if guide.y < y_high), default=0)
    frame = _Frame(x_low, max(x_high, x_low + 1), y_low, y_high, *size, left, right)
    return render(
        "chart.html",
        title=title,
        series=drawn,
        frame=frame,
        x_label=x_label,
        y_label=y_label,
        x_ticks=ticks(frame.x_low, frame.x_high, 8 if frame.width > 300 else 5, whole=True),
        y_labels=labels,
        guides=guides,
        crosses=crosses,
        legend=legend,
    )


def ticks(low: float, high: float, most: int = 5, whole: bool = False) -> list[float]:
    """Round numbers within the bounds, about ``most`` at most."""
    span = high - low
    if not span > 0:
        return [low]
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    step = max(1.0, round(step)) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class _Frame:
    """Maps data to places in the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int
    height: int
    left: float
    right: float

    def x(self, value: float) -> float:
        inner = self.width - self.left - self.right
        return round(self.left + inner * (value - self.x_low) / (self.x_high - self.x_low), 1)

    def y(self, value: float) -> float:
        inner = self.height - _TOP - _BOTTOM
        return round(_TOP + inner * (self.y_high - value) / (self.y_high - self.y_low), 1)

    def path(self, one: Series) -> str:
        """The line through the points, broken where a value is missing; empty where no two values are neighbours."""
        known = groupby(one.points, lambda point: point[1] is not None)
        pieces = [[f"{self.x(x)} {self.y(y)}" for x, y, _ in points if y is not None] for _, points in known]
        return "".join(f"M{'L'.join(piece)}" for piece in pieces if len(piece) > 1)

    def area(self, one: Series) -> str:
        """The outline of the band; empty without one."""
        there = [f"{self.x(x)} {self.y(high)}" for x, _, high in one.band]
        back = [f"{self.x(x)} {self.y(low)}" for x, low, _ in reversed(one.band)]
        return f"M{'L'.join([*there, *back])}Z" if len(one.band) > 1 else ""


def _padded(low: float, high: float) -> tuple[float, float]:
    """Bounds a little outside the data; data that is never negative gets none below zero."""
    room = 0.06 * (high - low) or 0.1 * abs(high) or 0.1
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def _tick_labels(values: Sequence[float]) -> dict[float, str]:
    """Enough digits to tell neighbouring ticks apart; powers of ten where all values are tiny or huge."""
    largest = max(map(abs, values), default=0.0)
    step = min((b - a for a, b in pairwise(values)), default=largest) or 1.0
    if 0 < largest < 1e-3 or largest >= 1e6:
        digits = math.floor(math.log10(max(1.0, largest / step))) + 2
        return {value: f"{value:.{digits}g}" for value in values}
    digits = next((d for d in range(9) if abs(round(step, d) - step) < 1e-6 * step), 9)
    return {value: f"{value + 0.0:.{digits}f}" for value in values}
