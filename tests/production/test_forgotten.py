"""A patient withdraws at a hospital, and the rounds that saw the patient are made again, over mTLS."""

import json

import pytest
from command import fedtar
from federation_process import SITES
from kits import whole

from fedtar_flare.data.cells import Timeline
from fedtar_flare.record.events import Start, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.site.cohort import load_cohort
from fedtar_flare.site.site_file import load_site_config

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]
A, B = SITES
LEAD = "lead@hub.org"


@pytest.fixture
def withdrawn(federation):
    """Hospital A keeps a list of patients who withdrew."""
    local = federation.sites[A] / "local"
    before = (local / "fedtar.yaml").read_text()
    (local / "withdrawn.txt").write_text("")
    (local / "fedtar.yaml").write_text(whole(f"source: synthetic\nexclude: {local / 'withdrawn.txt'}\n"))
    yield local / "withdrawn.txt"
    (local / "fedtar.yaml").write_text(before)


def passing(*command):
    code, out, err = fedtar(*command)
    assert code == 0, out + err
    return out


def test_rounds_are_made_again_without_a_patient_once_the_hospitals_have_approved_it(
    federation, exported, withdrawn, home, monkeypatch
):
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    config = load_site_config(A, workspace=federation.sites[A], simulator=False)
    cohort = load_cohort(config, A, timeline=Timeline(2), synthetic_patients=12)
    patient = cohort.samples("train", 2)[0].visit.patient_id
    first = federation.submit(exported("seen", rounds=2))
    events = read_events(federation.completed(first))
    seen, after = of_kind(events, Start)[0], {(step.round, step.step) for step in of_kind(events, Step)}

    withdrawn.write_text(f"{patient}\n")
    told = passing("site", "purge", "--patient", patient, "--kit", federation.sites[A], "--yes")
    assert "fedtar forget JOB --before 1." in told
    command = ("forget", first, "--kit", federation.kits / LEAD, "--before", 2, "--json")
    remake = json.loads(passing(*command))
    assert (remake["after"], remake["rounds"]) == (1, 1)
    held = json.loads(passing(*command, "--yes"))
    assert held == remake | {"job_id": held["job_id"]}
    assert federation.finished(held["job_id"]) != "FINISHED:COMPLETED", "no hospital has approved it"
    for site in SITES:
        passing("site", "approve", held["job_id"], "--kit", federation.sites[site])
    again = json.loads(passing(*command, "--yes"))["job_id"]
    events = read_events(federation.completed(again))
    (start,) = of_kind(events, Start)
    assert start.run_id != seen.run_id and start.first_round == 2
    assert {(step.round, step.step) for step in of_kind(events, Step)} == {step for step in after if step[0] == 2}
    assert all(sorted(step.sites) == list(SITES) for step in of_kind(events, Step))
    assert start.counts[A]["train"] == [count - 1 for count in seen.counts[A]["train"]]
    assert start.counts[B] == seen.counts[B]
