"""What the provisioned kits hold; nothing is started here."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import yaml
from command import passing, run
from kits import make_kits
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.provision import kit as kits
from fedtar_flare.provision.builder import KitBuilder
from fedtar_flare.provision.storage import KitJobManager, KitStorage
from fedtar_flare.registry import default_names
from fedtar_flare.site.policy import GUARD, SERVER_CLASSES, SITE_CLASSES, allowed_methods, rights, too_wide

pytestmark = pytest.mark.production

PROJECTS = ("project.yml", "project-relay.yml", "project-localhost.yml")
HEAD = "diagnosis.head.*"
"""What the trial's kits let pass beyond the contracts."""


def provision(project: Path, folder: Path) -> Path:
    return make_kits(yaml.safe_load(project.read_text()), folder)


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory, repository):
    """Project file name to its kits."""
    folder = tmp_path_factory.mktemp("kits")
    return {name: provision(repository / "provisioning" / name, folder / name) for name in PROJECTS}


def participants(repository, name, kind):
    content = yaml.safe_load((repository / "provisioning" / name).read_text())
    return [p["name"] for p in content["participants"] if p["type"] == kind]


def classes(config) -> set[str]:
    """Every class that a job's configuration names, nested ones too."""
    if isinstance(config, dict):
        own = {value for key, value in config.items() if key in ("path", "class_path")}
        return own.union(*map(classes, config.values()))
    return set().union(*map(classes, config)) if isinstance(config, list) else set()


GENERIC = {
    "server": "fedtar_flare.runtime.controller.FederatedController",
    "client": "fedtar_flare.runtime.site_executor.SiteExecutor",
}
"""What jobs of the other methods name in the place of FedTAR's two classes."""


@pytest.mark.parametrize("side", ["server", "client"])
def test_the_allow_list_has_exactly_the_classes_of_the_shipped_job(tmp_path, side):
    FedTARRecipe(name="job").export(str(tmp_path), byoc=False)
    config = json.loads((tmp_path / "job/app/config" / f"config_fed_{side}.json").read_text())
    allowed = set(SERVER_CLASSES if side == "server" else SITE_CLASSES)
    assert allowed - classes(config) == {GENERIC[side]} and classes(config) < allowed


@pytest.mark.parametrize("project", PROJECTS)
def test_every_kit_of_every_project_is_complete(provisioned, repository, project):
    place = provisioned[project]
    for kind, wanted in (("server", SERVER_CLASSES), ("client", SITE_CLASSES)):
        names = participants(repository, project, kind)
        assert names
        for kit in (place / name for name in names):
            resources = json.loads((kit / "local" / "resources.json.default").read_text())
            assert resources["class_list_enforcement_mode"] == "enforce" and "/tmp" not in json.dumps(resources)
            assert resources["class_allow_list"] == list(wanted)
            rights = json.loads((kit / "local" / "authorization.json.default").read_text())
            assert too_wide(rights) == [] and rights["permissions"]["lead"]["submit_job"] == "any"
            startup = next((kit / "startup").glob("fed_*.json"))
            assert json.loads(startup.read_text())["require_signed_jobs"] is True
            script = (kit / "startup" / "sub_start.sh").read_text()
            assert ("NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT:-60}" in script) is (kind == "server")
            assert "umask 077" in script and kits.QUIET_START in script and kits.START not in script
            if kind == "client":
                check_site_policy(kit, resources, {"extra_names": [HEAD]} if project == "project-localhost.yml" else {})
    for name in participants(repository, project, "relay"):
        script = (place / name / "startup" / "sub_start.sh").read_text()
        assert " -m fedtar_flare.provision.relay " in script and "umask 077" in script
        assert kits.complete_kit(place / name) == []


def check_site_policy(kit, resources, extra):
    launchers = [entry["path"] for entry in resources["components"] if entry["id"] == "process_launcher"]
    assert launchers == [kits.LAUNCHER] and resources["allow_log_streaming"] is False  # a log may name files and rows
    policy = json.loads((kit / "local" / "privacy.json").read_text())
    (scope,) = policy["scopes"]
    assert policy["default_scope"] == scope["name"]
    for filters in ("task_result_filters", "task_data_filters"):
        (guard,) = scope[filters]
        assert guard["path"] == GUARD and guard["args"] == {"methods": list(default_names()), **extra}


