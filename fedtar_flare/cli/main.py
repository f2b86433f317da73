"""Entry point of ``fedtar``: runs one command and turns errors into one readable message and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fedtar_flare.cli import data, jobs, reports, site
from fedtar_flare.errors import ConfigError, FedTARError
from fedtar_flare.reporting.format import plain
from fedtar_flare.version import __version__


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="fedtar",
        description="Federated learning of longitudinal medical report generation on NVIDIA FLARE.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong use: an option, a setting or a site file that does not fit.",
    )
    top.add_argument("--version", action="version", version=f"fedtar_flare {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for part in (jobs, reports, data, site):
        part.add_commands(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = parser().parse_args(argv)
    command = " ".join(["fedtar", arguments.command, *filter(None, [getattr(arguments, "subcommand", None)])])
    try:
        return int(arguments.run(arguments) or 0)
    except FedTARError as error:
        lines = (plain(line) for line in str(error).splitlines())  # it may quote what others have named
        print("\n".join([f"{command}: {next(lines, '')}", *lines]), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
