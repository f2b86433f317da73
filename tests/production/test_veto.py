"""What people see and do: an administrator watches, a hospital pauses, takes part again and renews its certificate."""

import json
import re
import subprocess

import pytest
from command import fedtar, passing
from federation_process import BIN, SITES, wait_for
from tables import edit_json

from fedtar_flare.core.files import hashes
from fedtar_flare.record.events import Step
from fedtar_flare.record.log import of_kind
from fedtar_flare.reporting.run import read_run

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]


def test_a_site_pauses_and_joins_while_the_job_runs_and_is_watched(federation, exported, tmp_path):
    job = exported("veto", rounds=4, training={"local_steps": 8, "batch_size": 4})
    identity, kit = federation.submit(job), federation.sites["hospital-b"]
    lead = ("--kit", federation.kits / "lead@hub.org", "--json")
    seen = tmp_path / "seen"
    watch = [BIN / "fedtar", "watch", identity, *lead]
    with seen.open("w") as out, subprocess.Popen(watch, env=federation.environment, stdout=out) as watching:
        wait_for(f"a first step\n{federation.tail(identity)}", lambda: of_kind(federation.events(identity), Step))
        trains = federation.running_job("hospital-a", identity)
        trains.suspend()  # a job of seconds, until it is watched
        try:
            wait_for("the watch says how far it is", lambda: '"task": "train"' in seen.read_text())
        finally:
            trains.resume()
        check_pause(federation, identity, kit)
    assert watching.returncode == 0
    check_seen([json.loads(line) for line in seen.read_text().splitlines()], identity)

    gauges = federation.folder / "status.prom"
    code, out, err = fedtar("status", *lead, "--limit", "1", "--prometheus", gauges)
    assert code == 0, err
    for who in ("server", *SITES):
        assert f'fedtar_certificate_end_seconds{{site="{who}"}}' in gauges.read_text()
    (entry,) = json.loads(out)
    assert (entry["id"], entry["name"], entry["status"]) == (identity, "veto", "FINISHED:COMPLETED")


def check_pause(federation, identity, kit):
    """The site is left out while it pauses, and the job completes with it."""

    def steps():
        return of_kind(federation.events(identity), Step)

    wait_for(f"a first step\n{federation.tail(identity)}", steps)
    try:
        assert "paused" in passing("site", "pause", "--kit", kit)
        paused = wait_for("a step without the paused site", lambda: [e for e in steps() if "hospital-b" in e.abstained])
        assert paused[0].abstained["hospital-b"] == "paused by the site"
        assert list(paused[0].sites) == ["hospital-a"]
    finally:
        passing("site", "join", "--kit", kit)
    results = federation.completed(identity)
    assert "get_widget" not in (results.parent / "error_log.txt").read_text(), "who watches makes no error"
    last = read_run(results).steps[-1]
    assert sorted([*last.sites, *last.abstained]) == sorted(SITES)
    for folder in (results.parent, federation.sites["hospital-a"] / identity):
        lines = [json.loads(line) for line in (folder / "log.json").read_text().splitlines()]
        placed = {(line["task"], line["round"], line["step"]) for line in lines if line["run"]}
        assert placed >= {("handshake", 0, 0), ("train", 1, 1), ("train", 4, 2), ("close_round", 4, 2)}

    entries = json.loads(passing("audit", "--kit", kit, "--json"))["entries"]
    told = [entry for entry in entries if entry.get("status") == "abstain"]
    assert any("paused" in entry.get("reason", "") for entry in told)


def check_seen(seen, identity):
    """What ``fedtar watch`` printed."""
    assert seen[-1]["status"] == "FINISHED:COMPLETED" and {entry["id"] for entry in seen} == {identity}
    progress = [entry["progress"] for entry in seen if entry.get("progress") and entry["progress"]["task"]]
    assert progress, seen
    for entry in progress:
        assert entry["task"] in ("handshake", "train", "close_round") and sorted(entry["sites"]) == sorted(SITES)
        assert all(0 < alpha < 1 for alpha in entry["numbers"]["alpha"]) and entry["time_steps"] == 2


def end_of(federation, site):
    """When the site's certificate ends, as the lead is told."""
    gauges = federation.folder / "status.prom"
    passing("status", "--kit", federation.kits / "lead@hub.org", "--prometheus", gauges)
    (end,) = re.findall(rf'fedtar_certificate_end_seconds{{site="{site}"}} (\S+)', gauges.read_text())
    return float(end)


def test_a_renewed_site_is_taken_in_and_its_new_end_is_told(federation):
    site, kit = "hospital-b", federation.sites["hospital-b"]
    before, local = end_of(federation, site), hashes(kit / "local")
    edit_json(federation.kits.parent / "state" / "cert.json", lambda state: state.pop(site))
    federation.provision()
    passing("renew", federation.kits.parent / "prod_01" / site, "--kit", kit)
    assert hashes(kit / "local") == local and end_of(federation, site) == before, "it runs on with the one before"
    federation.restart(site)
    assert end_of(federation, site) > before
