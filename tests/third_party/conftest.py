"""A method of another package, installed by pip beside this one, for commands that run as a user's do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import fedtar

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))  # for its modules


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """The folder into which pip has put the package."""
    (source := (folder := tmp_path_factory.mktemp("installed")) / "source").mkdir()
    for file in (EXAMPLES / "fedmedian").glob("*.*"):
        (source / file.name).write_bytes(file.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(folder / "site"), str(source)], check=True, capture_output=True, timeout=600)
    return folder / "site"


@pytest.fixture
def command(installed, home):
    """Runs ``fedtar`` with the package installed; returns what it printed, and fails where it fails."""
    path = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH")]))

    def run(*arguments, code=0, **environment):
        got, out, err = fedtar(*arguments, PYTHONPATH=path, FEDTAR_HOME=str(home), **environment)
        assert got == code, err
        return out if code == 0 else err

    return run
