"""The head that reads the findings leaves where a hospital's guard names it, and nowhere else."""

import json

import pytest
from command import passing

from fedtar_flare.record.events import Start, Step
from fedtar_flare.record.log import of_kind, read_events

pytestmark = [pytest.mark.production, pytest.mark.timeout(900)]
HEAD = "diagnosis.head.*"


def _unnamed(policy: str) -> str:
    """A site's privacy.json with the head no more among the names of its guards."""
    content = json.loads(policy)
    for scope in content["scopes"]:
        for entry in (*scope["task_result_filters"], *scope["task_data_filters"]):
            if (names := entry["args"].pop("extra_names", None)) is not None:
                assert names == [HEAD]
    return json.dumps(content)


def test_a_head_stays_at_the_hospital_whose_guard_does_not_name_it(federation, exported):
    """The trial's kits name it; hospital-b's no longer does. It is left out with the reason, and the other goes on."""
    file = federation.sites["hospital-b"] / "local" / "privacy.json"
    named = file.read_text()
    file.write_text(_unnamed(named))
    try:
        identity = federation.submit(exported("head", diagnosis={"labeler": "synthetic", "shared": True}, min_sites=1))
        events = read_events(federation.completed(identity, 400))
    finally:
        file.write_text(named)
    (start,) = of_kind(events, Start)
    assert {name for step in of_kind(events, Step) for name in step.sites} == {"hospital-a"}
    reason = start.absent["hospital-b"]
    assert "guard" in reason and "diagnosis.head" in reason and "extra_names" in reason
    entries = json.loads(passing("audit", federation.sites["hospital-a"], "--json"))["entries"]
    sent = [entry for entry in entries if entry["job"] == identity and entry.get("tensors")]
    assert any(tensor["name"].startswith("diagnosis.head") for entry in sent for tensor in entry["tensors"])
