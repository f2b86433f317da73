"""The doctor: a healthy kit passes, and each fault is found, named and given a cure."""

import json
import re
import socket
import socketserver
import ssl
import threading
from datetime import UTC, datetime, timedelta

import pytest
import trustme
import yaml
from command import failing, fedtar_here, passing
from kits import add_to_site_file, make_kit, write_radiographs
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from tables import cases, edit_json

from fedtar_flare.provision.kit import LAUNCHER, site_policy
from fedtar_flare.provision.status import metrics as job_metrics
from fedtar_flare.registry import default_names
from fedtar_flare.site.context import HEALTH, Participation, decide, state_of
from fedtar_flare.site.doctor import FAIL, OK, WARN, diagnose, metrics
from fedtar_flare.site.doctor.connection import certificates, server
from fedtar_flare.site.policy import GUARD, PRIVACY_FILTER, SITE_CLASSES, rights

RESOURCES, RIGHTS = "local/resources.json.default", "local/authorization.json.default"
PRIVACY = "local/privacy.json"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Root, server and client certificates of one project, and the root of another."""
    folder, root, now = tmp_path_factory.mktemp("project"), trustme.CA(), datetime.now(UTC)
    root.cert_pem.write_to_path(folder / "rootCA.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other.pem")
    for name, days in (("server", 365), ("client", 365), ("soon", 10), ("expired", -1)):
        dates = {"not_before": now - timedelta(400), "not_after": now + timedelta(days)}
        made = root.issue_cert(name, **dates)
        made.private_key_pem.write_to_path(folder / f"{name}.key")
        made.cert_chain_pems[0].write_to_path(folder / f"{name}.crt")
    return folder


@pytest.fixture(scope="module")
def listening(project):
    """A server that wants the project's client certificates; gives its port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=project / "rootCA.pem")
    context.load_cert_chain(project / "server.crt", project / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as serving:
        serving.socket = context.wrap_socket(serving.socket, server_side=True)
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving.server_address[1]
        serving.shutdown()


@pytest.fixture
def kit(tmp_path, project, listening, own_home):
    site_file = "source: manifest\npath: ../../data/manifest.csv\ncache_dir: ../../cache\n"
    kit = make_kit(tmp_path / "hospital", site_file)
    kit.chmod(0o700)
    for name in ("rootCA.pem", "client.crt", "client.key"):
        (kit / "startup" / name).write_bytes((project / name).read_bytes())
    (kit / "startup" / "client.key").chmod(0o600)
    service = {"target": f"127.0.0.1:{listening}", "scheme": "grpc"}
    resources = {"class_allow_list": list(SITE_CLASSES), "class_list_enforcement_mode": "enforce"}
    resources["components"] = [{"id": "process_launcher", "path": LAUNCHER, "args": {}}]
    client = {"servers": [{"service": service, "identity": "s"}]}
    files = {RESOURCES: resources, PRIVACY: site_policy(default_names()), RIGHTS: rights()}
    for name, content in ({"startup/fed_client.json": client} | files).items():
        (kit / name).write_text(json.dumps(content))
    write_radiographs(tmp_path / "data", 8, visits=2)
    return kit


def worst(kit, check):
    findings = [f for f in diagnose(kit, time_steps=2) if f.check == check]
    assert findings, check
    found = max(findings, key=lambda f: (OK, WARN, FAIL).index(f.status))
    assert found.status == OK or found.cure, found
    return found


def test_a_healthy_kit_has_nothing_to_mend(kit):
    assert worst(kit, "approval").status == WARN, "patients, and any job within the bounds comes"
    add_to_site_file(kit, "policy: {approval: required, min_patients: 9, max_learning_rate: 0.01, models: {a: null}}")
    findings = diagnose(kit, time_steps=2)
    assert [f for f in findings if f.status != OK and f.check != "disk space"] == []
    assert "4 patients" in next(f.text for f in findings if f.check == "data")
    assert not [*kit.rglob("fedtar.key")] and not state_of(kit).exists()


def _filter(kit, path, place, **arguments):
    """A filter more in the first scope of the site's policy."""
    entry = {"path": path, "args": arguments}
    edit_json(kit / PRIVACY, lambda content: content["scopes"][0]["task_result_filters"].insert(place, entry))


def _guards(kit, arguments):
    both = dict.fromkeys(("task_result_filters", "task_data_filters"), ({"path": GUARD, "args": arguments},))
    edit_json(kit / PRIVACY, lambda content: content["scopes"][0].update(both))


def _open_key(kit):
    state_of(kit).mkdir(mode=0o700)
    (state_of(kit) / "fedtar.key").write_text("00" * 32)
    (state_of(kit) / "fedtar.key").chmod(0o644)


CHANGES = {
    "without": lambda kit, name: (kit / name).unlink(),
    "files": lambda kit, files: [(kit / "local" / name).write_text(text) for name, text in files.items()],
    "site": add_to_site_file,
    "resources": lambda kit, values: edit_json(kit / RESOURCES, lambda content: content.update(values)),
    "rights": lambda kit, roles: edit_json(kit / RIGHTS, lambda content: content["permissions"].update(roles)),
    "policy": lambda kit, change: edit_json(kit / PRIVACY, change),
    "guards": _guards,
    "filter": lambda kit, entry: _filter(kit, **entry),
    "kit": lambda kit, change: change(kit),
}
OPEN_SCOPE = {"name": "open", "task_result_filters": [], "task_data_filters": []}
OWN_LIST = {"class_allow_list": [*SITE_CLASSES, *DEFAULT_CLASS_ALLOW_LIST]}
FAULTS = cases(__file__, "faults.yaml") | {
    "a readable key": ({"kit": _open_key}, "key", FAIL),
    "FLARE's own list": ({"resources": OWN_LIST}, "allow-list", WARN),
    "a scope without a guard": ({"policy": lambda content: content["scopes"].append(OPEN_SCOPE)}, "site policy", FAIL),
    "no audit": ({"policy": lambda content: content.pop("components")}, "audit", WARN),
    "paused": ({"kit": lambda kit: decide(state_of(kit), Participation.PAUSED)}, "participation", WARN),
    "a kit that others read": ({"kit": lambda kit: kit.chmod(0o750)}, "file modes", FAIL),
    "state that others read": (
        {"kit": lambda kit: (state_of(kit).mkdir(), state_of(kit).chmod(0o755))}, "file modes", FAIL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_and_has_a_cure(kit, fault):
    changes, check, status = FAULTS[fault]
    for how, what in changes.items():
        CHANGES[how](kit, what)
    assert worst(kit, check).status == status


def test_certificates_are_watched(kit, project):
    startup = kit / "startup"
    for name, status in (("soon", WARN), ("expired", FAIL), ("client", OK)):
        (startup / "client.crt").write_bytes((project / f"{name}.crt").read_bytes())
        assert [f.status for f in certificates(kit)] == [status, OK], name
    assert certificates(kit, now=datetime(2000, 1, 1, tzinfo=UTC))[0].status == FAIL
    (startup / "client.crt").write_text("no certificate")
    assert certificates(kit)[0].status == FAIL


METRIC = re.compile(r"\bfedtar_[a-z_]+")


def shown(repository, file):
    """Metrics of the dashboard, or of the alert rules."""
    return {*METRIC.findall((repository / "provisioning" / file).read_text())}


def test_dashboard_and_alerts_know_what_doctor_and_status_write_and_nothing_else(kit, repository):
    _filter(kit, PRIVACY_FILTER, 0, noise_multiplier=2.0)
    (state_of(kit) / "audit").mkdir(parents=True)
    (state_of(kit) / "audit" / "job.jsonl").write_text('{"outcome": "passed", "bytes": 7}\n')
    (kit / HEALTH).write_text('{"clock_ahead": 3.5}')
    written = metrics(diagnose(kit, time_steps=2), kit)
    assert "fedtar_sent_bytes 7\n" in written and "fedtar_clock_ahead_seconds 3.5\n" in written
    progress = {"task": "train", "round": 2, "rounds": 5, "alarms": ["x"], "bytes": {"up": 9}}
    progress |= {"sites": {"a": "working", 'b"\\\n\ud800': "absent: disconnected"}, "last_answer": {"a": 1e9}}
    of_server = job_metrics([{"id": "1f", "progress": progress}, {"id": "2f"}], {"a": 2e9})
    for line in (
        'fedtar_certificate_end_seconds{site="a"} 2000000000',
        'fedtar_job_round{job_id="1f"} 2',
        'fedtar_site_absent{job_id="1f",site="a"} 0',
        'fedtar_site_absent{job_id="1f",site="b\\"\\\\\\n\ufffd"} 1',
        'fedtar_site_answer_seconds{job_id="1f",site="a"} 1000000000',
        'fedtar_alarms{job_id="1f"} 1',
    ):
        assert line in of_server.splitlines()
    labels = {}
    for line in (written + of_server).splitlines():
        if not line.startswith("#"):
            labels.setdefault(line.split("{")[0].split(" ")[0], set()).update(re.findall(r'(\w+)="', line))
    assert {*labels} == shown(repository, "grafana.json") >= shown(repository, "alerts.yml")
    assert not set().union(*labels.values()) & {"job", "instance"}, "Prometheus gives these itself"
    rules = yaml.safe_load((repository / "provisioning" / "alerts.yml").read_text())["groups"][0]["rules"]
    said = [(rule["expr"], rule["annotations"]["summary"]) for rule in rules if rule["alert"]]
    for panel in json.loads((repository / "provisioning" / "grafana.json").read_text())["panels"]:
        said += [(target["expr"], target["legendFormat"]) for target in panel["targets"]]
    for expression, text in said:
        known = set.intersection(*(labels[name] for name in METRIC.findall(expression)))
        assert {*re.findall(r"{{\$?(?:labels\.)?(\w+)}}", text)} <= known | {"instance"}, text


def test_the_way_to_the_server(kit, project):
    assert server(kit).status == OK
    (kit / "startup" / "rootCA.pem").write_bytes((project / "other.pem").read_bytes())
    assert server(kit).status == FAIL and "TLS" in server(kit).text
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        service = {"target": f"127.0.0.1:{free.getsockname()[1]}"}
        (kit / "startup" / "fed_client.json").write_text(json.dumps({"servers": [{"service": service}]}))
        assert server(kit, seconds=5).status == FAIL and "firewall" in server(kit, seconds=5).cure
    (kit / "startup" / "fed_client.json").write_text("{}")
    assert server(kit).status == FAIL


def test_each_check_is_a_number_for_monitoring_and_no_text_goes_with_it(kit, tmp_path, repository):
    assert "0 failed" in passing("doctor", "--kit", kit)
    assert "startup kit" in failing("doctor", "--kit", kit / "nothing")
    (kit / "local" / "authorization.json").write_text("{}")
    file = tmp_path / "fedtar.prom"
    code, out, _ = fedtar_here("doctor", "--kit", kit, "--json", "--prometheus", file)
    assert code == 1 and any(f["status"] == "FAIL" and f["cure"] for f in json.loads(out))
    lines = file.read_text().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert [values[f'fedtar_doctor_status{{check="{check}"}}'] for check in ("rights", "server")] == ["2", "0"]
    ends = [float(value) for name, value in values.items() if name.startswith("fedtar_certificate_end_seconds")]
    assert len(ends) == 2 and min(ends) > datetime.now(UTC).timestamp() and str(tmp_path) not in file.read_text()
    assert {name.split("{")[0] for name in values} <= shown(repository, "grafana.json")
