"""What administrators, a lead, a thief of a kit and another hospital try, over mTLS, and how each attempt must end."""

import json
import shutil
import subprocess

import pytest
from attacking import Attacked
from federation_process import SITES, wait_for
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic, ReturnCode
from nvflare.private.defs import InfoCollectorTopic, JobFailureMsgKey, RequestHeader, SysCommandTopic, TrainingTopic
from sending import send
from tables import edit_json

from fedtar_flare.record.log import alarms

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]
ADMIN, STAFF, LEAD, MEMBER = "admin@hub.org", "it@hospital-a.org", "lead@hub.org", "member@hospital-b.org"
SITE, MARK = "hospital-a", "read_by_an_administrator"


@pytest.mark.parametrize("user", [ADMIN, STAFF, LEAD, MEMBER])
def test_nobody_has_a_shell_at_a_hospital_or_at_the_server(federation, user):
    session = federation.session(user)
    (federation.sites[SITE] / "secret.txt").write_text(f"{MARK}\n")
    for target, file in ((SITE, "secret.txt"), ("server", "log.txt")):
        reading = [f"{name} {target} {file}" for name in ("cat", "head", "tail")]
        for command in (*reading, f"grep {target} {MARK} {file}", f"ls {target}"):
            reply = _reply(session, command)
            assert "not authorized" in reply.lower(), (command, reply)
            assert MARK not in reply.replace(command, "") and "startup" not in reply


def test_code_that_a_project_admin_brings_for_the_sites_alone_is_refused_there(federation, exported):
    """The server's part has none, so the server itself has nothing to refuse."""
    job = exported("admins_code")
    (job / "app").rename(job / "app_server")
    (job / "app_site" / "config").mkdir(parents=True)
    (job / "app_site" / "custom").mkdir()
    (job / "app_site" / "custom" / "mine.py").write_text("print('mine')\n")
    file = job / "app_server" / "config" / "config_fed_client.json"
    file.rename(job / "app_site" / "config" / file.name)
    edit_json(job / "meta.json", lambda meta: meta.update(deploy_map={"app_server": ["server"], "app_site": [*SITES]}))
    identity = federation.submit(job, ADMIN)
    assert federation.finished(identity).startswith("FINISHED:") and federation.status(identity) != "FINISHED:COMPLETED"
    assert "BYOC not permitted" in federation.detail(identity)
    assert not any((federation.sites[name] / identity).exists() for name in SITES)


@pytest.mark.parametrize("user", [STAFF, MEMBER])
def test_who_only_looks_neither_submits_nor_stops_anything(federation, exported, user):
    session = federation.session(user)
    for attempt in (lambda: session.submit_job(str(exported("not_mine"))), lambda: session.shutdown("server")):
        with pytest.raises(Exception, match=r"(?i)authoriz"):
            attempt()
    assert federation.listens() and isinstance(session.list_jobs(), list)


def test_a_lead_s_job_that_names_its_own_id_is_refused_when_it_is_submitted(federation, exported):
    """FLARE would replace the folder of the kits with the job's id; ``test_server_watch`` has what else is refused."""
    job = exported("wrong_meta")
    edit_json(job / "meta.json", lambda meta: meta.update(job_id="local"))
    submit = ("job", "submit", "-j", job, "--startup-kit", federation.kits / LEAD)
    federation.command(*submit, fails="must not name its own id")
    assert (federation.server / "local" / "resources.json.default").is_file()


def test_what_the_processes_write_is_for_their_own_account(federation):
    for kit in (federation.server, *federation.sites.values()):
        written = [*kit.glob("log*"), *kit.glob("audit*"), *kit.glob("pool_stats"), kit / "pid.fl"]
        assert len(written) > 2
        assert [path for path in written if path.stat().st_mode & 0o077] == []


