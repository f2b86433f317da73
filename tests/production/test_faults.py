"""What dies, and what becomes of the run: real processes, killed with SIGKILL, over mTLS."""

import json
from datetime import datetime, timedelta
from html import unescape

import pytest
from command import fedtar, fedtar_here, passing
from federation_process import CLOCK, RELEASE, SITES, recipe, wait_for
from killing import LEAD, LIMIT, LONG, all_gone, check_same, in_step, resume, round_1_is_whole, run_of

from fedtar_flare.core.files import read_tensors
from fedtar_flare.reporting.run import read_run
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.site.context import state_of
from fedtar_flare.site.doctor import diagnose
from fedtar_flare.site.state import SiteState
from fedtar_flare.testing import last_checkpoint as last
from fedtar_flare.version import __version__

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]


@pytest.fixture
def job(exported):
    """The job of all tests here: two rounds of two steps, so that every run can be compared with the quiet one."""
    return lambda name, **changes: exported(name, rounds=2, **({"server": {"step_time_limit": LIMIT}} | LONG | changes))


@pytest.fixture(scope="module")
def quiet(federation, tmp_path_factory):
    """The last checkpoint of the same job, undisturbed."""
    folder = tmp_path_factory.mktemp("quiet")
    recipe("quiet", 2, server={"step_time_limit": LIMIT}, **LONG).export(str(folder), byoc=False)
    return last(federation.completed(federation.submit(folder / "quiet")))


def check_went_on_without(federation, identity, site):
    """The run is whole, the lost site is recorded as absent, and its time limit was waited out at most once."""
    record = read_run(federation.completed(identity, 600))
    assert [(step.round, step.step) for step in record.steps] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    lost = [event.absent[site] for event in record.steps if site in event.absent]
    lost += [event.left_out[site] for event in record.validations if site in event.left_out]
    assert site in record.steps[-1].absent and lost
    waited = [reason for reason in lost if reason.startswith(("no answer within", "disconnected while"))]
    assert len(waited) <= 1, lost
    others = [name for name in SITES if name != site]
    assert all(set(others) <= set(step.sites) for step in record.steps)


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
    limit = {"server": {"step_time_limit": 120}}  # waited out once here, so a shorter one
    identity = federation.submit(job("site_lost", **limit))
    in_step(federation, identity, "hospital-b", 1, 2)
    kit = federation.sites["hospital-b"]
    assert healthy(kit, "--within", 60) and healthy(federation.server)
    federation.kill_site("hospital-b")
    assert not healthy(kit, "--live") and healthy(federation.sites["hospital-a"], "--within", 60)
    check_went_on_without(federation, identity, "hospital-b")
    federation.start("hospital-b")  # the tests after this one have it again
    wait_for("a probe finds it ready again", lambda: healthy(kit))


def healthy(kit, *options):
    return fedtar_here("health", "--kit", kit, *options)[0] == 0


def test_a_site_whose_clock_is_a_day_ahead_and_that_has_a_later_patch_release_changes_nothing(federation, job, quiet):
    federation.restart("hospital-b", change=CLOCK.format(86400) + RELEASE.format(f"{MINOR}.99"))
    try:
        identity = federation.submit(job("skewed"))
        run_id = run_of(federation, identity)
        log = federation.sites["hospital-b"] / identity / "log.txt"
        tomorrow = f"{datetime.now().astimezone() + timedelta(days=1):%Y-%m-%d}"
        wait_for("its log is a day ahead", lambda: log.is_file() and tomorrow in log.read_text(errors="replace"))
        results = federation.completed(identity)
        assert all(sorted(event.sites) == sorted(SITES) for event in read_run(results).steps)
        check_same(last(results), quiet)
        finding = next(f for f in diagnose(federation.sites["hospital-b"]) if f.check == "clock")
        assert finding.status == "WARN" and "ahead of the server's" in finding.text
        entries = json.loads(passing("audit", "--kit", federation.sites["hospital-b"], "--json"))["entries"]
        assert {abs(entry["clock_ahead"] - 86400) < 60 for entry in entries if entry["job"] == identity} == {True}
        assert "off the server's" in log.read_text()
        state = SiteState(state_of(federation.sites["hospital-b"]), run_id, "hospital-b")
        assert len(state.spare()) > 1, "it ended well"
    finally:
        federation.restart("hospital-b")


