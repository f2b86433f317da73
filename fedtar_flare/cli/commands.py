"""How a command is declared, and the texts that several commands read: ``NAME=VALUE`` and ``GROUP.NAME=VALUE``.

Commands import heavy modules when they run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedtar_flare.errors import ConfigError

Commands = argparse._SubParsersAction


def add_command(
    commands: Commands[argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int | None],
    summary: str,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    """Add the command that a function runs; it has the function's name, and its docstring is the description."""
    command = commands.add_parser(run.__name__, help=summary, description=run.__doc__, epilog=epilog)
    command.set_defaults(run=run)
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


def add_place(command: argparse.ArgumentParser) -> None:
    """Add the options that say which site is meant."""
    place = command.add_mutually_exclusive_group()
    place.add_argument("--kit", type=Path, default=Path(), help="the site's startup kit (default: this folder)")
    place.add_argument("--simulated", metavar="SITE", help="a site of the simulator instead, by name")


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of some options by name, to hand on under the same names."""
    return {name: getattr(arguments, name) for name in names}


def grouped(texts: Sequence[str], groups: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``GROUP.NAME=VALUE`` texts of ``--set`` as settings by group. Raises ConfigError for another form or group."""
    settings: dict[str, dict[str, Any]] = {}
    for key, value in pairs(texts, "--set").items():
        group, _, name = key.partition(".")
        if group not in groups or not name:
            raise ConfigError(f"--set {key}: write GROUP.NAME=VALUE with a group of {', '.join(groups)}")
        settings.setdefault(group, {})[name] = value
    return settings


def pairs(texts: Sequence[str], option: str) -> dict[str, Any]:
    """``NAME=VALUE`` texts as a dictionary; values are read as YAML (numbers, true, lists, texts).

    Raises ConfigError for a text without ``=`` or a value that is not YAML.
    """
    import yaml

    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} {text}: write NAME=VALUE")
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{option} {text}: the value is not readable ({error})") from error
        if isinstance(values[name], str):  # YAML 1.1 takes 1e-3 for a text
            try:
                values[name] = float(value)
            except ValueError:
                continue
    return values
