"""A task in a copy of the simulator's template gives what the same task gives in a process of its own."""

import json
import logging
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch
from federation_process import wait_for
from flare_context import context, put_app
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from fedtar_flare.errors import ConfigError, DataError, ExchangeError, FedTARError
from fedtar_flare.methods.fedtar.executor import PatientAdaptiveExecutor
from fedtar_flare.protocol.messages import TaskHeader, version
from fedtar_flare.protocol.tasks import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.runtime import forked, handed
from fedtar_flare.site.place import Site, TaskAborted
from fedtar_flare.tensor_file import StateError, checksum

SETTINGS = {"training": {"local_steps": 2, "batch_size": 4}, "data": {"synthetic_patients": 12}}


def header(run, round_=0, step=0, after="0000-00", **more):
    return TaskHeader("fedtar", run, round_, step, 1, 2, after, **more)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The simulated site's home, for this process and the template's."""
    folder = tmp_path_factory.mktemp("forked")
    put_app(folder / "app", SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTAR_HOME", str(folder / "home"))
        patch.delenv("FEDTAR_SITES", raising=False)
        yield folder


@pytest.fixture(scope="module")
def simulator(place):
    """Process id of a stand-in for the simulator, whose template waits."""
    if not forked.may_fork(PatientAdaptiveExecutor("fedtar", "tiny", SETTINGS)):
        pytest.skip("a process is copied on Linux alone, and not beside a GPU")
    stand_in = subprocess.Popen(["sleep", "600"])
    assert forked.connect(place / "app", stand_in.pid) is None  # the first task starts it, and does its work itself
    folder = forked.template_folder(stand_in.pid)
    try:
        wait_for("the template waits", (folder / forked.SOCKET).exists)
        yield stand_in.pid
    finally:
        stand_in.kill()
        stand_in.wait()
    wait_for("the template has ended with the simulator", lambda: not folder.exists())


def site(place, app="app"):
    return Site(context(place, simulated=True, app=place / app))


def in_a_copy(simulator, place, task, about, weights, signal=None, scalar=lambda *point: None, app="app"):
    connection = forked.connect(place / "app", simulator)
    assert connection is not None
    return forked.perform(connection, task, about, weights, site(place, app), signal or Signal(), scalar)


@pytest.mark.slow
def test_a_copy_gives_the_same_bits(simulator, place):
    points: dict[str, list] = {"plain": [], "copy": []}

    def task(name, task, about, weights):
        if name == "copy":
            return in_a_copy(simulator, place, task, about, weights, scalar=lambda *p: points["copy"].append(p))
        made = PatientAdaptiveExecutor("fedtar", "tiny", SETTINGS)
        made.scalars_to = lambda *p: points["plain"].append(p)
        return made.perform(task, about, weights, site(place))

    results = {}
    for name in points:
        replies, w = [], {}
        for about, what in (
            (header(name, initial_site="site-1"), HANDSHAKE),
            (header(name, 1, 1), TRAIN),
            (header(name, 1, 2, version(1, 1), evaluate=True), CLOSE_ROUND),
        ):
            reply, tensors = task(name, what, about, w)
            payload = json.loads(json.dumps(reply.payload))
            replies.append((reply.status, reply.numbers, payload, checksum(tensors or {})))
            w = {n: w.get(n, 0) + value for n, value in tensors.items()} if tensors else w
        results[name] = replies
    assert results["copy"] == results["plain"]
    assert points["copy"] == points["plain"] and len(points["copy"]) == 2


@pytest.mark.slow
def test_errors_and_logs_come_back(simulator, place, caplog):
    in_a_copy(simulator, place, HANDSHAKE, header("errors", initial_site="site-1"), {})
    with pytest.raises(ExchangeError) as refused:
        in_a_copy(simulator, place, TRAIN, header("errors", 1, 1), {"x": torch.zeros(1)})
    assert refused.value.public == str(refused.value)
    with pytest.raises(FedTARError, match="no state of this run") as missing:
        in_a_copy(simulator, place, TRAIN, header("unknown-run", 1, 1), {})
    assert "in perform" in missing.value.__notes__[0]  # where it happened, for the site's log
    with caplog.at_level(logging.INFO):
        in_a_copy(simulator, place, HANDSHAKE, header("logs", initial_site="site-1", evaluate=True), {})
    assert "for this site alone" in caplog.text


@pytest.mark.slow
def test_an_abort_reaches_a_copy(simulator, place):
    in_a_copy(simulator, place, HANDSHAKE, header("aborted", initial_site="site-1"), {})
    put_app(place / "long", SETTINGS | {"training": {"local_steps": 10**6, "batch_size": 4}})
    signal = Signal()
    signal.trigger(True)
    weights = in_a_copy(simulator, place, HANDSHAKE, header("aborted", initial_site="site-1"), {})[1]
    with pytest.raises(TaskAborted):
        in_a_copy(simulator, place, TRAIN, header("aborted", 1, 1), weights, signal, app="long")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("rank is -1"),
        DataError("patient-7: no pixels", reason="no-pixel-data"),
        ExchangeError("the tensor 'x' is not known"),
        FedTARError("in full", public="in public"),
        StateError("state.safetensors: damaged"),
        TaskAborted("left"),
        OSError(28, "No space left on device", "file"),
        ZeroDivisionError("division by zero"),
    ],
)
def test_an_error_says_the_same_on_the_other_side(error):
    error.add_note("where it happened")
    other = handed.error_of(json.loads(json.dumps(handed.words_of(error))))
    assert str(other) == str(error) and other.__notes__ == error.__notes__
    for name in ("public", "reason", "errno"):
        assert getattr(other, name, None) == getattr(error, name, None)
    for kind in (FedTARError, ConfigError, DataError, ExchangeError, TaskAborted, OSError):
        assert isinstance(other, kind) is isinstance(error, kind)
    if not isinstance(error, FedTARError):
        assert type(other).__name__ == type(error).__name__  # the executor tells the server this name alone


def test_a_folder_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(forked.tempfile, "gettempdir", lambda: str(tmp_path))
    forked.template_folder(os.getpid()).mkdir(mode=0o755)
    assert forked.connect(tmp_path, os.getpid()) is None


@pytest.mark.parametrize(("threads", "swapped", "at_once"), [(1, True, 1), (2, False, 2), (None, False, 2)])
def test_only_where_a_process_ends_after_its_task(threads, swapped, at_once):
    swapping = FLContext()
    engine = SimpleNamespace(client=SimpleNamespace(args=SimpleNamespace(threads=threads)))
    swapping.get_engine = lambda: engine
    clients = [{"name": "site-1"}, {"name": "site-2"}]
    swapping.set_prop(FLContextKey.JOB_META, {"job_clients": clients}, private=True, sticky=False)
    assert forked.is_swapped(swapping) is swapped
    assert forked.at_once(swapping) == at_once and forked.at_once(FLContext()) == 1
    assert not forked.is_swapped(FLContext())
