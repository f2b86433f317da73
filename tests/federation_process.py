"""A provisioned federation of real processes with mTLS on localhost, for tests; ends exactly what it started.

FLARE's start scripts leave daemons that start their process again, and job processes lead sessions of their own. So
every process carries a mark of its federation in its environment, and is found and ended by that.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.record.events import Event
from fedtar_flare.record.log import ROUNDS_FILE, read_events
from fedtar_flare.runtime.recipe import MethodRecipe

BIN = Path(sys.executable).parent
MARK = "FEDTAR_TEST_FEDERATION"
POLL = 0.2
SITES = ("hospital-a", "hospital-b")
TRIAL = Path(__file__).parents[1] / "provisioning" / "project-localhost.yml"
CLOCK = """
import time
now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() + {0}, lambda: now_ns() + {0} * 10**9
"""
RELEASE = """
import fedtar_flare.version
fedtar_flare.version.__version__ = fedtar_flare.__version__ = "{0}"
"""
T = TypeVar("T")


def wait_for(what: str, condition: Callable[[], T], timeout: float = 400, poll: float = POLL) -> T:
    """The first true value of a condition, looked at every ``poll`` seconds; fails with ``what`` when none comes."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(poll)
    raise AssertionError(f"within {timeout:g} s: {what}")


def recipe(
    name: str = "tiny", rounds: int = 1, method: type[MethodRecipe] = FedTARRecipe, **changes: Any
) -> MethodRecipe:
    """A job of seconds: tiny model, two steps of two local updates, twelve synthetic patients a site."""
    settings: dict[str, Any] = {"preset": "tiny", "num_rounds": rounds, "time_steps": 2, "min_sites": 1}
    settings |= {"training": {"local_steps": 2, "batch_size": 4}, "data": {"synthetic_patients": 12}}
    return method(name=name, **(settings | changes))


