"""FedMRG in FLARE's simulator: two members and an unseen hospital, each task in a process of its own."""

from __future__ import annotations

import pytest
from command import run_simulator

from fedtar_flare.methods.fedmrg.events import EVENTS, Bank, Diagnoses, LossParts, Outside
from fedtar_flare.record.events import SHARED, End, Evaluation, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.recipe import MethodRecipe


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_job_runs_with_members_and_an_unseen_hospital(tmp_path):
    recipe = MethodRecipe("fedmrg",
        preset="tiny", num_rounds=2, time_steps=2, model={"max_length": 16, "num_beams": 1},
        training={"local_steps": 2, "batch_size": 4}, data={"synthetic_patients": 12},
        server={"unseen": ["site-3"], "evaluate_every": 2},
    )  # fmt: skip
    recipe.export(str(tmp_path / "jobs"))
    process, results = run_simulator(
        tmp_path / "jobs" / "fedmrg", tmp_path / "ws", "-n", "3", "-t", "3", home=tmp_path / "home"
    )
    assert process.returncode == 0, process.stdout[-4000:]
    events = read_events(results, (*SHARED, *EVENTS))
    assert [event.status for event in of_kind(events, End)] == ["completed"]
    assert [tuple(step.sites) for step in of_kind(events, Step)] == [("site-1", "site-2")] * 2
    assert of_kind(events, Outside)[0].sites == ["site-3"] and len(of_kind(events, LossParts)) == 2
    final = of_kind(events, Evaluation)[-1]
    assert set(final.sites) == {"site-1", "site-2", "site-3"} == set(of_kind(events, Diagnoses)[0].sites)
    second = of_kind(events, Bank)[1]
    assert second.rows and all(own["received"] for own in second.sites.values()), "rows come from the others"
    page = (results / "report.html").read_text()
    assert "unseen (1)" in page and 'id="bank"' in page