def test_a_hospital_that_keeps_its_own_key_gets_the_same_kit(provisioned, tmp_path, repository):
    """The commands of provisioning/README.md: the key stays in the hospital's folder."""
    files = repository / "provisioning"
    (hospital := tmp_path / "hospital").mkdir()
    (hub := tmp_path / "hub").mkdir()

    def nvflare(folder, *arguments):
        code, out, err = run("nvflare", *arguments, timeout=600, cwd=folder, HOME=str(tmp_path))
        assert code == 0, out + err

    nvflare(hub, "cert", "init", "--profile", files / "profile.yml", "-o", "ca")
    nvflare(hospital, "cert", "request", "-p", files / "hospital.yml")
    request = hospital / "hospital-6" / "hospital-6.request.zip"
    assert not any("key" in name for name in zipfile.ZipFile(request).namelist())
    signed = hub / "hospital-6.signed.zip"
    approve = ("cert", "approve", request, "-c", "ca", "--profile", files / "profile.yml", "--out", signed)
    nvflare(hub, *approve)
    fingerprint = json.loads((hub / "ca" / "ca.json").read_text())["rootCA_fingerprint"]
    nvflare(hospital, "package", signed, "--request-dir", "hospital-6", "--fingerprint", fingerprint)
    kit = hospital / "workspace" / "fedtar" / "prod_00" / "hospital-6"
    assert (kit / "startup" / "client.key").stat().st_mode & 0o077 == 0
    ours = provisioned["project.yml"] / "hospital-1" / "local"
    for name in ("resources.json.default", "authorization.json.default", "privacy.json"):
        assert (kit / "local" / name).read_text() == (ours / name).read_text()

    # Its renewal, for a year, with a new key that stays there too.
    nvflare(hospital, "cert", "request", "-p", files / "hospital.yml", "--force")
    nvflare(hub, *approve, "--force", "--valid-days", 2000)  # the first lasts three years
    key = hospital / "hospital-6" / "hospital-6.key"
    assert "valid until" in passing("renew", signed, "--key", key, "--kit", kit)
    assert (kit / "startup" / "client.key").read_bytes() == key.read_bytes()


def test_flare_s_own_kit_is_completed_by_the_command(provisioned, tmp_path, repository):
    """A hospital whose kit was made without the builder gets the same policy."""
    project = yaml.safe_load((repository / "provisioning" / "project-localhost.yml").read_text())
    project["builders"] = [b for b in project["builders"] if "fedtar_flare" not in b["path"]]
    (tmp_path / "plain.yml").write_text(yaml.safe_dump(project))
    place = provision(tmp_path / "plain.yml", tmp_path / "ws")
    for name in ("localhost", "hospital-a"):
        code, out, err = run("python", "-m", "fedtar_flare.provision.kit", place / name, timeout=600)
        assert code == 0, err
        ours = provisioned["project-localhost.yml"] / name / "local"
        pairs = [(f"{what}.json", f"{what}.json.default") for what in ("resources", "authorization", "log_config")]
        pairs += [("privacy.json", "privacy.json")] * (name != "localhost")
        assert {str(place / name / "local" / written) for written, _ in pairs} <= set(out.split())
        if name == "localhost":
            assert str(place / name / "startup" / "sub_start.sh") in out.split()
        for written, made in pairs:
            content = json.loads((ours / made).read_text())
            for scope in content.get("scopes", ()):  # so is what the trial lets pass
                for entry in scope["task_result_filters"] + scope["task_data_filters"]:
                    assert entry["args"].pop("extra_names") == [HEAD]
            for component in content.get("components", ()):  # which sites the project has is known to the builder alone
                if isinstance(component, dict):
                    component.get("args", {}).pop("sites", None)
            assert json.loads((place / name / "local" / written).read_text()) == content


def test_completing_a_kit_twice_keeps_the_site_s_own_policy_unless_it_is_too_wide(provisioned, tmp_path):
    kit = shutil.copytree(provisioned["project-localhost.yml"] / "hospital-a", tmp_path / "kit")
    (kit / "local" / "privacy.json").write_text('{"scopes": [], "mine": true}')
    file, narrow, seen = kit / "local" / "authorization.json", rights(), set()
    narrow["permissions"].pop("lead")
    for policy, ends in ((narrow, narrow), ({"format_version": "1.0", "permissions": {"lead": "any"}}, rights())):
        file.write_text(json.dumps(policy))
        kits.complete_kit(kit)
        assert json.loads(file.read_text()) == ends
        seen.add((kit / "local" / "resources.json").read_text())
    assert json.loads(file.with_name("authorization.json.before").read_text())["permissions"] == {"lead": "any"}
    assert json.loads((kit / "local" / "privacy.json").read_text())["mine"] is True and len(seen) == 1
    with pytest.raises(ConfigError, match=str(tmp_path)):
        kits.complete_kit(tmp_path)


