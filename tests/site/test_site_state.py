"""A site's state over processes, kills and moved clocks; and what a purge takes away, with ``--yes`` alone."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command import failing, passing
from flare_context import task_header
from kits import add_to_site_file, make_kit, write_radiographs
from labelers import published

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.files import StateError, write_text
from fedtar_flare.data.cells import Timeline
from fedtar_flare.imaging.cache import computed_path, store_computed
from fedtar_flare.imaging.pipeline import Size, entry_of, prepare
from fedtar_flare.learning.report_labeler import import_labeler
from fedtar_flare.protocol.messages import version
from fedtar_flare.provision.retention import main
from fedtar_flare.site import approval, job_records
from fedtar_flare.site.accountant import Ledger, PatientLedger
from fedtar_flare.site.admission import Declined
from fedtar_flare.site.cohort import labeler_of_site, load_cohort
from fedtar_flare.site.context import Site, state_of
from fedtar_flare.site.doctor import environment
from fedtar_flare.site.job_records import bind_run, count_answer, fix_cells
from fedtar_flare.site.purge import plan
from fedtar_flare.site.site_file import read_site_file
from fedtar_flare.site.state import MOST_REPEATS, SiteState

DIGEST = "ab" * 32
LAYOUT = {"time_steps": "2", "timeline": "visits", "min_cell": "5", "score": "test"}


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
    assert SiteState(tmp_path, "run2", "site-1").versions() == SiteState(tmp_path, "run", "site-2").versions() == []
    assert state.folder.stat().st_mode & 0o077 == 0
    for run_id, site in (("../up", "s"), ("run", "a/b"), ("", "s"), ("run", "..")):
        with pytest.raises(ConfigError):
            SiteState(tmp_path, run_id, site)
    with pytest.raises(ConfigError):
        state.save("latest", {}, {})
    (file := state.folder / "0002-01.safetensors").write_bytes(file.read_bytes()[:-1])
    for name, word in (("0002-01", r"0002-01\.safetensors"), ("0009-01", "not found")):
        with pytest.raises(StateError, match=word):
            state.read(name)


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_old_versions_go_but_every_kept_round_can_be_resumed(state, steps):
    save(state, (0, 0))
    for r in range(1, 6):
        for t in range(1, steps + 1):
            save(state, (r, t))
            assert state.latest(version(r, t - 1)) is not None or (r, t) == (1, 1)
    assert {version(r, steps) for r in (2, 3, 4, 5)} <= {*(kept := state.versions())} and len(kept) <= 5


def test_answered_tasks_outlive_the_process_and_the_last_place_counts(state, tmp_path):
    def answer(_):  # one of many jobs at once, which must not answer more often than one
        with suppress(ExchangeError), SiteState(tmp_path, "run", "site-1").answering("train", task_header(step=2)):
            state.add_answered("train", version(1, 2))

    assert state.answered() == {}
    save(state, (0, 0))
    for task, place in (("handshake", (0, 0)), ("train", (1, 1)), ("train", (1, 2))):
        SiteState(tmp_path, "run", "site-1").add_answered(task, version(*place))
    assert state.answered() == {"handshake": "0000-00", "train": "0001-02"} and state.versions() == ["0000-00"]
    with ThreadPoolExecutor(8) as pool:
        [*pool.map(answer, range(20)), *pool.map(lambda _: state.add_answered("train", version(1, 1)), range(60))]
    file = state.folder / "tasks.json"
    counts = {"handshake": 1, "handshake 0000-00": 1, "train": 66, "train 0001-01": 61, "train 0001-02": MOST_REPEATS}
    assert json.loads(file.read_text())["how often"] == counts, "each of two processes counts"
    assert file.stat().st_mode & 0o077 == 0
    file.write_text("[]")
    with pytest.raises(StateError, match=r"tasks\.json"):
        state.answered()


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
    [*map(forked.Process.start, both)]
    assert sum(granted.get() for _ in range(200)) == 100
    [*map(forked.Process.join, both)]


@pytest.mark.parametrize("days", [-366, 366])
def test_a_clock_a_year_off_resets_nothing_and_nothing_is_asked_again(tmp_path, monkeypatch, days):
    state, records = SiteState(tmp_path / "state", "run", "north"), tmp_path / "records"
    for _ in range(MOST_REPEATS):
        state.add_answered("train", version(1, 1))
    assert state.may_answer("scores", "weights")
    Ledger(records / "ledger.json").add("run", 2.0)
    PatientLedger(records / "patients.json").add("run", 1.0, 0.1, 5)
    bind_run(records, "job", "run", "")
    count_answer(records, "data", 1)
    fix_cells(records, "data", LAYOUT)
    approval.approve(records, DIGEST, "job")

    moved = datetime.now() + timedelta(days)
    monkeypatch.setattr(time, "time", moved.timestamp)
    monkeypatch.setattr(time, "gmtime", moved.utctimetuple)
    monkeypatch.setattr(job_records, "datetime", SimpleNamespace(now=lambda: moved))
    again = SiteState(tmp_path / "state", "run", "north")
    for refused in (
        lambda: again.answering("train", task_header()).__enter__(),
        lambda: count_answer(records, "data", 1),
        lambda: fix_cells(records, "data", LAYOUT | {"min_cell": "6"}),
        lambda: bind_run(records, "job", "another", ""),
    ):
        with pytest.raises((Declined, ExchangeError)):
            refused()
    assert again.may_answer("scores", "weights") and not again.may_answer("scores", "other weights")
    assert Ledger(records / "ledger.json").spent(1e-5).releases == 1
    assert PatientLedger(records / "patients.json").spent("run") > 0 and approval.is_approved(records, DIGEST)


RUNS = ("20260101-000000-aaaa", "20260202-000000-bbbb")
PAGES = ("examples.html", "periods.html", "ahead-0002.jsonl", "reading-0/1-now.png")


@pytest.fixture
def kit(tmp_path, own_home):
    """A kit with the state of two runs, an audit, a ledger, and four patients' radiographs prepared in two sizes."""
    kit = make_kit(tmp_path / "hospital-a", "source: manifest\npath: manifest.csv\ncache_dir: ../cache\n")
    write_radiographs(kit / "local", 4)
    (state_of(kit) / "audit").mkdir(parents=True)
    for run in RUNS:
        SiteState(state_of(kit), run, "hospital-a").save("0001-01", {}, {})
        for name in PAGES:
            write_text(state_of(kit) / run / "hospital-a" / name, "report")
    (state_of(kit) / "audit" / "job.jsonl").write_text("{}\n")
    (state_of(kit) / "privacy_ledger.json").write_text("{}")
    for size in (32, 40):
        for visit in visits(kit):
            prepare(visit, Size(size, 16), kit / "cache" / "prepared")
    return kit


