"""Real images through the real path: a CT series to a text, and radiographs through the FedTAR job at two sites."""

from datetime import datetime

import pytest
from simulator import run_simulator

from fedtar_flare.data.cohort import Visit
from fedtar_flare.fedtar.events import EVENTS, Outer
from fedtar_flare.fedtar.recipe import FedTARRecipe
from fedtar_flare.record.events import SHARED, Start, Validation
from fedtar_flare.record.log import of_kind, read_events

pytestmark = pytest.mark.shared_data


def test_a_real_ct_series_becomes_a_text(shared_data, tmp_path):
    import torch

    from fedtar_flare.imaging.batch import collate
    from fedtar_flare.imaging.pipeline import InputConfig, prepare
    from fedtar_flare.models.build import build_model, build_tokenizer
    from fedtar_flare.models.config import preset

    folder = shared_data / "lung_pet_ct_dx" / "A0001_3.000000-5mm-41315"
    config = preset("small")
    visit = Visit("p", "v", datetime(2020, 1, 1), folder, "unknown", "ct")
    image = prepare(visit, InputConfig(image_size=config.image_size, slices=config.slices), tmp_path)
    assert image.image.shape == (16, 3, 64, 64)
    assert 100 < image.position_mm[-1] - image.position_mm[0] < 320  # the lungs of an adult, in millimetres
    with torch.no_grad():
        ids = build_model(config).generate(collate([image]))
    assert len(build_tokenizer(config).decode(ids[0].tolist()).split()) > 3


@pytest.fixture(scope="module")
def hospitals(shared_data, tmp_path_factory):
    """Site files of two simulated hospitals over the real radiographs: Spain, and all others but Australia."""
    sites = tmp_path_factory.mktemp("sites")
    for name, place in (("site-1", "[Spain]"), ("site-2", "others")):
        (sites / f"{name}.yaml").write_text(
            f"source: covid_chestxray\npath: {shared_data / 'covid_chestxray'}\noptions:\n  location: {place}\n"
            f"state_dir: {sites / name}\n"
        )
    return sites


def radiograph_run(folder, hospitals, home, *arguments):
    recipe = FedTARRecipe(
        name="radiographs",
        preset="small",
        num_rounds=2,
        time_steps=2,
        training={"local_steps": 10, "batch_size": 4},
        server={"evaluate_every": 2},
    )
    recipe.export(str(folder))
    process, results = run_simulator(
        folder / "radiographs", folder / "ws", "-n", "2", *arguments, home=home, FEDTAR_SITES=str(hospitals)
    )
    assert process.returncode == 0, process.stdout[-4000:]
    return read_events(results, (*SHARED, *EVENTS))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def finished(hospitals, home, tmp_path_factory):
    """One whole run over the real radiographs, both hospitals side by side."""
    return radiograph_run(tmp_path_factory.mktemp("radiographs"), hospitals, home, "-t", "2")


@pytest.mark.timeout(1200)
def test_real_radiographs_train_through_the_job(finished):
    (start,), losses = of_kind(finished, Start), [event.loss for event in of_kind(finished, Validation)]
    visits = {site: sum(sum(steps) for steps in counts.values()) for site, counts in start.counts.items()}
    assert min(visits.values()) > 0 and sum(visits.values()) >= 20
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_threads_do_not_matter_on_real_radiographs(finished, hospitals, home, tmp_path):
    again = radiograph_run(tmp_path, hospitals, home)
    for a, b in zip(of_kind(finished, Validation), of_kind(again, Validation), strict=True):
        assert a.loss == pytest.approx(b.loss, abs=1e-5)
    for a, b in zip(of_kind(finished, Outer), of_kind(again, Outer), strict=True):
        assert a.alpha_after == pytest.approx(b.alpha_after, abs=1e-5)
