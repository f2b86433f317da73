import json
import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
import torch

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.files import StateError, read_tensors, write_tensors
from fedtar_flare.protocol.messages import version
from fedtar_flare.site import approval, audit, job_records
from fedtar_flare.site.accountant import Ledger, PatientLedger
from fedtar_flare.site.admission import Declined
from fedtar_flare.site.context import Site
from fedtar_flare.site.job_records import bind_run, count_answer, fix_cells, read_record
from fedtar_flare.site.state import MOST_REPEATS, SiteState
from fedtar_flare.testing import Hospital


@pytest.fixture
def state(tmp_path):
    return SiteState(tmp_path, "run", "site-1")


def save(state, *places, factor=1):
    for r, t in places:
        state.save(version(r, t), {"x": factor * torch.tensor([r, t])}, {"round": r})


def test_versions_are_found_by_the_task_that_names_them(state, tmp_path):
    assert state.latest(version(9, 9)) is None
    save(state, (0, 0), (1, 1), (1, 3))
    assert state.latest(version(1, 2)) == "0001-01"
    save(state, (2, 1))
    assert state.latest(version(1, 3)) == "0001-03"
    save(state, (1, 1), factor=10)  # going back to it keeps the later ones out of sight
    assert state.read(state.latest(version(1, 2)))[0]["x"].tolist() == [10, 10]
    tensors, info = state.read("0002-01")
    assert tensors["x"].tolist() == [2, 1] and info == {"round": 2}
    for other in (SiteState(tmp_path, "run2", "site-1"), SiteState(tmp_path, "run", "site-2")):
        assert other.versions() == []
    assert state.folder.stat().st_mode & 0o077 == 0
    for run_id, site in (("../up", "s"), ("run", "a/b"), ("", "s"), ("run", "..")):
        with pytest.raises(ConfigError):
            SiteState(tmp_path, run_id, site)
    with pytest.raises(ConfigError):
        state.save("latest", {}, {})


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_old_versions_go_but_every_kept_round_can_be_resumed(state, steps):
    save(state, (0, 0))
    for r in range(1, 6):
        for t in range(1, steps + 1):
            save(state, (r, t))
            assert state.latest(version(r, t - 1)) is not None or (r, t) == (1, 1)
    kept = state.versions()
    assert {version(r, steps) for r in (2, 3, 4, 5)} <= set(kept) and len(kept) <= 5


def test_answered_tasks_outlive_the_process_and_the_last_place_counts(state, tmp_path):
    assert state.answered() == {}
    save(state, (0, 0))
    for task, place in (("handshake", (0, 0)), ("train", (1, 1)), ("train", (1, 2))):
        SiteState(tmp_path, "run", "site-1").add_answered(task, version(*place))
    assert state.answered() == {"handshake": "0000-00", "train": "0001-02"} and state.versions() == ["0000-00"]
    with ThreadPoolExecutor(8) as pool:
        [*pool.map(lambda _: state.add_answered("train", version(1, 2)), range(60))]
    file = state.folder / "tasks.json"
    counts = {"handshake": 1, "handshake 0000-00": 1, "train": 62, "train 0001-01": 1, "train 0001-02": 61}
    assert json.loads(file.read_text())["how often"] == counts, "each of two processes counts"
    assert file.stat().st_mode & 0o077 == 0
    file.write_text("[]")
    with pytest.raises(StateError, match=r"tasks\.json"):
        state.answered()


def test_bits_survive_shared_memory_is_copied_and_damage_is_an_error_that_names_the_file(tmp_path):
    base, path = torch.randn(4, 4), tmp_path / "x.safetensors"
    sent = {"a": base, "b": base, "c": base.t(), "d": base.bfloat16()}
    write_tensors(path, sent, {"n": [1, None]})
    tensors, info = read_tensors(path)
    assert all(torch.equal(tensors[name], value) for name, value in sent.items()) and info == {"n": [1, None]}
    assert tensors["d"].dtype == torch.bfloat16
    path.write_bytes(path.read_bytes()[:-30])
    for file, word in ((path, r"x\.safetensors"), (tmp_path / "y.safetensors", "not found")):
        with pytest.raises(StateError, match=word):
            read_tensors(file)


