"""Purging: what goes, what stays, and nothing without ``--yes``."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from command import failing, passing
from kits import add_to_site_file, make_kit, write_radiographs
from labelers import published

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.files import write_text
from fedtar_flare.data.cells import Timeline
from fedtar_flare.imaging.cache import computed_path, store_computed
from fedtar_flare.imaging.pipeline import Size, entry_of, prepare
from fedtar_flare.learning.report_labeler import import_labeler
from fedtar_flare.provision.retention import main
from fedtar_flare.site.cohort import labeler_of_site, load_cohort
from fedtar_flare.site.context import Site, state_of
from fedtar_flare.site.doctor import environment
from fedtar_flare.site.job_records import bind_run
from fedtar_flare.site.purge import plan
from fedtar_flare.site.site_file import read_site_file
from fedtar_flare.site.state import SiteState

RUNS = ("20260101-000000-aaaa", "20260202-000000-bbbb")
PAGES = ("examples.html", "periods.html", "ahead-0002.jsonl", "reading-0/1-now.png")


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """A kit with the state of two runs, an audit, a ledger, and four patients' radiographs prepared in two sizes."""
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
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
    for job, run, resumes in (("job-1", RUNS[0], ""), ("job-1", "another", ""), ("job-3", RUNS[0], "job-1")):
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
    state.note_end()
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