def test_a_kit_that_a_second_machine_uses_too_is_told(federation):
    stolen = federation.folder / "stolen" / "hospital-b"
    shutil.copytree(federation.sites["hospital-b"], stolen, ignore=shutil.ignore_patterns("*.fl", "log.*", "*-*-*-*-*"))
    with (federation.folder / "stolen.out").open("ab") as out:
        subprocess.run(["bash", stolen / "startup" / "start.sh"], env=federation.environment, cwd=stolen, check=True,
                       stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)  # fmt: skip
    try:
        of_kits = lambda: [text for text in alarms(federation.server) if "site 'hospital-b'" in text]  # noqa: E731
        assert len(wait_for("the alarm", of_kits)) == 1
        log = (federation.folder / "localhost.out").read_text(errors="replace")
        assert "ALARM: two processes seem to use the kit" in log
        _system(federation, "disable-client")
        wait_for("neither is in", lambda: "hospital-b" not in federation.connected())
    finally:
        federation.kill_site(stolen)
        _system(federation, "enable-client")
        federation.restart("hospital-b")


def _system(federation, command):
    """As docs/explanation/security.md says."""
    federation.command("system", command, "hospital-b", "--force", "--startup-kit", federation.kits / ADMIN)


def _reply(session, command):
    try:
        return json.dumps(session.do_command(command), default=str)
    except Exception as error:  # FLARE's sessions raise for a refusal
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory, home):
    with Attacked(tmp_path_factory.mktemp("attacked"), home).running() as federation:
        yield federation


def commands(job):
    """Requests that end, change or read out another participant's processes: (cell, channel, topic, headers)."""
    site = [TrainingTopic.CHECK_STATUS, SysCommandTopic.SYS_INFO, SysCommandTopic.REPORT_ENV]
    site += [TrainingTopic.CHECK_RESOURCE, InfoCollectorTopic.SHOW_STATS, TrainingTopic.DELETE_RUN]
    site += [TrainingTopic.ABORT, TrainingTopic.RESTART, TrainingTopic.SHUTDOWN]
    yield from (("hospital-a", CellChannel.CLIENT_MAIN, topic, {RequestHeader.JOB_ID: job}) for topic in site)
    for cell in ("hospital-a", f"hospital-a.{job}", "server"):
        for topic in ("config_vars", "process_info", "stop_cell", "stop"):
            yield cell, "_net_manager", topic, {}
    for topic in ("show_errors", "configure_job_log", "abort"):
        yield f"hospital-a.{job}", CellChannel.CLIENT_COMMAND, topic, {}
    yield "server", CellChannel.SERVER_PARENT_LISTENER, ServerCommandNames.UPDATE_RUN_STATUS, {}
    for topic in (ServerCommandNames.SHOW_STATS, ServerCommandNames.HANDLE_DEAD_JOB, ServerCommandNames.APP_COMMAND):
        yield f"server.{job}", CellChannel.SERVER_COMMAND, topic, {}


def test_no_hospital_and_no_member_commands_another_s_site_or_the_server(attacked, exported):
    exported = exported(rounds=200)  # the most: it trains until it is aborted
    edit_json(exported / "meta.json", lambda meta: meta.update(deploy_map={"app": ["server", "hospital-a"]}))
    job = attacked.submit(exported)
    wait_for("the job trains", lambda: attacked.run_folder(job).is_dir() and attacked.events(job))
    pids = {name: attacked.job_process(name, job) for name in ("localhost", "hospital-a")}
    requests = list(commands(job))
    answers = attacked.attack(*requests)
    console = attacked.session("member@hospital-b.org").api.cell
    answers += [send(console.core_cell, *request) for request in requests]
    answered = dict(zip(map(str, requests * 2), answers, strict=True)).items()
    assert all(answer.startswith(ReturnCode.UNAUTHENTICATED) for answer in answers), answered
    failure = {JobFailureMsgKey.JOB_ID: job, JobFailureMsgKey.CODE: ProcessExitCode.EXCEPTION}
    attacked.attack(("server", CellChannel.SERVER_MAIN, CellChannelTopic.REPORT_JOB_FAILURE, failure))  # not its job
    assert {name: attacked.job_process(name, job) for name in pids} == pids
    assert attacked.status(job) == "RUNNING"
    assert {"hospital-a", "hospital-b"} <= attacked.connected()
    attacked.session("lead@hub.org").abort_job(job)  # whoever may, still does
    assert attacked.finished(job) == "FINISHED:ABORTED"
