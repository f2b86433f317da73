"""A second method over mTLS: what every method shares works for FedAvg as it does for FedTAR."""

import json
from functools import partial

import pytest
from command import passing
from federation_process import SITES
from killing import LONG, kill_server_process, resume, round_1_is_whole

from fedtar_flare.record.events import Start, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.runtime.recipe import MethodRecipe

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]


@pytest.fixture
def without_fedavg(federation):
    """The policy of hospital-b allows FedTAR alone; calling it allows what it did before."""
    file = federation.sites["hospital-b"] / "local" / "privacy.json"
    before = file.read_text()
    policy = json.loads(before)
    for filters in ("task_result_filters", "task_data_filters"):
        policy["scopes"][0][filters][-1]["args"]["methods"] = ["fedtar"]
    file.write_text(json.dumps(policy))
    yield lambda: file.write_text(before)
    file.write_text(before)


def test_fedavg_is_guarded_audited_and_resumed(federation, exported, without_fedavg):
    """The job is killed between rounds; a hospital whose policy forbids the method joins when it allows it."""
    identity = federation.submit(exported("tenant", rounds=2, method=partial(MethodRecipe, "fedavg"), **LONG))
    round_1_is_whole(federation, identity)
    (start,) = of_kind(kill_server_process(federation, identity), Start)
    assert start.method == "fedavg" and start.sites == ["hospital-a"]
    assert "policy allows (fedtar)" in start.absent["hospital-b"]

    without_fedavg()
    resumed = resume(federation, identity)
    results = federation.completed(resumed)
    events = read_events(results)
    walked = [[step.round, step.step, *sorted(step.sites)] for step in of_kind(events, Step)]
    assert walked == [[2, t, *SITES] for t in (1, 2)]
    kept = CheckpointFolder(federation.server / "fedtar_checkpoints" / identity).last()[0]
    assert of_kind(events, Start)[0].run_id == kept.info["run_id"] == start.run_id
    assert json.loads((results / "metrics.json").read_text())["method"] == "fedavg"
    assert "FedAvg" in (results / "report.html").read_text() and (results / "adapter" / "README.md").is_file()

    for site in SITES:
        entries = json.loads(passing("audit", "--kit", federation.sites[site], "--json"))["entries"]
        mine = [entry for entry in entries if entry["job"] in (identity, resumed)]
        sent = [entry for entry in mine if entry.get("tensors")]
        assert sent and {entry["method"] for entry in sent} == {"fedavg"}
        assert {tensor["group"] for entry in sent for tensor in entry["tensors"]} == {"adapter"}
        if site == "hospital-b":
            assert {entry["job"] for entry in sent} == {resumed}
            assert all(entry["status"] == "error" for entry in mine if entry["job"] == identity)