def free_port() -> int:
    """A port that nobody has, below those that the system gives to whoever connects: it stays free until it is used.

    It is drawn without the tests' seed, by which every process of them would draw the same.
    """
    for port in random.SystemRandom().sample(range(15000, 32000), 200):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def marked(mark: str) -> dict[int, list[str]]:
    """Process id to command line of every process that carries a mark and lives."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and (command := [part for part in process.cmdline() if part]):
                found[process.pid] = command
    return found


def end_marked(mark: str) -> None:
    """End every process that carries a mark, those first that start others again."""

    def end() -> bool:
        mine = marked(mark)
        for pid in sorted(mine, key=lambda pid: not any("start.sh" in part for part in mine[pid])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not marked(mark)

    wait_for("all processes ended", end)


@contextlib.contextmanager
def restored(*files: Path) -> Iterator[list[str]]:
    """The texts of files, which have them again at the end."""
    texts = [file.read_text() for file in files]
    try:
        yield texts
    finally:
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)


class Federation:
    """Server and sites of a project file, provisioned below ``folder`` with a free port.

    The project's server must be ``localhost``; ``sites`` has the content of site files by client, two of phantoms by
    default; ``home`` is the folder of caches, its own by default.
    """

    def __init__(
        self, folder: Path, home: Path | None = None, sites: dict[str, str] | None = None, project: Path = TRIAL
    ):
        sites = sites or dict.fromkeys(SITES, "source: synthetic\n")
        self.folder, self.mark, self.port = folder, uuid.uuid4().hex, free_port()
        content = yaml.safe_load(project.read_text())
        content["participants"] = [p for p in content["participants"] if p["type"] != "client" or p["name"] in sites]
        next(p for p in content["participants"] if p["type"] == "server")["fed_learn_port"] = self.port
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "project.yml").write_text(yaml.safe_dump(content, sort_keys=False))
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "FEDTAR_HOME": str(home or folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "20",  # s; the kit's own 60 are looked at in test_kits
            MARK: self.mark,
        }
        (folder / "home").mkdir(exist_ok=True)
        self.provision()
        self.kits = folder / "ws" / content["name"] / "prod_00"
        self.server, self.sites = self.kits / "localhost", {name: self.kits / name for name in sites}
        for name, text in sites.items():
            (self.sites[name] / "local" / "fedtar.yaml").write_text(text)
        self._sessions: dict[str, Session] = {}

    # ------------------------------------------------------------------ processes
    def start(self, *names: str, change: str = "") -> None:
        """Start kits by name and wait until their sites are registered.

        The server goes on listing a site that was killed, so a site's own word counts: a registration after this start.
        The kits' Python processes first run the program ``change``.
        """
        environment = self.environment
        if change:
            (folder := self.folder / f"change-{names[0]}").mkdir(exist_ok=True)
            (folder / "sitecustomize.py").write_text(change)
            path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
            environment = environment | {"PYTHONPATH": path}
        before = {name: self.registrations(name) for name in names}
        for name in names:
            kit: dict[str, Any] = {"cwd": self.kits / name, "env": environment, "stdin": subprocess.DEVNULL}
            with (self.folder / f"{name}.out").open("ab") as out:
                kit |= {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True, "check": True}
                subprocess.run(["bash", str(self.kits / name / "startup" / "start.sh")], **kit)
        wait_for("the server listens", self.listens)
        for name in (sites := sorted(set(names) & set(self.sites))):
            wait_for(f"{name} is registered", lambda name=name: self.registrations(name) > before[name])
        if sites:
            wait_for(f"the server lists {sites}", lambda: set(sites) <= self.connected())

    def registrations(self, name: str) -> int:
        """How often a site has said that the server took it in."""
        out = self.folder / f"{name}.out"
        return out.read_text(errors="replace").count("Successfully registered client") if out.is_file() else 0

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def connected(self) -> set[str]:
        return {client.name for client in self.session().get_system_info().client_info}

    def processes(self) -> dict[int, list[str]]:
        """Process id to command line of everything that this federation started and that lives."""
        return marked(self.mark)

    def job_process(self, name: str, job: str) -> int | None:
        """Process id of a job at a site, or at the server ('localhost')."""
        module = "runner_process" if name == "localhost" else "worker_process"
        for pid, command in self.processes().items():
            if any(module in part for part in command) and str(self.kits / name) in command and job in command:
                return pid
        return None

    def running_job(self, name: str, job: str) -> psutil.Process:
        """The process of a job, to be stopped for a while; there must be one."""
        pid = self.job_process(name, job)
        assert pid, f"{name} has no process of job {job}\n{self.tail(job)}"
        return psutil.Process(pid)

    def site_processes(self, name: str) -> list[int]:
        """Every process of one kit, its daemon first, so that ending them in this order starts none again."""
        kit = str(self.kits / name)
        mine = {pid: c for pid, c in self.processes().items() if any(part.startswith(kit) for part in c)}
        return sorted(mine, key=lambda pid: (not any("start.sh" in part for part in mine[pid]), pid))

    def kill(self, *pids: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_site(self, name: str) -> None:
        """As when its machine loses power."""
        if name == self.server.name:
            self._close_sessions()
        self.kill(*self.site_processes(name))
        wait_for(f"{name} is gone", lambda: not self.site_processes(name))
        for leftover in ("daemon_pid.fl", "pid.fl"):
            (self.kits / name / leftover).unlink(missing_ok=True)

    def restart(self, name: str, change: str = "") -> None:
        self.kill_site(name)
        self.start(name, change=change)

    def _close_sessions(self) -> None:
        for session in self._sessions.values():
            with contextlib.suppress(Exception):
                session.close()
        self._sessions.clear()

    def close(self) -> None:
        self._close_sessions()
        end_marked(self.mark)

    @contextlib.contextmanager
    def running(self, *relays: str) -> Iterator[Federation]:
        """The federation, whose server, relays and sites are up and registered; ended at the end."""
        with contextlib.closing(self):
            self.start("localhost", *relays)
            self.start(*self.sites)
            yield self

    # ------------------------------------------------------------------ administration
    def command(self, *arguments: object, fails: str = "") -> str:
        """What one ``nvflare`` command prints, which has to succeed, or to fail with these words."""
        command, own = [str(BIN / "nvflare"), *map(str, arguments)], {"env": self.environment, "cwd": self.folder}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, **own)
        said = done.stdout + done.stderr
        assert bool(done.returncode) is bool(fails) and fails in said, said
        return done.stdout

    def provision(self) -> None:
        """Make the kits of the project file as it is now; all but the first time, in a folder of their own."""
        self.command("provision", "-p", self.folder / "project.yml", "-w", self.folder / "ws", "--force")

    def session(self, user: str = "admin@hub.org") -> Session:
        """FLARE's own admin session, over mTLS."""
        if user not in self._sessions:
            self._sessions[user] = new_secure_session(user, str(self.kits / user), timeout=300)
        return self._sessions[user]

    def submit(self, job: Path, user: str = "lead@hub.org") -> str:
        return str(self.session(user).submit_job(str(job)))

    def status(self, job: str) -> str:
        return str(self.session().get_job_meta(job).get("status"))

    def finished(self, job: str, timeout: float = 1200) -> str:
        """The job's final status."""

        def done() -> str:
            status = self.status(job)
            return status if status.startswith(("FINISHED", "FAILED")) else ""

        return wait_for(f"job {job} ends\n{self.tail(job)}", done, timeout)

    def completed(self, job: str, timeout: float = 1200) -> Path:
        """The results of a job, which must complete."""
        assert self.finished(job, timeout) == "FINISHED:COMPLETED", self.tail(job)
        return self.download(job)

    def detail(self, job: str) -> str:
        """Everything the server keeps about a job, as text."""
        return json.dumps(self.session().get_job_meta(job), default=str)

    def download(self, job: str, user: str = "lead@hub.org") -> Path:
        """The job's results at the server, ``fedtar/`` of its workspace."""
        folder = Path(str(self.session(user).download_job_result(job)))
        return next(folder.rglob(ROUNDS_FILE)).parent

    # ------------------------------------------------------------------ what a test looks at
    def run_folder(self, job: str) -> Path:
        return self.server / job / "fedtar"

    def events(self, job: str) -> list[Event]:
        """Whole events of a running job, read at the server; none where its folder has gone, as it does at the end."""
        folder = self.run_folder(job)
        try:
            return read_events(folder)
        except (FedTARError, FileNotFoundError):
            if (folder / ROUNDS_FILE).is_file():
                raise
            return []

    def tail(self, job: str, lines: int = 40) -> str:
        out = []
        for file in [*self.kits.glob(f"*/{job}/log.txt"), *self.folder.glob("*.out")]:
            with contextlib.suppress(FileNotFoundError):  # the job ends just now
                out += [f"--- {file}", *file.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(out)
