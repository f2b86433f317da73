"""Marks in everything that identifies, and then every byte that the server holds is searched for them.

Two simulated hospitals with their own tables: patient ids, dates, DICOM tags, words of reports, file and folder names
carry unique marks. One run completes, in two others a site fails; none leaves a mark in the server's folder. What the
messages hold is searched in ``test_messages.py``.
"""

import json
import shutil
import zipfile

import pytest
from canary import DATE, MARK, marks_in, plant
from simulator import run_simulator

from fedtar_flare.fedtar.recipe import FedTARRecipe
from fedtar_flare.record.events import Start
from fedtar_flare.record.log import of_kind, read_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SITES = ("site-1", "site-2")
TINY = {
    "preset": "tiny",
    "num_rounds": 1,
    "time_steps": 2,
    "training": {"local_steps": 1, "batch_size": 4},
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return plant(tmp_path_factory.mktemp("data"), SITES)


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
    (start,) = of_kind(read_events(results), Start)
    assert start.sites == ["site-1"], process.stdout[-3000:]
    check_server(folder)
    assert MARK in (folder / "ws" / "site-2" / "log.txt").read_text()  # the site itself is told where to look
