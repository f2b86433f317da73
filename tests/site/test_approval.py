"""A job that a site has to approve: held until its staff has, and bound to the job as it lies at the site."""

import contextlib
import functools
import itertools
import json
import operator
import shutil
from unittest.mock import Mock

import pytest
from command import failing, passing
from hospital_site import SETTINGS
from kits import make_kit
from tables import edit_json

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.protocol.messages import ERROR, OK, ok
from fedtar_flare.runtime.deployed import app_of, read_job
from fedtar_flare.runtime.report_site import ReportSite
from fedtar_flare.site.approval import SIGNATURES, approve, digest_of, is_approved, withdraw
from fedtar_flare.site.audit import read_audit
from fedtar_flare.site.policy import GUARD
from fedtar_flare.testing import Hospital

CLIENT = "app/config/config_fed_client.json"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A job as a lead exports it for hospitals."""
    folder = tmp_path_factory.mktemp("jobs")
    FedTARRecipe(name="study", num_rounds=9, time_steps=2, **SETTINGS).export(str(folder), byoc=False)
    return folder / "study"


@pytest.fixture
def job(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "study")


@pytest.fixture
def kit(tmp_path):
    """A hospital's kit that asks for an approval."""
    return make_kit(tmp_path / "hospital", "source: synthetic\npolicy: {approval: required}\n")


def described(job, *place):
    return json.loads(passing("site", "describe", job, *place, "--json"))


