"""A running site sees to its retention by itself: at its start and once a day, never twice at once."""

import logging
import sys
from types import SimpleNamespace

import pytest
from kits import make_kit
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

from fedtar_flare.provision import retention
from fedtar_flare.provision.launcher import SupervisedProcessLauncher
from fedtar_flare.provision.retention import COMMAND, EVERY, Retention


@pytest.fixture
def started(monkeypatch):
    """Processes that end when the test says so: their commands."""
    started = SimpleNamespace(commands=[], code=None)

    def start(command, **_):
        started.commands.append(command)
        started.code = None
        return SimpleNamespace(poll=lambda: started.code, communicate=lambda: ("deleted: x\n", None), returncode=0)

    monkeypatch.setattr(retention.subprocess, "Popen", start)
    return started


@pytest.fixture
def kit(tmp_path):
    return make_kit(tmp_path / "hospital-a", "source: synthetic\nretention_days: 90\n")


def test_it_runs_at_the_start_and_once_a_day(kit, started, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    now, launcher, context = [5.0], SupervisedProcessLauncher(), FLContext()
    monkeypatch.setattr(retention.time, "monotonic", lambda: now[0])
    context.set_prop(FLContextKey.WORKSPACE_ROOT, str(kit), private=True, sticky=False)

    def beat():
        launcher.handle_event(EventType.AFTER_CLIENT_HEARTBEAT, context)

    beat()
    beat()
    assert started.commands == [[sys.executable, *COMMAND, str(kit)]]
    now[0] += EVERY
    beat()  # the first still runs
    assert len(started.commands) == 1
    started.code = 0
    beat()
    assert len(started.commands) == 2 and "retention: deleted: x" in caplog.text


def test_without_the_setting_nothing_is_started(kit, started):
    file = kit / "local" / "fedtar.yaml"
    for text in ("source: synthetic\n", "source: [", None):
        file.unlink() if text is None else file.write_text(text)
        Retention()(kit)
    assert started.commands == []
