"""Real images through the real path: a CT series to a text, and radiographs through the FedTAR job at two sites."""

import math

import pytest
from command import run_simulator

from fedtar_flare.methods.fedtar.events import EVENTS
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.record.events import SHARED, Evaluation, Start, Validation
from fedtar_flare.record.log import of_kind, read_events

pytestmark = pytest.mark.shared_data


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_radiographs_train_through_the_job(shared_data, tmp_path):
    """Two simulated hospitals: Spain, and all others but Australia."""
    sites = tmp_path / "sites"
    sites.mkdir()
    for name, place in (("site-1", "Spain"), ("site-2", "others")):
        (sites / f"{name}.yaml").write_text(
            f"source: covid_chestxray\npath: {shared_data / 'covid_chestxray'}\noptions:\n  location: {place}\n"
            f"state_dir: {sites / name}\n"
        )
    settings = {"training": {"local_steps": 10, "batch_size": 4}, "server": {"evaluate_every": 2}}
    settings |= {"preset": "small", "num_rounds": 2, "time_steps": 2, "diagnosis": {"labeler": "chexpert-rules"}}
    FedTARRecipe(name="radiographs", **settings).export(str(tmp_path))
    places = {"home": tmp_path / "home", "FEDTAR_SITES": str(sites)}
    process, results = run_simulator(tmp_path / "radiographs", tmp_path / "ws", "-n", "2", "-t", "2", **places)
    assert process.returncode == 0, process.stdout[-4000:]
    events = read_events(results, (*SHARED, *EVENTS))
    (start,), validated = of_kind(events, Start), of_kind(events, Validation)
    before, after = (event.sites for event in of_kind(events, Evaluation))
    visits = {site: sum(sum(steps) for steps in counts.values()) for site, counts in start.counts.items()}
    assert min(visits.values()) > 0 and sum(visits.values()) >= 20
    assert all(math.isfinite(event.loss) for event in validated) and len(validated) == 2
    for site in start.sites:  # on test patients; validation has too few of these to fall in every run
        assert after[site].all["token_loss"] < before[site].all["token_loss"]
