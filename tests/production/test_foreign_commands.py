"""One hospital, and a member's console, try to command another hospital's site and the server, over mTLS."""

import json

import pytest
from attacking import Attacked
from federation_process import wait_for
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic, ReturnCode
from nvflare.private.defs import InfoCollectorTopic, JobFailureMsgKey, RequestHeader, SysCommandTopic, TrainingTopic
from sending import send

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory, repository, home):
    folder = tmp_path_factory.mktemp("attacked")
    sites = dict.fromkeys(("hospital-a", "hospital-b"), "source: synthetic\n")
    federation = Attacked(repository / "provisioning" / "project-localhost.yml", folder, sites, home)
    try:
        federation.start("localhost", "hospital-a", "hospital-b")
        yield federation
    finally:
        federation.close()


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
    meta = json.loads((exported / "meta.json").read_text())
    (exported / "meta.json").write_text(json.dumps(meta | {"deploy_map": {"app": ["server", "hospital-a"]}}))
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