@pytest.mark.parametrize(
    ("listed", "named", "allowed"),
    [
        (["fedavg"], None, ["fedavg"]), ([], None, []), (["fedprox"], ["madeup"], ["fedprox", "madeup"]),
        (None, ["madeup"], ["madeup"]), (None, None, default_names()),
    ],
)  # fmt: skip
def test_methods_are_listed_by_given_names_alone(provisioned, tmp_path, madeup, listed, named, allowed):
    kit = shutil.copytree(provisioned["project-localhost.yml"] / "hospital-a", tmp_path / "kit")
    policy = kit / "local" / "privacy.json"
    policy.unlink() if listed is None else policy.write_text(json.dumps(kits.site_policy(listed)))
    kits.complete_kit(kit, named)
    assert allowed_methods(json.loads(policy.read_text())) == list(allowed)
    with pytest.raises(ConfigError, match="did you mean 'madeup'"):
        kits.complete_kit(kit, ["madeupp"])


RESOURCES = {"components": [], "class_allow_list": [], "snapshot_persistor": {"args": {}}}


def test_flare_s_own_classes_go_unless_they_are_kept():
    before = {**RESOURCES, "class_allow_list": [DEFAULT_CLASS_ALLOW_LIST[0], "the.hospital.s.Own"]}
    for keeps, first in ((False, ["the.hospital.s.Own"]), (True, before["class_allow_list"])):
        allowed = kits.complete(before, server=False, flare_classes=keeps)["class_allow_list"]
        assert allowed == [*first, *SITE_CLASSES]


def test_no_package_can_be_put_on_the_allow_list_and_builder_settings_are_checked():
    for path in ("fedtar_flare.", "fedtar_flare.methods.fedtar", "*", "Executor", "a..B"):
        with pytest.raises(ConfigError, match="one class"):
            kits.complete(RESOURCES, server=False, extra_classes=[path])
    wrong = {"extra_classes": "a.b.C", "filters": {}, "gpus": {"x": {"cores": 1}}, "methods": ["fedtra"]}
    for name, value in (wrong | {"extra_names": "lora"}).items():
        with pytest.raises(ConfigError):
            KitBuilder(**{name: value})


def test_filters_of_the_site_run_before_the_guard_and_gpus_reach_their_site(tmp_path, repository):
    project = yaml.safe_load((repository / "provisioning" / "project-localhost.yml").read_text())
    builder = next(b for b in project["builders"] if b["path"].startswith("fedtar_flare"))
    noise = {"path": "nvflare.app_common.filters.exclude_vars.ExcludeVars", "args": {}}
    builder["args"] = {"filters": [noise], "gpus": {"hospital-a": {"count": 2, "memory": 40}}, "lead_byoc": True}
    (tmp_path / "p.yml").write_text(yaml.safe_dump(project))
    local = provision(tmp_path / "p.yml", tmp_path / "ws") / "hospital-a" / "local"
    (scope,) = json.loads((local / "privacy.json").read_text())["scopes"]
    assert [entry["path"] for entry in scope["task_result_filters"]] == [noise["path"], GUARD]
    resources = json.loads((local / "resources.json.default").read_text())
    manager = next(entry for entry in resources["components"] if entry["id"] == "resource_manager")
    assert (manager["args"]["num_of_gpus"], manager["args"]["mem_per_gpu_in_GiB"]) == (2, 40)
    assert json.loads((local / "authorization.json.default").read_text())["permissions"]["lead"]["byoc"] == "any"


@pytest.mark.parametrize("build", [KitStorage, KitJobManager])
def test_storage_lies_in_the_kit(tmp_path, monkeypatch, build):
    monkeypatch.chdir(tmp_path)
    build("storage/x")
    assert (tmp_path / "storage" / "x").is_dir()
    for folder in ("/elsewhere", "../elsewhere", ""):
        with pytest.raises(ConfigError):
            build(folder)
