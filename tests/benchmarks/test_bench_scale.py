"""Seconds per step and memory of the server against the number of sites; writes ``docs/scale.svg``.

The controller alone, its sites functions in the same process, and FLARE's simulator with a process per site, both with
updates of the small preset's size. Linux only. Run alone on a quiet machine:

    pytest -m benchmark tests/benchmarks/test_bench_scale.py -s
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from scale_chart import chart
from simulator import run_simulator

from fedtar_flare.fedtar.recipe import FedTARRecipe
from fedtar_flare.record.events import Step
from fedtar_flare.record.log import of_kind, read_events

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux' /proc"),
]
TESTS = Path(__file__).resolve().parent.parent
ALONE = (10, 50, 100, 250, 500)
SIMULATED = (5, 10, 20)
STEPS = 3
SITE_MB = 700
"""Free memory that the simulator must find for each site's process."""

CONTROLLER = """
    import json, logging, sys, time
    from pathlib import Path
    import torch
    from federation import LocalFederation
    from trivial_site import TrivialSite

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    at_sites = cpu_at_sites = 0.0

    def timed(site):
        def answer(*task):
            global at_sites, cpu_at_sites
            start, cpu = time.perf_counter(), time.process_time()
            try:
                return site(*task)
            finally:
                at_sites += time.perf_counter() - start
                cpu_at_sites += time.process_time() - cpu
        return answer

    class Timed(LocalFederation):
        starts = []
        def ask(self, task, *arguments, **settings):
            self.starts.append((task, time.perf_counter(), at_sites, time.process_time(), cpu_at_sites))
            return super().ask(task, *arguments, **settings)

    def memory(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6

    number, steps, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    names = [f"site-{i:03d}" for i in range(number)]
    sites = {name: timed(TrivialSite(name)) for name in names}
    controller = Timed(folder, sites, num_rounds=1, time_steps=steps, step_time_limit=0)
    before = memory("VmRSS")
    controller.run()
    assert not controller.panics
    pairs = [pair for pair in zip(controller.starts, controller.starts[1:]) if pair[0][0] == "train"]
    seconds = [(b[1] - a[1]) - (b[2] - a[2]) for a, b in pairs]
    cpu = [(b[3] - a[3]) - (b[4] - a[4]) for a, b in pairs]
    print(json.dumps({"seconds": seconds, "cpu": cpu, "before": before, "peak": memory("VmHWM")}))
"""


def alone(number, folder):
    """The controller's own seconds per step (all replies, mean, step, record), its processor's, and its peak in MB."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    source = "\n".join(line.removeprefix("    ") for line in CONTROLLER.splitlines())
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source, str(number), str(STEPS), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["seconds"]) == STEPS
    cpu = statistics.median(found["cpu"])
    print(
        f"controller alone, {number:3d} sites: {_row(found['seconds'], found['peak'])} (before the run "
        f"{found['before']:.0f}), {cpu:.2f} s of processor time per step",
        flush=True,
    )
    return number, statistics.median(found["seconds"]), cpu, found["peak"]


def simulated(number, folder):
    """Median of the seconds until the last reply of a step was in (``rounds.jsonl``), and the server's peak in MB."""
    free = psutil.virtual_memory().available / 1e6
    threads = int(min(number, free // SITE_MB))
    if threads < number:
        pytest.skip(f"{number} sites need {number * SITE_MB / 1e3:.0f} GB of memory, {free / 1e3:.0f} GB are free")
    job = _job(folder)
    peak = {"server": 0.0, "site": 0.0}
    done = threading.Event()

    def watch():
        while not done.wait(0.2):
            for child in psutil.Process().children(recursive=True):
                try:
                    kind = "site" if any("simulator_worker" in part for part in child.cmdline()) else "server"
                    lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
                    high = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
                    peak[kind] = max(peak[kind], high * 1024 / 1e6)
                except (psutil.Error, OSError):
                    continue  # it has ended

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.monotonic()
    try:
        process, results = run_simulator(
            job, folder / "ws", "-n", str(number), "-t", str(threads), home=folder / "home", OMP_NUM_THREADS="1"
        )
    finally:
        done.set()
        watcher.join()
    assert process.returncode == 0, process.stdout[-3000:]
    steps = of_kind(read_events(results), Step)
    assert [len(step.sites) for step in steps] == [number] * STEPS
    seconds = [step.seconds for step in steps]
    print(
        f"simulator, {number:3d} sites, {threads} threads: {_row(seconds, peak['server'])}, "
        f"largest site {peak['site']:.0f} MB, {time.monotonic() - start:.0f} s in all",
        flush=True,
    )
    return number, statistics.median(seconds), peak["server"]


def _row(seconds, peak):
    low, high = min(seconds), max(seconds)
    return f"{statistics.median(seconds):6.2f} s per step ({low:.2f} to {high:.2f}), server peak {peak:.0f} MB"


def _job(folder):
    """The shipped job with an executor that answers at once."""
    FedTARRecipe(name="scale", num_rounds=1, time_steps=STEPS).export(str(folder))
    config = folder / "scale" / "app" / "config" / "config_fed_client.json"
    client = json.loads(config.read_text())
    client["executors"][0]["executor"] = {"path": "trivial_site.TrivialExecutor", "args": {}}
    config.write_text(json.dumps(client))
    shutil.copy(TESTS / "trivial_site.py", folder / "scale" / "app" / "custom")
    return folder / "scale"


def test_scale(tmp_path, repository):
    load = os.getloadavg()[0]
    print(
        f"\n{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, load {load:.1f} at the start"
    )
    controllers = [alone(number, tmp_path / f"alone-{number}") for number in ALONE]
    simulators = [simulated(number, tmp_path / f"simulated-{number}") for number in SIMULATED]
    series = {
        "controller alone": [(number, seconds, peak) for number, seconds, _, peak in controllers],
        "simulator": simulators,
        "controller, processor time": [(number, cpu, None) for number, _, cpu, _ in controllers],
    }
    for name in ("controller alone", "simulator"):
        peaks = [peak for _, _, peak in series[name]]
        print(f"{name}: the server's peak grows by {100 * (max(peaks) / peaks[0] - 1):.1f} % from the smallest run on")
    path = repository / "docs" / "scale.svg"
    path.write_text(chart("One time step of FedTAR against the number of sites", series), encoding="utf-8")
    print(f"chart: {path}; load {os.getloadavg()[0]:.1f} at the end")
