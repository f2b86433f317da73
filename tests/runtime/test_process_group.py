"""A site whose file says ``processes: 2``: its tasks give what one process gives, and no process is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from federation_process import wait_for
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from tables import leaves

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.protocol.messages import version
from fedtar_flare.registry import names
from fedtar_flare.site.state import ReadOnlyState
from fedtar_flare.testing import Hospital, executor_of


def is_running(pid):
    """Whether a process is there and not waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_no_process_outlives_the_executors():
    code = "from fedtar_flare.runtime.process_group import ProcessGroup; group = ProcessGroup(2, 'cpu'); "
    code += "print(*(one.pid for one in group._processes), group._folder.name, flush=True); input()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        *pids, folder = parent.stdout.readline().split()
    finally:
        parent.kill()
        parent.communicate()
    wait_for("the processes have ended with the executor's", lambda: not any(map(is_running, pids)))
    shutil.rmtree(folder)


def test_the_page_names_the_methods_that_cannot(repository):
    text = (repository / "docs" / "reference" / "site-file.md").read_text()
    named = " ".join(text.partition("cannot use more than one process: ")[2].partition(".")[0].split())
    cannot = []
    for name in names():
        try:
            executor_of(name).require_sharing()
        except ConfigError as error:
            assert f"method '{name}'" in str(error) and "processes: 1" in str(error)
            cannot.append(f"`{name}`")
    assert named == " and ".join(cannot)


@pytest.fixture
def site_of(tmp_path, site_files):
    made = []

    def make(processes, local_steps=3):
        file = site_files / "site-1.yaml"
        file.write_text(f"source: synthetic\nstate_dir: {tmp_path / f'state-{processes}'}\nprocesses: {processes}\n")
        training = {"local_steps": local_steps, "batch_size": 5}
        settings = {"preset": "tiny", "data": {"synthetic_patients": 16}, "training": training}
        FedTARRecipe(name="job", num_rounds=9, time_steps=2, **settings).export(str(tmp_path), byoc=False)
        made.append(Hospital(tmp_path / "kit", fresh=False, app=tmp_path / "job" / "app", **settings))
        return made[-1]

    yield make
    for site in made:
        site.executor.handle_event(EventType.END_RUN, FLContext())


def a_round(site):
    """Everything that a site sends in one round, among it of a task that fails, and what it keeps."""
    answers = [site.handshake(evaluate=True), site.train({"x": torch.zeros(1)}, 1, 1)]
    assert "'x'" in answers[1][0].reason
    w = answers[0][1]
    for t in (1, 2):
        reply, update = site.train(w, 1, t)
        answers.append((reply, update))
        w = {name: value + update[name].float() for name, value in w.items()}
    answers.append(site.close(w, 1, evaluate=True))
    return answers


def numbers_of(value):
    """All numbers within JSON-able content, by place."""
    return {place: float(leaf) for place, leaf in leaves(value).items() if isinstance(leaf, int | float)}


@pytest.mark.slow
def test_a_round_of_two_processes_is_that_of_one(site_of):
    one = a_round(site_of(1))
    site = site_of(2)
    two = a_round(site)
    for (expected, tensors), (found, mine) in zip(one, two, strict=True):
        assert (found.status, found.reason) == (expected.status, expected.reason)
        for part in ("numbers", "payload"):
            right, said = numbers_of(getattr(expected, part)), numbers_of(getattr(found, part))
            assert said.keys() == right.keys()
            for place, number in right.items():
                if "seconds" not in place:
                    assert said[place] == pytest.approx(number, rel=1e-3, abs=1e-5), place
        assert (mine or {}).keys() == (tensors or {}).keys()
        for name, value in (tensors or {}).items():
            # AdamW's first steps have the size of the rate whatever the gradient's, so rounding shows where it is tiny
            np.testing.assert_allclose(mine[name].float(), value.float(), rtol=1e-2, atol=2e-4)
    pids = [one.pid for one in site.executor._group._processes]
    site.executor.handle_event(EventType.END_RUN, FLContext())
    assert not any(map(is_running, pids))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_task_ends_with_one_of_its_processes(site_of, how, caplog):
    site = site_of(2, local_steps=10**6)
    _, w = site.handshake()
    group = site.executor._group
    pids = [one.pid for one in group._processes]

    def while_they_train():
        os.kill(pids[1], signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "stopped":
            site.signal.trigger(True)

    threading.Timer(5, while_they_train).start()
    answer, tensors = site.train(w, 1, 1)
    assert tensors is None and not group.alive
    if how == "stopped":
        assert answer == ReturnCode.TASK_ABORTED
    else:
        assert answer.reason == "one of the 2 processes that do this site's tasks together ended without an answer"
        assert "rank 1, signal SIGKILL" in caplog.text and "Traceback" not in caplog.text
    assert not any(map(is_running, pids))


def test_what_another_process_keeps_is_not_written(tmp_path):
    state = ReadOnlyState(tmp_path, "run", "site-1")
    state.save(version(1, 1), {"x": np.ones(1)}, {})
    state.add_answered("train", version(1, 1))
    assert state.may_answer("scores", "x") and state.may_answer("scores", "y")
    state.remove(version(1, 1))
    assert not list(tmp_path.iterdir())
