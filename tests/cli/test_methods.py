"""``fedtar simulate --method NAME`` and what comes after it, for the methods that bring nothing of their own to it."""

import json
from pathlib import Path

import pytest
from command import failing, fedtar, passing

from fedtar_flare.record.events import Evaluation, Start, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.registry import contract_of, names

RIVALS = [name for name in names() if name != "fedtar"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "fedavg"])
def test_a_simulation_leaves_what_every_method_s_does(tmp_path, name):
    code, out, err = fedtar(
        "simulate", "--method", name, "-n", 2, "-r", 1, "--time-steps", 2, "--preset", "tiny", "--local-steps", 2,
        "--patients", 12, "--json", "-w", tmp_path / "ws", FEDTAR_HOME=str(tmp_path / "home"),
    )  # fmt: skip
    assert code == 0, err[-3000:]
    assert "starting the sites" in err and "INFO" not in out + err
    results = Path(json.loads(out.strip().splitlines()[-1])["results"])
    assert results == tmp_path / "ws" / name / "server" / "simulate_job" / "fedtar"
    events, contract = read_events(results), contract_of(name)
    (start,) = of_kind(events, Start)
    pooled = {site: sum(counts["train"]) for site, counts in start.counts.items()}
    steps = of_kind(events, Step)
    assert start.method == name and len(steps) == 2 and len(of_kind(events, Evaluation)) == 2
    for step in steps:
        assert {site: update.samples for site, update in step.sites.items()} == pooled
        assert (step.update_norm is None) is (name == "local") and bool(step.bytes_up) is (name != "local")
    metrics = json.loads((results / "metrics.json").read_text())
    assert metrics["method"] == name and metrics["numbers"] == {} and set(metrics["final"]) == set(pooled)
    page = (results / "report.html").read_text()
    assert contract.title in page and 'id="alpha"' not in page and 'id="examples"' in page
    card = results / "adapter" / "README.md"
    assert card.is_file() is (name != "local")
    assert name == "local" or contract.title in card.read_text()

    entries = json.loads(passing("audit", tmp_path / "home", "--json"))["entries"]
    sent = {(entry["method"], entry["task"]) for entry in entries if entry.get("tensors")}
    assert sent == {(name, task) for task in (("handshake",) if name == "local" else ("handshake", "train"))}


def test_centralised_training_has_no_job_for_hospitals(tmp_path):
    assert "simulation only" in failing("export", "--method", "centralised", "--no-byoc", "-o", tmp_path)
    assert not (tmp_path / "centralised").exists()
