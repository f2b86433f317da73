"""A run over the years, over mTLS: studies arrive, the server is killed, a hospital joins, a patient withdraws."""

import json

import numpy as np
import pytest
from command import fedtar, fedtar_here, page_commands
from federation_process import SITES, restored, wait_for
from kits import whole
from make_dicom import write_radiograph

from fedtar_flare.core.files import PRIVATE, write_text
from fedtar_flare.data.cells import SPLITS, Timeline, split_of
from fedtar_flare.methods.fedtar.events import Alphas, Outer
from fedtar_flare.reporting.run import read_run
from fedtar_flare.site.cohort import load_cohort
from fedtar_flare.site.context import state_of
from fedtar_flare.site.site_file import load_site_config

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]
A, B = SITES
LEAD, KEY = "lead@hub.org", "ab" * 32
DATA = {"alignment": "period", "periods": ["2019-04-01"], "synthetic_patients": 12}
FIRST = {"data": DATA, "temporal": {"replay": "seen"}}
POLICY = "{approval: required, min_patients: 1, min_local_steps: 1, min_batch_size: 1}"


def patients(split):
    """Two of a split by hospital A's key."""
    return [name for name in map("P{}".format, range(40)) if split_of(name, bytes.fromhex(KEY)) == split][:2]


def arrive(folder, day, *names):
    """A radiograph of each patient comes into the folder, and its report into a list there."""
    for name in names:
        uid, accession = f"1.2.{day}.{name[1:]}", f"{name}-{day}"
        tags = {"StudyInstanceUID": uid, "SeriesInstanceUID": f"{uid}.1", "SOPInstanceUID": f"{uid}.1.1"}
        tags |= {"PatientID": name, "AccessionNumber": accession, "StudyDate": day, "StudyTime": "101500"}
        picture = np.random.default_rng([int(day), int(name[1:])]).integers(0, 4096, (64, 64))
        write_radiograph(folder / f"{accession}.dcm", picture, **tags)
        with (folder / "reports.csv").open("a") as reports:
            reports.write(f"{accession},The lungs are clear.\n")


def passing(*command):
    """What a command prints; one that submits a job has a process of its own."""
    code, out, err = (fedtar if command[0] in ("continue", "forget") else fedtar_here)(*command)
    assert code == 0, out + err
    return out.strip()


@pytest.fixture
def hospital_a(federation, tmp_path):
    """Hospital A has the table of its DICOM folder, and approves every job."""
    file, key = federation.sites[A] / "local" / "fedtar.yaml", state_of(federation.sites[A]) / "fedtar.key"
    if not key.exists():
        write_text(key, "cd" * 32, PRIVATE)
    with restored(file, key):
        file.write_text(whole(f"source: manifest\npath: {tmp_path / 'table.csv'}\npolicy: {POLICY}\n"))
        write_text(key, KEY, PRIVATE)
        yield federation.sites[A]


