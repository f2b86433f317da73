import json
from functools import partial
from pathlib import Path

import pytest
import torch
from command import run
from federation_process import recipe

from fedtar_flare.methods.fedtar.events import EVENTS, Outer
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.record.events import SHARED, End, Evaluation, Start, Step, Validation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.runtime.in_process import run_in_process

TINY = partial(recipe, rounds=2, data={"synthetic_patients": 16})


@pytest.fixture(scope="session")
def finished(tmp_path_factory, home):
    """One whole run of the tiny job by its own script: what it printed, and its results."""
    TINY().export(str(folder := tmp_path_factory.mktemp("tiny")))
    code, out, err = run(
        "python", folder / "tiny" / "job.py", "-n", 2, "-w", folder, timeout=900, FEDTAR_HOME=str(home)
    )
    assert code == 0, err[-4000:]
    return out + err, folder / "tiny" / "server" / "simulate_job" / "fedtar"


def recorded(results: Path, kind):
    return of_kind(read_events(results, (*SHARED, *EVENTS)), kind)


@pytest.mark.parametrize(("byoc", "interval"), [(True, 0.05), (False, 2.0)])
def test_a_production_export_has_no_custom_folder_and_asks_seldom(tmp_path, byoc, interval):
    recipe = FedTARRecipe(name="strict")
    recipe.export(str(tmp_path / "before"), byoc=not byoc)  # the last export alone counts
    recipe.export(str(tmp_path / "job"), byoc=byoc)
    assert bool(list((tmp_path / "job").rglob("custom"))) is byoc
    configs = [json.loads(path.read_text()) for path in (tmp_path / "job").rglob("config_fed_*.json")]
    assert [c["server"]["task_request_interval"] for c in configs if "server" in c] == [interval], configs


@pytest.mark.slow
def test_a_run_leaves_everything_that_it_promises(finished):
    printed, results = finished
    steps, (start,), (end,) = recorded(results, Step), recorded(results, Start), recorded(results, End)
    assert end.status == "completed"
    assert [(step.round, step.step) for step in steps] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [event.round for event in recorded(results, Evaluation)] == [0, 1, 2]
    assert start.sites == ["site-1", "site-2"]
    for site in start.sites:
        assert sum(start.counts[site]["train"]) > sum(start.counts[site]["test"]) > 0
    for step in steps:
        assert step.bytes_up == step.bytes_down == 2 * start.exchange.bytes
        assert all(one.samples == start.counts[name]["train"][step.step - 1] for name, one in step.sites.items())
    for name in ("rounds.jsonl", "report.html", "adapter/adapter_model.safetensors", "adapter/README.md"):
        assert (results / name).is_file(), name
    page = (results / "report.html").read_text()
    assert 'id="examples"' in page and "site-2, after round 2" in page
    metrics = json.loads((results / "metrics.json").read_text())
    for key in ("warm_start", "final"):
        assert metrics[key]["site-1"]["all"]["n"] == sum(start.counts["site-1"]["test"])
        assert 0 <= metrics[key]["site-1"]["all"]["bleu_4"] <= 1
    alphas = metrics["numbers"]["alpha"]
    assert alphas == pytest.approx(recorded(results, Outer)[-1].alpha_after, abs=1e-6)
    assert "BLEU-4" in printed and all(f"{name}.html" in printed for name in ("report", "examples"))


def curves(results: Path, site: str) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's scalars of one sender: tag to points."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(results.parent / "tb_events" / site))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.slow
def test_the_server_s_curves_are_in_tensorboard(finished):
    _, results = finished
    outer = recorded(results, Outer)
    server = curves(results, "simulator_server")
    losses = [value for _, value in server["validation loss/all sites"]]
    assert losses == pytest.approx([event.loss for event in recorded(results, Validation)], rel=1e-5)
    assert [value for _, value in server["alpha/step 1"]] == pytest.approx([event.alpha_before[0] for event in outer])


@pytest.mark.slow
def test_a_run_in_one_process_gives_the_same_bits(finished, tmp_path, home, monkeypatch):
    _, first = finished
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    second = run_in_process(TINY(), 2, tmp_path)
    a, b = (CheckpointFolder(results / "checkpoint").last()[0] for results in (first, second))
    assert a.info["run_id"] != b.info["run_id"]
    assert all(torch.equal(a.weights[n], b.weights[n]) for n in a.weights)
    assert all(torch.equal(a.method[n], b.method[n]) for n in a.method)
    scores = [[(event.sites, event.generic) for event in recorded(results, Evaluation)] for results in (first, second)]
    assert scores[0] == scores[1]