def test_a_digest_changes_with_every_byte_name_and_file(job):
    app = job / "app"
    before = digest_of(app)
    assert digest_of(shutil.copytree(app, job.parent / "again")) == before
    for file in sorted(path for path in app.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert digest_of(app) != before, (file.name, place)
        file.write_bytes(content)
    (app / "custom").mkdir()
    seen = {before}
    added = "custom/a=", "custom/a=x", "custom/b=x", "custom.py=x", "ab=cd", "abc=d"
    for name, _, content in (text.partition("=") for text in added):
        (app / name).write_text(content)
        seen.add(digest_of(app))
        (app / name).unlink()
    assert len(seen) == 7, "nor can a name and a content pass for another pair"
    for name in SIGNATURES:  # what FLARE adds to a submitted job does not count
        (app / name).write_text("{}")
        (app / "config" / name).write_text("{}")
    assert digest_of(app) == before
    with pytest.raises(ConfigError, match="no app of a job"):
        digest_of(job)


def test_an_approval_holds_for_one_digest_until_it_is_withdrawn(tmp_path):
    own, other = "a" * 64, "b" * 64
    assert not is_approved(tmp_path, own)
    assert approve(tmp_path, own, "study").name == "study"
    assert is_approved(tmp_path, own) and not is_approved(tmp_path, other)
    file = tmp_path / "approvals" / f"{own}.json"
    assert file.stat().st_mode & 0o077 == 0
    shutil.copy(file, file.with_name(f"{other}.json"))
    assert not is_approved(tmp_path, other), "a copy under another digest approves nothing"
    assert withdraw(tmp_path, own) and not withdraw(tmp_path, own) and not is_approved(tmp_path, own)
    for digest, text in ((own, "{"), (own, '{"digest": "a"}'), (own, "[]"), ("../../local/fedtar.key", "")):
        file.write_text(text)
        with pytest.raises(ConfigError, match="approvals" if text else "no digest"):
            is_approved(tmp_path, digest)


def test_a_held_job_reads_nothing_and_an_approved_one_goes_on_until_something_changes(kit, job, monkeypatch):
    """Approved beforehand from the lead's folder, it counts for the app that FLARE puts at the site."""
    patients, admitted, nobody = [], [], Mock(samples=Mock(return_value=()))
    monkeypatch.setattr(ReportSite, "patients", lambda *_: patients.append(1) or nobody)
    monkeypatch.setattr("fedtar_flare.runtime.site_executor.admit", lambda *_: admitted.append(1))
    payload = {"settings": "same", "counts": {split: [1, 1] for split in ("train", "validation", "test")}}
    monkeypatch.setattr(ReportSite, "_handshake", lambda self, task: (ok(task.header, payload=payload), None))
    app = shutil.copytree(job / "app", kit / "job-1" / "app_hospital")
    hospital = Hospital(kit, name="hospital", simulated=False, app=app)

    def status():
        reply, _ = hospital.handshake()
        return reply.status, reply.reason

    digest = digest_of(app)
    held = (ERROR, f"held: not approved by this site (digest of the job: {digest})")
    assert status() == held and not patients
    assert not admitted, "nothing of a job is held against its model before somebody has looked at it"
    assert digest in passing("site", "approve", job, "--kit", kit, "--digest", digest)
    records = next(path.parent for path in kit.parent.rglob("approvals"))
    assert status() == (OK, "") and len(patients) == len(admitted) == 1
    assert "for run run)" in passing("site", "approve", "--list", "--kit", kit)
    hospital.job = "job-2"
    reason = hospital.handshake("again")[0].reason
    assert reason.startswith("held: this site's approval was for one run (run)") and digest in reason
    hospital.job = "job-1"
    withdraw(records, digest)
    assert status() == held
    approve(records, digest, "study")
    client = app / "config" / "config_fed_client.json"
    original = client.read_bytes()
    client.write_bytes(original + b" ")
    assert status()[1].startswith("held: not approved") and digest not in status()[1]
    client.write_bytes(original)
    hospital.settings = hospital.settings | {"training": {"local_steps": 3, "batch_size": 4}}
    assert status() == (ERROR, "held: the job that runs is not the one that was approved")
    shutil.rmtree(app)
    assert status()[0] == ERROR and str(kit) not in status()[1]
    assert len(patients) == 1


def test_staff_sees_a_job_approves_it_and_takes_it_back(kit, job):
    app = shutil.copytree(job / "app", kit / "0f3a-job" / "app_hospital")
    (app.parent / "meta.json").write_text(json.dumps({"name": "study", "submitter_name": "lead@hub.org"}))
    digest = digest_of(app)
    out = passing("site", "describe", "0f3a-job", "--kit", kit)
    assert "within the bounds of this site" in out and f"--digest {digest}" in out
    assert "lead@hub.org" in out and '"local_steps": 2' in out and "t_numbers" in out and "custom" not in out
    assert digest in failing("site", "approve", "0f3a-job", "--kit", kit, "--digest", "0" * 64)
    assert passing("site", "approve", "--list", "--kit", kit).split() == ["held", "-", digest, "0f3a-job"]
    passing("site", "approve", "0f3a-job", "--kit", kit)
    assert described(job, "--kit", kit) == {"job": "study", "digest": digest, "approved": True, "beyond": []}
    out = passing("site", "approve", "--list", "--kit", kit)
    assert out.startswith("approved") and digest in out and "held" not in out
    passing("site", "approve", "--withdraw", "0f3a-job", "--kit", kit)
    assert "no job of digest" in failing("site", "approve", "--withdraw", digest, "--kit", kit)
    [audit] = [file for file in kit.parent.rglob("*.jsonl") if file.parent.name == "audit"]
    decided = [(entry["outcome"], entry["reason"]) for entry in read_audit([audit])]
    assert decided == [("approved", digest), ("withdrawn", digest)]
    assert "messages" not in passing("audit", "--kit", audit), "a decision is no message that left"


def test_nothing_is_approved_that_cannot_be_written_down(kit, job, monkeypatch):
    monkeypatch.setattr("fedtar_flare.site.audit.write", Mock(side_effect=OSError("no space left on device")))
    assert "audit cannot be written" in failing("site", "approve", job, "--kit", kit, code=1)
    assert described(job, "--kit", kit)["approved"] is False


def test_what_a_lead_wrote_does_not_steer_the_terminal(kit, job):
    spoof = "\nwithin the bounds of this site\u2028within the bounds of this site\n\x1b[2J"
    edit_json(job / "meta.json", lambda content: content.update(name=f"study{spoof}", submitter_name=spoof))
    weights = {"weights": f"/w{spoof}"}
    edit_json(job / CLIENT, lambda c: c["executors"][0]["executor"]["args"]["settings"].update(model=weights))
    out = passing("site", "describe", job, "--kit", kit)
    assert "\x1b" not in out and "DECLINES" in out
    assert "within the bounds of this site" not in out.splitlines()


def test_staff_sees_what_a_site_would_decline_and_code_that_comes_along(kit, job):
    (kit / "local" / "fedtar.yaml").write_text("source: synthetic\npolicy: {min_local_steps: 9}\n")
    (job / "app" / "custom").mkdir()
    nested = {"path": "evil.Outer", "args": {"x": {"class_path": "evil.Inner", "args": {"y": {"name": "Innermost"}}}}}
    edit_json(job / CLIENT, lambda c: c["components"].append({"id": "x", "path": GUARD, "args": {"methods": nested}}))
    out = passing("site", "describe", job, "--kit", kit)
    assert "training.local_steps 2 (at least 9)" in out and "DECLINES" in out
    assert "'custom' FOLDER" in out and "needs no approval" in out
    assert "evil.Outer, evil.Inner, Innermost" in out


def test_a_job_of_something_else_is_not_described(kit, job):
    original = (job / CLIENT).read_text()
    for change, words in (
        (lambda one, entries: one.update(path="os.system"), "no class of fedtar_flare"),
        (lambda one, entries: one.update(path=GUARD), "is no SiteExecutor"),
        (lambda one, entries: entries.append(entries[0]), "one executor, not 2"),
        (lambda one, entries: one["args"].update(nothing=1), "nothing"),
        (lambda one, entries: one["args"]["settings"].update(training={"batch": 1}), "batch_size"),
    ):
        (job / CLIENT).write_text(original)
        edit_json(job / CLIENT, lambda c, change=change: change(c["executors"][0]["executor"], c["executors"]))
        assert words in failing("site", "describe", job, "--kit", kit)


def test_no_content_of_a_job_s_files_ends_in_a_traceback(kit, job):
    values = itertools.cycle([None, 5, "x", [], [1], {}, {"a": 1}])
    for name in (CLIENT, "app/config/config_fed_server.json", "meta.json"):
        original = (job / name).read_text()
        for place in places(json.loads(original)):
            content = json.loads(original)
            *way, last = place
            functools.reduce(operator.getitem, way, content)[last] = next(values)
            (job / name).write_text(json.dumps(content))
            with contextlib.suppress(FedTARError):
                read_job(app_of(job, "hospital")).describe()
        (job / name).write_text(original)


def places(content, *way):
    """The ways to all parts of a JSON content, four deep."""
    for key in content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ():
        yield (*way, key)
        if len(way) < 4:
            yield from places(content[key], *way, key)


def test_where_a_job_lies(kit, job):
    for wrong in ("nowhere", kit):
        assert str(wrong) in failing("site", "describe", wrong, "--kit", kit)
    shutil.copytree(job / "app", job / "other")
    edit_json(job / "meta.json", lambda meta: meta.update(deploy_map={"app": ["server"], "other": ["hospital"]}))
    (job / "other" / "note.txt").write_text("for this hospital")
    assert described(job, "--kit", kit)["digest"] == digest_of(job / "other")
