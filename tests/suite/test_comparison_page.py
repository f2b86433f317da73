import math
import warnings
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_results import write_results

from fedtar_flare.suite import charts, figures, page
from fedtar_flare.suite.against import COMPARED
from fedtar_flare.suite.figures import COLOURS, FADED, Figure, Line, Panel, draw
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.joining import gains
from fedtar_flare.suite.plan import cells
from fedtar_flare.suite.results import done
from fedtar_flare.suite.summary import summaries

ARMS = {
    "local": {"method": "local", "label": "each hospital alone"},
    "fedavg": {"method": "fedavg", "label": "FedAvg"},
    "fedtar": {"method": "fedtar", "label": "FedTAR <b>"},
}
SITES = ["site-1", "site-2"]
SUITE = {"name": "made up", "sites": SITES, "seeds": [0, 1], "settings": {"preset": "tiny"}, "arms": ARMS}
GRID = {"grid": {"patients": [12, 24], "hospitals": [1, 2]}}
CASES = {"cases": {"late": {"label": "joins late", "about": "site-2", "hospitals": {"site-2": {"joins": 2}}}}}


def made(folder, **changes):
    suite = Suite(**{**SUITE, **changes})
    planned = cells(suite)
    write_results(folder, planned)
    return suite, planned


def parsed(path):
    text = path.read_text()
    return text, ElementTree.fromstring(text.replace("<!DOCTYPE html>", "").replace("&nbsp;", " "))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    suite, planned = made(folder, outside=["site-3"], leave_one_out=True, also_compared_with=["fedtar"])
    return folder, page.write_page(folder, suite, planned)


def test_the_page_has_the_tables_and_the_figures_of_the_paper(compared):
    folder, path = compared
    text, root = parsed(path)
    titles = [heading.text for heading in root.iter("h2")]
    assert [title for title in titles if "hospital" in title or "Difference" in title] == [
        "At the hospitals that took part",
        "Difference to each hospital alone",
        "Difference to FedTAR <b>",
        "The shared adapter alone, at the hospitals that took part",
        "The shared adapter alone, at hospitals outside",
        "Leave one hospital out",
    ]
    assert (
        "When does joining pay?" not in titles and "FedTAR &lt;b&gt;" in text and "http://" not in text.split("<svg")[0]
    )
    drawn = {
        "cider_per_hospital",
        "scores",
        "validation_loss",
        "alpha",
        "patient_embeddings",
        "texts",
        "cost",
    }
    for kind in ("svg", "png"):
        assert {file.stem for file in (folder / "figures").glob(f"*.{kind}")} == drawn
    assert sum("svg" in element.tag and "aria-label" in element.attrib for element in root.iter()) == len(drawn)
    assert not any(colour in text.split("</style>")[1] for colour in COLOURS), "colours follow the page's theme"


def test_the_page_of_a_grid_answers_when_joining_pays(tmp_path):
    suite, planned = made(tmp_path, **GRID, **CASES)
    text, root = parsed(page.write_page(tmp_path, suite, planned))
    titles = [heading.text for heading in root.iter("h2")]
    assert titles[0] == "When does joining pay?" and "At the hospitals that took part" not in titles
    assert {file.name for file in (tmp_path / "figures").glob("joining*.svg")} == {
        "joining_cider.svg",
        "joining_finding_f1_known.svg",
        "joining_finding_f1_new.svg",
    }
    assert "joins late: FedAvg" in text and text.count("<th>seeds</th>") == 2


def test_a_gain_is_over_the_reference_at_the_same_hospitals_and_seed(tmp_path):
    suite, planned = made(tmp_path, **GRID, **CASES)
    results = done(tmp_path, planned)
    found = [gain for gain in gains(results, suite) if gain.score == "cider"]
    assert len({(gain.arm, *gain.values.items()) for gain in found}) == len(found) == 2 * (4 + 1)
    for gain in found:
        sites = ["site-2"] if "case" in gain.values else ["site-1"]  # the one that all points of the grid have
        means = {
            arm: np.mean(
                [
                    np.mean([row["cider"] for row in one.members() if row["site"] in sites])
                    for one in results
                    if one.cell.name == arm and one.cell.variant.values == gain.values | number
                ]
            )
            # alone, a hospital was run once for all numbers of hospitals
            for arm, number in ((gain.arm, {}), ("local", {"hospitals": 1} if "hospitals" in gain.values else {}))
        }
        assert gain.gain.value == pytest.approx(means[gain.arm] - means["local"])


