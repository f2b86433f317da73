"""Charts as small SVG (2 to 10 kB) without a plotting package; colours are CSS variables that follow the page's theme.

This is the only drawing engine of the package: build a :class:`Chart` of :class:`Series` or :class:`Bar`, and put
:meth:`Chart.figure` on a page; or put several under one title and legend in a :class:`Figure`, which also writes files.

Every series has its own marker shape, so it can be told apart without colour. The palette ``site`` is safe for
colour-blind readers (after Okabe and Ito); ``step`` is a ramp from early to late that also falls in lightness; ``ink``
is for pooled values and means; ``faded`` is for series in the background.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal

from markupsafe import Markup

from fedtar_flare.core.files import write_text
from fedtar_flare.reporting.render import render, theme

SITE_COLOURS = 7
"""Number of site colours in the style sheet; further sites reuse them with another marker."""

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
SMALL = (270, 175)
"""Width and height in px of a chart that shares its row with others."""

Palette = Literal["site", "step", "ink", "faded"]
Point = tuple[float, float | None, str]


@dataclass(frozen=True)
class Series:
    """A line through points, with its entry in the legend.

    Attributes
    ----------
    name : str
    points : sequence of (x, y, tooltip)
        A y of None breaks the line; a point without a neighbour is drawn as a marker.
    palette, index : {"site", "step", "ink", "faded"}, int
        Colour, see the module, and its position in the palette; the position also gives the marker.
    band : sequence of (x, low, high)
        Shaded behind the line; a whisker at a point without a neighbour.
    dashed : bool
        A line for comparison, without markers.
    """

    name: str
    points: Sequence[Point]
    palette: Palette = "site"
    index: int = 0
    band: Sequence[tuple[float, float, float]] = ()
    dashed: bool = False

    @property
    def behind(self) -> bool:
        """Whether it is drawn behind other series."""
        return self.palette in ("ink", "faded")

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
    """A dashed horizontal line at ``y`` with a name, such as an upper bound.

    Attributes
    ----------
    y, name : float, str
    """

    y: float
    name: str


@dataclass(frozen=True)
class Bar:
    """A horizontal bar between its name and its value as text.

    Attributes
    ----------
    name, value, words : str, float, str
        ``words`` is the value with its unit.
    ends : tuple of float, optional
        An interval around the value.
    """

    name: str
    value: float
    words: str
    ends: tuple[float, float] | None = None


@dataclass(frozen=True)
class Chart:
    """Lines over axes, or bars. Means and faded series are drawn behind the others.

    Attributes
    ----------
    title, x_label, y_label : str
        Labels have their units.
    series, bars : sequence of Series, sequence of Bar
        Lines are drawn where there are no bars.
    y_range, x_range : tuple of float, optional
        Ends of the axes; by default from the data.
    guides, crosses : sequence of Guide, sequence of (x, tooltip)
        Lines across the chart, and events marked on the x axis.
    whole, log : bool
        An x axis with ticks at whole numbers only, or a logarithmic one with ticks at the points.
    size : tuple of int
        Width and height in px; the drawing scales with the page.
    """

    title: str
    series: Sequence[Series] = ()
    bars: Sequence[Bar] = ()
    x_label: str = ""
    y_label: str = ""
    y_range: tuple[float, float] | None = None
    x_range: tuple[float, float] | None = None
    guides: Sequence[Guide] = ()
    crosses: Sequence[tuple[float, str]] = ()
    whole: bool = True
    log: bool = False
    size: tuple[int, int] = (420, 240)

    @property
    def drawn(self) -> list[Series]:
        """Series with a value."""
        return [one for one in self.series if one.runs]

    @property
    def y_values(self) -> list[float]:
        """All values that the y axis has to include."""
        points = [y for one in self.drawn for _, y, _ in one.points if y is not None]
        ends = [end for one in self.drawn for _, *ends in one.band for end in ends]
        return points + ends + [guide.y for guide in self.guides]

    def figure(self, legend: bool = True) -> Markup:
        """Draw the chart as an HTML ``figure`` with its title; one without any value says so."""
        drawn = self._svg() if self.bars or self.drawn else ""
        return render("chart.html", title=self.title, drawing=drawn, series=self.drawn if legend else ())

    @property
    def extent(self) -> tuple[int, int]:
        """Width and height of the drawing."""
        if not self.bars:
            return self.size
        words = max(len(bar.name) for bar in self.bars) + max(len(bar.words) for bar in self.bars)
        return round(20 + _BAR + _LETTER * words), _BAR_ROW * len(self.bars)

    def _svg(self, place: str = "") -> Markup:
        """The drawing; ``place`` are attributes of a drawing within another."""
        return self._bars(place) if self.bars else self._lines(place)

    def _bars(self, place: str) -> Markup:
        before = 10 + _LETTER * max(len(bar.name) for bar in self.bars)
        most = max(max(bar.value, *(bar.ends or (0.0,))) for bar in self.bars) or 1.0
        return render("bars.svg", chart=self, place=place, before=before, unit=_BAR / most, row=_BAR_ROW)

    def _lines(self, place: str) -> Markup:
        xs = [x for one in self.drawn for x, _, _ in one.points] + [x for x, _ in self.crosses]
        x_low, x_high = self.x_range or (min(xs), max(xs))
        small = self.size[0] <= _NARROW
        y_low, y_high = self.y_range or _padded(self.y_values)
        labels = _tick_labels(ticks(y_low, y_high, 4 if small else 5))
        left = 22 + _LETTER * max(map(len, labels.values()), default=0)
        right = _RIGHT + _LETTER * max((len(guide.name) for guide in self.guides if guide.y < y_high), default=0)
        high = x_high if x_high > x_low else x_low + 1
        marks = sorted(set(xs)) if self.log else ticks(x_low, high, 5 if small else 8, whole=self.whole)
        right = max(right, _LETTER * len(f"{marks[-1]:g}") / 2 + 1)  # half of the last label
        frame = _Frame(x_low, high, y_low, y_high, *self.size, left, right, self.log)
        return render("lines.svg", chart=self, place=place, frame=frame, x_ticks=marks, y_labels=labels)


@dataclass(frozen=True)
class Figure:
    """Charts under one title and with one legend.

    Attributes
    ----------
    name, title, about : str
        File name without its suffix, heading, and a sentence below it.
    charts, last : sequence of Chart, str
        ``last`` names the series at the end of the legend.
    """

    name: str
    title: str
    about: str
    charts: Sequence[Chart]
    last: str = ""

    @property
    def legend(self) -> list[Series]:
        """The first series of each name."""
        found: dict[str, Series] = {}
        for one in (one for chart in self.charts for one in chart.drawn):
            found.setdefault(one.name, one)
        return sorted(found.values(), key=lambda one: one.name == self.last)

    def html(self) -> Markup:
        """Draw the figure for a page."""
        drawn = [chart.figure(legend=False) for chart in self.charts]
        small = "small" if self.charts[0].size[0] <= _NARROW else ""
        return render("figure.html", figure=self, figures=drawn, series=self.legend, kind=small)

    def write(self, folder: Path, columns: int = 3) -> Path:
        """Write the whole figure to ``<name>.svg``, in the light theme on white, for papers."""
        drawn, x, y, row, width = [], 0, 26, 0, 0
        for i, chart in enumerate(self.charts):
            if i % columns == 0:
                x, y, row = 0, y + row, 0
            wide, high = chart.extent
            place = Markup(f'x="{x}" y="{y + 18}" width="{wide}" height="{high}" ')
            drawn.append((x, y, chart.title, chart._svg(place)))
            x, row = x + wide + 20, max(row, high + 34)
            width = max(width, x)
        y, x, keys = y + row + 8, 0, []
        for one in self.legend:
            room = 40 + _LETTER * len(one.name)
            if x and x + room > width:
                x, y = 0, y + 18
            keys.append((x, y, one))
            x += round(room)
        text = render("figure.svg", figure=self, drawn=drawn, keys=keys, size=(max(width, x), y + 14))
        colours = dict(re.findall(r"(--[\w-]+):([^;]+);", theme("light", 12)))
        fixed = re.sub(r"var\((--[\w-]+)\)", lambda found: colours[found[1]], text)
        return write_text(folder / f"{self.name}.svg", fixed)


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
    log: bool

    def x(self, value: float) -> float:
        low, high, at = (math.log(v) if self.log else v for v in (self.x_low, self.x_high, value))
        return round(self.left + (self.width - self.left - self.right) * (at - low) / (high - low), 1)

    def y(self, value: float) -> float:
        return round(_TOP + (self.height - _TOP - _BOTTOM) * (self.y_high - value) / (self.y_high - self.y_low), 1)

    def path(self, one: Series) -> str:
        """The line through the points, broken where a value is missing; empty where no two values are neighbours."""
        pieces = [[f"{self.x(x)} {self.y(y)}" for x, y, _ in run if y is not None] for run in one.runs]
        return "".join(f"M{'L'.join(piece)}" for piece in pieces if len(piece) > 1)

    def area(self, one: Series) -> str:
        """The outline of the band; empty without one."""
        ends = {x: (low, high) for x, low, high in one.band}
        outline = ""
        for run in one.runs:
            xs = [x for x, _, _ in run if x in ends]
            forth = [f"{self.x(x)} {self.y(ends[x][1])}" for x in xs]
            back = [f"{self.x(x)} {self.y(ends[x][0])}" for x in reversed(xs)]
            outline += f"M{'L'.join([*forth, *back])}Z" if len(xs) > 1 else ""
        return outline

    def whiskers(self, one: Series) -> str:
        """The interval at each point without a neighbour."""
        ends = {x: (low, high) for x, low, high in one.band}
        lone = [run[0][0] for run in one.runs if len(run) == 1 and run[0][0] in ends]
        return "".join(f"M{self.x(x)} {self.y(ends[x][0])}V{self.y(ends[x][1])}" for x in lone)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of an axis with room for the data; it begins at 0 where nothing is negative."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 0.1
    return low - room if low < 0 else 0.0, high + room


def _tick_labels(values: Sequence[float]) -> dict[float, str]:
    """Enough digits for neighbouring ticks to differ; powers of ten where all values are tiny or huge."""
    largest = max(map(abs, values), default=0.0)
    step = min((b - a for a, b in pairwise(values)), default=largest) or 1.0
    if 0 < largest < 1e-3 or largest >= 1e6:
        digits = math.floor(math.log10(max(1.0, largest / step))) + 2
        return {value: f"{value:.{digits}g}" for value in values}
    digits = next((d for d in range(9) if abs(round(step, d) - step) < 1e-6 * step), 9)
    return {value: f"{value + 0.0:.{digits}f}" for value in values}
