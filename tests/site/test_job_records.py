"""One run for each job, with the rounds and time steps of the job's own files, and one division of a site's data."""

import json
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
from command import passing
from hospital_site import T
from kits import add_to_site_file, make_kit, write_radiographs

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.site import job_records
from fedtar_flare.site.admission import Declined
from fedtar_flare.site.audit import read_audit
from fedtar_flare.site.context import state_of
from fedtar_flare.site.job_records import CELLS, RUNS, fix_cells, layout_conflicts, read_record
from fedtar_flare.site.site_file import SiteConfig, read_site_file
from fedtar_flare.testing import Hospital, executor_of
from fedtar_flare.testing.hospital import write_workflow

POLICY = "{min_patients: 1, min_local_steps: 1, min_batch_size: 1}"


@pytest.fixture
def kit(tmp_path, own_home):
    kit = make_kit(tmp_path / "hospital", f"source: manifest\npath: manifest.csv\npolicy: {POLICY}\n")
    write_radiographs(kit / "local", 9, visits=3)
    (key := state_of(kit) / "fedtar.key").parent.mkdir(mode=0o700)
    key.write_text("ab" * 32)  # of a random key, three patients might all be tested on
    key.chmod(0o600)
    return kit


@pytest.fixture
def asked(kit):
    """Asks the hospital for a handshake: run, job, header fields, and what the job's own files say."""

    def ask(run, job="job-1", says=(), settings=(), **header):
        said = {"num_rounds": 2, "time_steps": T} | {n: v for n, v in header.items() if n == "time_steps"} | dict(says)
        hospital = Hospital(kit, name="hospital", simulated=False, app=kit / job / "app", **dict(settings))
        hospital.job = job
        write_workflow(hospital.app, **said)
        given = replace(hospital.header(run, 0, 0, after="0000-00", initial_site="hospital"), **{"rounds": 2, **header})
        reply, weights = hospital.run("handshake", given)
        assert (weights is None) is (reply.status == "error") and bool(reply.payload) is (reply.status == "ok")
        return reply.reason

    return ask


@pytest.mark.parametrize(("name", "value"), [("rounds", 200), ("rounds", 1), ("time_steps", 1), ("time_steps", 20)])
def test_a_server_does_not_ask_for_other_rounds_or_steps_than_the_job_has(asked, name, value):
    reason = asked("run", says={"time_steps": T}, **{name: value})
    assert reason == f"the server asks for {name.replace('rounds', 'num_rounds')} {value}; the job's own files say 2"
    assert asked("run", says={"num_rounds": None}) == "the server asks for num_rounds 2; the job's own files say None"


def test_a_job_has_one_run_and_another_job_gets_it_by_resuming_alone(asked, kit):
    assert asked("run-a") == "" == asked("run-a")
    assert "has begun another run" in asked("run-b")
    assert "another job, which this one does not resume" in asked("run-a", job="job-2")
    assert asked("run-a", job="job-3", says={"resume_from": "job-1"}) == ""
    assert asked("run-x", job="job-4") == "" == asked("run-x", job="job-5", says={"resume_from": "one it missed"})
    for run in ("run-x", "run-y"):
        assert "does not resume" in asked(run, job="job-6", says={"resume_from": "job-1"})
    assert "has begun another run" in asked("run-c", job="job-3", says={"resume_from": "job-1"})
    [record] = kit.parent.rglob(RUNS)
    assert read_record(record) == {"job-1": "run-a", "job-3": "run-a", "job-4": "run-x", "job-5": "run-x"}
    assert record.stat().st_mode & 0o077 == 0
    record.write_text("{")
    assert asked("run-a") == "the site's record of its jobs cannot be read"


def test_a_run_begins_with_another_ones_state_only_as_the_approved_job_says(asked, kit):
    assert asked("run-a") == ""
    state = {"origin": "run-a/0001-02", "member": True, "after": "0001-02", "initial_site": ""}
    made_again = {"resume_from": "job-1", "remake_before": 2}
    others = [({}, {}), ({"resume_from": "job-1"}, {}), ({"resume_from": "job-2", "remake_before": 2}, {})]
    others += [(made_again, {"origin": origin}) for origin in ("run-b/0001-02", "run-a/0002-01")]
    for number, (says, more) in enumerate(others):
        assert "not one of those" in asked("new", f"job-{number + 2}", says, **state | more)
    assert "does not resume" in asked("run-a", "job-8", made_again, **state), "it has a run of its own"
    (kit / "job-9" / "app" / "config").mkdir(parents=True)
    (kit / "job-9" / "app" / "config" / "config_fed_client.json").write_text("{}")
    assert asked("new", "job-9", made_again, **state).startswith("held: not approved"), "whatever the policy says"
    [record] = kit.parent.rglob(RUNS)
    assert read_record(record) == {"job-1": "run-a", "job-9": "new"}


