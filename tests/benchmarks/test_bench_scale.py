"""Seconds per step and memory of the server in FLARE's simulator, with a process for each site that answers at once.

The controller by itself is an axis of ``python -m tests.benchmarks.scale``. Linux only. Run alone on a quiet machine:

    pytest -m benchmark tests/benchmarks/test_bench_scale.py -s
"""

import json
import os
import shutil
import statistics
import threading
import time
from pathlib import Path

import psutil
import pytest
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
SIMULATED = (5, 10, 20)
STEPS = 3
SITE_MB = 700
"""Free memory that the simulator must find for each site's process."""


def simulated(number, folder):
    """The server's peak in MB; prints it, and the seconds until the last reply of a step was in (``rounds.jsonl``)."""
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
    return peak["server"]


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


def test_scale(tmp_path):
    load = os.getloadavg()[0]
    print(
        f"\n{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, load {load:.1f} at the start"
    )
    peaks = [simulated(number, tmp_path / f"simulated-{number}") for number in SIMULATED]
    print(f"the server's peak grows by {100 * (max(peaks) / peaks[0] - 1):.1f} % from the smallest run on")
    print(f"load {os.getloadavg()[0]:.1f} at the end")
