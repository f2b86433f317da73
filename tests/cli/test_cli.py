"""The ``fedtar`` command by itself: help, version, wrong use, and what it tells of settings."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from command import failing, fedtar, passing
from tables import cases

from fedtar_flare.cli.main import main, parser
from fedtar_flare.core.files import write_text
from fedtar_flare.registry import own_names
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.site.site_file import read_site_file


def commands(one, words=()):
    """Every command, as the words that name it, and its parser."""
    inner = [action for action in one._actions if action.choices and action.dest in ("command", "subcommand")]
    for name, command in inner[0].choices.items() if inner else ():
        yield from commands(command, (*words, name))
    if not inner:
        yield words, one


COMMANDS = dict(commands(parser()))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_one_name_for_one_option(words):
    assert len(passing(*words, "--help")) > 200
    options = [option for action in COMMANDS[words]._actions for option in action.option_strings]
    assert len({option.lower() for option in options}) == len(options), "two options differ by case alone"
    assert {"-o", "--out"} & set(options) in (set(), {"-o", "--out"})


SUITE = "{name: s, seeds: [0], sites: [a], arms: {one: {method: fedavg, settings: {training: {lrr: 1}}}}}"


@pytest.fixture
def no_process(monkeypatch):
    """Any process that is started fails the test."""
    for name in ("subprocess.Popen.__init__", "os.fork", "os.posix_spawn"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("a process was started"))


@pytest.mark.parametrize("case", cases(__file__, "wrong_use.yaml"), ids=lambda case: " ".join(case[:2]))
def test_wrong_use_is_one_readable_message_and_starts_nothing(case, tmp_path, no_process):
    command, arguments, words, files = (*case, {})[:4]
    for name, text in {"arms.yaml": SUITE, **files}.items():
        write_text(tmp_path / name, text)
    before = sorted(tmp_path.rglob("*"))
    err = failing(*command.split(), *arguments.split(" ") if arguments else (), cwd=tmp_path)
    assert words in err and err.startswith(" ".join(filter(None, ["fedtar", command])) + ": ")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_cannot_be_written_is_named_in_one_line(tmp_path):
    file = write_text(tmp_path / "file", "")
    for command, out in ["init", file / "site.yaml"], ["compare quick", file / "out"], ["compare quick", "/proc"]:
        err = failing(*command.split(), "-o", out, code=1)
        assert err.startswith(f"fedtar {command.split()[0]}: ") and f"'{'/proc' if out == '/proc' else file}" in err
        assert err.count("\n") == 1
    err = failing("simulate", "-n", 1, "-w", tmp_path / "ws", code=1, FEDTAR_HOME="/proc")
    assert "'/proc/state'" in err and err.count("\n") == 1, "once, and not by FLARE"


def test_the_installed_command_ends_with_its_output_its_code_and_what_was_to_be_done_at_the_end():
    what = "atexit.register(print, 'at the end'); main.main = lambda: print('shown') or 3; main.entry()"
    program = f"import atexit; from fedtar_flare.cli import main; {what}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "shown\nat the end\n", "")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_a_kill_and_a_closed_terminal_end_a_simulation_as_an_interruption(sent, tmp_path, monkeypatch, capsys):
    def caught(*_):  # as FLARE's runner catches it, and returns
        if sent == signal.SIGINT:  # meanwhile there is no second run in the folder
            code, _, said = fedtar("simulate", "--preset", "tiny", "-w", tmp_path)
            assert code == 1 and f"{tmp_path}/fedtar: another run has this folder" in said and said.count("\n") == 1
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), sent)

    monkeypatch.setattr(MethodRecipe, "execute", caught)
    before = signal.signal(sent, signal.SIG_DFL)  # which a shell may have had ignored
    try:
        assert main(["simulate", "--preset", "tiny", "-w", str(tmp_path)]) == 130
    finally:
        signal.signal(sent, before)
    assert "interrupted after 0 whole rounds" in capsys.readouterr().err


def test_a_site_file_that_is_missing_or_wrong_starts_nothing(tmp_path, no_process):
    (tmp_path / "site-1.yaml").write_text("source: synthetic\n")
    assert "no site-2.yaml" in failing("simulate", "-n", 2, cwd=tmp_path, FEDTAR_SITES=str(tmp_path))
    (tmp_path / "site-2.yaml").write_text("source: manifst\n")
    assert "did you mean 'manifest'" in failing("simulate", "-n", 2, cwd=tmp_path, FEDTAR_SITES=str(tmp_path))


@pytest.mark.parametrize("name", own_names())
def test_settings_as_they_are_shown_give_the_same_job(name):
    shown = json.loads(passing("settings", name, "--json"))
    assert all(setting["meaning"] for setting in shown)
    groups = {}
    for setting in shown:
        group, _, name_in_group = setting["name"].rpartition(".")
        (groups.setdefault(group, {}) if group else groups)[name_in_group] = setting["value"]
    assert MethodRecipe(name, **groups).resolved() == MethodRecipe(name).resolved()


def test_the_site_file_that_init_writes_has_every_key_with_its_default(tmp_path):
    file, least = tmp_path / "fedtar.yaml", tmp_path / "least.yaml"
    (tmp_path / "manifest.csv").touch()
    least.write_text("source: manifest\npath: manifest.csv\npolicy: {}\n...\n")
    passing("init", cwd=tmp_path)
    expected = read_site_file(least).to_dict() | {"origin": file}
    assert read_site_file(file).to_dict() == expected
    text = file.read_text()
    file.write_text(re.sub(r"^#(  )?(?=\w+:)", r"\1", text, flags=re.M))
    assert file.read_text() != text and read_site_file(file).to_dict() == expected
