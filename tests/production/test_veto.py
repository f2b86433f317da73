"""A hospital's own say while a job runs: it pauses, the job goes on without it, and it takes part again."""

import json

import pytest
from command import fedtar
from federation_process import SITES, wait_for

from fedtar_flare.record.events import End, Step
from fedtar_flare.record.log import of_kind, read_events

pytestmark = [pytest.mark.production, pytest.mark.timeout(900)]


def test_a_site_pauses_and_joins_while_the_job_runs(federation, exported):
    job = exported("veto", rounds=4, training={"local_steps": 8, "batch_size": 4})
    identity, kit = federation.submit(job), federation.sites["hospital-b"]

    def steps():
        return of_kind(federation.events(identity), Step)

    wait_for(f"a first step\n{federation.tail(identity)}", steps)
    try:
        code, out, err = fedtar("site", "pause", "--kit", kit)
        assert code == 0 and "paused" in out, err
        paused = wait_for("a step without the paused site", lambda: [e for e in steps() if "hospital-b" in e.abstained])
        assert paused[0].abstained["hospital-b"] == "paused by the site"
        assert list(paused[0].sites) == ["hospital-a"]
    finally:
        code, _, err = fedtar("site", "join", "--kit", kit)
        assert code == 0, err
    events = read_events(federation.completed(identity, 400))
    assert [event.status for event in of_kind(events, End)] == ["completed"]
    last = of_kind(events, Step)[-1]
    assert sorted([*last.sites, *last.abstained]) == sorted(SITES)

    code, out, _ = fedtar("audit", kit, "--json")
    told = [entry for entry in json.loads(out)["entries"] if entry.get("status") == "abstain"]
    assert code == 0 and any("paused" in entry.get("reason", "") for entry in told)
