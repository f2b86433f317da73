"""The shipped relay project, its addresses put on this machine: hospitals of a region take part through their relay."""

import json
import re
from contextlib import suppress

import psutil
import pytest
import torch
import yaml
from attacking import Attacked
from command import passing
from federation_process import free_port, recipe, wait_for
from killing import in_step, run_of
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageType, ReturnCode
from nvflare.private.defs import SysCommandTopic, TrainingTopic

from fedtar_flare.methods.fedtar.events import Outer
from fedtar_flare.protocol.exchange import pairs
from fedtar_flare.record.events import Late
from fedtar_flare.record.log import of_kind
from fedtar_flare.reporting.run import read_run
from fedtar_flare.testing import last_checkpoint as last

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]
BEHIND, STRAIGHT = ("hospital-1", "hospital-2"), "hospital-3"
RANKS = {"hospital-1": 1, "hospital-2": 2, "hospital-3": 4}
"""Greatest that a site file allows; the job asks for the last."""


class Relayed(Attacked):
    """The shipped relay project on this machine; the relay attacks, and the second of the two hospitals behind it."""

    attackers = ("relay-north.hospital-2", "relay-north")

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
        sites = {name: f"source: synthetic\nlora_rank: {rank}\n" for name, rank in RANKS.items()}
        super().__init__(folder, home, sites, folder / "local.yml")

    def peers(self, name):
        """Ports on this machine to which the processes of a kit are connected."""
        kit, ports = str(self.kits / name), set()
        for pid, command in self.processes().items():
            if any(kit in part for part in command):
                with suppress(psutil.NoSuchProcess):
                    links = psutil.Process(pid).net_connections("tcp")
                    ports |= {c.raddr.port for c in links if c.raddr and c.status == psutil.CONN_ESTABLISHED}
        return ports


@pytest.fixture(scope="module")
def relayed(tmp_path_factory, repository, home):
    project = repository / "provisioning" / "project-relay.yml"
    with Relayed(project, tmp_path_factory.mktemp("relay") / "federation", home).running("relay-north") as federation:
        yield federation


@pytest.fixture(scope="module")
def results(relayed, tmp_path_factory):
    """Of a job that goes on without hospital 2, which stands still in its first task until the next round.

    In that, hospital 3 stands still until hospital 2 has answered, so that its answer comes in no later round.
    """
    settings = {"lora": {"mean": "product"}, "server": {"wait_seconds": 20.0}, "min_sites": 2}
    training = {"training": {"local_steps": 24, "batch_size": 4}}  # seconds, in which a site is stopped
    recipe("through_relay", 2, **settings, **training).export(str(folder := tmp_path_factory.mktemp("job")), byoc=False)
    job = relayed.submit(folder / "through_relay")
    run_of(relayed, job)
    slow, other = (relayed.running_job(name, job) for name in (BEHIND[1], STRAIGHT))
    in_step(relayed, job, BEHIND[1], 1, 1)
    slow.suspend()
    in_step(relayed, job, STRAIGHT, 2, 1)
    other.suspend()
    slow.resume()
    wait_for("the late answer is there", lambda: of_kind(relayed.events(job), Late))
    other.resume()
    return job, relayed.completed(job)


def test_a_job_runs_through_the_relay_and_a_late_answer_enters_the_next_round_at_half_its_size(results):
    record = read_run(results[1])
    missing = [[(step.round, step.step), *step.absent] for step in record.steps if step.absent]
    assert missing == [[(1, 1), BEHIND[1]], [(1, 2), BEHIND[1]]] and not any(step.refused for step in record.steps)
    assert [step.sites[name].late for step in record.steps for name in step.sites if name == BEHIND[1]] == [1, 0]
    assert "of 1 rounds before: it counts 1 / 2" in (results[1] / "report.html").read_text()
    for turn in record.events(Outer):
        sent = {name: values for name, values in turn.t_numbers.items() if values is not None}
        assert sorted(sent) == [BEHIND[0], STRAIGHT] and BEHIND[1] in turn.left_out and all(map(any, sent.values()))


