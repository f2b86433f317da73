import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtar_flare.reporting.plots import SMALL, Bar, Chart, Figure, Series, sharing_y, ticks

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@given(NUMBERS, st.floats(1e-6, 1e6), st.integers(2, 8))
def test_ticks_are_few_even_and_inside(low, span, most):
    high = low + span
    values = ticks(low, high, most)
    assert len(values) <= most + 1
    margin = 1e-6 * span + 4 * math.ulp(abs(low) + span)  # the span may be near the resolution of the numbers
    assert all(low - margin <= value <= high + margin for value in values)
    gaps = [b - a for a, b in pairwise(values)]
    assert not gaps or max(gaps) == pytest.approx(min(gaps), rel=1e-3)


def chart(*points, **settings):
    return drawn(Series("<site>", [(x, y, f"{x}: {y}") for x, y in points]), **settings)


def drawn(series, **settings):
    settings = {"x_label": "round", "y_label": "loss", **settings}
    return ElementTree.fromstring(Chart('A "title" & more', [series], **settings).figure())


def paths(figure, kind):
    return [path.get("d") for path in figure.iter("path") if path.get("class") == kind]


@given(st.lists(st.tuples(st.integers(0, 50), st.none() | NUMBERS), max_size=12))
def test_any_series_gives_well_formed_svg_inside_its_frame(points):
    figure = chart(*points)
    assert figure.find("figcaption").text == 'A "title" & more'
    if all(y is None for _, y in points):
        assert figure.find("p").text == "Nothing recorded yet."
        return
    marks = [e.get("transform") for e in figure.iter("path") if e.find("title") is not None]
    assert len(marks) == sum(y is not None for _, y in points)
    for mark in marks:
        x, y = map(float, re.match(r"translate\((\S+) (\S+)\)", mark).groups())
        assert 0 <= x <= 420 and 0 <= y <= 240
    assert "nan" not in ElementTree.tostring(figure, encoding="unicode").lower()


def test_tick_labels_differ():
    ranges = (0.0071, 0.0184), (3.0, 3.00002), (1e-9, 5e-9), (0, 9e5), (0, 3e8), (1e6, 1e6 + 1), (-2e-4, 1e-4)
    for low, high in ranges:
        words = [e.text for e in chart((0, low), (1, high)).iter("text") if e.get("class") == "end"]
        assert len(words) >= 2 and len(set(words)) == len(words), (low, high)


def test_a_band_is_shaded_within_the_frame_and_a_point_without_neighbours_shows_its_interval():
    (band,) = paths(drawn(Series("a", [(0, 1.0, ""), (1, 2.0, "")], band=[(0, 0.5, 1.5), (1, -4.0, 9.0)])), "band")
    corners = [tuple(map(float, pair)) for pair in re.findall(r"([-\d.]+) ([-\d.]+)", band)]
    assert len(corners) == 4 and all(0 <= x <= 420 and 0 <= y <= 240 for x, y in corners)
    ends = Series("a", [(0, 1.0, ""), (1, None, ""), (2, 3.0, "")], band=[(0, 0.5, 2.0), (2, 2.0, 4.0)])
    figure = drawn(ends)
    (whiskers,) = paths(figure, "whisker")
    assert whiskers.count("M") == 2 and not paths(figure, "band") + paths(figure, "line")
    (line,) = paths(chart((0, 1.0), (1, 2.0), (2, None), (3, 1.0)), "line")
    assert line.count("M") == 1 and line.count("L") == 1, "a gap breaks the line"


def test_bars_have_names_and_words_and_fit_in():
    bars = [Bar(f"an arm with a rather long name, the {i}th of all", 10.0 * i, f"{i} min") for i in range(4)]
    drawn = ElementTree.fromstring(Chart("Cost", bars=bars).figure())
    words = [text.text for text in drawn.iter("text")]
    assert words == [word for bar in bars for word in (bar.name, bar.words)]
    width = float(drawn.find("svg").get("viewBox").split()[2])
    assert len(paths(drawn, "bar")) == 4 and all(float(text.get("x")) < width for text in drawn.iter("text"))


def test_a_figure_has_one_legend_and_one_scale():
    lines = [Series("a <b>", [(0, 1.0, "")]), Series("others", [(0, 2.0, "")], "faded")]
    charts = sharing_y([Chart(f"{k}", lines[k:], (), "x", "y", size=SMALL) for k in (0, 1)])
    assert len({chart.y_range for chart in charts}) == 1 and charts[0].y_range[0] == 0, "axes are not cut"
    assert sharing_y(charts, 0.5)[0].y_range[0] == 0.5 and sharing_y(charts, 1.5)[0].y_range[0] == 0
    figure = Figure("F", "about it", [charts[1], charts[0]], last="others")
    assert [one.name for one in figure.legend] == ["a <b>", "others"]
    page = ElementTree.fromstring(f"<main>{figure.html()}</main>")
    assert len(list(page.iter("figure"))) == 2 and len(list(page.iter("li"))) == 2
