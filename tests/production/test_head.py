"""The head that reads the findings leaves where a hospital's guard names it, and nowhere else."""

import json

import pytest

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
    job = exported("head", diagnosis={"labeler": "synthetic", "shared": True}, min_sites=1)
    file = federation.sites["hospital-b"] / "local" / "privacy.json"
    named = file.read_text()
    (start,), steps = _run(federation, job)
    assert not start.absent and {name for step in steps for name in step.sites} == {"hospital-a", "hospital-b"}
    file.write_text(_unnamed(named))
    try:
        (start,), steps = _run(federation, job)
    finally:
        file.write_text(named)
    assert {name for step in steps for name in step.sites} == {"hospital-a"}
    reason = start.absent["hospital-b"]
    assert "guard" in reason and "diagnosis.head" in reason and "extra_names" in reason


def _run(federation, job):
    identity = federation.submit(job)
    events = read_events(federation.completed(identity, 400))
    return of_kind(events, Start), of_kind(events, Step)