MINOR = __version__.rpartition(".")[0]
ENDS = {"aborted by the admin": "FINISHED:ABORTED", "the server lost as a whole": "FINISHED:ABNORMAL"}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_whose_job_ended_is_resumed_with_the_same_numbers(federation, job, quiet, end):
    identity = federation.submit(folder := job("resumed"))
    round_1_is_whole(federation, identity)
    if end == "aborted by the admin":
        in_step(federation, identity, "hospital-a", 2, 2)
        federation.session(LEAD).abort_job(identity)
    else:
        federation.kill_site("localhost")
        assert not healthy(federation.server) and healthy(federation.sites["hospital-a"], "--live")
        federation.start("localhost", change=RELEASE.format(f"{MINOR}.99"))  # upgraded meanwhile
        wait_for("the sites found the server again", lambda: set(SITES) <= federation.connected(), 300)
    assert federation.finished(identity) == ENDS[end]
    all_gone(federation, identity)
    for site in SITES:
        files = [*state_of(federation.sites[site]).glob(f"*/{site}/*.safetensors")]
        assert files and all(map(read_tensors, files)), "whole, or this raises"

    if end == "aborted by the admin":
        check_not_resumed_by_another(federation, identity, folder)
    resumed = resume(federation, identity)
    results = federation.completed(resumed)
    kept = CheckpointFolder(federation.server / "fedtar_checkpoints" / identity).last()[0]
    assert kept.round == 1 and last(results).info["run_id"] == kept.info["run_id"]  # the same run, at the sites too
    assert [(event.round, event.step) for event in read_run(results).steps] == [(2, 1), (2, 2)]
    check_same(last(results), quiet)
    assert (results / "adapter" / "adapter_model.safetensors").is_file()


def check_not_resumed_by_another(federation, identity, job_folder):
    folder = federation.server / "fedtar_checkpoints" / identity
    assert json.loads((folder / "submitter.json").read_text()) == {"submitter": LEAD}
    other = ("resume", identity, "--kit", federation.kits / "admin@hub.org")
    code, out, err = fedtar(*other)
    assert (code, out) == (1, "") and "not as admin@hub.org signed it" in err, "the copy would be signed by another"
    code, out, err = fedtar(*other, "--job", job_folder)
    assert code == 0, err
    theft = out.strip()
    assert federation.finished(theft) != "FINISHED:COMPLETED"
    assert "was somebody else's" in (federation.folder / "localhost.out").read_text(errors="replace")
    assert not folder.with_name(theft).exists()


def test_a_job_that_ended_before_its_first_round_says_so_when_it_is_resumed(federation, job):
    identity = federation.submit(job("too_early"))
    run_of(federation, identity)
    process = federation.running_job("localhost", identity)
    process.suspend()  # a job of seconds is not to end while it is asked about
    code, _, err = fedtar("resume", identity, "--kit", federation.kits / LEAD)
    assert code == 1 and "--force" in err and "Traceback" not in err  # never beside the run itself
    process.kill()
    federation.finished(identity)
    code, out, err = fedtar("resume", identity, "--kit", federation.kits / LEAD)
    assert (code, out) == (1, "") and "before its first round" in err and "Traceback" not in err


def test_a_hospital_that_was_not_connected_is_named_from_the_start(federation, job):
    federation.kill_site("hospital-b")
    try:
        identity = federation.submit(job("absent", server={"step_time_limit": 600}))
        in_step(federation, identity, "hospital-a", 1, 2)
        federation.running_job("hospital-a", identity).suspend()  # so that it is asked while the job runs

        def named() -> bool:
            (entry,) = json.loads(fedtar("status", identity, "--kit", federation.kits / LEAD, "--json")[1])
            alarms = (entry.get("progress") or {}).get("alarms", ())
            return any(identity in alarm and "hospital-b" in alarm for alarm in alarms)

        wait_for(f"the absent hospital is named\n{federation.tail(identity)}", named)
    finally:
        federation.start("hospital-b")
    federation.session(LEAD).abort_job(identity)
    federation.finished(identity)


def test_a_hospital_of_another_minor_release_is_left_out_with_the_reason_until_it_has_theirs(federation, job, tmp_path):
    federation.restart("hospital-b", change=RELEASE.format("99.0.0"))
    try:
        identity = federation.submit(job("upgraded", server={"step_time_limit": 600}))
        reason = "the site's is 99.0.0; install the same major.minor"  # a test before this one upgraded the server
        asked = ("status", identity, "--kit", federation.kits / LEAD, "--prometheus", tmp_path / "status.prom")

        def named() -> bool:
            said = fedtar_here(*asked)[1]
            return all(part in said for part in ("train: round", "hospital-b absent: the server's", reason))

        in_step(federation, identity, "hospital-a", 1, 2)
        trains = federation.running_job("hospital-a", identity)
        trains.suspend()  # a job of seconds, to be seen while it trains
        wait_for(f"who is left out, and why, is said while others train\n{federation.tail(identity)}", named)
        trains.resume()
        assert 'site="hospital-b"} 1' in (tmp_path / "status.prom").read_text()
        results = federation.completed(identity)
        assert [[*event.sites] for event in read_run(results).steps] == [["hospital-a"]] * 4
        assert reason in unescape((results / "report.html").read_text())
    finally:
        federation.restart("hospital-b")
    record = read_run(federation.completed(resume(federation, identity, "-r", 3)))
    assert record.start.sites == [*SITES] and [sorted(step.sites) for step in record.steps] == [[*SITES]] * 2
