"""``fedtar compare``: run a suite of methods, seeds and settings, and write the page that compares them."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedtar_flare.cli.commands import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, compare, "run several methods on the same hospitals and compare them on one page")
    command.add_argument("suite", type=Path, help="suite file (YAML)")
    command.add_argument("-o", "--output", type=Path, default=Path("comparison"), help="folder of the results")
    command.add_argument("-j", "--processes", type=int, default=1, help="runs at the same time (default 1)")
    command.add_argument("--only", action="append", default=[], metavar="ARM", help="this arm alone; may be repeated")
    command.add_argument("--page", action="store_true", help="run nothing: write the page of what is done")


def compare(arguments: argparse.Namespace) -> int:
    """Run every arm of a suite with every seed, without FLARE's processes, and write comparison.html.

    What has a result is not run again: the command goes on where it was stopped.
    """
    from fedtar_flare.errors import ConfigError
    from fedtar_flare.suite.file import read_suite
    from fedtar_flare.suite.hospitals import require_hospitals
    from fedtar_flare.suite.page import write_page
    from fedtar_flare.suite.plan import experiments
    from fedtar_flare.suite.run import run_suite

    if arguments.processes < 1:
        raise ConfigError(f"--processes must be at least 1, not {arguments.processes}")
    suite = read_suite(arguments.suite)
    if odd := sorted(set(arguments.only) - set(suite.arms)):
        raise ConfigError(f"--only {odd[0]}: the suite's arms are {', '.join(suite.arms)}")
    planned = experiments(suite)
    chosen = [one for one in planned if not arguments.only or one.name in arguments.only]
    if not arguments.page:
        require_hospitals(suite)
    failed = [] if arguments.page else run_suite(arguments.output, chosen, processes=arguments.processes)
    page = write_page(arguments.output, suite, planned)
    print(f"page: {page}" if page else "no run is done yet: there is nothing to compare")
    for line in failed:
        print(f"failed: {line}")
    return 1 if failed or page is None else 0
