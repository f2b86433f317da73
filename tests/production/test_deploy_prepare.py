"""``nvflare deploy prepare`` on our kits: FLARE's launchers of containers and clusters start jobs behind our own."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from command import run
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.fuel.utils.component_builder import ComponentBuilder
from test_kits import provision

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.provision import kit as kits
from fedtar_flare.provision.launcher import SupervisedProcessLauncher
from fedtar_flare.site.doctor.policy import rights, shell

pytestmark = pytest.mark.production

PAGE = Path(__file__).parents[2] / "docs/how-to/clusters.md"
IMAGE, JOB = {"docker_image": "fedtar:0.1.0"}, {"job_id": "0f3d1c1e-8a52-4d4e-9c11-2f6a0c3d5b7e"}
RUNTIMES = {
    "docker": {"parent": IMAGE},
    "k8s": {"parent": IMAGE},
    "slurm": yaml.safe_load(re.search(r"```yaml\n# slurm.yaml\n(.*?)```", PAGE.read_text(), re.S)[1]),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, repository):
    return provision(repository / "provisioning" / "project-localhost.yml", tmp_path_factory.mktemp("ws"))


def prepared(kit, folder, runtime):
    """The kit for that runtime, as provisioning/README.md says: FLARE's tool, then ours."""
    (folder / "config.yml").write_text(yaml.safe_dump({"runtime": runtime} | RUNTIMES[runtime]))
    out = folder / kit.name
    tool = ("nvflare", "deploy", "prepare", kit, "--output", out, "--config", folder / "config.yml")
    code, *said = run(*tool, timeout=600)
    assert code == 0, said
    kits.complete_kit(out)
    return out


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_site_s_jobs_are_started_by_flare_s_launcher_behind_our_own(place, tmp_path, monkeypatch, runtime):
    kit = prepared(place / "hospital-a", tmp_path, runtime)
    whole = json.loads((kit / "local" / "resources.json").read_text())
    assert kits.complete(whole, server=False) == whole and "PassthroughResourceManager" in str(whole["components"])
    assert {finding.status for finding in (shell(kit), rights(kit))} == {"OK"}
    (entry,) = [one for one in whole["components"] if "launcher" in one["id"]]
    assert entry["path"] == kits.LAUNCHER
    builder = type("Builder", (ComponentBuilder,), {"get_module_scanner": lambda self: None})()
    ours, context = builder.build_component(entry), FLContext()
    assert runtime in type(ours.launcher).__name__.lower()
    monkeypatch.setattr(type(ours.launcher), "handle_event", lambda *_: None)  # nor is there a cluster to ask
    for event in (EventType.SYSTEM_BOOTSTRAP, EventType.BEFORE_JOB_LAUNCH):
        ours.handle_event(event, context)
    assert context.get_prop(FLContextKey.JOB_LAUNCHER) == [ours], "FLARE refuses a site with two"
    codes = [ProcessExitCode.INFRASTRUCTURE_ERROR, 0]  # lost, as Slurm's launcher says; then it ends by itself

    def ended(self, meta, context):
        code = codes.pop(0)
        return SimpleNamespace(wait=lambda: None, poll=lambda: code)

    monkeypatch.setattr(type(ours.launcher), "launch_job", ended)
    handle = ours.launch_job(JOB, context)
    handle.wait()
    assert handle.poll() == 0 and not codes, "it was started again"
    with pytest.raises(ConfigError, match="launcher must be"):
        SupervisedProcessLauncher(launcher={"path": "a.launcher.Spec"})


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_server_keeps_its_watch_over_jobs_logins_and_storage(place, tmp_path, runtime):
    kit = prepared(place / "localhost", tmp_path, runtime)
    found = {one["id"]: one for one in json.loads((kit / "local" / "resources.json").read_text())["components"]}
    assert found["job_manager"]["path"] == kits.JOBS and found["login_alarm"]["path"] == kits.LOGINS
    jobs = found["job_manager"]["args"]
    assert jobs["folder"] == "storage/jobs" and jobs["sites"] == ["hospital-a", "hospital-b", "hospital-c"]
