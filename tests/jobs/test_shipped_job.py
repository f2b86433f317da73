"""The jobs in ``jobs/``: each is its method's export, and a shorter one of each runs."""

import filecmp
from functools import partial

import pytest
from command import run_simulator
from federation_process import recipe

from fedtar_flare.record.events import End, Step, Validation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.registry import names
from fedtar_flare.runtime.recipe import MethodRecipe


def test_every_method_has_its_job(repository):
    assert sorted(folder.name for folder in (repository / "jobs").iterdir()) == sorted(names())


@pytest.mark.parametrize("name", names())
def test_a_shipped_job_is_its_method_s_export(tmp_path, repository, name):
    MethodRecipe(name).export(str(tmp_path))
    shipped, made = repository / "jobs" / name, tmp_path / name
    files = sorted(p.relative_to(made) for p in made.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(shipped) for p in shipped.rglob("*") if p.is_file())
    _, differing, errors = filecmp.cmpfiles(made, shipped, [str(f) for f in files], shallow=False)
    assert not differing and not errors, f"run: fedtar export --method {name}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in names() if name not in ("fedtar", "fedmrg", "fedkei")])
def test_a_short_job_of_each_rival_runs(tmp_path, tmp_path_factory, name):
    recipe(name, method=partial(MethodRecipe, name)).export(str(tmp_path))
    home = tmp_path_factory.mktemp("home")
    process, results = run_simulator(tmp_path / name, tmp_path / "ws", "-n", "2", "-t", "2", home=home)
    assert process.returncode == 0, process.stdout[-4000:]
    events = read_events(results)
    assert [event.status for event in of_kind(events, End)] == ["completed"]
    for step in of_kind(events, Step):
        assert sorted(step.sites) == (["site-1"] if name == "centralised" else ["site-1", "site-2"])
        assert all(site.last_loss for site in step.sites.values())
    assert of_kind(events, Validation)[0].loss
