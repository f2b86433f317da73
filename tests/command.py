"""Run ``fedtar`` as a user does, in a process of its own, or here, where the process is not the point."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from simulator import end_session

BIN = Path(sys.executable).parent


def fedtar(
    *arguments: object, timeout: float = 300, cwd: Path | None = None, **environment: str
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command; its process is ended as a whole."""
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


def fedtar_here(*arguments: object, cwd: Path | None = None, **environment: str) -> tuple[int, str, str]:
    """The same from within this process, without the seconds that a start of Python and its imports take.

    An error that the command does not turn into a message is raised here.
    """
    from fedtar_flare.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with chdir(cwd or Path.cwd()), patch.dict(os.environ, environment), redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as wrong_use:  # by argparse
            code = int(wrong_use.code or 0)
    return code, out.getvalue(), err.getvalue()
