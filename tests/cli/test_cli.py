"""The ``fedtar`` command as a user runs it: a process of its own."""

import json
from pathlib import Path

import pytest
from command import fedtar

from fedtar_flare.version import __version__


def test_help_and_version():
    assert fedtar("--version")[1].strip() == f"fedtar_flare {__version__}"
    code, out, _ = fedtar("simulate", "--help")
    assert code == 0 and "--time-steps" in out and "--patients" in out


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([], 2, "COMMAND"),
        (["simulat"], 2, "simulate"),
        (["simulate", "--preset", "smal"], 1, "small"),
        (["simulate", "--rounds", "0"], 1, "num_rounds"),
        (["simulate", "--sites", "0"], 1, "at least one"),
        (["simulate", "--clients", "a,a"], 1, "twice"),
    ],
)
def test_wrong_use_is_one_readable_message(arguments, code, word, tmp_path):
    got, _, err = fedtar(*arguments, *(["-w", tmp_path] if arguments[:1] == ["simulate"] else []))
    assert got == code and word in err and "Traceback" not in err


def test_simulate_runs_all_sites_side_by_side(tmp_path):
    small = ["--preset", "tiny", "-r", "1", "-T", "2", "--patients", "12", "--local-steps", "1"]
    code, out, err = fedtar(
        "simulate", "-n", "2", *small, "--json", "-w", tmp_path / "ws", FEDTAR_HOME=str(tmp_path / "home")
    )
    assert code == 0, err[-3000:]
    paths = json.loads(out.strip().splitlines()[-1])
    assert Path(paths["report"]).is_file()
