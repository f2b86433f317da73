"""The package's only drawing engine: charts as small SVG in CSS variables that follow the page's theme.

Every series has its own marker. The palette ``site`` is safe for colour-blind readers (after Okabe and Ito), ``step`` a
ramp that also falls in lightness, ``ink`` for pooled values and means, ``faded`` for the background.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np
from markupsafe import Markup

from fedtar_flare.reporting.render import render

SITE_COLOURS = 7  # in the style sheet; further sites reuse them with another marker
_MARKERS = (
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0Z",  # circle
    "M-2.7-2.7H2.7V2.7H-2.7Z",  # square
    "M0-3.6L3.5 2.6H-3.5Z",  # triangle
    "M0-3.9L3.3 0L0 3.9L-3.3 0Z",  # diamond
    "M0 3.6L3.5-2.6H-3.5Z",  # triangle downwards
    "M-1.2-3.4H1.2V-1.2H3.4V1.2H1.2V3.4H-1.2V1.2H-3.4V-1.2H-1.2Z",  # cross
)
_RIGHT, _TOP, _BOTTOM = 10, 8, 34  # room around the plot; on the left, as much as the tick labels take
_LETTER = 6.4  # mean width of a letter
_BAR, _BAR_ROW = 230, 24
_NARROW = 300  # px; a narrower chart has fewer ticks, and more such charts stand in a row
FEWEST = 5  # points worth a figure of their t-SNE
SMALL = (270, 175)  # px, of a chart that shares its row with others

Palette = Literal["site", "step", "ink", "faded"]
Point = tuple[float, float | None, str]


@dataclass(frozen=True)
class Series:
    """A line through points, with its entry in the legend."""

    name: str
    points: Sequence[Point]  # (x, y, tooltip); None for y breaks the line; a marker at one without a neighbour
    palette: Palette = "site"
    index: int = 0  # of the colour in the palette, and of the marker
    band: Sequence[tuple[float, float, float]] = ()  # (x, low, high), shaded; a whisker at one without a neighbour
    dashed: bool = False  # a line for comparison, without markers

    @property
    def colour(self) -> str:
        """As a CSS variable."""
        if self.palette in ("site", "step"):
            return f"var(--{self.palette}-{self.index % SITE_COLOURS if self.palette == 'site' else self.index})"
        return "var(--ink)" if self.palette == "ink" else "var(--muted)"

    @property
    def stroke(self) -> str:
        """CSS class of the line."""
        return "guide" if self.dashed else {"ink": "line thick", "faded": "line faded"}.get(self.palette, "line")

    @property
    def marker(self) -> str:
        """Outline as an SVG path; empty without markers."""
        return "" if self.dashed else _MARKERS[self.index % len(_MARKERS)]

    @property
    def runs(self) -> list[list[Point]]:
        """Unbroken pieces of the line."""
        pieces = groupby(self.points, lambda point: point[1] is not None)
        return [list(points) for has_value, points in pieces if has_value]


@dataclass(frozen=True)
class Guide:
    """A dashed horizontal line at ``y`` with a name, such as an upper bound."""

    y: float
    name: str


@dataclass(frozen=True)
class Bar:
    """A horizontal bar between its name and its value in ``words``, with the unit."""

    name: str
    value: float
    words: str


@dataclass(frozen=True)
class Chart:
    """Bars, or lines over axes; means and faded series are drawn behind the others."""

    title: str
    series: Sequence[Series] = ()
    bars: Sequence[Bar] = ()
    x_label: str = ""
    y_label: str = ""
    y_range: tuple[float, float] | None = None  # by default from the data
    x_range: tuple[float, float] | None = None
    guides: Sequence[Guide] = ()
    crosses: Sequence[tuple[float, str]] = ()  # events marked on the x axis, (x, tooltip)
    whole: bool = True  # ticks of x at whole numbers only
    size: tuple[int, int] = (420, 240)  # px; the drawing scales with the page

    @property
    def drawn(self) -> list[Series]:
        """Series with a value."""
        return [line for line in self.series if line.runs]

    @property
    def y_values(self) -> list[float]:
        """All values that the y axis has to include."""
        points = [y for line in self.drawn for _, y, _ in line.points if y is not None]
        ends = [end for line in self.drawn for _, *ends in line.band for end in ends]
        return points + ends + [guide.y for guide in self.guides]

    def figure(self, legend: bool = True) -> Markup:
        """Draw the chart as an HTML ``figure`` with its title; one without any value says so."""
        drawn: Markup | str = self._lines() if self.drawn and not self.bars else ""
        if self.bars:
            before = 10 + _LETTER * max(len(bar.name) for bar in self.bars)
            width = round(10 + before + _BAR + _LETTER * max(len(bar.words) for bar in self.bars))
            unit = _BAR / (max(bar.value for bar in self.bars) or 1.0)
            drawn = render("bars.svg", chart=self, width=width, before=before, unit=unit, row=_BAR_ROW)
        return render("chart.html", title=self.title, drawing=drawn, series=self.drawn if legend else ())

    def _lines(self) -> Markup:
        xs = [x for line in self.drawn for x, _, _ in line.points] + [x for x, _ in self.crosses]
        x_low, x_high = self.x_range or (min(xs), max(xs))
        small = self.size[0] <= _NARROW
        y_low, y_high = self.y_range or _padded(self.y_values)
        labels = {y: f"{y + 0.0:.10g}" for y in ticks(y_low, y_high, 4 if small else 5)}
        left = 22 + _LETTER * max(map(len, labels.values()), default=0)
        right = _RIGHT + _LETTER * max((len(guide.name) for guide in self.guides if guide.y < y_high), default=0)
        high = x_high if x_high > x_low else x_low + 1
        marks = ticks(x_low, high, 5 if small else 8, whole=self.whole)
        right = max(right, _LETTER * len(f"{marks[-1]:g}") / 2 + 1)  # half of the last label
        frame = _Frame(x_low, high, y_low, y_high, *self.size, left, right)
        drawn = sorted(self.drawn, key=lambda line: line.palette not in ("ink", "faded"))
        return render("lines.svg", chart=self, drawn=drawn, frame=frame, x_ticks=marks, y_labels=labels)


@dataclass(frozen=True)
class Figure:
    """Charts under a title and a sentence, with one legend, in which the series named ``last`` is the last."""

    title: str
    about: str
    charts: Sequence[Chart]
    last: str = ""

    @property
    def legend(self) -> list[Series]:
        """The first series of each name."""
        first: dict[str, Series] = {}
        for chart in self.charts:
            for series in chart.drawn:
                first.setdefault(series.name, series)
        return sorted(first.values(), key=lambda series: series.name == self.last)

    def html(self) -> Markup:
        """Draw the figure for a page."""
        drawn = [chart.figure(legend=False) for chart in self.charts]
        small = "small" if self.charts[0].size[0] <= _NARROW else ""
        return render("figure.html", figure=self, figures=drawn, series=self.legend, kind=small)


def sharing_y(charts: Sequence[Chart], start: float = 0.0) -> list[Chart]:
    """Give charts the same y axis."""
    values = [value for chart in charts for value in chart.y_values] or [start]
    low, high = _padded(values)
    return [replace(chart, y_range=(start if min(values) >= start else low, high)) for chart in charts]


def ticks(low: float, high: float, most: int = 5, whole: bool = False) -> list[float]:
    """Choose round numbers for the ticks of an axis."""
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
    """Maps data to positions in the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int
    height: int
    left: float
    right: float

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return round(self.left + (self.width - self.left - self.right) * share, 1)

    def y(self, value: float) -> float:
        return round(_TOP + (self.height - _TOP - _BOTTOM) * (self.y_high - value) / (self.y_high - self.y_low), 1)

    def path(self, line: Series) -> str:
        """The line through the points, broken where a value is missing; empty where no two values are neighbours."""
        pieces = [[f"{self.x(x)} {self.y(y)}" for x, y, _ in run if y is not None] for run in line.runs]
        return "".join(f"M{'L'.join(piece)}" for piece in pieces if len(piece) > 1)

    def area(self, line: Series) -> str:
        """The outline of the band; empty without one."""
        ends = {x: (low, high) for x, low, high in line.band}
        outline = ""
        for run in line.runs:
            xs = [x for x, _, _ in run if x in ends]
            forth = [f"{self.x(x)} {self.y(ends[x][1])}" for x in xs]
            back = [f"{self.x(x)} {self.y(ends[x][0])}" for x in reversed(xs)]
            outline += f"M{'L'.join([*forth, *back])}Z" if len(xs) > 1 else ""
        return outline

    def whiskers(self, line: Series) -> str:
        """The interval at each point without a neighbour."""
        ends = {x: (low, high) for x, low, high in line.band}
        lone = [run[0][0] for run in line.runs if len(run) == 1 and run[0][0] in ends]
        return "".join(f"M{self.x(x)} {self.y(ends[x][0])}V{self.y(ends[x][1])}" for x in lone)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of an axis with room for the data; it begins at 0 where nothing is negative."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 0.1
    return low - room if low < 0 else 0.0, high + room


def tsne(points: np.ndarray) -> np.ndarray:
    """Embed at least :data:`FEWEST` points (N, d) in the plane by t-SNE with a fixed seed: (N, 2) between -1 and 1."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(points) - 1) / 3)
    plane = TSNE(perplexity=perplexity, init="random", random_state=0).fit_transform(points.astype(np.float64))
    return 2 * (plane - plane.min(0)) / np.maximum(np.ptp(plane, 0), 1e-12) - 1


def scatter(title: str, groups: Mapping[str, tuple[int, Sequence[tuple[float, float, str]]]]) -> Chart:
    """Draw embedded points by group."""
    series = []
    for name, (colour, points) in groups.items():
        apart = [point for x, y, tip in points for point in ((x, y, tip), (x, None, ""))]  # no line joins two points
        series.append(Series(name, apart, index=colour))
    return Chart(title, series, x_label="t-SNE, first axis", y_label="second axis", whole=False)