def test_each_hospital_sends_its_own_rank_of_what_comes_down_sorted_for_every_rank(relayed, results):
    job, folder = results
    for name, rank in RANKS.items():
        entries = json.loads(passing("audit", "--kit", relayed.sites[name], "--json"))["entries"]
        sent = [entry for entry in entries if (entry["job"], entry["task"]) == (job, "train")]
        shapes = {("lora_A" in tensor["name"], *tensor["shape"]) for entry in sent for tensor in entry["tensors"]}
        assert {shape[1] if shape[0] else shape[2] for shape in shapes} == {rank} and len(sent) >= 2
    w = last(folder).weights
    for a, b in pairs(w):  # so the first r rows and columns are the nearest matrix of rank r
        gram, sizes = w[a] @ w[a].T, w[b].norm(dim=0)
        torch.testing.assert_close(gram, torch.eye(4) / 3, rtol=0, atol=1e-5)
        assert bool((sizes[:-1] >= sizes[1:] - 1e-5).all()) and w[a].shape[0] == 4


def test_who_is_behind_the_relay_has_no_connection_to_the_server(relayed):
    project = yaml.safe_load((relayed.folder / "project.yml").read_text())
    server = next(p for p in project["participants"] if p["type"] == "server")["fed_learn_port"]
    wait_for("the relay is connected to the server", lambda: server in relayed.peers("relay-north"))
    for name in BEHIND:
        assert relayed.relay_port in relayed.peers(name) and server not in relayed.peers(name)
    assert server in relayed.peers(STRAIGHT) and relayed.relay_port not in relayed.peers(STRAIGHT)


def test_no_hospital_behind_the_relay_speaks_as_the_server_or_answers_its_neighbour(relayed):
    neighbour, log = "relay-north.hospital-1", relayed.kits / "relay-north" / "log.txt"
    pids = relayed.site_processes("hospital-1")
    as_server = ["server", MessageType.REQ], ["server", MessageType.REPLY], [relayed.attackers[0], MessageType.REPLY]
    relayed.attack(*((neighbour, CellChannel.CLIENT_MAIN, TrainingTopic.SHUTDOWN, {}, *false) for false in as_server))
    stopped = wait_for("the relay stops them", lambda: re.findall("refused '|dropped a reply", log.read_text())[2:])
    assert len(stopped) == 1 and relayed.site_processes("hospital-1") == pids


def test_a_relay_speaks_as_the_server_to_those_behind_it_alone_and_has_no_shell_there(relayed):
    behind, relay = "relay-north.hospital-1", relayed.attackers[1]
    logs = {name: relayed.kits / name / "log.txt" for name in ("localhost", "hospital-1")}
    pids = {name: relayed.site_processes(name) for name in ("localhost", "hospital-1", STRAIGHT)}
    stop = CellChannel.CLIENT_MAIN, TrainingTopic.SHUTDOWN, {}
    own = [(STRAIGHT, *stop), ("server", "_net_manager", "stop", {}), (behind, *stop)]
    *answers, _ = relayed.attack(*own, cell=relay)
    assert all(answer.startswith(ReturnCode.UNAUTHENTICATED) for answer in answers), answers
    assert "refused 'train.shutdown' on 'admin' from 'relay-north' to " in logs["hospital-1"].read_text()
    get = CellChannel.SERVER_COMMAND, ServerCommandNames.GET_TASK, {}
    relayed.attack((STRAIGHT, *stop, "server"), ("server", *get, STRAIGHT), cell=relay)
    across = f"refused '.*' from '(?:server|{STRAIGHT})' to .*: it came by another participant"
    wait_for("the server stops what is across", lambda: re.findall(across, logs["localhost"].read_text())[1:])
    relayed.attack((behind, CellChannel.CLIENT_MAIN, SysCommandTopic.SHELL, {}, "server"), cell=relay)
    wait_for("the site believes it and has no shell", lambda: "no site answers 'sys" in logs["hospital-1"].read_text())
    assert {name: relayed.site_processes(name) for name in pids} == pids
