"""Run ``fedtar`` as a user does: a process of its own, ended as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from simulator import end_session

BIN = Path(sys.executable).parent


def fedtar(
    *arguments: object, timeout: float = 300, cwd: Path | None = None, **environment: str
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        [str(BIN / "fedtar"), *map(str, arguments)],
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", **environment},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        end_session(process.pid)
    return process.returncode, out, err