@pytest.mark.parametrize(
    ("header", "settings", "words"),
    [
        ({"time_steps": T + 1}, {}, f"time_steps {T + 1} (so far {T})"),
        ({}, {"data": {"alignment": "period", "periods": ["2020-01-02"]}}, "timeline period 2020-01-02"),
        ({}, {"data": {"min_cell": 2}}, "min_cell 2 (so far 1)"),
        ({"score": "all"}, {}, "score all (so far test)"),
    ],
)
def test_cells_that_an_earlier_job_divided_otherwise_wait_for_the_site_s_word(asked, kit, header, settings, words):
    """Two jobs with T = 2 and T = 3: the difference of two cells was one visit of one patient."""
    assert asked("run-a") == ""
    reason = asked("run-b", "job-2", settings=settings, **header)
    assert reason.startswith("declined: ") and words in reason and "fedtar site cells --release" in reason
    out = passing("site", "cells", "--kit", kit)
    assert f"manifest.csv: time_steps {T}, timeline visit, min_cell 1" in out and "released" not in out
    assert "released" in passing("site", "cells", "--kit", kit, "--release")
    assert asked("run-b", "job-2", settings=settings, **header) == ""
    [audit] = kit.parent.rglob("approvals.jsonl")
    assert [entry["outcome"] for entry in read_audit([audit])] == ["released"]


def test_staff_sees_beforehand_that_a_job_divides_data_otherwise_and_of_whom_it_has_scores(asked, kit, tmp_path):
    def described(name, *options, **settings):
        recipe = FedTARRecipe(name=name, preset="tiny", num_rounds=2, **{"time_steps": T} | settings)
        recipe.export(tmp_path, byoc=False)
        return passing("site", "describe", tmp_path / name, "--kit", kit, *options)

    out = described("all", server={"unseen": ["hospital"]})
    assert "scores are of all patients of this site, which never trains" in out and "DECLINES" not in out
    assert "scores are of its test patients" in described("test", server={"unseen": ["x"]})
    assert asked("run-a") == ""
    assert "score all (so far test)" in described("all", server={"unseen": ["hospital"]})
    beyond = json.loads(described("longer", "--json", time_steps=T + 1))["beyond"]
    assert any(f"time_steps {T + 1} (so far {T})" in line for line in beyond)


def test_a_method_without_time_steps_keeps_to_one_smallest_cell_too(tmp_path):
    """Multiples of 5, 6, 7 and so on told the number itself."""
    executor = executor_of("fedkei", preset="tiny", data={"min_cell": 7})
    asked = executor.strategy.cell_layout(SiteConfig(source="manifest", path=tmp_path), 2)
    assert asked.keys() == {"min_cell", "tasks"} and asked["min_cell"] == "7"
    for layout in (asked, {"time_steps": "2", "min_cell": "7"}, asked):
        fix_cells(tmp_path, "a.csv", layout)
    for layout in ({"min_cell": "6"}, {"time_steps": "3", "min_cell": "7"}):
        assert layout_conflicts(tmp_path, "a.csv", layout)


@pytest.mark.parametrize(
    "other",
    [{"tasks": ["effusion", "mass=nodule|rare"]}, {"base": ["none", "rare"]}, {"order": "reversed"},
     {"order": "shuffled"}, {"labeler": "chexpert-rules"}],
)  # fmt: skip
def test_jobs_of_tasks_that_would_differ_in_a_few_images_are_declined(tmp_path, other):
    """The sum of one job's gradients, less that of the other's, was a single patient's."""
    given = {"tasks": ["effusion", "mass=nodule"], "base": ["none"]}
    jobs = given, given | {"eta_out": 0}, given | other
    executors = [executor_of("fedkei", preset="tiny", fedkei=job) for job in jobs]
    first, same, differs = (e.strategy.cell_layout(SiteConfig(source="manifest", path=tmp_path), 2) for e in executors)
    fix_cells(tmp_path, "a.csv", first)
    assert not layout_conflicts(tmp_path, "a.csv", same) and layout_conflicts(tmp_path, "a.csv", differs)


