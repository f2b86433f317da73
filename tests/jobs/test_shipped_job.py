"""The jobs in jobs/, and FedTAR's by its own script: what a run leaves and streams, to the bit."""

import json
import runpy
from functools import partial
from pydoc import locate

import pytest
import torch
from command import run, run_simulator
from federation_process import recipe

from fedtar_flare.methods.fedtar.events import Outer
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.registry import contract_of, names
from fedtar_flare.reporting.run import read_run
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.simulation import ExecutorSite, InThisProcess, run_in_process

RUN_ELSEWHERE = ("fedtar", "fedmrg", "fedkei")
"""Below, in ``test_fedmrg_run.py`` and in ``test_fedkei_run.py``."""


def contents(job):
    return {file.relative_to(job): file.read_bytes() for file in job.rglob("*") if file.is_file()}


def made_by(script, folder):
    """Contents of the job that a ``job.py`` makes."""
    made = runpy.run_path(str(script))["recipe"]
    made.export(str(folder))
    return contents(folder / made.name)


@pytest.mark.parametrize("name", names())
def test_a_shipped_job_is_the_export_of_its_method_and_of_its_own_script(tmp_path, repository, name):
    """So ``fedtar export`` makes each from the installed package alone."""
    shipped = repository / "jobs" / name
    MethodRecipe(name).export(str(tmp_path))
    assert contents(shipped) == contents(tmp_path / name) == made_by(shipped / "job.py", tmp_path / "script")


def test_the_script_of_a_job_holds_all_that_was_set(tmp_path):
    data = {"prior": "report", "transforms": ({"name": "Spacingd", "pixdim": [1, 1, 2.5]},)}
    settings = {"server": {"step_time_limit": 60, "alpha_form": "softmax"}, "patient": {"local_adapter": False}}
    settings |= {"model": {"lora_targets": ["decoder.*.c_attn"]}, "training": {"lr": 1e-5}, "data": data}
    FedTARRecipe(name="study", time_steps=2, **settings).export(str(tmp_path / "once"))
    once = tmp_path / "once" / "study"
    assert contents(once) == made_by(once / "job.py", tmp_path / "again")


SIMULATED = ("scaffold", "centralised")


def run_of_files(config, folder, sites):
    """Results of the job that these files of FLARE's describe, in this process."""
    server, client = (json.loads((config / f"config_fed_{side}.json").read_text()) for side in ("server", "client"))
    (workflow,), (entry,) = server["workflows"], client["executors"]
    executor = locate(entry["executor"]["path"])
    made = {name: ExecutorSite(name, executor(**entry["executor"]["args"]), folder / name) for name in sites}
    controller = InThisProcess(folder, made, **workflow["args"])
    controller.run()
    assert not controller.panics, controller.panics
    return controller.results_folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in names() if name not in RUN_ELSEWHERE])
def test_a_short_job_of_each_rival_runs(tmp_path, home, monkeypatch, name):
    """At one hospital, which is enough for the job; what two bring is asked of each method in its own tests.

    SCAFFOLD's and the centre's through FLARE's simulator; of the others what FLARE reads, in this process.
    """
    sites = ("site-1", "site-2")[: 2 if name == "centralised" else 1]
    recipe(name, method=partial(MethodRecipe, name)).export(str(tmp_path))
    if name in SIMULATED:
        number = str(len(sites))
        process, results = run_simulator(tmp_path / name, tmp_path / "ws", "-n", number, "-t", number, home=home)
        assert process.returncode == 0, process.stdout[-4000:]
    else:
        monkeypatch.setenv("FEDTAR_HOME", str(home))
        results = run_of_files(tmp_path / name / "app" / "config", tmp_path / "ws", sites)
    record = read_run(results)
    assert record.status == "completed"
    for step in record.steps:
        assert sorted(step.sites) == ["site-1"]
        assert all(site.train_loss for site in step.sites.values())
    assert name == "evaluate" or record.validations[0].loss


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


@pytest.mark.parametrize(("byoc", "interval"), [(True, 0.05), (False, 2.0)])
def test_a_production_export_has_no_custom_folder_asks_seldom_and_guards_every_task(tmp_path, byoc, interval):
    recipe = FedTARRecipe(name="strict")
    recipe.export(str(tmp_path / "before"), byoc=not byoc)  # the last export alone counts
    recipe.export(str(tmp_path / "job"), byoc=byoc)
    assert bool(list((tmp_path / "job").rglob("custom"))) is byoc
    configs = [json.loads(path.read_text()) for path in (tmp_path / "job").rglob("config_fed_*.json")]
    assert [c["server"]["task_request_interval"] for c in configs if "server" in c] == [interval], configs
    (site,) = (config for config in configs if "executors" in config)
    for direction in ("task_data_filters", "task_result_filters"):  # FLARE 2.9 takes '*' literally: it names no task
        guarded = {t for c in site[direction] for t in c["tasks"] if any("Guard" in f["path"] for f in c["filters"])}
        assert guarded == set(contract_of("fedtar").task_names)


@pytest.mark.slow
def test_a_run_leaves_everything_that_it_promises(finished):
    printed, results = finished
    start = (record := read_run(results)).start
    for step in record.steps:
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
    assert alphas == pytest.approx(record.events(Outer)[-1].alpha_after, abs=1e-6)
    assert "BLEU-4" in printed and all(f"{name}.html" in printed for name in ("report", "examples", "phi"))


@pytest.mark.slow
def test_a_run_in_one_process_gives_the_same_bits(finished, tmp_path, home, monkeypatch):
    _, first = finished
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    second = run_in_process(TINY(), 2, tmp_path)
    a, b = (CheckpointFolder(results / "checkpoint").last()[0] for results in (first, second))
    assert a.info["run_id"] != b.info["run_id"]
    assert all(torch.equal(a.weights[n], b.weights[n]) for n in a.weights)
    assert all(torch.equal(a.method[n], b.method[n]) for n in a.method)
    assert read_run(first).evaluations == read_run(second).evaluations
