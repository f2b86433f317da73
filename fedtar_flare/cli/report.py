"""``fedtar report``: make the page of a run again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedtar_flare.cli.commands import Commands


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "report",
        help="make the page of a run from its record, also of one that was killed or downloaded",
        description="Write report.html from the run record (rounds.jsonl), and print the table of scores.",
    )
    command.add_argument(
        "run_folder", type=Path, help="results of a run, a simulator workspace, or a downloaded job's folder"
    )
    command.add_argument("--json", action="store_true", help="print path and status as JSON instead of the table")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page."""
    from fedtar_flare.reporting.console import final_table
    from fedtar_flare.reporting.page import write_report
    from fedtar_flare.reporting.run import find_run, read_run

    folder = find_run(arguments.run_folder)
    page, run = write_report(folder), read_run(folder)
    if arguments.json:
        found = {"report": str(page), "run_id": run.start.run_id, "status": run.status, "rounds": len(run.validations)}
        print(json.dumps(found))
    else:
        print(final_table(run))
        print(f"report: {page}")
    return 0
