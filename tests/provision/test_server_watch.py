"""What the server's own components refuse and report: jobs at their submission, and a kit that is used twice."""

import json
import logging
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from command import failing
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FedEventHeader, FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.app_common.logging.job_log_receiver import JobLogReceiver
from nvflare.fuel.f3.sfm.sfm_endpoint import SfmEndpoint
from nvflare.widgets.fed_event import ServerFedEventRunner
from tables import cases

from fedtar_flare.provision import logins
from fedtar_flare.provision.logins import AGAIN_AFTER, TAKEN_OVER, WITHIN, LoginAlarm
from fedtar_flare.provision.status import CERTIFICATES, ending, job_line
from fedtar_flare.provision.storage import KitJobManager
from fedtar_flare.record.log import ALARMS_FILE, ALARMS_SHOWN, STATS_GROUP, alarms, raise_alarm

SITES = ["hospital-a", "hospital-b"]
UNKNOWN = "no site 'hospital-x'; it has hospital-a, hospital-b"
CASES = cases(__file__, "server_watch.yaml")
JOBS = CASES["jobs"]


def submit(manager, connected=(), **meta):
    """Why the server refuses a job with this meta.json; None where it takes it."""
    context = FLContext()
    context.get_engine = lambda: SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=n) for n in connected])
    context.set_prop(FLContextKey.JOB_META, {"name": "job", **meta}, private=True, sticky=False)
    manager.handle_event(EventType.SUBMIT_JOB, context)
    return context.get_prop(FLContextKey.JOB_BLOCK_REASON)


