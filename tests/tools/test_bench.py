"""The bench runs at a tiny size, saves its results and renders them."""

import json

import pytest

from tools.bench.__main__ import main
from tools.bench.cpu import Comparison, alternated


def test_the_command_saves_each_result(tmp_path, capsys):
    file = tmp_path / "bench.json"
    names = ["step-loop-8", "step-shared-8", "mean-5"]
    assert main(["--quick", "--json", str(file), *(word for name in names for word in ("--only", name))]) == 0
    printed, saved = capsys.readouterr().out, json.loads(file.read_text())
    assert saved["quick"] and "torch" in saved["machine"]["versions"] and list(saved["results"]) == names
    assert printed.count("\n") == 2 + len(names) and "WeightedAggregationHelper" in printed
    with pytest.raises(SystemExit):
        main(["--only", "nothing of this name"])


@pytest.mark.parametrize(
    ("goal", "theirs", "cells"),
    [
        (1.5, [1.0] * 3, ["at most 1.5x", "3x (2 to 4) **missed**"]),
        (-1.5, [4.0, 6.0, 8.0], ["at least 1.5x", "2x (2 to 2)"]),
        (-3, [4.0, 6.0, 8.0], ["at least 3x", "2x (2 to 2) **missed**"]),
    ],
)
def test_ratios_point_the_way_of_their_goal(goal, theirs, cells):
    row = Comparison("a", "b", goal, print).row({"ours": [2.0, 3.0, 4.0], "theirs": theirs})
    assert [cell.strip() for cell in row.split("|")][3:5] == cells


def test_cases_take_turns():
    order, ticks = [], iter(range(100))
    cases = {name: lambda name=name: order.append(name) for name in "ab"}
    found = alternated(cases, 2, clock=lambda: float(next(ticks)))
    assert order == ["a", "b"] * 3 and found == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


@pytest.mark.slow
def test_the_gpu_bench_runs_on_a_cpu_at_tiny_size(tmp_path, capsys, monkeypatch):
    file = tmp_path / "gpu.json"
    assert main(["--gpu", "--tiny", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["tiny"] and [row["what"] for row in found["rows"]] == [
        *["plain", "ours"] * 2, *["reading"] * 2, "writing", "writing without", "sharing"
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in found["rows"])
    assert capsys.readouterr().out.count("\n") == 2 + len(found["rows"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--gpu"]) == 1 and "no GPU here" in capsys.readouterr().out
