"""The jobs in ``jobs/``: each is its method's export, and a shorter one of each runs."""

import filecmp
import runpy
from functools import partial

import pytest
from command import run_simulator
from federation_process import recipe

from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.record.events import End, Step, Validation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.registry import names
from fedtar_flare.runtime.recipe import MethodRecipe

RUN_ELSEWHERE = ("fedtar", "fedmrg", "fedkei")
"""In ``test_fedtar_job.py``, ``test_fedmrg_run.py`` and ``test_fedkei_run.py``."""


def export_of(script, folder):
    """The job that a ``job.py`` makes."""
    made = runpy.run_path(str(script))["recipe"]
    made.export(str(folder))
    return folder / made.name


def same_files(first, second):
    files = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    _, differing, errors = filecmp.cmpfiles(first, second, [str(f) for f in files], shallow=False)
    assert not differing and not errors


@pytest.mark.parametrize("name", names())
def test_a_shipped_job_is_the_export_of_its_method_and_of_its_own_script(tmp_path, repository, name):
    """So ``fedtar export`` makes each from the installed package alone."""
    shipped = repository / "jobs" / name
    MethodRecipe(name).export(str(tmp_path))
    same_files(shipped, tmp_path / name)
    same_files(shipped, export_of(shipped / "job.py", tmp_path / "script"))


def test_the_script_of_a_job_holds_all_that_was_set(tmp_path):
    data = {"prior": "report", "transforms": ({"name": "Spacingd", "pixdim": [1, 1, 2.5]},)}
    settings = {"server": {"step_time_limit": 60, "alpha_form": "softmax"}, "patient": {"local_adapter": False}}
    settings |= {"model": {"lora_targets": ["decoder.*.c_attn"]}, "training": {"lr": 1e-5}, "data": data}
    FedTARRecipe(name="study", time_steps=2, **settings).export(str(tmp_path / "once"))
    same_files(tmp_path / "once" / "study", export_of(tmp_path / "once" / "study" / "job.py", tmp_path / "again"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in names() if name not in RUN_ELSEWHERE])
def test_a_short_job_of_each_rival_runs(tmp_path, home, name):
    """At one hospital, which is enough for the job; what two bring is asked of each method in its own tests."""
    sites = 2 if name == "centralised" else 1
    recipe(name, method=partial(MethodRecipe, name)).export(str(tmp_path))
    process, results = run_simulator(tmp_path / name, tmp_path / "ws", "-n", str(sites), "-t", str(sites), home=home)
    assert process.returncode == 0, process.stdout[-4000:]
    events = read_events(results)
    assert [event.status for event in of_kind(events, End)] == ["completed"]
    for step in of_kind(events, Step):
        assert sorted(step.sites) == ["site-1"]
        assert all(site.train_loss for site in step.sites.values())
    assert of_kind(events, Validation)[0].loss
