"""What dies, and what becomes of the run: real processes, killed with SIGKILL, over mTLS."""

import json
from datetime import datetime, timedelta
from functools import partial

import pytest
import torch
from command import fedtar
from federation_process import SITES, recipe, wait_for

from fedtar_flare.files import read_json
from fedtar_flare.record.events import Start, Step, Validation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.site.place import state_of
from fedtar_flare.site.state import RUN
from fedtar_flare.tensor_file import read_tensors

pytestmark = [pytest.mark.production, pytest.mark.timeout(900)]
LEAD = "lead@hub.org"
LONG = {"training": {"local_steps": 8, "batch_size": 4}}
LIMIT = 120
"""Seconds; generous, because a handshake on a busy machine starts with a minute of imports."""


@pytest.fixture
def job(exported):
    """The job of all tests here: two rounds of two steps, so that every run can be compared with the quiet one."""
    return lambda name, **changes: exported(name, rounds=2, **({"server": {"step_time_limit": LIMIT}} | LONG | changes))


@pytest.fixture(scope="module")
def quiet(federation, tmp_path_factory):
    """The same job submitted twice, undisturbed, side by side: both last checkpoints."""
    folder = tmp_path_factory.mktemp("quiet")
    recipe("quiet", 2, server={"step_time_limit": LIMIT}, **LONG).export(str(folder), byoc=False)
    jobs = [federation.submit(folder / "quiet") for _ in range(2)]
    results = [federation.completed(identity, 400) for identity in jobs]
    return [(last(folder), read_events(folder)) for folder in results]


def last(results):
    return CheckpointFolder(results / "checkpoint").last()[0]


def steps(events):
    return of_kind(events, Step)


def has_step(federation, identity, round_, step):
    events = steps(federation.events(identity))
    return any((event.round, event.step) == (round_, step) for event in events)


def check_same(a, b):
    """Weights, and what the method keeps at the server."""
    assert a.round == b.round and a.weights.keys() == b.weights.keys() and a.method.keys() == b.method.keys()
    for name in a.weights:
        torch.testing.assert_close(a.weights[name], b.weights[name], rtol=0, atol=1e-6)
    for name in a.method:
        torch.testing.assert_close(a.method[name], b.method[name], rtol=0, atol=1e-6)


def state_files(federation, site):
    return sorted(state_of(federation.sites[site]).glob(f"*/{site}/*.safetensors"))


def run_of(federation, identity):
    """The run id that the server made for a job."""
    start = wait_for(
        f"{identity} has begun\n{federation.tail(identity)}",
        lambda: next(iter(of_kind(federation.events(identity), Start)), None),
    )
    return start.run_id


def in_step(federation, identity, site, round_, step):
    """Waits until a site is within the training of a step: it has kept the broadcast and not yet its new state."""
    folder = state_of(federation.sites[site]) / run_of(federation, identity) / site
    wait_for(
        f"{site} trains round {round_}, step {step}\n{federation.tail(identity)}",
        lambda: (folder / f"broadcast-{round_:04d}-{step - 1:02d}.safetensors").is_file(),
    )


def test_the_same_job_twice_at_the_same_time_counts_nothing_twice(quiet):
    (first, events), (second, _) = quiet
    assert first.info["run_id"] != second.info["run_id"]
    check_same(first, second)
    assert [(event.round, event.step) for event in steps(events)] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(sorted(event.sites) == sorted(SITES) for event in steps(events))


def test_a_site_s_job_process_that_dies_is_started_again_and_nothing_changes(federation, job, quiet):
    identity = federation.submit(job("killed_once"))
    in_step(federation, identity, "hospital-b", 1, 2)
    before = federation.job_process("hospital-b", identity)
    federation.kill(before)
    wait_for("it is started again", lambda: federation.job_process("hospital-b", identity) not in (None, before))
    results = federation.completed(identity, 400)
    assert all(sorted(event.sites) == sorted(SITES) for event in steps(read_events(results)))
    check_same(last(results), quiet[0][0])


def check_went_on_without(federation, identity, site):
    """The run is whole, the lost site is recorded as absent, and its time limit was waited out at most once."""
    events = read_events(federation.completed(identity, 600))
    assert [(event.round, event.step) for event in steps(events)] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    lost = [event.absent[site] for event in steps(events) if site in event.absent]
    lost += [event.left_out[site] for event in of_kind(events, Validation) if site in event.left_out]
    assert site in steps(events)[-1].absent and lost
    waited = [reason for reason in lost if reason.startswith(("no answer within", "disconnected while"))]
    assert len(waited) <= 1, lost
    others = [name for name in SITES if name != site]
    assert all(set(others) <= set(event.sites) for event in steps(events))


