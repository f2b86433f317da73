"""The Helm chart as helm renders it by the page's commands, against Kubernetes' own schemas; no cluster runs it."""

import re
import shlex
import shutil
import subprocess

import pytest
import yaml

LIVE = ["fedtar", "health", "/kit", "--live"]
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
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, cwd=repository)
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
    assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()
    assert container["securityContext"] == CONFINED and own["seccompProfile"] == {"type": "RuntimeDefault"}
    written = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
    assert written == {"/kit", "/state", "/cache", "/tmp", "/home/fedtar", "/dev/shm"}
    probes = [container[f"{one}Probe"]["exec"]["command"] for one in ("startup", "liveness", "readiness")]
    assert probes == [LIVE, LIVE, LIVE[:3]]


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
