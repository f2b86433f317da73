"""One hospital, and a member's console, try to command another hospital's site and the server, over mTLS."""

import json
import os

import pytest
from federation_process import Federation, wait_for
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.private.admin_defs import Message as Request
from nvflare.private.defs import InfoCollectorTopic, RequestHeader, SysCommandTopic, TrainingTopic

pytestmark = [pytest.mark.production, pytest.mark.timeout(900)]
ATTACKER = """
import glob, json, os, sys, threading, time
def work():
    while True:
        for file in glob.glob(os.environ["FEDTAR_TEST_ATTACKS"] + "/*.json"):
            from nvflare.fuel.f3.cellnet.core_cell import CoreCell
            cell = CoreCell.ALL_CELLS.get("hospital-b")
            if cell is None:
                continue
            from production_wire import send
            with open(file) as text:
                answers = [send(cell, *attack) for attack in json.load(text)]
            with open(file + ".new", "w") as text:
                json.dump(answers, text)
            os.remove(file)
            os.rename(file + ".new", file[:-5] + ".out")
        time.sleep(0.2)
if any("client_train" in argument for argument in sys.orig_argv):
    threading.Thread(target=work, daemon=True).start()
"""
SEND = '''
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.private.admin_defs import Message as Request

def send(cell, target, channel, topic, headers):
    """The return code of one request from a cell, as FLARE's own code would send it."""
    body = {}
    if channel == "admin":
        body = Request(topic, "")
        body.set_headers(headers)
    reply = cell.send_request(channel, topic, target, new_cell_message({}, body), timeout=5.0)
    return str(reply.get_header(MessageHeaderKey.RETURN_CODE)) + " " + str(reply.payload)[:200]
'''


class Attacked(Federation):
    """Two hospitals; the second runs an attacker's code beside FLARE's, in the process that its kit started."""

    def start(self, *names, **named):
        folder = self.folder / "attacker"
        (folder / "attacks").mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(ATTACKER)
        (folder / "production_wire.py").write_text(SEND)
        honest = dict(self.environment)
        if "hospital-b" in names:
            self.environment |= {
                "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
                "FEDTAR_TEST_ATTACKS": str(folder / "attacks"),
            }
        super().start(*names, **named)
        self.environment = honest

    def attack(self, *requests):
        """Return codes and answers of requests from hospital-b's own cell."""
        attacks = self.folder / "attacker" / "attacks"
        (attacks / "a.new").write_text(json.dumps(requests))
        (attacks / "a.new").rename(attacks / "a.json")
        answers = wait_for("hospital-b's requests are answered", lambda: list(attacks.glob("*.out")), 200)[0]
        text = answers.read_text()
        answers.unlink()
        return json.loads(text)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory, repository, home):
    folder = tmp_path_factory.mktemp("attacked")
    sites = dict.fromkeys(("hospital-a", "hospital-b"), "source: synthetic\n")
    federation = Attacked(repository / "provisioning" / "project-localhost.yml", folder, sites, home)
    try:
        federation.start("localhost")
        federation.start("hospital-a")
        federation.start("hospital-b")
        yield federation
    finally:
        federation.close()


def commands(job):
    """Requests that end, change or read out another participant's processes: (cell, channel, topic, headers)."""
    of_job = {RequestHeader.JOB_ID: job}
    for topic in (
        TrainingTopic.CHECK_STATUS,
        SysCommandTopic.SYS_INFO,
        SysCommandTopic.REPORT_ENV,
        TrainingTopic.CHECK_RESOURCE,
        InfoCollectorTopic.SHOW_STATS,
        TrainingTopic.DELETE_RUN,
        TrainingTopic.ABORT,
        TrainingTopic.RESTART,
        TrainingTopic.SHUTDOWN,
    ):
        yield "hospital-a", CellChannel.CLIENT_MAIN, topic, of_job
    for cell in ("hospital-a", f"hospital-a.{job}"):
        for topic in ("config_vars", "process_info", "stop_cell", "stop"):
            yield cell, "_net_manager", topic, {}
    for topic in ("show_errors", "configure_job_log", "abort"):
        yield f"hospital-a.{job}", CellChannel.CLIENT_COMMAND, topic, {}
    for topic in ("config_vars", "process_info", "stop_cell", "stop"):
        yield "server", "_net_manager", topic, {}
    yield "server", CellChannel.SERVER_PARENT_LISTENER, ServerCommandNames.UPDATE_RUN_STATUS, {}
    for topic in (ServerCommandNames.SHOW_STATS, ServerCommandNames.HANDLE_DEAD_JOB, ServerCommandNames.APP_COMMAND):
        yield f"server.{job}", CellChannel.SERVER_COMMAND, topic, {}


def test_no_hospital_and_no_member_commands_another_s_site_or_the_server(attacked, exported):
    job = attacked.submit(exported(rounds=60))
    wait_for("the job trains", lambda: attacked.run_folder(job).is_dir() and attacked.events(job))
    pids = {name: attacked.job_process(name, job) for name in ("localhost", "hospital-a")}
    requests = list(commands(job))
    answers = attacked.attack(*requests)
    console = attacked.session("member@hospital-b.org").api.cell
    answers += [_from_console(console, *request) for request in requests]
    answered = [f"{request}: {answer}" for request, answer in zip(requests * 2, answers, strict=True)
                if not answer.startswith(ReturnCode.UNAUTHENTICATED)]  # fmt: skip
    assert not answered
    assert {name: attacked.job_process(name, job) for name in pids} == pids
    assert attacked.status(job) == "RUNNING"
    assert {"hospital-a", "hospital-b"} <= attacked.connected()
    attacked.session("lead@hub.org").abort_job(job)  # whoever may, still does
    assert attacked.finished(job) == "FINISHED:ABORTED"


def _from_console(cell, target, channel, topic, headers):
    body = {}
    if channel == CellChannel.CLIENT_MAIN:
        body = Request(topic, "")
        body.set_headers(headers)
    reply = cell.core_cell.send_request(channel, topic, target, new_cell_message({}, body), timeout=5.0)
    return f"{reply.get_header(MessageHeaderKey.RETURN_CODE)} {str(reply.payload)[:200]}"
