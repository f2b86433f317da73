"""Whole runs as a user starts them: seconds from command to results, and the largest memory of server and site.

Run alone on a quiet machine: ``pytest -m benchmark tests/benchmarks/test_bench_budgets.py -s``.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from simulator import end_session

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(3600)]
BIN = Path(sys.executable).parent


def measured(command, folder, home):
    """Wall seconds and the largest resident memory of any server and any site process, in MB."""
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "FEDTAR_HOME": str(home)}
    start = time.monotonic()
    process = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)  # fmt: skip
    peak = {"server": 0.0, "site": 0.0}
    done = threading.Event()

    def watch():
        while not done.wait(0.2):
            for child in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                try:
                    kind = "site" if any("simulator_worker" in part for part in child.cmdline()) else "server"
                    peak[kind] = max(peak[kind], child.memory_info().rss / 1e6)
                except psutil.Error:
                    continue

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        code = process.wait()
    finally:
        done.set()
        watcher.join()
        end_session(process.pid)
    assert code == 0
    return time.monotonic() - start, peak


@pytest.mark.parametrize("kind", ["plain", "side by side"])
def test_budgets(kind, tmp_path, repository):
    if kind == "plain":
        command = [str(BIN / "nvflare"), "simulator", str(repository / "jobs" / "fedtar"), "-w", str(tmp_path / "ws")]
    else:
        command = [str(BIN / "fedtar"), "simulate", "-w", str(tmp_path / "ws")]
    seconds, peak = measured(command, tmp_path, tmp_path / "home")
    print(
        f"\n{kind}: {seconds / 60:.1f} min, largest server process {peak['server']:.0f} MB, "
        f"largest site process {peak['site']:.0f} MB ({psutil.cpu_count()} cores)"
    )
