"""A federation of many sites on one machine: ``PYTHONPATH=.:tests python -m tools.bench.sites SITES FOLDER``.

Real processes over mTLS, as in the production tests, with the tiny preset. Prints as JSON the megabytes of each kind of
process at its peak (pages that processes share are divided among them; ``alone``: as if they shared none), the server's
connections, and when each round ended.
"""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
import yaml
from federation_process import Federation, recipe

from fedtar_flare.record.events import Validation
from fedtar_flare.record.log import of_kind
from tools.bench.__main__ import machine

ROUNDS = 5
KINDS = {
    "server_train": "server",
    "runner_process": "server's job",
    "client_train": "site",
    "worker_process": "site's job",
}
"""What a process of FLARE's is, by its module."""


def measure(count: int, folder: Path) -> dict[str, object]:
    """Run one job and watch its processes."""
    content = yaml.safe_load(Path("provisioning/project-localhost.yml").read_text())
    names = [f"hospital-{number}" for number in range(1, count + 1)]
    clients = [{"name": name, "type": "client", "org": name.replace("-", "_")} for name in names]
    content["participants"] = [one for one in content["participants"] if one["type"] != "client"] + clients
    folder.mkdir(parents=True)
    (project := folder / "sites.yml").write_text(yaml.safe_dump(content, sort_keys=False))
    federation = Federation(project, folder / "federation", dict.fromkeys(names, "source: synthetic\n"))
    peaks: dict[str, float] = {}
    ends: dict[int, float] = {}
    try:
        began = time.monotonic()
        federation.start("localhost")
        federation.start(*names)
        connected = time.monotonic() - began
        recipe("many", ROUNDS, min_sites=count).export(str(folder), byoc=False)
        began, job = time.monotonic(), federation.submit(folder / "many")
        while not (status := federation.status(job)).startswith(("FINISHED", "FAILED")):
            for event in of_kind(federation.events(job), Validation):
                ends.setdefault(event.round, round(time.monotonic() - began, 1))
            for name, value in sample(federation).items():
                peaks[name] = max(round(value), peaks.get(name, 0))
            print(f"{time.monotonic() - began:.0f} s: {status}, {ends}, {peaks}", file=sys.stderr, flush=True)
            time.sleep(0.5)
    finally:
        federation.close()
    seconds = {"connected": round(connected), "round ends": ends}
    return {"sites": count, "status": status, "seconds": seconds, "peaks": peaks, "machine": machine()}


def sample(federation: Federation) -> dict[str, float]:
    """What processes take now, sites in the median, and the server's connections."""
    found: dict[str, list[float]] = {}
    links, total = 0, 0.0
    for pid, command in federation.processes().items():
        kind = next((KINDS[part.rpartition(".")[2]] for part in command if part.rpartition(".")[2] in KINDS), None)
        if kind is None:
            continue
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            memory = process.memory_full_info()
            total += memory.pss / 1e6
            found.setdefault(f"{kind}, MB", []).append(memory.pss / 1e6)
            found.setdefault(f"{kind}, MB alone", []).append(memory.rss / 1e6)
            if kind.startswith("server"):
                ours = [link for link in process.net_connections("tcp") if link.laddr.port == federation.port]
                links += sum(link.status == psutil.CONN_ESTABLISHED for link in ours)
    return {name: median(several) for name, several in found.items()} | {"all, MB": total, "connections": links}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), Path(sys.argv[2])), indent=1))
