"""The bench lists its comparisons, runs one at a tiny size, keeps its results and renders them."""

import json

import pytest

from tests.benchmarks.__main__ import comparisons, main
from tests.benchmarks.harness import Absent, Comparison, alternated


def test_the_command_lists_runs_one_and_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    assert main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert names == list(comparisons()) and {"step-shared-8", "generation", "mean-5", "wire-float32"} <= set(names)

    file = tmp_path / "bench.json"
    call = ["--quick", "--json", str(file), "--only", "mean-5"]
    assert main(call) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert found["quick"] and "torch" in found["machine"]["versions"]
    assert {side: len(values) for side, values in found["results"]["mean-5"].items()} == {"ours": 2, "theirs": 2}
    assert said.count("\n") == 3 and "WeightedAggregationHelper" in said

    monkeypatch.setattr(Comparison, "measure", lambda *_: pytest.fail("measured again"))
    assert main(call) == 0
    with pytest.raises(SystemExit):
        main(["--only", "nothing of this name"])


@pytest.mark.parametrize("name", ["step-loop-8", "wire-bfloat16", "fedkei-flops", "model-input"])
def test_a_comparison_runs_at_a_tiny_size(name):
    one = comparisons()[name]
    assert one.what in one.row(one.measure(quick=True))


def test_a_comparison_that_cannot_be_made_says_why(tmp_path, capsys, monkeypatch):
    def absent(quick, folder):
        raise Absent("no such package")

    monkeypatch.setattr("tests.benchmarks.__main__.comparisons", lambda: {"gone": Comparison("gone", absent, "a", "b")})
    assert main(["--json", str(tmp_path / "bench.json")]) == 0
    assert "| gone | | | not measured: no such package" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("goal", "measured", "cells"),
    [
        (("at most", 1.5), {"ours": [2.0, 3.0, 4.0], "theirs": [1.0] * 3}, ["at most 1.5x", "3x (2 to 4) **missed**"]),
        (("at least", 1.5), {"ours": [1.0] * 3, "theirs": [2.0, 3.0, 4.0]}, ["at least 1.5x", "3x (2 to 4)"]),
        (("", 0.0), {"ours": [1.0], "theirs": [2.0]}, ["reported", "0.5x (0.5 to 0.5)"]),
    ],
    ids=["slower", "faster", "without a goal"],
)
def test_ratios_point_the_way_of_their_goal(goal, measured, cells):
    row = Comparison("a", print, "a", "b", goal).row(measured)
    assert [cell.strip() for cell in row.split("|")][3:5] == cells


def test_cases_take_turns():
    order = []
    ticks = iter(range(100))
    cases = {name: lambda name=name: order.append(name) for name in "ab"}
    found = alternated(cases, 2, clock=lambda: float(next(ticks)))
    assert order == ["a", "b"] * 3 and found == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


@pytest.mark.slow
def test_the_gpu_bench_runs_without_one_in_small_and_says_what_it_needs(tmp_path, capsys, monkeypatch):
    file = tmp_path / "gpu.json"
    assert main(["--gpu", "--tiny", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["tiny"] and [row["what"] for row in found["rows"]] == [
        *["plain", "ours"] * 2, *["reading"] * 2, "writing", "writing without"
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in found["rows"])
    assert capsys.readouterr().out.count("\n") == 2 + len(found["rows"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--gpu"]) == 1 and "no GPU here" in capsys.readouterr().out
