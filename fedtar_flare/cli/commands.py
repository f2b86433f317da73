"""What commands share: how they are declared, read ``NAME=VALUE`` texts, and print; heavy modules wait for a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import is_file_or_folder, parse_yaml
from fedtar_flare.core.text import EVERY_SECONDS

Commands = argparse._SubParsersAction


class Parser(argparse.ArgumentParser):
    """A parser whose errors begin with the whole command and name the nearest word; nothing is abbreviated."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:  # else the command at the top, which knows less, would say it
            self.error(f"unknown argument '{unknown[0]}'{_nearest(unknown[0], self._option_string_actions)}")
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(action.choices)
            hint = _nearest(str(value), known) or f" (known: {', '.join(known)})"
            raise argparse.ArgumentError(action, f"'{value}' is unknown{hint}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see '{self.prog} --help')\n")


PRESETS = "small (default), tiny, timm, vlm-tiny, medgemma, paper, paper-ct, fedmrg-paper, r2gen or fedkei-paper"
WORKERS = "processes (default: one per processor that has 4 GB)"


def _nearest(word: str, known: Iterable[str]) -> str:
    from fedtar_flare.core.settings import suggestion  # whose imports take longer than most commands

    return suggestion(word.partition("=")[0], list(known))


def add_command(
    commands: Commands[argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int | None],
    summary: str,
    epilog: str | None = None,
    with_json: bool = True,
) -> argparse.ArgumentParser:
    """Add the command that a function runs; it has the function's name, and its docstring is the description."""
    name = run.__name__.rstrip("_").replace("_", "-")
    command = commands.add_parser(name, help=summary, description=run.__doc__, epilog=epilog)
    command.set_defaults(run=run)
    if with_json:
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return command


def add_group(
    commands: Commands[argparse.ArgumentParser], name: str, summary: str
) -> Commands[argparse.ArgumentParser]:
    """Add a command that has commands of its own, such as ``fedtar data check``."""
    group = commands.add_parser(name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}.")
    return group.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)


def add_repeated(command: argparse._ActionsContainer, option: str, form: str, summary: str) -> None:
    """Add an option that may be given several times, each with a text of this form."""
    command.add_argument(option, action="append", default=[], metavar=form, help=summary)


def add_sites(command: argparse.ArgumentParser) -> None:
    """Add the option that says how many simulated sites there are, or their names."""
    text = "how many hospitals (site-1, site-2, ...), or their names, separated by commas (default 3)"
    command.add_argument("-n", "--sites", default="3", metavar="NUMBER|NAME,NAME", help=text)


def add_site_choice(command: argparse.ArgumentParser) -> None:
    """Add the options that say which site is meant."""
    choice = command.add_mutually_exclusive_group()
    choice.add_argument("--kit", type=Path, default=Path(), help="the site's startup kit (default: this folder)")
    choice.add_argument("--simulated", metavar="SITE", help="a site of the simulator instead, by name")


def existing(text: str) -> Path:
    """The path of a file or folder that an argument names; wrong use where there is none."""
    if not is_file_or_folder(path := Path(text)):
        raise argparse.ArgumentTypeError(f"{text}: there is no such file or folder")
    return path


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of some options by name, to hand on under the same names."""
    return {name: getattr(arguments, name) for name in names}


def show(arguments: argparse.Namespace, data: Any, *lines: str) -> None:
    """Print the data, paths as texts, as JSON where the command has ``--json``, else the lines."""
    text = json.dumps(data, default=str) if arguments.json else "\n".join(lines)
    print(text.encode(errors="replace").decode())  # names of files need not be UTF-8


def grouped(texts: Sequence[str], groups: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``GROUP.NAME=VALUE`` texts of ``--set`` as settings by group; ConfigError for another form or group."""
    settings: dict[str, dict[str, Any]] = {}
    for key, value in pairs(texts, "--set").items():
        group, _, name = key.partition(".")
        if group not in groups or not name:
            from fedtar_flare.core.settings import suggestion

            form = "GROUP.NAME=VALUE ('fedtar settings' lists all)"
            known = f"{', '.join(groups)}{suggestion(group, groups) if name else ''}"
            raise ConfigError(f"--set {key}: write {form}, with a group of {known}")
        settings.setdefault(group, {})[name] = value
    return settings


def pairs(texts: Sequence[str], option: str) -> dict[str, Any]:
    """``NAME=VALUE`` texts as a dictionary; values are read as YAML. Raises ConfigError for another form."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} {text}: write NAME=VALUE")
        values[name] = parse_yaml(value, f"{option} {text}")
    return values


class ProgressLine:
    """Shows progress on standard error: a line that rewrites itself on a terminal, plain lines now and then else."""

    def __init__(self) -> None:
        self._terminal, self._open = sys.stderr.isatty(), False
        self.every = 0.2 if self._terminal else EVERY_SECONDS

    def __call__(self, line: str) -> None:
        start, end = ("\r", "\x1b[K") if self._terminal else ("", "\n")
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)
        self._open = self._terminal

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
