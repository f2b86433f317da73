"""Run ``fedtar`` or the simulator as a user does, in a process of its own; or ``fedtar`` here, where that is enough."""

import io
import os
import re
import signal
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

BIN = Path(sys.executable).parent


def run(
    *command: object, timeout: float, cwd: Path | None = None, stderr: int = subprocess.PIPE, **environment: str
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command.

    The simulator starts processes of its own and leaves them when it is killed, so all run in a session that is ended
    as a whole.
    """
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    program, *arguments = command
    process = subprocess.Popen(
        [str(BIN / str(program)), *map(str, arguments)],
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", **environment},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def fedtar(
    *arguments: object, timeout: float = 300, cwd: Path | None = None, **environment: str
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one ``fedtar`` command."""
    return run("fedtar", *arguments, timeout=timeout, cwd=cwd, **environment)


def walk(page: Path, folder: Path, timeout: float = 1800, **environment: str) -> dict[str, str]:
    """What each command printed that stands after ``$`` in a page's console blocks: all are run in order, by a shell.

    ``folder`` is made where it is not there. The first command that fails ends the walk.
    """
    folder.mkdir(exist_ok=True)
    printed, options = {}, {"timeout": timeout, "cwd": folder, "stderr": subprocess.STDOUT}
    for command in console_commands(page):
        code, printed[command], _ = run("/bin/bash", "-c", command, **options, **environment)
        assert code == 0, f"{command}\n{printed[command][-3000:]}"
    return printed


def console_commands(page: Path) -> list[str]:
    """What stands after ``$`` in a page's console blocks."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def page_commands(page: Path, **words: object) -> dict[str, list[object]]:
    """Arguments of the ``fedtar`` commands in a page's text, by the first two; ``words`` of them are replaced."""
    commands = [one.split() for one in re.findall(r"`fedtar ([^`]+)`", page.read_text(encoding="utf-8"))]
    return {" ".join(command[:2]): [words.get(word, word) for word in command] for command in commands}


def run_simulator(job: Path, workspace: Path, *arguments: str, home: Path, timeout: float = 900, **environment: str):
    """Run a job folder with ``nvflare simulator``; returns the finished process and the folder of its results."""
    command = ["nvflare", "simulator", job, "-w", workspace, *arguments]
    environment = {"FEDTAR_HOME": str(home)} | environment
    code, output, _ = run(*command, timeout=timeout, stderr=subprocess.STDOUT, **environment)
    return subprocess.CompletedProcess(command, code, output), workspace / "server/simulate_job/fedtar"


def loaded_by(program: str, *modules: str) -> list[str]:
    """Those of the modules that a program in a Python of its own has imported at its end."""
    code = f"{program}\nimport sys\nprint(*[name for name in {modules} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


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


def passing(*arguments: object, **options: Any) -> str:
    """What :func:`fedtar_here` prints, where the command has to succeed."""
    code, out, err = fedtar_here(*arguments, **options)
    assert code == 0, out + err
    return out


def failing(*arguments: object, code: int = 2, **options: Any) -> str:
    """What :func:`fedtar_here` says on standard error, where the command has to fail so; nothing else is printed."""
    found, out, err = fedtar_here(*arguments, **options)
    assert (found, out) == (code, "") and "Traceback" not in err
    return err
