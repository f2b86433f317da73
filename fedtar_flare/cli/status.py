"""``fedtar status``: jobs of a real federation and how far they are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedtar_flare.cli.commands import Commands


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "status",
        help="jobs of a real federation: round, step, losses and sites of those that run",
        description="Ask the server of a provisioned federation, over mTLS, with the startup kit of an admin user.",
    )
    command.add_argument("job_id", nargs="?", help="one job; without it the newest ones")
    command.add_argument("--startup-kit", type=Path, required=True, help="folder of the admin user's kit")
    command.add_argument("-n", "--limit", type=int, default=10, help="how many of the newest jobs (default 10)")
    command.add_argument("--json", action="store_true", help="print a JSON list instead")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the jobs."""
    from fedtar_flare.provision.status import job, jobs, line

    kit = arguments.startup_kit
    found = [job(kit, arguments.job_id)] if arguments.job_id else jobs(kit, arguments.limit)
    if arguments.json:
        print(json.dumps(found))
    else:
        print("\n".join(map(line, found)) or "no job was submitted yet")
    return 0
