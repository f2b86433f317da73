"""The tutorial as a newcomer walks it, and real radiographs through the job."""

import json
import math

import pytest
from command import run_simulator, walk

from fedtar_flare.core.files import write_text
from fedtar_flare.methods.fedtar.events import Alphas, Outer
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.reporting.run import read_run


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_run_learns_and_drafts(tmp_path, repository):
    """The loss falls, scores rise at every site, alpha moves within its bounds; each hospital drafts in its own way."""
    (tmp_path / "home").mkdir()
    page, folder = repository / "docs" / "tutorial" / "first-run.md", tmp_path / "empty"
    *_, box, shared, own = walk(page, folder, HOME=str(tmp_path / "home"), FEDTAR_HOME="").values()
    assert "each hospital alone: kept from suite first_run" in box, "python -m tools.keep_control keeps it anew"
    assert "shared adapter alone" in shared and "the site's own adapters" in own
    results = folder / "simulator_workspace" / "server" / "simulate_job" / "fedtar"
    record = read_run(results)
    losses = [event.loss for event in record.validations]
    assert losses[-1] < 0.9 * losses[0]
    metrics = json.loads((results / "metrics.json").read_text())
    for site, before in metrics["warm_start"].items():
        after = metrics["final"][site]
        assert after["all"]["bleu_4"] > before["all"]["bleu_4"] and after["all"]["cider"] > before["all"]["cider"]
    outer = record.events(Outer)
    start, end = record.events(Alphas)[0].alpha, outer[-1].alpha_after
    assert max(abs(a - b) for a, b in zip(start, end, strict=True)) >= 0.005  # of three outer steps
    for event in outer:
        assert all(0 < alpha < 1 for alpha in event.alpha_after)


@pytest.mark.slow
@pytest.mark.shared_data
@pytest.mark.timeout(1200)
def test_real_radiographs_train_through_the_job(shared_data, tmp_path):
    """Two simulated hospitals: Spain, and all others but Australia."""
    sites, source = tmp_path / "sites", f"source: covid_chestxray\npath: {shared_data / 'covid_chestxray'}\n"
    for name, place in (("site-1", "Spain"), ("site-2", "others")):
        own = f"options: {{location: {place}}}\nstate_dir: {sites / name}\n"
        write_text(sites / f"{name}.yaml", source + own)
    settings = {"training": {"local_steps": 10, "batch_size": 4}, "server": {"evaluate_every": 2}}
    settings |= {"preset": "small", "num_rounds": 2, "time_steps": 2, "diagnosis": {"labeler": "chexpert-rules"}}
    FedTARRecipe(name="radiographs", **settings).export(str(tmp_path))
    places = {"home": tmp_path / "home", "FEDTAR_SITES": str(sites)}
    process, results = run_simulator(tmp_path / "radiographs", tmp_path / "ws", "-n", "2", "-t", "2", **places)
    assert process.returncode == 0, process.stdout[-4000:]
    record = read_run(results)
    before, after = (event.sites for event in record.evaluations)
    visits = {site: sum(sum(steps) for steps in counts.values()) for site, counts in record.start.counts.items()}
    assert min(visits.values()) > 0 and sum(visits.values()) >= 20
    assert [math.isfinite(event.loss) for event in record.validations] == [True] * 2
    for site in record.start.sites:  # on test patients; validation has too few of these to fall in every run
        assert after[site].all["token_loss"] < before[site].all["token_loss"]
