"""After provisioned runs, every byte outside the hospitals is searched for what identifies their patients."""

import json

import pytest
from canary import MARK, marks_in, plant
from command import passing
from federation_process import SITES, Federation
from kits import whole

from fedtar_flare.reporting.run import read_run
from fedtar_flare.site.context import state_of

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]


def site_file(table):
    """Few patients, quick jobs."""
    return whole(f"source: manifest\npath: {table}\npolicy: {{min_patients: 1, min_local_steps: 1}}\n")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """A federation whose sites hold marked patients."""
    folder, tables = tmp_path_factory.mktemp("marked"), tmp_path_factory.mktemp("hospitals")
    sites = {name: site_file(plant(tables / f"{MARK}{name}")) for name in SITES}
    with Federation(folder, sites=sites).running() as federation:
        yield federation


def traces_outside(federation):
    """Files outside the sites' kits, consoles and image caches that hold a mark; and how many were searched."""
    own = {federation.kits / name for name in SITES} | {federation.folder / f"{name}.out" for name in SITES}
    own |= {state_of(kit) for kit in federation.sites.values()}
    found, searched = [], 0
    for part in {*federation.kits.iterdir(), *federation.folder.glob("*.out"), federation.folder / "home"} - own:
        if part.is_dir():
            found += [f"{part.name}/{name}" for name in marks_in(part)]
            searched += sum(path.is_file() for path in part.rglob("*"))
        else:
            found += [part.name] * (MARK.encode() in part.read_bytes())
    return found, searched


def test_a_whole_run_leaves_no_trace_of_a_patient_outside_the_hospitals(hospitals, exported):
    job = hospitals.submit(exported("marked"))
    results = hospitals.completed(job)  # into the lead's kit, which is searched too
    record = read_run(results)
    assert [sorted(step.sites) for step in record.steps] == [sorted(SITES)] * 2
    assert all(record.start.skipped_studies[site] for site in SITES)  # the broken row was read, and only counted
    found, searched = traces_outside(hospitals)
    assert found == [] and searched > 50
    assert marks_in(results.parent) == []
    for site in SITES:  # what the hospital's own audit says was sent, without a mark either
        out = passing("audit", "--kit", hospitals.sites[site], "--json")
        assert MARK not in out
        messages = json.loads(out)["entries"]
        assert {entry["task"] for entry in messages} == {"handshake", "train", "close_round"}
        assert all(entry["outcome"] == "passed" and not entry["other"] for entry in messages)


def test_a_failing_site_s_error_names_files_to_its_own_staff_alone(hospitals, exported):
    site = hospitals.sites["hospital-b"]
    table = hospitals.folder / f"{MARK}bad.csv"
    table.write_text(f"{MARK}column\n{MARK}value\n")
    (site / "local" / "fedtar.yaml").write_text(site_file(table))
    job = hospitals.submit(exported("failing"))
    start = read_run(hospitals.completed(job)).start
    assert start.sites == ["hospital-a"] and "hospital-b" in start.absent
    found, _ = traces_outside(hospitals)
    assert found == []
    assert any(MARK in log.read_text(errors="replace") for log in site.rglob("log.txt"))
