"""``fedtar watch``: follow one job of a real federation until it ends."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedtar_flare.cli.commands import Commands


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "watch",
        help="follow one job of a real federation until it ends",
        description="Print a line whenever a job gets further. Exit code 0 when it completes, 1 otherwise.",
    )
    command.add_argument("job_id", help="the job; 'fedtar status' lists them")
    command.add_argument("--startup-kit", type=Path, required=True, help="folder of the admin user's kit")
    command.add_argument("--json", action="store_true", help="print one JSON object a line instead")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Follow the job."""
    from fedtar_flare.provision.status import line, watch

    def say(entry: dict[str, object]) -> None:
        print(json.dumps(entry) if arguments.json else line(entry), flush=True)

    return 0 if watch(arguments.startup_kit, arguments.job_id, say) == "FINISHED:COMPLETED" else 1
