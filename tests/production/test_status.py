"""What an administrator sees of a running job, from the startup kit alone."""

import json

import pytest
from command import fedtar
from federation_process import SITES

pytestmark = [pytest.mark.production, pytest.mark.timeout(600)]


def test_status_and_watch_show_how_far_a_job_is(federation, exported):
    identity = federation.submit(exported("watched", training={"local_steps": 8, "batch_size": 4}))
    kit = federation.kits / "lead@hub.org"
    code, out, err = fedtar("watch", identity, "--kit", kit, "--json", timeout=400)
    assert code == 0, out + err
    seen = [json.loads(line) for line in out.splitlines()]
    assert seen[-1]["status"] == "FINISHED:COMPLETED" and {entry["id"] for entry in seen} == {identity}
    progress = [entry["progress"] for entry in seen if entry.get("progress") and entry["progress"]["task"]]
    assert progress, out
    for entry in progress:
        assert entry["task"] in ("handshake", "train", "close_round") and sorted(entry["sites"]) == sorted(SITES)
        assert entry["numbers"]["alpha"] == pytest.approx([0.5, 0.5], abs=0.1) and entry["time_steps"] == 2

    code, out, err = fedtar("status", "--kit", kit, "--json", "--limit", "1")
    assert code == 0, err
    assert [(entry["id"], entry["name"], entry["status"]) for entry in json.loads(out)] == [
        (identity, "watched", "FINISHED:COMPLETED")
    ]
