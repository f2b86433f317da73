"""What a malicious server asks of a site, sent as such a server would: without the name of a command, or as 'super'."""

import io
import os
import shutil
from types import SimpleNamespace
from unittest.mock import Mock
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from kits import make_kit
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.sec.audit import Auditor, AuditService
from nvflare.private.admin_defs import Message
from nvflare.private.defs import RequestHeader, SysCommandTopic, TrainingTopic
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.provision.launcher import SupervisedProcessLauncher
from fedtar_flare.provision.storage import validated
from fedtar_flare.provision.wire import ANSWERED, wrap

REAL = "0f3d1c1e-8a52-4d4e-9c11-2f6a0c3d5b7e"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site's agent with FLARE's processors, as the site has them once its launcher heard that it starts."""
    kit = make_kit(tmp_path / "hospital-a")
    (kit / "local" / "privacy.json").write_text("the site's policy")
    monkeypatch.chdir(kit)
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", list(ClientRequestProcessors.request_processors))
    monkeypatch.setattr(AuditService, "the_auditor", Auditor(str(tmp_path / "audit.log")))
    mask = os.umask(0o022)
    SupervisedProcessLauncher().handle_event(EventType.SYSTEM_BOOTSTRAP, FLContext())
    new = os.umask(mask)
    workspace = Workspace(str(kit), "hospital-a")
    engine = SimpleNamespace(
        workspace=workspace,
        args=SimpleNamespace(workspace=str(kit)),
        get_client_name=lambda: "hospital-a",
        new_context=FLContext,
        get_engine_status=dict,
        delete_run=lambda job_id: shutil.rmtree(workspace.get_run_dir(job_id)),
    )
    monkeypatch.setattr("nvflare.private.fed.client.training_cmds.ClientEngineInternalSpec", SimpleNamespace)
    agent = FedAdminAgent("hospital-a", SimpleNamespace(register_request_cb=lambda **kwargs: None), engine)
    for processor in ClientRequestProcessors.request_processors:
        agent.register_processor(processor)
    yield SimpleNamespace(kit=kit, agent=agent, umask=new)
    AuditService.the_auditor.close()


def ask(site, topic, body="", **headers):
    request = Message(topic, body)
    request.set_headers(headers)
    return str(site.agent._dispatch_request(CellMessage(payload=request)).payload.body)


@pytest.mark.parametrize("headers", [{}, {RequestHeader.USER_ROLE: "super"}])
def test_only_what_a_federation_needs_is_answered_and_the_server_has_no_shell(site, headers):
    topics = set(site.agent.processors)
    assert topics >= ANSWERED and SysCommandTopic.SHELL in topics - ANSWERED  # names that FLARE still has
    for topic in topics - ANSWERED:
        assert ask(site, topic, "cat ../x.csv", **headers) == f"refused by the site: no site answers '{topic}'"


@pytest.mark.parametrize("job_id", ["local", "startup", "fedtar_state", "../hospital-a", REAL.upper(), f"{REAL}\n"])
@pytest.mark.parametrize("topic", [TrainingTopic.DELETE_RUN, TrainingTopic.DEPLOY])
def test_a_folder_of_the_kit_is_no_job(site, topic, job_id):
    before = sorted(site.kit.rglob("*"))
    reply = ask(site, topic, **{RequestHeader.JOB_ID: job_id, RequestHeader.JOB_META: {}, RequestHeader.APP_NAME: "x"})
    assert "no job's id" in reply and sorted(site.kit.rglob("*")) == before


def test_a_real_job_s_folder_is_still_deleted_on_request_and_files_are_private_from_the_start(site):
    (site.kit / REAL).mkdir()
    assert ask(site, TrainingTopic.DELETE_RUN, **{RequestHeader.JOB_ID: REAL}) == "OK"
    assert not (site.kit / REAL).exists() and site.umask == 0o077


def archive(files):
    packed = io.BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as made:
        for name, content in files.items():
            made.writestr(name, content)
    return packed.getvalue()


APPS = {
    "a bomb": lambda: archive({"config/a": bytes(2 << 20)}),
    "a bomb in many parts": lambda: archive({f"config/{i}": bytes(1 << 19) for i in range(3)}),
    "many files": lambda: archive({f"config/{i}": b"" for i in range(20)}),
    "an archive that is itself too large": lambda: archive({"a": os.urandom(2 << 20)}),
    "no archive": lambda: b"PK",
    "a text": lambda: "PK",
    "the kit's settings": lambda: archive({"config/comm_config.json": '{"comm_driver_path": "."}'}),
    "settings that are unpacked all the same": lambda: archive({"app/resources.conf.default/..": "a = b"}),
    "a directory of entries that takes all memory": lambda: archive({"a": b""}) + b"PK\x01\x02" * 30,
}


@pytest.mark.parametrize("app", APPS)
def test_an_app_that_would_fill_the_disk_is_not_unpacked_at_a_site_or_the_server(site, app, monkeypatch, tmp_path):
    """FLARE does so before it looks at a signature, and imports what a file named as the kit's own says."""
    monkeypatch.setattr("fedtar_flare.provision.wire.MOST_BYTES", 1 << 20)
    monkeypatch.setattr("fedtar_flare.provision.wire.MOST_FILES", 10)
    unpack = Mock()
    monkeypatch.setattr("nvflare.private.fed.client.training_cmds.unzip_all_from_bytes", unpack)
    job = {RequestHeader.JOB_ID: REAL, RequestHeader.JOB_META: {"job_id": REAL}, RequestHeader.APP_NAME: "app"}
    assert "refused by the site: the app" in ask(site, TrainingTopic.DEPLOY, APPS[app](), **job) and not unpack.called
    good = archive({"config/config_fed_client.json": "{}"})
    ask(site, TrainingTopic.DEPLOY, good, **job)
    assert unpack.call_args.args[0] == good
    monkeypatch.setattr(JobMetaValidator, "validate", lambda *_: (True, "", {"name": "job"}))
    wrap(JobMetaValidator, "validate", validated)
    (file := tmp_path / "job.zip").write_bytes(content if isinstance(content := APPS[app](), bytes) else b"PK")
    assert JobMetaValidator().validate("job", str(file))[0] is False
    assert JobMetaValidator().validate("job", str(tmp_path / "none.zip"))[0] is False
    file.write_bytes(archive({"job/meta.json": "{}"}))
    assert JobMetaValidator().validate("job", str(file)) == (True, "", {"name": "job"})


def test_a_job_with_code_is_not_started_whatever_role_signed_it(tmp_path, monkeypatch):
    command = Mock(return_value="true")
    monkeypatch.setattr(SupervisedProcessLauncher, "get_command", command)
    context, kit = FLContext(), make_kit(tmp_path / "hospital-a")
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(kit), "hospital-a"), private=True)
    for meta in ({"job_id": REAL, "byoc": True}, {"job_id": REAL, "byoc": True, "submitter_role": "super"}):
        with pytest.raises(FedTARError, match="code of its own"):
            SupervisedProcessLauncher().launch_job(meta, context)
    assert not command.called
    SupervisedProcessLauncher(byoc=True).launch_job({"job_id": REAL, "byoc": True}, context).wait()
    SupervisedProcessLauncher().launch_job({"job_id": REAL}, context).wait()
    assert command.call_count == 2
