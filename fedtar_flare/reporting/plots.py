"""Charts as small SVG (2 to 10 kB) without a plotting package; colours are CSS variables that follow the page's theme.

Every series has its own marker shape, so that it can be told without colour. ``site`` is a palette safe for
colour-blind readers (after Okabe and Ito); ``step`` is a ramp from early to late that also falls in lightness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from markupsafe import Markup

from fedtar_flare.reporting.format import text

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
_EMPTY = '<p class="none">Nothing recorded yet.</p>'
_RIGHT, _TOP, _BOTTOM = 10, 8, 34  # room around the plot; on the left, as much as the tick labels take
_MANY_POINTS = 30  # from here on, markers shrink to dots


@dataclass(frozen=True)
class Series:
    """One line through (x, y, tooltip); a y of None breaks it.

    The palette ``ink`` is for pooled values and means (thicker). ``index`` is the place in the palette, from 0; ``of``
    is the number of places in a ``step`` ramp.
    """

    name: str
    points: Sequence[tuple[float, float | None, str]]
    palette: Literal["site", "step", "ink"] = "site"
    index: int = 0
    of: int = 1

    @property
    def colour(self) -> str:
        if self.palette == "ink":
            return "var(--ink)"
        return f"var(--{self.palette}-{self.index % SITE_COLOURS if self.palette == 'site' else self.index})"


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
        return Markup(
            f'<figure><figcaption>{text(title)}</figcaption><p class="none">Nothing recorded yet.</p></figure>'
        )
    xs = [x for one in drawn for x, _, _ in one.points] + [x for x, _ in crosses]
    ys = [y for one in drawn for _, y, _ in one.points if y is not None]
    x_low, x_high = x_range or (min(xs), max(xs))
    y_low, y_high = y_range or _padded(min([*ys, *(g.y for g in guides)]), max([*ys, *(g.y for g in guides)]))
    labels = _tick_labels(ticks(y_low, y_high, 5 if size[1] > 200 else 4))
    left = 22 + 6.4 * max(map(len, labels.values()), default=0)
    right = _RIGHT + 6.4 * max((len(guide.name) for guide in guides if guide.y < y_high), default=0)
    frame = _Frame(x_low, max(x_high, x_low + 1), y_low, y_high, *size, left, right)
    parts = [
        _axes(frame, labels, x_label, y_label),
        *(_guide(frame, guide) for guide in guides),
        *(_line(frame, one) for one in sorted(drawn, key=lambda one: one.palette != "ink")),  # a mean lies behind
        *(_cross(frame, x, tip) for x, tip in crosses),
    ]
    svg = (
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{text(title)}">{"".join(parts)}</svg>'
    )
    key = legend_of(drawn) if legend and len(drawn) > 1 else ""
    return Markup(f"<figure><figcaption>{text(title)}</figcaption>{svg}{key}</figure>")


def legend_of(series: Sequence[Series]) -> Markup:
    """Names of series, each with its line and marker."""
    items = "".join(
        f'<li style="color:{one.colour}"><svg viewBox="-11 -6 22 12" class="key" aria-hidden="true">'
        f'<path class="line{" thick" if one.palette == "ink" else ""}" d="M-10 0H10"/><path d="{_marker(one)}"/></svg>'
        f"<span>{text(one.name)}</span></li>"
        for one in series
    )
    return Markup(f'<ul class="legend">{items}</ul>')


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


def _padded(low: float, high: float) -> tuple[float, float]:
    """Bounds a little outside the data; data that is never negative gets none below zero."""
    room = 0.06 * (high - low) or 0.1 * abs(high) or 0.1
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def _axes(frame: _Frame, y_labels: Mapping[float, str], x_label: str, y_label: str) -> str:
    left, right = frame.x(frame.x_low), frame.x(frame.x_high)
    bottom, top = frame.y(frame.y_low), frame.y(frame.y_high)
    grid = "".join(f'<path class="grid" d="M{left} {frame.y(y)}H{right}"/>' for y in y_labels)
    y_words = "".join(
        f'<text x="{left - 6:g}" y="{frame.y(y) + 3.8:g}" class="end">{word}</text>' for y, word in y_labels.items()
    )
    x_words = "".join(
        f'<path class="axis" d="M{frame.x(x)} {bottom}v4"/>'
        f'<text x="{frame.x(x)}" y="{bottom + 15:g}" class="mid">{x:g}</text>'
        for x in ticks(frame.x_low, frame.x_high, 8 if frame.width > 300 else 5, whole=True)
    )
    middle = (top + bottom) / 2
    return (
        f'{grid}<path class="axis" d="M{left} {bottom}H{right}"/>{y_words}{x_words}'
        f'<text x="{(left + right) / 2:g}" y="{frame.height - 4}" class="mid label">{text(x_label)}</text>'
        f'<text transform="translate(10 {middle:g}) rotate(-90)" class="mid label">{text(y_label)}</text>'
    )


def _tick_labels(values: Sequence[float]) -> dict[float, str]:
    """Enough digits to tell neighbouring ticks apart; powers of ten where all values are tiny or huge."""
    largest = max(map(abs, values), default=0.0)
    step = min((b - a for a, b in pairwise(values)), default=largest) or 1.0
    if 0 < largest < 1e-3 or largest >= 1e6:
        digits = math.floor(math.log10(max(1.0, largest / step))) + 2
        return {value: f"{value:.{digits}g}" for value in values}
    digits = next((d for d in range(9) if abs(round(step, d) - step) < 1e-6 * step), 9)
    return {value: f"{value + 0.0:.{digits}f}" for value in values}


def _guide(frame: _Frame, guide: Guide) -> str:
    """The line's name stands beside the plot, or under the line's left end where the line is at the top."""
    y, left, right = frame.y(guide.y), frame.x(frame.x_low), frame.x(frame.x_high)
    beside = f'x="{right + 5:g}" y="{y + 3.8:g}" class="note"'
    place = beside if guide.y < frame.y_high else f'x="{left + 5:g}" y="{y + 12:g}" class="note"'
    return f'<path class="guide" d="M{left} {y}H{right}"/><text {place}>{text(guide.name)}</text>'


def _line(frame: _Frame, one: Series) -> str:
    pieces: list[list[str]] = [[]]
    marks = []
    shrink = " scale(.5)" if len(one.points) > _MANY_POINTS else ""
    for x, y, tip in one.points:
        if y is None:
            pieces.append([])
            continue
        place = f"{frame.x(x)} {frame.y(y)}"
        pieces[-1].append(place)
        marks.append(
            f'<path transform="translate({place}){shrink}" d="{_marker(one)}"><title>{text(tip)}</title></path>'
        )
    lines = "".join(f"M{'L'.join(piece)}" for piece in pieces if len(piece) > 1)
    line = f'<path class="line{" thick" if one.palette == "ink" else ""}" d="{lines}"/>' if lines else ""
    return f'<g style="color:{one.colour}">{line}{"".join(marks)}</g>'


def _cross(frame: _Frame, x: float, tip: str) -> str:
    place = f"{frame.x(x)} {frame.y(frame.y_low)}"
    return (
        f'<path class="cross" transform="translate({place})" d="M-4-4L4 4M-4 4L4-4"><title>{text(tip)}</title></path>'
    )


def _marker(one: Series) -> str:
    return _MARKERS[one.index % len(_MARKERS)]
