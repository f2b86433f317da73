"""The systemd unit, the container's files and the Helm chart; the image is built and run where a person asks for it."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fedtar_flare.version import __version__


@pytest.fixture(scope="module")
def unit(tmp_path_factory, repository):
    """The unit as systemd sees it for one site."""
    file = tmp_path_factory.mktemp("unit") / "fedtar-site@hospital-1.service"
    shutil.copyfile(repository / "provisioning" / "fedtar-site@.service", file)
    return file


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian package systemd)")
@pytest.mark.parametrize("check", [["verify"], ["security", "--offline=true", "--no-pager", "--threshold=30"]])
def test_systemd_finds_nothing_wrong_with_the_unit(unit, check):
    done = subprocess.run(["systemd-analyze", *check, str(unit)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert check != ["verify"] or not (done.stdout + done.stderr).strip()


@pytest.fixture(scope="module")
def dockerfile(repository):
    """(instruction, arguments) of each line, continuation lines joined."""
    text = (repository / "provisioning" / "Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


def test_the_image_starts_from_a_fixed_base_and_does_not_run_as_root(dockerfile):
    names = [name for name, _ in dockerfile]
    assert "ADD" not in names and re.fullmatch(r"BASE=python:3\.1[1-3]-slim-\w+", dockerfile[0][1])
    for name, rest in dockerfile:
        if name == "COPY":  # the kit, with its private key, is mounted and never part of the image
            assert not {"provisioning", "kit", "."} & set(shlex.split(rest)[:-1])
        if name == "RUN" and "pip install" in rest:
            assert "--no-cache-dir -c /src/constraints.txt" in rest
    users = [rest for name, rest in dockerfile if name == "USER"]
    assert users == ["fedtar"] and names.index("USER") < names.index("ENTRYPOINT")


def test_the_hospital_s_container_can_do_little_beside_its_work(repository, dockerfile):
    content = yaml.safe_load((repository / "provisioning" / "compose.yml").read_text())
    (service,) = content["services"].values()
    assert service["image"] == f"fedtar:{__version__}"  # no tag that moves
    assert service["user"].split(":")[0] != "0" and service["cap_drop"] == ["ALL"] and service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"] and service["mem_limit"] and service["pids_limit"]
    assert not {"privileged", "network_mode", "pid", "ports", "cap_add", "env_file", "devices"} & set(service)
    uid = re.search(r"--uid (\d+)", next(rest for _, rest in dockerfile if "useradd" in rest)).group(1)
    assert service["user"] == f"{uid}:{uid}"
    volumes = {target: (source, *mode) for source, target, *mode in (v.split(":") for v in service["volumes"])}
    written = {source: target for target, (source, *mode) in volumes.items() if mode != ["ro"]}
    assert written == {"./workspace": "/kit", "./state": "/state", "./cache": "/cache"}
    assert set(volumes) - set(written.values()) == {"/data", "/kit/startup", "/kit/local"}


CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


@pytest.fixture(scope="module")
def text(repository):
    if not shutil.which("helm") or not shutil.which("kubectl"):
        pytest.skip("helm and kubectl are not on the PATH ('tests/helm.sh FOLDER' puts them into a folder)")
    return (repository / "docs/how-to/clusters.md").read_text()


@pytest.fixture(scope="module")
def render(repository, text, tmp_path_factory):
    values = tmp_path_factory.mktemp("values") / "my.yaml"
    values.write_text(re.search(r"```yaml\n# my.yaml\n(.*?)```", text, re.S)[1])
    commands = {line.split()[2]: shlex.split(line)[3:-1] for line in re.findall("^helm install .*my.yaml$", text, re.M)}

    def render(name, *more, fails=""):
        """The objects by kind, or with what message helm fails."""
        command = ["helm", "template", name, *commands[name], values, *more]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, cwd=repository)
        assert bool(done.returncode) == bool(fails) and fails in done.stderr, done.stderr
        return {one["kind"]: one for one in yaml.safe_load_all(done.stdout) if one}

    return render


@pytest.mark.parametrize("name", ["hospital-1", "hub"])
def test_a_pod_fits_the_schemas_and_can_do_little_beside_its_work(render, name):
    validate = pytest.importorskip("kubernetes_validate", reason="PyPI: kubernetes-validate").validate
    found = render(name, "--set", "resources.limits.nvidia\\.com/gpu=1,storage.className=fast")
    assert sorted(found) == ["NetworkPolicy", "Service", "StatefulSet"]
    for one in found.values():
        for version in ("1.27", "1.37"):
            validate(one, version, strict=True)
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    (container,), own = pod["containers"], pod["securityContext"]
    assert pod["automountServiceAccountToken"] is False and own["runAsNonRoot"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName", "initContainers"} & set(pod)
    assert container["securityContext"] == CONFINED and own["seccompProfile"] == {"type": "RuntimeDefault"}
    written = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
    assert written == {"/kit", "/state", "/cache", "/tmp", "/home/fedtar", "/dev/shm"}


def test_a_hospital_goes_out_to_the_hub_alone_and_nobody_comes_in(render):
    found = render("hospital-1", "--set", "hub.address=2001:db8::7")
    policy, pod = found["NetworkPolicy"]["spec"], found["StatefulSet"]["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress", "Egress"] and policy["ingress"] == []
    to = [{"ipBlock": {"cidr": "2001:db8::7/128"}}]
    assert policy["egress"] == [{"to": to, "ports": [{"protocol": "TCP", "port": 8002}]}]
    assert pod["spec"]["dnsPolicy"] == "None" and pod["spec"]["hostAliases"][0]["ip"] == "2001:db8::7"
    assert render("hub", "--set", "service.type=ClusterIP")["NetworkPolicy"]["spec"]["egress"] == []
    assert render("hub")["NetworkPolicy"]["spec"]["ingress"][0]["from"] == [{"ipBlock": {"cidr": "198.51.100.7/32"}}]
    render("hub", "--set", "service.sources=null", fails="sources")
    for change, named in (("hub.address=", "/hub/address"), ("image.tag=latest", "/image/tag"), ("x=1", "'x'")):
        render("hospital-1", "--set", change, fails=named)


SCRIPT = Path(__file__).parents[2] / "provisioning" / "try_image.sh"
OPTIONS = os.environ.get("FEDTAR_IMAGE")


@pytest.mark.production
@pytest.mark.timeout(3600)
@pytest.mark.skipif(OPTIONS is None, reason="FEDTAR_IMAGE, options of 'buildah bud', is not set; takes 30 GB and root")
def test_a_federation_completes_a_job_from_the_image():
    options = shlex.split(OPTIONS or "")
    run = subprocess.run([SCRIPT, *options], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert {"account: 10001", "folders of the kit that refuse a file: 2", "the kits are as they were"} <= {*lines}
    assert "it lists what pip and dpkg list, no more and no less" in lines
    health = [line.split(",")[0].removeprefix("health of ") for line in lines if line.startswith("health")]
    assert " ".join(health) == "localhost: 1 localhost: 0 hospital-a: 1 hospital-a: 0 hospital-a: 1 localhost: 1"
    assert "0 failed" in run.stdout and "FINISHED:COMPLETED" in run.stdout
    (size,) = (int(line.split()[-1]) for line in lines if line.startswith("size"))
    assert size < (3000 if "CPU_INDEX" in (OPTIONS or "") else 8000)