def test_a_study_that_came_between_two_periods_is_first_written_about_and_then_learnt_from(
    federation, exported, repository, hospital_a, tmp_path
):
    """As docs/how-to/run-for-years.md has it. Hospital B misses the first period; A has approved that alone."""

    page = repository / "docs" / "how-to" / "run-for-years.md"
    left = {*page_commands(page)} - {"continue RESULTS", "resume JOB", "site cells", "status"}  # which other tests run

    def does(name, **words):
        """What one of the page's commands prints."""
        left.discard(name)
        return passing(*page_commands(page, **words)[name])

    (pacs := tmp_path / "pacs").mkdir()
    (pacs / "reports.csv").write_text("accession_number,report\n")
    table = {"FOLDER": pacs, "REPORTS": pacs / "reports.csv", "TABLE": tmp_path / "table.csv"}
    for day in ("20190110", "20190510"):
        arrive(pacs, day, *(name for split in SPLITS for name in patients(split)))
    does("data index", **table)
    passing("site", "approve", job := exported("years", **FIRST), "--kit", hospital_a)
    passing("site", "pause", "--kit", federation.sites[B])
    first = federation.submit(job)
    start = read_run(federation.completed(first)).start
    assert start.counts == {A: {split: [2, 2] for split in SPLITS}}

    federation.restart("localhost")
    wait_for("the sites found the server again", lambda: set(SITES) <= federation.connected(), 300)
    arrive(pacs, "20190810", patients("train")[0], *patients("test"))
    does("data index", **table)
    lead = {"JOB": first, "KIT": federation.kits / LEAD, "ROUNDS": 1, "DATE": "2019-07-01"}
    held = does("continue JOB", **lead)
    assert federation.finished(held) != "FINISHED:COMPLETED"
    assert f"{A}: held: not approved" in (federation.folder / "localhost.out").read_text(errors="replace")
    assert "not approved here" in does("site describe", JOB=held, KIT=hospital_a)
    does("site approve", JOB=held, KIT=hospital_a)
    passing("site", "join", "--kit", federation.sites[B])

    results = federation.completed(does("continue JOB", **lead))
    record = read_run(results)
    again, (alphas,), (outer,) = record.start, record.events(Alphas), record.events(Outer)
    assert (again.run_id, again.first_round, again.time_steps) == (start.run_id, 2, 3)
    assert again.counts[A] == {"train": [2, 2, 1], "validation": [2, 2, 0], "test": [2, 2, 2]}
    assert [[step.round, step.step, *step.sites] for step in record.steps] == [[2, t, A, B] for t in (1, 2, 3)]
    assert len(outer.alpha_after) == 3 and alphas.alpha[2] == alphas.alpha[1] != alphas.alpha[0]
    ahead, (before, after) = record.ahead, record.evaluations
    assert list(ahead) == [3] and sorted(ahead[3]) == list(SITES) and ahead[3][A]["n"] == 2
    assert all(cell["token_loss"] == before.sites[site].steps[3]["token_loss"] for site, cell in ahead[3].items())
    assert [t for t, cell in before.sites[A].steps.items() if cell["n"]] == [3], "and nothing else is told again"
    assert [cell["n"] for cell in after.sites[A].steps.values()] == [2, 2, 2]
    assert all(f"{site}, period 3" in (results / "report.html").read_text() for site in SITES)
    assert not left


@pytest.fixture
def withdrawn(federation):
    """Hospital A keeps a list of patients who withdrew."""
    local = federation.sites[A] / "local"
    (local / "withdrawn.txt").write_text("")
    with restored(local / "fedtar.yaml"):
        (local / "fedtar.yaml").write_text(whole(f"source: synthetic\nexclude: {local / 'withdrawn.txt'}\n"))
        yield local / "withdrawn.txt"


def test_rounds_are_made_again_without_a_patient_once_the_hospitals_have_approved_it(
    federation, exported, withdrawn, home, monkeypatch
):
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    config = load_site_config(A, workspace=federation.sites[A], simulator=False)
    cohort = load_cohort(config, A, timeline=Timeline(2), synthetic_patients=12)
    patient = cohort.samples("train", 2)[0].visit.patient_id
    first = federation.submit(job := exported("seen", rounds=2))
    seen = read_run(federation.completed(first))

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
    again = json.loads(passing(*command, "--job", job, "--yes"))["job_id"]  # the folder itself is the same job
    record = read_run(federation.completed(again))
    assert record.start.run_id != seen.start.run_id and record.start.first_round == 2
    made, before = ([(step.round, step.step, *sorted(step.sites)) for step in one.steps] for one in (record, seen))
    assert made == before[2:] == [(2, 1, *SITES), (2, 2, *SITES)]
    counts, earlier = record.start.counts, seen.start.counts
    assert counts[A]["train"] == [count - 1 for count in earlier[A]["train"]] and counts[B] == earlier[B]
