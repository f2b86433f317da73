"""The jobs in ``jobs/``: each is its method's export, and each runs as the README says."""

import filecmp
import json
import shutil

import pytest
from simulator import run_simulator

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


def shorter(job, folder):
    """A copy of a job with the tiny model, one round of two exchanges, twelve patients a site and two local updates."""
    copy = shutil.copytree(job, folder / job.name)
    for side, (entry, arguments) in {
        "server": ("workflows", {"num_rounds": 1, "time_steps": 2}),
        "client": (
            "executors",
            {
                "preset": "tiny",
                "settings": {
                    "training": {"local_steps": 2, "batch_size": 4},
                    "data": {"synthetic_patients": 12},
                },
            },
        ),
    }.items():
        file = copy / "app" / "config" / f"config_fed_{side}.json"
        config = json.loads(file.read_text())
        component = config[entry][0].get("executor", config[entry][0])
        settings = component["args"].get("settings", {}) | arguments.pop("settings", {})
        component["args"] |= arguments | {"settings": settings}
        file.write_text(json.dumps(config))
    return copy


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in names() if name not in ("fedtar", "fedmrg", "fedkei")])
def test_the_other_shipped_jobs_run(tmp_path, tmp_path_factory, repository, name):
    job = shorter(repository / "jobs" / name, tmp_path)
    home = tmp_path_factory.mktemp("home")
    process, results = run_simulator(job, tmp_path / "ws", "-n", "2", "-t", "2", home=home)
    assert process.returncode == 0, process.stdout[-4000:]
    events = read_events(results)
    assert [event.status for event in of_kind(events, End)] == ["completed"]
    for step in of_kind(events, Step):
        assert sorted(step.sites) == (["site-1"] if name == "centralised" else ["site-1", "site-2"])
        assert all(site.last_loss for site in step.sites.values())
    assert of_kind(events, Validation)[0].loss