@pytest.fixture
def manager(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return KitJobManager(sites=SITES)


@pytest.mark.parametrize("words", JOBS)
def test_a_job_that_cannot_be_is_refused_when_it_is_submitted(manager, words):
    for meta in JOBS[words]:
        assert words in submit(manager, **meta)
        joined = submit(manager, connected=["hospital-x"], **meta)  # such a site keeps its own key and joined later
        assert (joined is None) is (words == UNKNOWN)
    for meta in CASES["taken"]:
        assert submit(manager, **meta) is None
    assert submit(KitJobManager("storage/other"), deploy_map={"app": ["anybody"]}) is None


def test_no_participant_fires_flare_s_own_events_or_names_a_file_at_the_server(manager):
    JobLogReceiver()._on_chunk_received(b"x", stream := {}, FLContext())
    (runner := ServerFedEventRunner()).poster = Mock()  # which is not to fire them here
    for kind in (EventType.FATAL_SYSTEM_ERROR, EventType.SYSTEM_BOOTSTRAP, "fed.analytix_log_stats"):
        event = Shareable({ReservedHeaderKey.PEER_PROPS: {ReservedKey.IDENTITY_NAME: "hospital-b"}})
        event[ReservedHeaderKey.HEADERS] = {FedEventHeader.TIMESTAMP: 1.0, FedEventHeader.EVENT_TYPE: kind, **event}
        runner._receive(topic="", request=event, fl_ctx=None)
    kinds = [event.get_header(FedEventHeader.EVENT_TYPE) for event in runner.in_events]
    assert not stream and len(kinds) == 3 and all(kind.startswith("fed.") for kind in kinds)


def heartbeat(alarm, error):
    context = FLContext()
    if error:
        context.set_prop(FLContextKey.COMMUNICATION_ERROR, error, sticky=False)
    alarm.handle_event(EventType.CLIENT_HEARTBEAT_PROCESSED, context)


def test_a_kit_that_is_used_twice_raises_one_alarm_in_ten_minutes(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    now, alarm = [0.0], LoginAlarm()
    monkeypatch.setattr(logins.time, "monotonic", lambda: now[0])
    heartbeat(alarm, None)
    heartbeat(alarm, "Client 'hospital-c' is disabled")
    assert not (tmp_path / ALARMS_FILE).exists()
    for _ in range(3):
        heartbeat(alarm, "Client ID already registered as a client: hospital-b")
    (told,) = alarms(tmp_path)
    assert "site 'hospital-b'" in told and "disable-client hospital-b" in told
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    now[0] = AGAIN_AFTER
    heartbeat(alarm, "Client ID already registered as a client: hospital-b")
    assert len(alarms(tmp_path)) == 2 and (tmp_path / ALARMS_FILE).stat().st_mode & 0o077 == 0


def connection(name):
    return SimpleNamespace(get_name=lambda: name, conn=SimpleNamespace(close=lambda: None), name=name)


def test_connections_that_take_each_other_s_place_are_an_alarm_and_a_restart_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SfmEndpoint, "add_connection", SfmEndpoint.add_connection)  # put back at the end
    now = [0.0]
    monkeypatch.setattr(logins.time, "monotonic", lambda: now[0])
    LoginAlarm().handle_event(EventType.SYSTEM_BOOTSTRAP, FLContext())
    twice, once, job = (SfmEndpoint(SimpleNamespace(name=n)) for n in ("hospital-b", "hospital-a", "hospital-a.job"))
    for number in range(8):
        once.add_connection(connection(f"a{number}"))
        now[0] += WITHIN  # restarts, hours apart
        job.add_connection(connection(f"j{number}"))
    for number in range(TAKEN_OVER + 5):
        job.add_connection(connection(f"k{number}"))
    assert alarms(tmp_path) == []
    for number in range(TAKEN_OVER + 3):
        assert len(alarms(tmp_path)) == (number > TAKEN_OVER)
        twice.add_connection(connection(f"b{number}"))
        now[0] += 10.0
    (told,) = alarms(tmp_path)
    assert "site 'hospital-b'" in told and len(twice.connections) == 1


def test_alarms_are_shown_by_status_the_newest_of_a_day_alone(tmp_path):
    assert alarms(tmp_path) == []
    (tmp_path / ALARMS_FILE).write_text(json.dumps({"time": 0, "text": "long ago"}) + "\n{cut")
    assert alarms(tmp_path) == []
    (tmp_path / ALARMS_FILE).write_text("")
    for number in range(ALARMS_SHOWN + 2):
        raise_alarm(tmp_path, f"number {number}")
    found = alarms(tmp_path)
    assert [text.split(" ", 1)[1] for text in found] == [f"number {n}" for n in range(2, ALARMS_SHOWN + 2)]
    entry = {"id": "x", "name": "job", "status": "RUNNING", "progress": {"task": "", "sites": {}, "alarms": found}}
    assert job_line(entry).count("ALARM") == ALARMS_SHOWN


def test_a_line_says_how_far_a_job_is_with_the_newest_loss_and_no_name_steers_the_terminal():
    job = {"id": "1f", "status": "RUNNING", "name": "night"}
    progress = {"task": "train", "round": 2, "rounds": 5, "step": 1, "time_steps": 3, "seconds": 61.4}
    progress |= {"sites": {"north": "done", "south": "asked"}, "validation_loss": {"1": 0.75, "10": 0.5}}
    _, line = job_line(job | {"progress": progress}).splitlines()
    assert all(word in line for word in ("round 2 of 5", "step 1 of 3", "south asked", "loss 0.5000"))
    for name in ("\x1b[2J\x1b[31mFINISHED", "two\nlines", "bell\x07", "right-to-left\u202e"):
        text = job_line(job | {"name": name})
        assert text.isprintable() and text.count("RUNNING") == 1
        for part in ({"task": name}, {"round": name}, {"sites": {name: name}}, {"numbers": {name: [1.0]}}):
            lines = job_line(job | {"progress": progress | part}).split("\n")
            assert len(lines) == 2 and all(map(str.isprintable, lines))


MALFORMED = CASES["malformed"] | {"no JSON": ({}, json.JSONDecodeError("no JSON", "x", 0), {})}
for wrong in CASES["wrong"]:
    MALFORMED[str(wrong)] = {}, [{"job_id": "x", "status": "RUNNING"}], CASES["progress"] | wrong


@pytest.mark.parametrize(("certificates", "jobs", "progress"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_answer_of_the_server_is_one_message(tmp_path, monkeypatch, certificates, jobs, progress):
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_admin.json").write_text('{"admin": {"username": "lead"}}')
    answers = {"check_status": {CERTIFICATES: certificates}, "list_jobs": jobs, "get_job_meta": {"status": "RUNNING"}}
    answers["show_stats"] = {"server": {STATS_GROUP: progress}}
    session = Mock(**{f"{name}.side_effect": [answer] for name, answer in answers.items()})
    monkeypatch.setattr("nvflare.fuel.flare_api.flare_api.new_secure_session", lambda *_, **__: session)
    err = failing("status", "--kit", tmp_path, "--prometheus", tmp_path / "status.prom", code=1)
    assert "the server's answer is malformed (lead; " in err and "which release" in err and err.count("\n") == 1
    assert not (tmp_path / "status.prom").exists()


def test_the_terminal_names_whose_certificate_ends_soon_or_has_ended_lately():
    """``test_veto`` has how the server comes to know of it."""
    now = datetime.now(UTC)
    days = {"server": -1, "hospital-a": 5, "hospital-b": 200, "gone": -40}
    said = ending({name: (now + timedelta(number)).timestamp() for name, number in days.items()})
    ends = [f"hospital-a ends on {now + timedelta(5):%Y-%m-%d}", f"server ended on {now - timedelta(1):%Y-%m-%d}"]
    assert said == [f"CERTIFICATE of {line}: renew it" for line in ends]