def test_a_process_killed_while_it_writes_leaves_the_version_before_and_every_entry_of_its_ledgers(tmp_path):
    """A child writes the same version again and again and is killed; what is there must be one whole version."""
    code = """
import itertools, sys, torch
from pathlib import Path
from fedtar_flare.site.accountant import Ledger, PatientLedger
from fedtar_flare.site.state import SiteState
folder = Path(sys.argv[1])
for number in itertools.count():
    Ledger(folder / "ledger.json").add("run", 2.0)
    PatientLedger(folder / "patients.json").add("run", 2.0, 0.1, 1)
    state = SiteState(folder, "run", "site-1")
    state.add_answered("train", "0001-01")
    state.save("0001-01", {"x": torch.full((200_000,), float(number))}, {"number": number})
    print(number, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        try:
            next(line for line in child.stdout if int(line) >= 20)
        finally:
            child.kill()
    tensors, info = SiteState(tmp_path, "run", "site-1").read("0001-01")
    assert (last := info["number"]) >= 20 and bool((tensors["x"] == last).all())
    assert last < Ledger(tmp_path / "ledger.json").spent(1e-5).releases <= last + 2
    assert last < json.loads((tmp_path / "run/site-1/tasks.json").read_text())["how often"]["train"] <= last + 2
    assert PatientLedger(tmp_path / "patients.json").spent("run") > 0


def answer_all(folder, which, barrier, granted):
    state = SiteState(folder, "run", "site-1")
    for question in range(100):
        barrier.wait()
        granted.put(state.may_answer(f"close {question}", which))


def test_of_two_processes_that_are_asked_at_once_one_answers(tmp_path):
    """A round that both close from weights of the server's choice tells a difference."""
    forked = multiprocessing.get_context("fork")
    barrier, granted = forked.Barrier(2), forked.SimpleQueue()
    both = [forked.Process(target=answer_all, args=(tmp_path, which, barrier, granted)) for which in "ab"]
    for process in both:
        process.start()
    assert sum(granted.get() for _ in range(200)) == 100
    for process in both:
        process.join()


YEAR, DIGEST = 366 * 86400, "ab" * 32  # so many days are another year on any day
LAYOUT = {"time_steps": "2", "timeline": "visits", "min_cell": "5", "score": "test"}


def move_clock(monkeypatch, seconds):
    now, utc = time.time, time.gmtime
    monkeypatch.setattr(time, "time", lambda: now() + seconds)
    monkeypatch.setattr(time, "gmtime", lambda at=None: utc(now() + seconds if at is None else at))

    class Moved(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(time.time(), tz)

    monkeypatch.setattr(job_records, "datetime", Moved)


@pytest.mark.parametrize("moved", [-YEAR, YEAR])
def test_a_moved_clock_resets_nothing_and_nothing_is_asked_again(tmp_path, monkeypatch, moved):
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path))
    site, state = Site.outside_of_jobs(tmp_path, simulated="north"), SiteState(tmp_path / "state", "run", "north")
    header = Hospital(tmp_path, name="north").header("run", 1, 1, after="0000-00")
    records, before = tmp_path / "records", time.strftime("%Y", time.gmtime())
    for _ in range(MOST_REPEATS):
        state.add_answered("train", version(1, 1))
    assert state.may_answer("scores", "weights")
    Ledger(records / "ledger.json").add("run", 2.0)
    PatientLedger(records / "patients.json").add("run", 1.0, 0.1, 5)
    bind_run(records, "job", "run", "")
    count_answer(records, "data", 1)
    fix_cells(records, "data", LAYOUT)
    approval.approve(records, DIGEST, "job")
    audit.write(site, "job", {"task": "train"})
    accounts = {file: file.read_bytes() for file in records.rglob("*.json")}

    move_clock(monkeypatch, moved)
    assert time.strftime("%Y", time.gmtime()) != before and approval.is_approved(records, DIGEST)
    again = SiteState(tmp_path / "state", "run", "north")
    with pytest.raises(ExchangeError):
        again.check_quota("train", header)
    assert again.may_answer("scores", "weights") and not again.may_answer("scores", "other weights")
    assert Ledger(records / "ledger.json").spent(1e-5).releases == 1
    assert PatientLedger(records / "patients.json").spent("run") > 0
    for refused in (
        lambda: count_answer(records, "data", 1),
        lambda: fix_cells(records, "data", LAYOUT | {"min_cell": "6"}),
        lambda: bind_run(records, "job", "another", ""),
    ):
        with pytest.raises((Declined, ExchangeError)):
            refused()
    assert {file: file.read_bytes() for file in records.rglob("*.json")} == accounts
    audit.write(site, "job", {"task": "train"})
    (file,) = audit.audit_files(site.records)
    assert audit.verify(file).lines == 2 and not audit.verify(file).problem
    assert read_record(records / job_records.RUNS) == {"job": "run"}
