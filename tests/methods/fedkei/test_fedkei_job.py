"""The FedKEI job in FLARE's simulator, each task of each hospital in a process of its own."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from command import run_simulator

from fedtar_flare.methods.fedkei.events import EVENTS, Learnt, Mixed
from fedtar_flare.methods.fedkei.outside import KNOWLEDGE_FILE, read_knowledge
from fedtar_flare.record.events import SHARED, End
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.suite.engine import run_in_process

SETTINGS = {"training": {"epochs": 2, "batch_size": 8}, "data": {"synthetic_patients": 20}, "model": {"slices": 2}}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_shipped_job_runs_to_its_page_and_to_the_bits_of_one_process(tmp_path, repository, monkeypatch):
    job = shutil.copytree(repository / "jobs" / "fedkei", tmp_path / "fedkei")
    file = job / "app" / "config" / "config_fed_client.json"
    config = json.loads(file.read_text())
    arguments = config["executors"][0]["executor"]["args"]
    arguments |= {"preset": "tiny", "settings": arguments["settings"] | SETTINGS}
    file.write_text(json.dumps(config))
    process, results = run_simulator(job, tmp_path / "ws", "-n", "2", "-t", "2", home=tmp_path / "home")
    assert process.returncode == 0, process.stdout[-4000:]
    events = read_events(results, (*SHARED, *EVENTS))
    assert [event.status for event in of_kind(events, End)] == ["completed"]
    assert [sorted(one.sites) for one in of_kind(events, Learnt)] == [["site-1", "site-2"]] * 3
    assert [one.modules for one in of_kind(events, Mixed)] == [0, 2, 4]
    assert all(one.probed for one in of_kind(events, Mixed)[1:])
    assert read_knowledge(results / KNOWLEDGE_FILE).modules == 6
    page = (results / "report.html").read_text()
    assert 'id="tasks"' in page and 'id="curves"' in page and 'id="clusters"' in page

    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    recipe = MethodRecipe("fedkei", preset="tiny", **SETTINGS, fedkei={"rand_baseline": True})
    one, other = (
        CheckpointFolder(folder / "checkpoint").last()[0]
        for folder in (results, run_in_process(recipe, 2, tmp_path / "here"))
    )
    assert one.info["method"] == other.info["method"] and one.method.keys() == other.method.keys()
    assert all(torch.equal(one.method[name], other.method[name]) for name in one.method)