def test_of_many_arms_the_reference_fedtar_and_the_best_have_colours(tmp_path):
    many = {f"arm-{i}": {"method": "fedavg"} for i in range(9)}
    _, planned = made(tmp_path, arms={**ARMS, **many}, seeds=[0])
    results = done(tmp_path, planned)
    arms = summaries(results)
    by_arm = {arm.name: [one.result for one in results if one.cell.name == arm.name] for arm in arms}
    colours = charts.arm_colours(arms, by_arm, "local")
    assert {"local", "fedtar", "arm-8"} <= set(colours) and len(colours) == len(set(colours.values())) == 6
    for score in COMPARED:
        of = {arm.name: value for arm in arms if (value := arm.mean("members", score)) is not None}
        assert not of or max(of.values()) == max(value for name, value in of.items() if name in colours)
    line = charts.arm_line("fedavg", {"fedavg": "FedAvg"}, colours, {1.0: [2.0, 4.0]})
    assert (line.name, line.colour, line.y, line.low, line.high) == (figures.OTHERS, FADED, [3.0], [2.0], [4.0])


def test_no_line_is_drawn_through_rounds_in_which_an_arm_was_not_scored():
    whole = Line("whole", [0, 1, 2], [1.0, 2.0, 3.0], COLOURS[0], [0.5, 1.0, 2.0], [2.0, 3.0, 4.0])
    ends = Line("ends", [0, 2], [1.0, 5.0], COLOURS[1], [0.0, 4.0], [2.0, 6.0])
    assert charts.broken_where_not_scored([whole])[0] == whole
    again, broken = charts.broken_where_not_scored([whole, ends])
    assert again == whole and broken.x == [0, 1, 2]
    for values, expected in ((broken.y, [1, 5]), (broken.low, [0, 4]), (broken.high, [2, 6])):
        assert math.isnan(values[1]) and values[::2] == expected


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.floats(3, 20))
def test_a_legend_has_as_many_columns_as_fit_beside_each_other(lengths, width):
    names = ["n" * length for length in lengths]

    def needed(many):
        """Columns as matplotlib fills them: the first ones have a name more where they do not come out even."""
        columns = np.array_split(np.array(lengths), many)
        return sum(figures._HANDLE + figures._LETTER * column.max() for column in columns)

    many = figures.legend_columns(names, width)
    assert many == max(n for n in range(1, len(names) + 1) if n == 1 or needed(n) <= width)


def test_a_point_without_neighbours_shows_its_interval_too(tmp_path):
    def intervals_of(line):
        draw(Figure("f", "F", "", [Panel("p", "x", "y", [line])]), tmp_path)
        return (tmp_path / "f.svg").read_text().count("stroke-opacity: 0.6")

    nan = math.nan
    whole = Line("a", [0, 1, 2], [1.0, 2.0, 3.0], COLOURS[0], [0.5, 1.0, 2.0], [2.0, 3.0, 4.0])
    ends = Line("a", [0, 1, 2], [1.0, nan, 3.0], COLOURS[0], [0.5, nan, 2.0], [2.0, nan, 4.0])
    assert figures._alone(whole.y) == [] and figures._alone(ends.y) == [0, 2] and figures._alone([nan, 1.0]) == [1]
    assert (intervals_of(whole), intervals_of(ends)) == (0, 2)


def test_names_of_bars_stand_once_and_nothing_lies_on_them(tmp_path):
    bars = [(f"an arm with a rather long name, the {i}th of all of them", i + 1.0) for i in range(20)]
    panels = [Panel("Time", "minutes", "", bars=bars), Panel("Tensors", "MB", "", bars=bars)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(Figure("cost", "Cost", "", panels, columns=2, share_y=True), tmp_path)
    text = (tmp_path / "cost.svg").read_text()
    assert all(text.count(f"{name}<") == 1 for name, _ in bars)


def test_the_page_says_once_at_which_round_most_runs_were_scored(tmp_path):
    suite, planned = made(tmp_path)
    results = done(tmp_path, planned)
    assert f"Round {results[0].result['scored_round']} in every run." in page.page(tmp_path, suite, results)
    next(one for one in results if one.cell.name == "fedavg" and one.cell.seed == 1).result["scored_round"] = 1
    assert ", but for (seed by seed) FedAvg 4, 1." in page.page(tmp_path, suite, results)


def test_without_matplotlib_the_page_says_how_to_get_the_charts(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "can_draw", lambda: False)
    suite, planned = made(tmp_path, seeds=[0])
    text, root = parsed(page.write_page(tmp_path, suite, planned))
    assert "fedtar_flare[figures]" in text and "svg" not in {element.tag for element in root.iter()}
    assert page.write_page(tmp_path / "empty", suite, planned) is None


def test_the_same_figure_is_drawn_alike(tmp_path):
    line = Line("a", [1, 2], [1.0, float("nan")], COLOURS[0], [0.5, 1.0], [2.0, 3.0])
    figure = Figure("one", "One", "", [Panel("p", "round", "loss", [line]), Panel("b", "s", "", bars=[("x", 2.0)])])
    first, second = (draw(figure, tmp_path / name) for name in "ab")
    assert first.svg == second.svg and (tmp_path / "a/one.svg").read_bytes() == (tmp_path / "b/one.svg").read_bytes()
