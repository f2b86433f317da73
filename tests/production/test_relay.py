"""The shipped relay project, its addresses put on this machine: hospitals of a region take part through their relay."""

import psutil
import pytest
import yaml
from federation_process import Federation, free_port, wait_for

from fedtar_flare.record.events import End, Step
from fedtar_flare.record.log import of_kind, read_events

pytestmark = [pytest.mark.production, pytest.mark.timeout(900)]
BEHIND, STRAIGHT = ("hospital-1", "hospital-2"), "hospital-3"


class Relayed(Federation):
    """A federation whose sites come up behind a relay.

    Args:
        project: the relay project.
        folder: everything is below it.
        home: folder of caches.
    """

    def __init__(self, project, folder, home):
        content = yaml.safe_load(project.read_text())
        self.relay_port = free_port()
        for participant in content["participants"]:
            name, kind = participant["name"], participant["type"]
            if kind == "server":
                participant["name"] = "localhost"
            elif kind == "relay":
                participant["listening_host"] |= {"default_host": "localhost", "port": self.relay_port}
            elif kind == "admin":
                participant["name"] = name.replace("@hub.example.org", "@hub.org")
        folder.mkdir(parents=True)
        (folder / "local.yml").write_text(yaml.safe_dump(content, sort_keys=False))
        sites = dict.fromkeys((*BEHIND, STRAIGHT), "source: synthetic\n")
        super().__init__(folder / "local.yml", folder, sites, home)

    def peers(self, name):
        """Ports on this machine to which the processes of a kit are connected."""
        kit, ports = str(self.kits / name), set()
        for pid, command in self.processes().items():
            if any(kit in part for part in command):
                try:
                    links = psutil.Process(pid).net_connections("tcp")
                except psutil.NoSuchProcess:
                    continue
                ports |= {c.raddr.port for c in links if c.raddr and c.status == psutil.CONN_ESTABLISHED}
        return ports


@pytest.fixture(scope="module")
def relayed(tmp_path_factory, repository, home):
    project = repository / "provisioning" / "project-relay.yml"
    running = Relayed(project, tmp_path_factory.mktemp("relay") / "federation", home)
    try:
        running.start("localhost")
        running.start("relay-north")
        running.start(*BEHIND, STRAIGHT)
        yield running
    finally:
        running.close()


def test_a_job_runs_through_the_relay(relayed, exported):
    job = relayed.submit(exported("through_relay"))
    events = read_events(relayed.completed(job, 500))
    assert [event.status for event in of_kind(events, End)] == ["completed"]
    assert [sorted(step.sites) for step in of_kind(events, Step)] == [[*BEHIND, STRAIGHT]] * 2


def test_who_is_behind_the_relay_has_no_connection_to_the_server(relayed):
    project = yaml.safe_load((relayed.folder / "project.yml").read_text())
    server = next(p for p in project["participants"] if p["type"] == "server")["fed_learn_port"]
    wait_for("the relay is connected to the server", lambda: server in relayed.peers("relay-north"), 30)
    for name in BEHIND:
        assert relayed.relay_port in relayed.peers(name) and server not in relayed.peers(name)
    assert server in relayed.peers(STRAIGHT) and relayed.relay_port not in relayed.peers(STRAIGHT)
