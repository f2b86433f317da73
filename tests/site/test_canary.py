"""Marks in everything that identifies, and then every byte that the server holds is searched for them.

Simulated hospitals with their own tables: patient ids, dates, DICOM tags, words of reports, file and folder names
carry unique marks. One run completes, in another two of three sites fail; neither leaves a mark in the server's folder.
What the messages hold is searched in ``test_messages.py``.
"""

import json
import re
import shutil
import zipfile

import pytest
from canary import DATE, MARK, marks_in, plant
from command import run_simulator

from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.record.events import Start
from fedtar_flare.record.log import of_kind, read_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SITES = ("site-1", "site-2")
TINY = {"preset": "tiny", "num_rounds": 1, "time_steps": 2, "training": {"local_steps": 1, "batch_size": 4}}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return plant(tmp_path_factory.mktemp("data"), (*SITES, "site-3"))


def run(folder, planted, home, sites="2"):
    FedTARRecipe(name="canary", **TINY).export(str(folder))
    environment = {"home": home, "FEDTAR_SITES": str(planted), "PYTHONHASHSEED": "0"}
    return run_simulator(folder / "canary", folder / "ws", "-n", sites, "-t", sites, **environment)


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
    assert events[-1].status == "completed"
    (start,) = of_kind(events, Start)
    assert sorted(start.sites) == list(SITES) and all(sum(c["train"]) > 0 for c in start.counts.values())
    assert start.skipped_studies["site-1"]  # the row without an image was there and was counted
    files = {path.name for path in check_server(folder)}
    assert {"rounds.jsonl", "report.html", "log.txt"} <= files
    assert any(name.startswith("events.out.tfevents") for name in files)
    audit = sorted((home / "state" / "sites").rglob("*.jsonl"))
    assert len(audit) == 2 and all(MARK not in file.read_text() for file in audit)
    entries = [json.loads(line) for file in audit for line in file.read_text().splitlines()]
    messages = [e for e in entries if e["outcome"] != "streamed"]
    assert {e["task"] for e in messages} == {"handshake", "train", "close_round"}
    assert all(e["outcome"] == "passed" and not e["other"] for e in messages)


def test_failing_sites_tell_no_mark_either(planted, tmp_path_factory):
    """One site's table cannot be read, another's state cannot be used: errors name files, and must not leave."""
    folder, home = tmp_path_factory.mktemp("failing"), tmp_path_factory.mktemp("home")
    sites = folder / "sites"
    shutil.copytree(planted, sites)
    table, blocked = folder / f"{MARK}bad.csv", folder / f"{MARK}blocked"
    table.write_text(f"{MARK}column\n{MARK}value\n")
    blocked.write_text("a file where a folder should be")
    for site, key, path in (("site-2", "path", table), ("site-3", "state_dir", blocked)):
        file = sites / f"{site}.yaml"
        file.write_text(re.sub(f"(?m)^{key}: .*$", f"{key}: {path}", file.read_text()))
    process, results = run(folder, sites, home, "3")
    (start,) = of_kind(read_events(results), Start)
    assert start.sites == ["site-1"], process.stdout[-3000:]
    assert set(start.absent) == {"site-2", "site-3"}
    check_server(folder)
    for site in ("site-2", "site-3"):  # the site itself is told where to look
        assert MARK in (folder / "ws" / site / "log.txt").read_text()
