"""Other methods than FedTAR over mTLS: killed and resumed, guarded and audited, and an evaluation of candidates."""

import csv
import json
from functools import partial

import pytest
import torch
from command import passing
from federation_process import SITES, restored, wait_for
from killing import LONG, kill_server_process, resume, round_1_is_whole, run_of, steps

from fedtar_flare.core.files import read_json
from fedtar_flare.data.cells import Timeline
from fedtar_flare.provision.kit import site_policy
from fedtar_flare.record.events import Start, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.site.context import state_of
from fedtar_flare.site.state import RUN
from fedtar_flare.synthetic.cohort import synthetic_cohort
from fedtar_flare.testing import last_checkpoint as last

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]


def test_a_run_of_fedkei_killed_at_probe_and_adapt_and_at_a_site_ends_with_the_same_bits(federation, exported):
    def done(identity):
        return [(event.round, event.step) for event in steps(federation.events(identity))]

    settings = {"method": partial(MethodRecipe, "fedkei"), "rounds": 2}
    settings |= {"fedkei": {"tasks": ["effusion", "nodule"], "base": ["none", "cardiomegaly", "emphysema"]}}
    # batches of one image, so that PROBE and ADAPT last seconds and the kill falls within them
    settings |= {"training": {"epochs": 8, "batch_size": 1}, "data": {"synthetic_patients": 48}}
    whole = federation.submit(exported("fedkei_quiet", **settings))
    running = federation.submit(exported("fedkei_killed", **settings))
    for task, before in (("probe", (1, 2)), ("adapt", (2, 1))):
        file = state_of(federation.sites["hospital-a"]) / run_of(federation, running) / "hospital-a" / RUN

        def asked(task=task, file=file):
            return file.is_file() and f"{task} 2" in read_json(file).get("asked", {})

        wait_for(f"hospital-a was asked for {task} of task 2\n{federation.tail(running)}", asked)
        events = kill_server_process(federation, running)
        assert [(event.round, event.step) for event in steps(events)][-1] == before, f"killed within {task}"
        running = resume(federation, running)
    wait_for(f"the resumed run is at adapt of task 2\n{federation.tail(running)}", lambda: (2, 1) in done(running))
    before = federation.job_process("hospital-b", running)
    federation.kill(before)
    assert (2, 2) not in done(running), "killed within adapt"
    wait_for("it is started again", lambda: federation.job_process("hospital-b", running) not in (None, before))
    results = federation.completed(running)
    assert [(event.round, event.step) for event in steps(read_events(results))] == [(2, 1), (2, 2)]
    assert all(sorted(event.sites) == sorted(SITES) for event in steps(read_events(results)))
    end, quiet = last(results), last(federation.completed(whole))
    assert end.info["method"] == quiet.info["method"] and len(end.info["method"]["modules"]) == 4
    assert end.method.keys() == quiet.method.keys() and end.method
    assert all(torch.equal(end.method[name], quiet.method[name]) for name in end.method)


@pytest.fixture
def without_fedavg(federation):
    """The policy of hospital-b allows FedTAR alone; calling it allows what it did before."""
    file = federation.sites["hospital-b"] / "local" / "privacy.json"
    with restored(file) as (before,):
        file.write_text(json.dumps(site_policy(["fedtar"])))
        yield lambda: file.write_text(before)


def test_fedavg_is_guarded_audited_and_resumed(federation, exported, without_fedavg):
    """The job is killed between rounds; a hospital whose policy forbids the method joins when it allows it."""
    identity = federation.submit(exported("tenant", rounds=2, method=partial(MethodRecipe, "fedavg"), **LONG))
    round_1_is_whole(federation, identity)
    (start,) = of_kind(kill_server_process(federation, identity), Start)
    assert start.method == "fedavg" and start.sites == ["hospital-a"]
    assert "policy allows (fedtar)" in start.absent["hospital-b"]

    without_fedavg()
    resumed = resume(federation, identity)
    results = federation.completed(resumed)
    events = read_events(results)
    walked = [[step.round, step.step, *sorted(step.sites)] for step in of_kind(events, Step)]
    assert walked == [[2, t, *SITES] for t in (1, 2)]
    kept = CheckpointFolder(federation.server / "fedtar_checkpoints" / identity).last()[0]
    assert of_kind(events, Start)[0].run_id == kept.info["run_id"] == start.run_id
    assert json.loads((results / "metrics.json").read_text())["method"] == "fedavg"
    assert "FedAvg" in (results / "report.html").read_text() and (results / "adapter" / "README.md").is_file()

    for site in SITES:
        entries = json.loads(passing("audit", "--kit", federation.sites[site], "--json"))["entries"]
        mine = [entry for entry in entries if entry["job"] in (identity, resumed)]
        sent = [entry for entry in mine if entry.get("tensors")]
        assert sent and {entry["method"] for entry in sent} == {"fedavg"}
        assert {tensor["group"] for entry in sent for tensor in entry["tensors"]} == {"adapter"}
        if site == "hospital-b":
            assert {entry["job"] for entry in sent} == {resumed}
            assert all(entry["status"] == "error" for entry in mine if entry["job"] == identity)


def test_hospitals_compare_their_candidates_over_mtls(federation, exported, home):
    files = [kit / "local" / "fedtar.yaml" for kit in federation.sites.values()]
    for name, file in zip(SITES, files, strict=True):
        cohort = synthetic_cohort(name, folder=home / "synthetic", patients=12, timeline=Timeline(2), seed=0)
        for candidate, kept in (("whole", 100), ("half", 3)):
            texts = [(s.visit.visit_id, ". ".join(s.visit.report.split(". ")[:kept])) for s in cohort.samples("test")]
            with (file.parent / f"{candidate}.csv").open("w", newline="") as opened:
                csv.writer(opened).writerows([("study_id", "prediction"), *texts])
    with restored(*files) as texts:
        for file, text, only in zip(files, texts, ("  half: half.csv\n", ""), strict=True):
            file.write_text(f"{text}candidates:\n  whole: whole.csv\n{only}")
        evaluation = partial(MethodRecipe, "evaluate", evaluate={"candidates": {"whole": "", "half": "", "job": ""}})
        results = federation.completed(federation.submit(exported("evaluated", method=evaluation)))
    scores = json.loads((results / "cross_val_results.json").read_text())
    assert {site: {*of} for site, of in scores.items()} == {
        SITES[0]: {"whole", "half", "job"},
        SITES[1]: {"whole", "job"},
    }
    assert all(of["whole"]["finding_f1"] > 0.9 > of["job"].get("finding_f1", 0) for of in scores.values())
    page = (results / "report.html").read_text()
    assert "whole - half" in page and "not-here" in page
