"""The scale command measures its axes at tiny sizes, keeps what it found, draws and tabulates it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.benchmarks.scale import POINTS
from tests.benchmarks.scale_charts import AXES, at, draw_charts, tables

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux' /proc")


@pytest.mark.slow
def test_the_command_measures_keeps_and_draws(tmp_path, repository):
    file, charts = tmp_path / "scale.json", tmp_path / "charts"
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.scale", "--quick", "--json", str(file)]
    command += ["--charts", str(charts), "--only", "rank", "--only", "sites"]
    packages = os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": packages}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["quick"] and found["machine"]["threads"] == 1 and set(found["measured"]) == {"rank", "sites"}
    for axis, places in found["measured"].items():
        fields = [*AXES[axis].seconds.values(), *AXES[axis].megabytes.values()]
        assert list(places) == [str(value) for value in POINTS[axis].quick]
        assert all(one[name] > 0 for measured in places.values() for one in measured for name in fields)
    (one,) = found["measured"]["rank"]["2"]
    assert one["private.bytes"] > one["exchange.bytes"] and one["first opening.seconds"] > 0
    assert {chart.name for chart in charts.iterdir()} == {"scale-rank.svg", "scale-sites.svg"}
    assert done.stdout.count("| sites |") == 1 and "processor seconds" in (charts / "scale-sites.svg").read_text()


def test_every_axis_has_points_and_a_median_of_each_field():
    assert list(POINTS) == list(AXES)
    measured = [{"parameters": 2e6, "a": 1.0}, {"parameters": 2e6, "a": 9.0}, {"parameters": 2e6, "a": 2.0}]
    assert at(AXES["model"], {"one": measured}) == [(2.0, {"parameters": 2e6, "a": 2.0})]
    rows = at(AXES["sites"], {"50": [{"a": 5.0}], "10": [{"a": 1.0}]})
    assert rows == [(10.0, {"a": 1.0}), (50.0, {"a": 5.0})]


def test_charts_and_tables(tmp_path):
    fields = {f for axis in AXES.values() for f in (*axis.seconds.values(), *axis.megabytes.values())} | {"parameters"}
    places = {
        name: {str(value): [dict.fromkeys(fields, 1e6 * (i + 1))] for i, value in enumerate(points.values)}
        for name, points in POINTS.items()
    }
    drawn = {name: AXES[name] for name in ("visits", "model")}
    draw_charts({name: places[name] for name in drawn}, tmp_path)
    assert {file.stem for file in tmp_path.iterdir()} == {f"scale-{name}" for name in drawn}
    for name, axis in drawn.items():
        text = (tmp_path / f"scale-{name}.svg").read_text()
        assert all(line in text for line in (axis.label, "in proportion", *axis.seconds, *axis.megabytes))
    assert tables(places).count("|---:") == sum(1 + len(axis.seconds) + len(axis.megabytes) for axis in AXES.values())
