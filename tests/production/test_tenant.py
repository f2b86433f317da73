"""A second method over mTLS: what every method shares works for FedAvg as it does for FedTAR."""

import json
from functools import partial

import pytest
from command import fedtar
from federation_process import SITES, wait_for

from fedtar_flare.record.events import Start, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.runtime.recipe import MethodRecipe

pytestmark = [pytest.mark.production, pytest.mark.timeout(900)]


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
    long = {"training": {"local_steps": 8, "batch_size": 4}}
    identity = federation.submit(exported("tenant", rounds=2, method=partial(MethodRecipe, "fedavg"), **long))
    checkpoints = federation.server / "fedtar_checkpoints" / identity
    wait_for(f"round 1 is whole\n{federation.tail(identity)}", (checkpoints / "round-0001.safetensors").is_file)
    federation.kill(federation.job_process("localhost", identity))
    (start,) = of_kind(federation.events(identity), Start)
    assert start.method == "fedavg" and start.sites == ["hospital-a"]
    assert "policy allows (fedtar)" in start.absent["hospital-b"]
    assert federation.finished(identity) == "FINISHED:EXECUTION_EXCEPTION"
    wait_for(
        "its processes are gone", lambda: not any(federation.job_process(n, identity) for n in ("localhost", *SITES))
    )

    without_fedavg()
    code, out, err = fedtar("resume", identity, "--kit", federation.kits / "lead@hub.org", "--json")
    assert code == 0, err
    resumed = json.loads(out)["job_id"]
    results = federation.completed(resumed, 400)
    events = read_events(results)
    assert [(step.round, step.step, sorted(step.sites)) for step in of_kind(events, Step)] == [
        (2, 1, list(SITES)),
        (2, 2, list(SITES)),
    ]
    assert of_kind(events, Start)[0].run_id == CheckpointFolder(checkpoints).last()[0].info["run_id"] == start.run_id
    assert json.loads((results / "metrics.json").read_text())["method"] == "fedavg"
    assert "FedAvg" in (results / "report.html").read_text() and (results / "adapter" / "README.md").is_file()

    for site in SITES:
        code, out, err = fedtar("audit", federation.sites[site], "--json")
        assert code == 0, err
        mine = [entry for entry in json.loads(out)["entries"] if entry["job"] in (identity, resumed)]
        sent = [entry for entry in mine if entry.get("tensors")]
        assert sent and {entry["method"] for entry in sent} == {"fedavg"}
        assert {tensor["group"] for entry in sent for tensor in entry["tensors"]} == {"adapter"}
        if site == "hospital-b":
            assert {entry["job"] for entry in sent} == {resumed}
            assert all(entry["status"] == "error" for entry in mine if entry["job"] == identity)
