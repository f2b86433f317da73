"""Commands by the name of their module; each has ``add_parser(commands)`` and imports heavy modules when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib import import_module

Commands = argparse._SubParsersAction


def add_commands(commands: Commands[argparse.ArgumentParser], names: Iterable[str]) -> None:
    """Add the commands of these modules of ``fedtar_flare.cli``, in their order."""
    for name in names:
        import_module(f"fedtar_flare.cli.{name}").add_parser(commands)


def add_group(commands: Commands[argparse.ArgumentParser], name: str, help_text: str, members: Iterable[str]) -> None:
    """Add a command that has commands of its own, such as ``fedtar data check``."""
    group = commands.add_parser(name, help=help_text, description=help_text[:1].upper() + help_text[1:] + ".")
    add_commands(group.add_subparsers(dest="subcommand", metavar="COMMAND", required=True), members)