def test_a_site_s_job_process_that_keeps_dying_leaves_the_job_to_the_others(federation, job):
    identity = federation.submit(job("killed_always"))
    in_step(federation, identity, "hospital-b", 1, 2)
    killed = set()

    def gone() -> bool:
        pid = federation.job_process("hospital-b", identity)
        if pid and pid not in killed:
            federation.kill(pid)
            killed.add(pid)
        return "this site leaves the job" in (federation.folder / "hospital-b.out").read_text(errors="replace")

    wait_for(f"the site gives up\n{federation.tail(identity)}", gone)
    assert len(killed) == 4  # once, and three restarts
    check_went_on_without(federation, identity, "hospital-b")


def test_a_site_that_is_lost_as_a_whole_is_skipped_and_can_come_back(federation, job):
    limit = {"server": {"step_time_limit": 80}}  # waited out once here, so a shorter one
    identity = federation.submit(job("site_lost", **limit))
    in_step(federation, identity, "hospital-b", 1, 2)
    federation.kill_site("hospital-b")
    check_went_on_without(federation, identity, "hospital-b")
    federation.start("hospital-b")  # the tests after this one have it again


def test_a_site_whose_clock_is_a_day_ahead_changes_nothing(federation, job, quiet):
    federation.kill_site("hospital-b")
    federation.start("hospital-b", clock_ahead_s=86400)
    try:
        identity = federation.submit(job("skewed"))
        run_of(federation, identity)
        log = federation.sites["hospital-b"] / identity / "log.txt"
        tomorrow = f"{datetime.now().astimezone() + timedelta(days=1):%Y-%m-%d}"
        wait_for("its log is a day ahead", lambda: log.is_file() and tomorrow in log.read_text(errors="replace"))
        results = federation.completed(identity, 400)
        assert all(sorted(event.sites) == sorted(SITES) for event in steps(read_events(results)))
        check_same(last(results), quiet[0][0])
    finally:
        federation.kill_site("hospital-b")
        federation.start("hospital-b")


STATUS = {"aborted by the admin": "FINISHED:ABORTED", "the server lost as a whole": "FINISHED:ABNORMAL"}
ENDS = ["killed within a step", "aborted by the admin", "the server lost as a whole"]


@pytest.mark.parametrize("end", ENDS)
def test_a_run_whose_job_ended_is_resumed_with_the_same_numbers(federation, job, quiet, end):
    identity = federation.submit(job("resumed"))
    round_1_is_whole(federation, identity)
    if end == "killed within a step":
        in_step(federation, identity, "hospital-a", 2, 2)
    if end == "aborted by the admin":
        in_step(federation, identity, "hospital-a", 2, 1)
        federation.session(LEAD).abort_job(identity)
    elif end == "the server lost as a whole":
        federation.kill_site("localhost")
        federation.start("localhost")
        wait_for("the sites found the server again", lambda: set(SITES) <= federation.connected(), 300)
    else:
        federation.kill(federation.job_process("localhost", identity))
    status = federation.finished(identity)
    assert status == STATUS.get(end, "FINISHED:EXECUTION_EXCEPTION")
    all_gone(federation, identity)
    for site in SITES:
        assert state_files(federation, site)
        for file in state_files(federation, site):
            read_tensors(file)  # whole, or this raises

    if end == ENDS[0]:
        check_not_resumed_by_another(federation, identity)
    resumed = resume(federation, identity)
    results = federation.completed(resumed, 400)
    kept = CheckpointFolder(federation.server / "fedtar_checkpoints" / identity).last()[0]
    assert kept.round == 1 and last(results).info["run_id"] == kept.info["run_id"]  # the same run, at the sites too
    assert [(event.round, event.step) for event in steps(read_events(results))] == [(2, 1), (2, 2)]
    check_same(last(results), quiet[0][0])
    assert (results / "adapter" / "adapter_model.safetensors").is_file()


def round_1_is_whole(federation, identity):
    wait_for(
        f"round 1 is whole\n{federation.tail(identity)}",
        lambda: (federation.server / "fedtar_checkpoints" / identity / "round-0001.safetensors").is_file(),
    )


def kill_server_process(federation, identity):
    """Kills the job's process at the server, waits until the job has failed everywhere; the record until then."""
    federation.kill(federation.job_process("localhost", identity))
    events = federation.events(identity)  # the run folder goes with the job
    assert federation.finished(identity) == "FINISHED:EXECUTION_EXCEPTION"
    all_gone(federation, identity)
    return events


def all_gone(federation, identity):
    wait_for(
        "its processes are gone", lambda: not any(federation.job_process(n, identity) for n in ("localhost", *SITES))
    )


