"""Runs of FedMRG and FedKEI that are killed and resumed: real processes, over mTLS."""

from functools import partial

import pytest
import torch
from federation_process import SITES, wait_for
from killing import LONG, check_same, kill_server_process, last, resume, round_1_is_whole, run_of, steps

from fedtar_flare.core.files import read_json
from fedtar_flare.record.log import read_events
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.site.context import state_of
from fedtar_flare.site.state import RUN

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]


def test_a_killed_run_of_fedmrg_is_resumed_with_the_same_weights_and_bank(federation, exported):
    settings = {"method": partial(MethodRecipe, "fedmrg"), "fedmrg": {"backbone": "lora", "bank_rows": 4}, "rounds": 2}
    settings |= LONG
    whole = federation.submit(exported("fedmrg_quiet", **settings))  # side by side
    identity = federation.submit(exported("fedmrg_killed", **settings))
    round_1_is_whole(federation, identity)
    kill_server_process(federation, identity)
    resumed = resume(federation, identity)
    results = federation.completed(resumed)
    assert [(event.round, event.step) for event in steps(read_events(results))] == [(2, 1)]
    end = last(results)
    assert sorted(end.method) == [f"bank/2/{site}" for site in SITES]
    check_same(end, last(federation.completed(whole)))


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
