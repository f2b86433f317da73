"""What a running site does by itself: it tells a probe of its health, and sees to its retention once a day."""

import logging
import os
import queue
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from kits import make_kit
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from fedtar_flare.cli.main import main
from fedtar_flare.core.files import write_json
from fedtar_flare.provision import health, retention
from fedtar_flare.provision import launcher as launching
from fedtar_flare.provision.health import kit_health
from fedtar_flare.provision.launcher import SupervisedProcessLauncher
from fedtar_flare.provision.retention import COMMAND, EVERY
from fedtar_flare.site import audit
from fedtar_flare.site.context import CLOCK_AHEAD, HEALTH, Site
from fedtar_flare.site.doctor import OK, WARN, connection


def asked(kit, *options):
    return main(["health", "--kit", str(kit), *options])


def test_a_site_is_alive_while_its_heart_beats_and_ready_while_the_server_answers(tmp_path, monkeypatch):
    now, filters, launcher, context = [1000.0], [], SupervisedProcessLauncher(), FLContext()
    monkeypatch.chdir(kit := make_kit(tmp_path / "kit"))
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", [])
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    cell = SimpleNamespace(add_incoming_reply_filter=lambda channel, topic, cb: filters.append(cb))
    context.set_prop(ReservedKey.ENGINE, SimpleNamespace(get_cell=lambda: cell), private=True, sticky=False)
    context.set_prop(FLContextKey.WORKSPACE_ROOT, str(kit), private=True, sticky=False)
    assert (asked(kit), asked(kit, "--live")) == (1, 1)
    launcher.handle_event(EventType.SYSTEM_BOOTSTRAP, context)
    now[0] += 10 * health.STALLED  # the server is away: it has not registered for half an hour
    assert (asked(kit), asked(kit, "--live")) == (1, 0)
    for code, after, ready, live in (
        (ReturnCode.OK, 0, 0, 0),
        (ReturnCode.OK, health.UNANSWERED, 0, 0),
        (ReturnCode.UNAUTHENTICATED, 1, 1, 0),  # its name is disabled
        (ReturnCode.OK, health.STALLED + 1, 1, 1),
    ):
        launcher.handle_event(EventType.BEFORE_CLIENT_HEARTBEAT, context)
        filters[0](Message({MessageHeaderKey.RETURN_CODE: code}))
        now[0] += after
        assert (asked(kit), asked(kit, "--live")) == (ready, live), (code, after)
    assert kit_health(kit, live=True, within=0)[1] == "site: no heartbeat for 180 s"
    launcher.handle_event(EventType.BEFORE_CLIENT_HEARTBEAT, context)
    last = "site: last heartbeat 0 s ago; server: last answer 181 s ago"
    assert [kit_health(kit, within=within) for within in (180, 182)] == [(False, last), (True, last)]


@pytest.mark.parametrize(("ahead", "status"), [(86400, WARN), (-3600, WARN), (2, OK)])
def test_the_doctor_and_the_audit_tell_a_clock_that_differs_from_the_server_s(tmp_path, ahead, status):
    """``test_faults`` has how the server tells its time."""
    kit = make_kit(tmp_path / "kit")
    assert connection.clock(kit) == []
    write_json(kit / HEALTH, {CLOCK_AHEAD: float(ahead)})
    (finding,) = connection.clock(kit)
    assert finding.status == status and f"{abs(ahead)} s {'ahead of' if ahead > 0 else 'behind'}" in finding.text
    audit.write(Site.outside_of_jobs(kit), "job", {"task": "train"})
    (line,) = audit.read_audit(audit.audit_files(kit))
    assert line.get("clock_ahead") == (None if status == OK else ahead)


def test_a_process_that_is_stopped_or_has_ended_is_not_alive(tmp_path):
    kit = make_kit(tmp_path / "kit")
    with subprocess.Popen("cat", stdin=subprocess.PIPE) as process:  # as long as this process holds the pipe
        write_json(kit / HEALTH, {"pid": process.pid, "beat": time.monotonic(), "answered": time.monotonic()})
        assert kit_health(kit)[0]
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert kit_health(kit, live=True) == (False, "the site's process is stopped")
        process.kill()
        process.wait()
        assert kit_health(kit, live=True) == (False, "the site's process has ended")


def test_it_looks_at_what_may_go_at_the_start_and_once_a_day(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    kit, now, launcher, context = make_kit(tmp_path / "hospital-a"), [5.0], SupervisedProcessLauncher(), FLContext()
    commands = queue.Queue()

    def run(command, **_):
        commands.put(command)
        return SimpleNamespace(stdout="deleted: x\n", returncode=0)

    monkeypatch.setattr(retention.subprocess, "run", run)
    monkeypatch.setattr(launching.time, "monotonic", lambda: now[0])
    context.set_prop(FLContextKey.WORKSPACE_ROOT, str(kit), private=True, sticky=False)
    for later in (0, 10, EVERY):
        now[0] += later
        launcher.handle_event(EventType.AFTER_CLIENT_HEARTBEAT, context)
    for _ in range(2):
        assert commands.get(timeout=60) == [sys.executable, *COMMAND, str(kit)]
    while "retention: deleted: x" not in caplog.text:
        time.sleep(0.01)
    assert commands.empty()