def resume(federation, identity):
    """The id of the job that goes on."""
    code, out, err = fedtar("resume", identity, "--kit", federation.kits / LEAD, "--json")
    assert code == 0, err
    return json.loads(out)["job_id"]


def test_a_killed_run_of_fedmrg_is_resumed_with_the_same_weights_and_bank(federation, exported):
    settings = {"method": partial(MethodRecipe, "fedmrg"), "fedmrg": {"backbone": "lora", "bank_rows": 4}, "rounds": 2}
    settings |= {"server": {"step_time_limit": LIMIT}} | LONG
    whole = federation.submit(exported("fedmrg_quiet", **settings))
    assert federation.finished(whole, 400) == "FINISHED:COMPLETED", federation.tail(whole)
    identity = federation.submit(exported("fedmrg_killed", **settings))
    round_1_is_whole(federation, identity)
    kill_server_process(federation, identity)
    resumed = resume(federation, identity)
    results = federation.completed(resumed, 400)
    assert [(event.round, event.step) for event in steps(read_events(results))] == [(2, 1)]
    end = last(results)
    assert sorted(end.method) == [f"bank/2/{site}" for site in SITES]
    check_same(end, last(federation.download(whole)))


def test_a_run_of_fedkei_killed_at_probe_and_at_adapt_and_a_site_s_process_too_ends_with_the_same_bits(
    federation, exported
):
    settings = {"method": partial(MethodRecipe, "fedkei"), "rounds": 2, "server": {"step_time_limit": LIMIT}}
    settings |= {"fedkei": {"tasks": ["effusion", "nodule"], "base": ["none", "cardiomegaly", "emphysema"]}}
    # batches of one image, so that PROBE and ADAPT last seconds and the kill falls within them
    settings |= {"training": {"epochs": 8, "batch_size": 1}, "data": {"synthetic_patients": 48}}
    whole = federation.submit(exported("fedkei_quiet", **settings))
    assert federation.finished(whole, 400) == "FINISHED:COMPLETED", federation.tail(whole)
    running = federation.submit(exported("fedkei_killed", **settings))
    for task, before in (("probe", (1, 2)), ("adapt", (2, 1))):
        file = state_of(federation.sites["hospital-a"]) / run_of(federation, running) / "hospital-a" / RUN
        wait_for(
            f"hospital-a was asked for {task} of task 2\n{federation.tail(running)}",
            lambda task=task, file=file: file.is_file() and f"{task} 2" in read_json(file).get("asked", {}),
        )
        events = kill_server_process(federation, running)
        assert [(event.round, event.step) for event in steps(events)][-1] == before, f"killed within {task}"
        running = resume(federation, running)
    wait_for(
        f"the resumed run is at adapt of task 2\n{federation.tail(running)}",
        lambda: has_step(federation, running, 2, 1),
    )
    before = federation.job_process("hospital-b", running)
    federation.kill(before)
    assert not has_step(federation, running, 2, 2), "killed within adapt"
    wait_for("it is started again", lambda: federation.job_process("hospital-b", running) not in (None, before))
    results = federation.completed(running, 400)
    assert [(event.round, event.step) for event in steps(read_events(results))] == [(2, 1), (2, 2)]
    assert all(sorted(event.sites) == sorted(SITES) for event in steps(read_events(results)))
    end, quiet = last(results), last(federation.download(whole))
    assert end.info["method"] == quiet.info["method"] and len(end.info["method"]["modules"]) == 4
    assert end.method.keys() == quiet.method.keys() and end.method
    assert all(torch.equal(end.method[name], quiet.method[name]) for name in end.method)


def check_not_resumed_by_another(federation, identity):
    folder = federation.server / "fedtar_checkpoints" / identity
    assert json.loads((folder / "submitter.json").read_text()) == {"submitter": LEAD}
    code, out, err = fedtar("resume", identity, "--kit", federation.kits / "admin@hub.org")
    assert code == 0, err
    theft = out.strip()
    assert federation.finished(theft) != "FINISHED:COMPLETED"
    assert "was somebody else's" in (federation.folder / "localhost.out").read_text(errors="replace")
    assert not folder.with_name(theft).exists()


def test_a_job_that_ended_before_its_first_round_says_so_when_it_is_resumed(federation, job):
    identity = federation.submit(job("too_early"))
    code, _, err = fedtar("resume", identity, "--kit", federation.kits / LEAD)
    assert code == 1 and "--force" in err and "Traceback" not in err  # never beside the run itself
    run_of(federation, identity)
    federation.kill(federation.job_process("localhost", identity))
    federation.finished(identity)
    resumed = resume(federation, identity)
    assert federation.finished(resumed) != "FINISHED:COMPLETED"
    assert "no checkpoint of job" in (federation.folder / "localhost.out").read_text(errors="replace")