def test_a_file_that_was_cut_short_anywhere_is_noticed(kit):
    add_to_site_file(kit, "exclude: gone.txt")
    file = kit / "local" / "fedtar.yaml"
    whole = file.read_text()
    assert read_site_file(file).policy.min_patients == 1
    for end in range(len(whole) - 1):
        file.write_text(whole[:end])
        with pytest.raises(ConfigError):
            read_site_file(file)
    file.write_text(whole.replace(f"policy: {POLICY}\n", ""))
    with pytest.raises(ConfigError, match="must have a 'policy'"):
        read_site_file(file)


PERIODS = {"time_steps": "2", "timeline": "period 2019-04-01T00:00:00", "min_cell": "5"}


def with_period(day, **changes):
    return PERIODS | {"time_steps": "3", "timeline": f"{PERIODS['timeline']} {day}T00:00:00"} | changes


def test_a_period_may_be_added_after_every_visit_that_was_counted_and_no_earlier(tmp_path):
    fix_cells(tmp_path, "a.csv", PERIODS, "2019-06-30T12:00:00")
    assert layout_conflicts(tmp_path, "a.csv", with_period("2019-06-30"))
    assert not layout_conflicts(tmp_path, "a.csv", with_period("2019-07-01"))
    fix_cells(tmp_path, "a.csv", PERIODS, "2019-07-01T08:00:00", begins=False)  # came while the run went on
    assert layout_conflicts(tmp_path, "a.csv", with_period("2019-07-01"))
    more = with_period("2019-07-02")
    fix_cells(tmp_path, "a.csv", more, "2019-08-01T00:00:00")
    assert layout_conflicts(tmp_path, "a.csv", PERIODS) and not layout_conflicts(tmp_path, "a.csv", more)
    assert layout_conflicts(tmp_path, "a.csv", more | {"min_cell": "6"})
    with pytest.raises(Declined):
        fix_cells(tmp_path, "a.csv", PERIODS, begins=False)  # a run that divides otherwise goes no further
    (tmp_path / CELLS).unlink()  # released: the run that goes on does not choose, the next job does
    fix_cells(tmp_path, "a.csv", more, begins=False)
    fix_cells(tmp_path, "a.csv", PERIODS)
    fix_cells(tmp_path, "b.csv", more)  # each data set has a division of its own
    assert not layout_conflicts(tmp_path, "a.csv", PERIODS) and layout_conflicts(tmp_path, "b.csv", PERIODS)
    (tmp_path / CELLS).write_text("[]")
    with pytest.raises(FedTARError):
        fix_cells(tmp_path, "a.csv", PERIODS)


def test_the_newest_visit_is_not_found_by_trying_days(tmp_path):
    """Each refusal tells a day: three are told, whatever else the job asks, and the same day again tells nothing."""

    def refusal(day, **changes):
        with pytest.raises(Declined) as refused:
            fix_cells(tmp_path, "a.csv", with_period(day, **changes))
        return str(refused.value)

    fix_cells(tmp_path, "a.csv", PERIODS, "2019-09-20T12:00:00")
    assert "before visits" in refusal("2019-07-01") and "before visits" in refusal("2019-09-01")
    assert "min_cell" in refusal("2019-10-01", min_cell="6")
    assert refusal("2019-09-15") == refusal("2019-09-25")
    assert "before visits" in refusal("2019-09-01")
    fix_cells(tmp_path, "a.csv", with_period("2019-10-01"))


@pytest.mark.parametrize("newest, days, allowed", [("2019", 1, True), ("2019", 2, False), ("2190", 200_000, True)])
def test_a_period_that_has_not_come_binds_nobody_unless_dates_are_shifted(tmp_path, monkeypatch, newest, days, allowed):
    now = datetime(2026, 2, 28, 23, 59)
    monkeypatch.setattr(job_records, "datetime", SimpleNamespace(now=lambda: now))
    fix_cells(tmp_path, "a.csv", PERIODS, newest)
    day = now.date() + timedelta(days=days)
    assert (layout_conflicts(tmp_path, "a.csv", with_period(day)) == []) is allowed