def visits(kit):
    config = read_site_file(kit / "local" / "fedtar.yaml").replace(simulated=True)
    return load_cohort(config, "site", timeline=Timeline(1)).visits


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_one_run_goes_and_all_else_stays(kit):
    before = files(kit.parent)
    steps = plan(Site.outside_of_jobs(kit), run=RUNS[0])
    assert files(kit.parent) == before
    steps.carry_out()
    gone = {f"hospital-a.fedtar_state/{RUNS[0]}/hospital-a/{name}" for name in ("0001-01.safetensors", *PAGES)}
    assert before - files(kit.parent) == gone and not (state_of(kit) / RUNS[0]).exists()


def test_a_run_whose_state_was_deleted_begins_no_second_time(kit):
    """What may be asked once was forgotten with the state, and an approval was for one run."""
    records = state_of(kit)
    for job, run in zip(("job-1", "job-2"), RUNS, strict=True):
        bind_run(records, job, run, "")
    plan(Site.outside_of_jobs(kit), run=RUNS[0]).carry_out()
    again = (("job-1", RUNS[0], ""), ("job-1", "another", ""), ("job-3", RUNS[0], "job-1"))
    as_another = (("job-9", RUNS[0], ""), ("job-9", RUNS[0], "one that it missed"))  # the same files under another id
    for job, run, resumes in (*again, *as_another):
        with pytest.raises(ExchangeError):
            bind_run(records, job, run, resumes)
    bind_run(records, "job-2", RUNS[1], "")
    bind_run(records, "job-3", RUNS[1], "job-2")


def test_one_patients_images_and_what_was_computed_from_them_go_in_every_size_and_nobody_elses(kit):
    for entry in (kit / "cache" / "prepared").glob("*/*.npy"):
        store_computed(computed_path(entry, "tokens"), np.zeros(3, np.float32))
    before = files(kit.parent)
    plan(Site.outside_of_jobs(kit), patient="P2").carry_out()
    gone = {Path(name) for name in before - files(kit.parent)}
    images, computed = ({(*p.name.split("."),)[:2] for p in gone if p.suffix == end} for end in (".npy", ".computed"))
    assert len(images) == 2 and computed == images
    pages = {f"hospital-a.fedtar_state/{run}/hospital-a/{name}" for run in RUNS for name in PAGES}
    assert {str(path) for path in gone if path.suffix not in (".npy", ".computed")} == pages
    for visit in visits(kit):
        there = [entry_of(visit, Size(size, 16), kit / "cache" / "prepared").is_file() for size in (32, 40)]
        assert there == [visit.patient_id != "P2"] * 2
    assert not (state_of(kit) / "fedtar.key").exists()  # looking makes nothing


@pytest.mark.parametrize("what", [{"patient": "P2"}, {"cache": True}, {"everything": True}])
def test_labels_of_references_go_with_the_images(kit, what, tmp_path):
    import_labeler(published(tmp_path / "hub", "chexbert")[0], tmp_path / "labeler")
    add_to_site_file(kit, f"labeler: {tmp_path / 'labeler'}")
    reader = labeler_of_site(read_site_file(kit / "local" / "fedtar.yaml"))
    reader.label([visit.report for visit in visits(kit)], [])
    assert [Path(one).name[:7] for one in files(kit) if one.endswith(".json") and "labels" in one] == ["labels-"]
    plan(Site.outside_of_jobs(kit), **what).carry_out()
    assert not list(kit.rglob("labels-*")) and (tmp_path / "labeler" / "labeler.json").is_file()


