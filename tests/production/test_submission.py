"""Who may submit what, over mTLS; and the release of what was learnt."""

import contextlib
import json
from pathlib import Path

import nvflare.fuel.hci.client.file_transfer as file_transfer
import pytest
from command import failing, passing, run
from federation_process import SITES, recipe, restored
from tables import edit_json

from fedtar_flare.reporting.run import read_run
from fedtar_flare.site.context import state_of
from fedtar_flare.site.release import verify_release

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]
LEAD = "lead@hub.org"


@contextlib.contextmanager
def approved(federation, job):
    """Hospital B holds every job but this one, whose folder it was shown beforehand."""
    kit = federation.sites["hospital-b"]
    with restored(kit / "local" / "fedtar.yaml") as (text,):
        (kit / "local" / "fedtar.yaml").write_text(f"{text}policy: {{approval: required}}\n")
        assert f"approved: {job.name}" in passing("site", "approve", job, "--kit", kit)
        yield


def test_a_lead_without_the_right_to_bring_code_submits_to_a_hospital_that_approved_it(federation, exported):
    """What the hospital was shown beforehand is, but for the signatures, what FLARE puts there; or it would hold it."""
    job = exported("as_shown")
    with approved(federation, job):
        submit = ("--format", "json", "job", "submit", "-j", job, "--startup-kit", federation.kits / LEAD)
        identity = json.loads(federation.command(*submit))["data"]["job_id"]
        assert read_run(federation.completed(identity)).start.sites == list(SITES)


def test_from_the_job_s_script_to_an_adapter_that_leaves_with_its_hospitals_votes(federation, exported, tmp_path):
    """A hospital has approved the job's production form; both audit and vote with their own kits, the lead releases."""
    recipe("from_script").export(str(tmp_path / "simulated"))
    script = tmp_path / "simulated" / "from_script" / "job.py"
    with approved(federation, exported("from_script")):
        code, out, err = run("python", script, "--env", "prod", "--kit", federation.kits / LEAD, timeout=600)
        assert code == 0, err
        results = federation.completed(job := out.split("fedtar watch ")[1].split()[0])
    assert [sorted(step.sites) for step in read_run(results).steps] == [sorted(SITES)] * 2
    for site in SITES:  # a job's log names files and rows
        assert (federation.sites[site] / job / "log.txt").stat().st_mode & 0o077 == 0
    project = ("--project", federation.folder / "project.yml")
    home = {"FEDTAR_HOME": federation.environment["FEDTAR_HOME"]}
    release = ("release", results, *project, "--kit", federation.kits / LEAD)
    for name, kit in federation.sites.items():
        assert f"no vote of {name}" in failing(*release, code=1)
        run_id = json.loads(passing("site", "audit-model", results, "--kit", kit, "--json", **home))["run_id"]
        assert json.loads((state_of(kit) / run_id / name / "run.json").read_text())["sites"] == list(SITES)
        passing("site", "vote", results, "yes", *project, "--kit", kit, "-o", results, **home)
    passing(*release)
    verify_release(results / "adapter", federation.server / "startup" / "rootCA.pem")


@pytest.mark.parametrize(("side", "where"), [("server", "localhost"), ("client", "hospital-a")])
def test_a_class_that_is_not_on_the_allow_list_is_refused(federation, exported, side, where):
    job = exported(f"foreign_{side}")
    foreign = "fedtar_flare.reporting.page.write_report"  # of this package, and still not for jobs
    more = {"id": "x", "path": foreign, "args": {}}
    edit_json(job / "app" / "config" / f"config_fed_{side}.json", lambda config: config["components"].append(more))
    identity = federation.submit(job)
    assert federation.finished(identity) in ("FINISHED:EXECUTION_EXCEPTION", "FINISHED:ABNORMAL", "FINISHED:ABORTED")
    log = (federation.folder / f"{where}.out").read_text(errors="replace")
    assert f"Component '{foreign}' at config path" in log and "is not in allow_list" in log


@pytest.mark.parametrize("signed", [True, False])
def test_a_job_that_nobody_signed_or_that_was_changed_afterwards_is_refused(federation, exported, monkeypatch, signed):
    sign = file_transfer.sign_folders

    def sign_then_change(folder, *arguments, **settings):
        if signed:
            sign(folder, *arguments, **settings)
            file = next(Path(folder).rglob("config_fed_server.json"))
            file.write_text(file.read_text() + " ")

    monkeypatch.setattr(file_transfer, "sign_folders", sign_then_change)
    identity = federation.submit(exported(f"changed_{signed}"))
    assert federation.finished(identity) == "FINISHED:FAILED_TO_RUN"
    reason = "does not pass signature verification" if signed else "unsigned job rejected"
    assert reason in federation.detail(identity)
