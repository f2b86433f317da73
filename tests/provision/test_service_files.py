"""The systemd unit and the container's files, without starting either (``provisioning/try_image.sh`` does)."""

import json
import re
import shlex
import shutil
import subprocess

import pytest
import yaml

from fedtar_flare.version import __version__


@pytest.fixture(scope="module")
def unit(tmp_path_factory, repository):
    """The unit as systemd sees it for one site."""
    file = tmp_path_factory.mktemp("unit") / "fedtar-site@hospital-1.service"
    shutil.copyfile(repository / "provisioning" / "fedtar-site@.service", file)
    return file


def test_the_service_has_an_account_of_its_own_and_can_change_neither_policy_nor_certificates(unit):
    lines = {*unit.read_text().split("\n[Service]\n")[1].splitlines()}
    assert {
        "User=fedtar",
        "UMask=0077",
        "NoNewPrivileges=yes",
        "MemoryMax=32G",
        "ProtectSystem=strict",
        "IPAddressDeny=any",
    } < lines
    assert {"ReadOnlyPaths=/srv/fedtar/%i/startup /srv/fedtar/%i/local", "StateDirectory=fedtar"} < lines


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian package systemd)")
@pytest.mark.parametrize("check", [["verify"], ["security", "--offline=true", "--no-pager", "--threshold=30"]])
def test_systemd_finds_nothing_wrong_with_the_unit(unit, check):
    done = subprocess.run(["systemd-analyze", *check, str(unit)], capture_output=True, text=True, timeout=60)
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
    built, started = {"ARG", "FROM", "RUN", "COPY", "USER", "ENV", "VOLUME"}, {"HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert set(names) <= built | started  # no ADD
    assert re.fullmatch(r"BASE=python:3\.1[1-3]-slim-\w+", dockerfile[0][1])
    assert [rest for name, rest in dockerfile if name == "FROM"] == ["${BASE} AS build", "${BASE}"]
    for name, rest in dockerfile:
        if name == "COPY":  # the kit, with its private key, is mounted and never part of the image
            assert not {"provisioning", "kit", "."} & set(shlex.split(rest)[:-1])
        if name == "RUN" and "pip install" in rest:
            assert "--no-cache-dir -c /src/constraints.txt" in rest
    users = [rest for name, rest in dockerfile if name == "USER"]
    assert users == ["fedtar"] and names.index("USER") < names.index("ENTRYPOINT")


def test_the_hospital_s_container_can_do_little_beside_its_work(repository, dockerfile):
    content = yaml.safe_load((repository / "provisioning" / "compose.yml").read_text())
    assert set(content) == {"services"}
    (service,) = content["services"].values()
    assert service["image"] == f"fedtar:{__version__}"  # no tag that moves
    assert service["user"].split(":")[0] != "0" and service["cap_drop"] == ["ALL"] and service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"] and all(
        service[limit] for limit in ("mem_limit", "pids_limit", "cpus")
    )
    assert not {"privileged", "network_mode", "pid", "ports", "cap_add", "env_file", "devices"} & set(service)
    probes = [next(rest for name, rest in dockerfile if name == "HEALTHCHECK").partition(" CMD ")[2]]
    probes += [json.dumps(service["healthcheck"]["test"][1:])]
    assert probes == ['["fedtar", "health", "/kit"]'] * 2
    uid = re.search(r"--uid (\d+)", next(rest for _, rest in dockerfile if "useradd" in rest)).group(1)
    assert service["user"] == f"{uid}:{uid}"
    volumes = {target: (source, *mode) for source, target, *mode in (v.split(":") for v in service["volumes"])}
    written = {source: target for target, (source, *mode) in volumes.items() if mode != ["ro"]}
    assert written == {"./workspace": "/kit", "./state": "/state", "./cache": "/cache"}
    assert set(volumes) - set(written.values()) == {"/data", "/kit/startup", "/kit/local"}