def test_a_patient_who_withdrew_is_found_too(kit):
    (kit / "local" / "out.txt").write_text("P2\n")
    add_to_site_file(kit, "exclude: out.txt")
    steps = plan(Site.outside_of_jobs(kit), patient="P2")
    assert sum("P2" in what for _, what in steps.remove) == 2 and not any("exclude" in line for line in steps.stays)


def test_a_patient_whose_rows_are_gone_is_known_to_the_runs(kit):
    SiteState(state_of(kit), RUNS[0], "hospital-a").note_patients([f"P{n}" for n in range(5)], 2)
    table = kit / "local" / "manifest.csv"
    rows = table.read_text().splitlines(keepends=True)
    table.write_text("".join(row for row in rows if not row.startswith("P2,")))
    steps = plan(Site.outside_of_jobs(kit), patient="P2")
    assert {path.name for path, _ in steps.remove} == {path.split("/")[0] for path in PAGES}
    assert any("forget JOB --before 2" in line for line in steps.stays)


def test_what_is_not_there_is_refused_and_nothing_goes(kit):
    before = files(kit.parent)
    runs = ({"run": run} for run in ("../audit", "audit", "20269999"))
    for wrong in ({"patient": "P9"}, *runs, {"older_than": -1.0}):
        with pytest.raises(ConfigError):
            plan(Site.outside_of_jobs(kit), **wrong)
    assert files(kit.parent) == before


JOB = "0f3d1c1e-8a52-4d4e-9c11-2f6a0c3d5b7e"


def test_what_is_old_goes_and_retention_leaves_the_audit(kit, capsys):
    for folder in (JOB, JOB.replace("0f", "1f"), "transfer"):
        (kit / folder / "app_hospital-a").mkdir(parents=True)
        (kit / folder / "log.txt").write_text("row 17")
    run, log, old = state_of(kit) / RUNS[0], state_of(kit) / "audit" / "job.jsonl", time.time() - 8640000
    for place in (run, log, kit / JOB, kit / "transfer"):
        for path in (place, *place.rglob("*")):
            os.utime(path, (old, old))
    assert not plan(Site.outside_of_jobs(kit), retention=True).remove
    add_to_site_file(kit, "retention_days: 99")
    assert not plan(Site.outside_of_jobs(kit), older_than=101).remove
    for options, more in (({"older_than": 99}, {log}), ({"retention": True}, set())):
        removed = {path for path, _ in plan(Site.outside_of_jobs(kit), **options).remove}
        assert removed == {run / "hospital-a", kit / JOB} | more
    before = {path.name for path in kit.iterdir()}
    assert main([str(kit)]) == 0 and "nothing deleted today" in capsys.readouterr().out and (kit / JOB).is_dir()
    assert main([str(kit)]) == 0 and capsys.readouterr().out.count("deleted: ") == 2
    assert {path.name for path in kit.iterdir()} == before - {JOB}


def test_what_only_a_resume_needs_goes_some_days_after_a_run_ended_well(kit):
    state, old = SiteState(state_of(kit), RUNS[0], "hospital-a"), time.time() - 15 * 86400
    for name in ("0002-01", "0003-01"):
        state.save(name, {}, {})
    state.write("broadcast-0003-00", {}, {})
    site, config = Site.outside_of_jobs(kit), read_site_file(kit / "local" / "fedtar.yaml")

    def left():
        for path in (state.folder, *state.folder.rglob("*")):
            os.utime(path, (old, old))
        return {path.name.split(".")[0] for path, _ in plan(site, retention=True).remove}

    assert left() == set(), "it may have to be resumed"
    state.note(ended=True)
    assert not plan(site, retention=True).remove, "somebody has just written to it"
    assert "2 runs" in (text := environment.retention(kit, config).text) and "next in 14" in text
    assert left() == {"0001-01", "0002-01", "broadcast-0003-00"}
    assert "next in 0" in environment.retention(kit, config).text
    plan(site, retention=True).carry_out()
    assert "next in 84" in environment.retention(kit, config.replace(retention_days=99)).text
    assert state.versions() == ["0003-01"] and {*PAGES} < files(state.folder)


def test_the_command_shows_first_and_deletes_with_yes(kit):
    (kit / JOB).mkdir()
    before = files(kit.parent)
    out = passing("site", "purge", "--patient", "P1", "--kit", kit)
    assert "would delete" in out and files(kit.parent) == before
    assert json.loads(passing("site", "purge", "--all", "--yes", "--json", "--kit", kit))["deleted"]
    left = files(kit.parent)
    assert {"hospital-a.fedtar_state/privacy_ledger.json", "hospital-a/local/manifest.csv"} < left
    assert not [f for f in left if f.endswith((".npy", ".safetensors", ".jsonl", ".html"))] and not (kit / JOB).exists()
    failing("site", "purge", "--yes", "--kit", kit)
