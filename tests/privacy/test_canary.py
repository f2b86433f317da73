"""Marks in everything that identifies, and then every byte that the server holds is searched for them.

Two simulated hospitals with their own tables: patient ids, dates, DICOM tags, words of reports, file and folder names
carry unique marks. One run completes, in two others a site fails; none leaves a mark in the server's folder. What the
messages hold is searched in ``test_messages.py``.
"""

import json
import shutil
import zipfile

import pytest
from simulator import run_simulator

from fedtar_flare.data.synthetic_sites import write_sites
from fedtar_flare.fedtar.recipe import FedTARRecipe
from fedtar_flare.flare.record import read_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SITES = ("site-1", "site-2")
MARK = "canaryqzx"
DATE = "1987-06"
TINY = {
    "preset": "tiny",
    "num_rounds": 1,
    "time_steps": 2,
    "training": {"local_steps": 1, "batch_size": 4},
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Two hospitals whose tables carry marks in every column, and the marks."""
    import csv

    from pydicom import dcmread

    folder = tmp_path_factory.mktemp("data")
    sites = folder / "sites"
    sites.mkdir()
    for written in write_sites(folder / "made", list(SITES), patients=10, time_steps=2, seed=3):
        home = folder / f"{MARK}folder{written.site[-1]}"
        home.mkdir()
        rows = list(csv.DictReader(written.manifest.open(encoding="utf-8")))
        patients = {}
        for number, row in enumerate(rows):
            source = written.manifest.parent / row["image"]
            target = home / f"{MARK}series{number}"
            shutil.copytree(source, target)
            for file in target.rglob("*.dcm"):
                dataset = dcmread(file)
                dataset.PatientName = f"{MARK}Name^{number}"
                dataset.PatientID = f"{MARK}Tag{number}"
                dataset.InstitutionName = f"{MARK}Institution"
                dataset.StudyDate = "19870613"
                dataset.save_as(file)
                file.rename(file.with_name(f"{MARK}{file.name}"))
            patients.setdefault(row["patient_id"], f"{MARK}id{len(patients)}")
            row["patient_id"] = patients[row["patient_id"]]
            row["study_datetime"] = f"{DATE}-{1 + number % 28:02d}T{number % 24:02d}:00:00"
            row["image"] = target.name
            report = row.get("report") or (written.manifest.parent / row["report_path"]).read_text(encoding="utf-8")
            row["report"] = f"{report} {MARK}word{number}."
        rows.append({**rows[0], "patient_id": f"{MARK}broken", "image": f"{MARK}missing"})  # is left out, and counted
        names = ["patient_id", "study_datetime", "image", "report", "age", "sex"]
        with (home / f"{MARK}table.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        (sites / f"{written.site}.yaml").write_text(
            f"source: manifest\npath: {home / f'{MARK}table.csv'}\nmin_cell: 1\nstate_dir: {folder / written.site}\n"
        )
    return sites


def marks_in(folder):
    """Files below ``folder`` whose bytes or whose name hold a mark; archives are looked into."""
    marks = [MARK.encode(), MARK.encode("utf-16-le"), DATE.encode(), b"19870613"]
    found = []
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        contents = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        if MARK in str(path.relative_to(folder)) or any(mark in data for mark in marks for data in contents):
            found.append(str(path.relative_to(folder)))
    return found


def run(folder, planted, home, **settings):
    FedTARRecipe(name="canary", **{**TINY, **settings}).export(str(folder))
    return run_simulator(
        folder / "canary", folder / "ws", "-n", "2", "-t", "2", home=home, FEDTAR_SITES=str(planted), PYTHONHASHSEED="0"
    )


def check_server(folder):
    server = folder / "ws" / "server"
    looked_at = [path for path in server.rglob("*") if path.is_file()]
    assert len(looked_at) > 5  # logs, record, results
    assert marks_in(server) == []
    return looked_at


def test_the_search_finds_a_mark_wherever_it_is(tmp_path):
    (tmp_path / "a.txt").write_text(f"x {MARK} y")
    (tmp_path / "b.bin").write_bytes(b"\0" + DATE.encode() + b"\1")
    (tmp_path / f"{MARK}.txt").write_text("")
    with zipfile.ZipFile(tmp_path / "c.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("d", MARK * 100)
    (tmp_path / "clean").write_text("x")
    assert len(marks_in(tmp_path)) == 4


def test_no_mark_reaches_the_server(planted, tmp_path_factory):
    folder, home = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("home")
    process, results = run(folder, planted, home)
    assert process.returncode == 0, process.stdout[-4000:]
    events = read_events(results)
    assert events[-1]["status"] == "completed"
    start = next(event for event in events if event["event"] == "start")
    assert sorted(start["sites"]) == list(SITES) and all(sum(c["train"]) > 0 for c in start["counts"].values())
    assert start["skipped_studies"]["site-1"]  # the row without an image was there and was counted
    files = {path.name for path in check_server(folder)}
    assert {"rounds.jsonl", "report.html", "log.txt"} <= files
    assert any(name.startswith("events.out.tfevents") for name in files)
    audit = sorted((home / "state" / "sites").rglob("*.jsonl"))
    assert len(audit) == 2 and all(MARK not in file.read_text() for file in audit)
    entries = [json.loads(line) for file in audit for line in file.read_text().splitlines()]
    messages = [e for e in entries if e["outcome"] != "streamed"]
    assert {e["task"] for e in messages} == {"handshake", "train", "close_round"}
    assert all(e["outcome"] == "passed" and not e["other"] for e in messages)


@pytest.mark.parametrize("kind", ["table", "unexpected"])
def test_a_failing_site_tells_no_mark_either(planted, tmp_path_factory, kind):
    """One site's table cannot be read, or its state cannot be used: its error names files, and must not leave."""
    folder, home = tmp_path_factory.mktemp("failing"), tmp_path_factory.mktemp("home")
    sites = folder / "sites"
    shutil.copytree(planted, sites)
    text = (sites / "site-2.yaml").read_text()
    if kind == "table":
        table = folder / f"{MARK}bad.csv"
        table.write_text(f"{MARK}column\n{MARK}value\n")
        path = next(line for line in text.splitlines() if line.startswith("path:"))
        (sites / "site-2.yaml").write_text(text.replace(path, f"path: {table}"))
    else:
        blocked = folder / f"{MARK}blocked"
        blocked.write_text("a file where a folder should be")
        path = next(line for line in text.splitlines() if line.startswith("state_dir:"))
        (sites / "site-2.yaml").write_text(text.replace(path, f"state_dir: {blocked}"))
    process, results = run(folder, sites, home)
    events = read_events(results)
    start = next(event for event in events if event["event"] == "start")
    assert start["sites"] == ["site-1"], process.stdout[-3000:]
    check_server(folder)
    assert MARK in (folder / "ws" / "site-2" / "log.txt").read_text()  # the site itself is told where to look
