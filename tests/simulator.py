"""Run ``nvflare simulator`` as a user would, as a process of its own, and end whatever it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def run_simulator(job: Path, workspace: Path, *arguments: str, home: Path, timeout: float = 900, **environment: str):
    """Run a job folder; returns the finished process and the folder of its results.

    The simulator starts processes of its own and leaves them when it is killed, so all run in a session that is ended
    as a whole.
    """
    command = [str(Path(sys.executable).parent / "nvflare"), "simulator", str(job), "-w", str(workspace), *arguments]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "FEDTAR_HOME": str(home), "HF_HUB_OFFLINE": "1", **environment}
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        end_session(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, output), workspace / "server/simulate_job/fedtar"


def end_session(pid: int) -> None:
    """End every process of the session that ``pid`` leads; only ever called for a process that a test started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
