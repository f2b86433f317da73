"""The bench command lists its comparisons, runs one at a tiny size, keeps its results and renders them."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.__main__ import comparisons, main
from tests.benchmarks.result import Absent, Result, alternated, table


def test_the_command_lists_runs_one_and_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    assert main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert names == list(comparisons()) and {"step-shared-8", "generation", "mean-5", "wire-float32"} <= set(names)

    file, written = tmp_path / "bench.json", tmp_path / "table.md"
    call = ["--quick", "--json", str(file), "--table", str(written)]
    assert main(["--only", "mean-5", *call]) == 0
    found = json.loads(file.read_text())
    assert found["quick"] and list(found["results"]) == ["mean-5"] and "torch" in found["machine"]["versions"]
    one = Result.from_dict(found["results"]["mean-5"])
    assert len(one.ours) == len(one.theirs) == 2 and one.spread[0] <= one.median <= one.spread[1]
    assert written.read_text().count("\n") == 3 and one.rival in written.read_text()

    monkeypatch.setattr("tests.benchmarks.compare_server._mean_of", lambda *_: pytest.fail("measured again"))
    assert main(["--only", "mean-5", *call]) == 0
    with pytest.raises(SystemExit):
        main(["--only", "nothing of this name"])


def test_a_comparison_that_cannot_be_made_says_why(tmp_path, capsys, monkeypatch):
    def absent(quick):
        raise Absent("no such package")

    monkeypatch.setattr("tests.benchmarks.__main__.comparisons", lambda: {"gone": absent})
    assert main(["--json", str(tmp_path / "bench.json")]) == 0
    assert "| gone | | | not measured: no such package" in capsys.readouterr().out


def test_ratios_point_the_way_of_their_goal():
    slower = Result("a", "a", "b", "s", (2.0, 3.0, 4.0), (1.0, 1.0, 1.0), ("at most", 1.5))
    faster = Result("a", "a", "b", "s", (1.0, 1.0, 1.0), (2.0, 3.0, 4.0), ("at least", 1.5))
    assert slower.ratios == faster.ratios == (2.0, 3.0, 4.0) and faster.met and slower.met is False
    alone = Result("a", "a", "", "s", (1.0, 2.0), asked=("at most", 5.0))
    assert alone.met and alone.median == 1.5 and Result("a", "a", "b", "s", (1.0,), (1.0,)).met is None
    rows = table([slower, alone], {}).splitlines()
    assert "3x (2 to 4) **missed**" in rows[2] and "at most 5 s" in rows[3]


def test_cases_take_turns():
    order = []
    ticks = iter(range(100))
    cases = {name: lambda name=name: order.append(name) for name in "ab"}
    found = alternated(cases, 2, clock=lambda: float(next(ticks)))
    assert order == ["a", "b"] * 3 and found == {"a": (1.0, 1.0), "b": (1.0, 1.0)}
