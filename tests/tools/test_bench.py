"""The bench runs at a tiny size, saves its results and renders them."""

import json

import pytest

from tools.bench.__main__ import main


def test_the_command_saves_each_result(tmp_path, capsys):
    file = tmp_path / "bench.json"
    names = ["step-loop-8", "step-shared-8", "mean-5"]
    assert main(["--quick", "--json", str(file), *(word for name in names for word in ("--only", name))]) == 0
    printed, saved = capsys.readouterr().out, json.loads(file.read_text())
    assert saved["quick"] and "torch" in saved["machine"]["versions"] and list(saved["results"]) == names
    assert printed.count("\n") == 2 + len(names) and "WeightedAggregationHelper" in printed
    with pytest.raises(SystemExit):
        main(["--only", "nothing of this name"])


@pytest.mark.slow
def test_the_gpu_bench_runs_on_a_cpu_at_tiny_size(tmp_path, capsys, monkeypatch):
    file = tmp_path / "gpu.json"
    assert main(["--gpu", "--tiny", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["tiny"] and [row["what"] for row in result["rows"]] == [
        *["plain", "ours"] * 2, *["reading"] * 2, "writing", "writing without", "sharing"
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in result["rows"])
    assert capsys.readouterr().out.count("\n") == 2 + len(result["rows"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--gpu"]) == 1 and "no GPU here" in capsys.readouterr().out
