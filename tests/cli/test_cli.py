"""The ``fedtar`` command by itself: help, version and wrong use."""

import pytest
from command import fedtar, fedtar_here

from fedtar_flare.version import __version__


def test_the_installed_command_says_its_version_and_what_is_wrong_with_a_setting(tmp_path):
    """Two processes of their own, with their exit codes; below, the same in this one."""
    code, out, err = fedtar("--version")
    assert (code, out.strip(), err) == (0, f"fedtar_flare {__version__}", "")
    code, out, err = fedtar("simulate", "--preset", "smal", "-w", tmp_path)
    assert (code, out) == (2, "") and "small" in err and "Traceback" not in err


def test_every_command_has_help():
    for command in (["simulate"], ["export"], ["report"], ["generate"], ["warmstart"], ["data", "synth"]):
        code, out, _ = fedtar_here(*command, "--help")
        assert code == 0 and len(out) > 300, command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["simulat"], "simulate"),
        (["simulate", "--rounds", "0"], "fedtar simulate: num_rounds"),
        (["simulate", "--sites", "0"], "at least one"),
        (["simulate", "--sites", "a,a"], "twice"),
        (["simulate", "--method", "fedtarr"], "fedtar"),
        (["compare", "quik"], "quick"),
        (["data", "check", "nowhere.csv"], "fedtar data check: nowhere.csv"),
    ],
)
def test_wrong_use_is_one_readable_message(arguments, words, tmp_path):
    code, _, err = fedtar_here(*arguments, *(["-w", tmp_path] if arguments[:1] == ["simulate"] else []))
    assert code == 2 and words in err and "Traceback" not in err
