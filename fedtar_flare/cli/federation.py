"""``fedtar status``, ``watch`` and ``resume``: jobs of a real federation, asked with an admin's startup kit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedtar_flare.cli.commands import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    command = add_command(commands, status, "round, step, losses and sites of the jobs of a real federation")
    command.add_argument("job_id", nargs="?", help="one job; without it the newest ones")
    command.add_argument("--startup-kit", type=Path, required=True, help="folder of the admin user's kit")
    command.add_argument("-n", "--limit", type=int, default=10, help="how many of the newest jobs (default 10)")
    command.add_argument("--json", action="store_true", help="print a JSON list instead")

    command = add_command(commands, watch, "follow one job of a real federation until it ends")
    command.add_argument("job_id", help="the job; 'fedtar status' lists them")
    command.add_argument("--startup-kit", type=Path, required=True, help="folder of the admin user's kit")
    command.add_argument("--json", action="store_true", help="print one JSON object a line instead")

    command = add_command(
        commands, resume, "go on with a run of a real federation whose job was killed, aborted or is to be longer"
    )
    command.add_argument("job_id", help="the ended job; 'fedtar status' lists them")
    command.add_argument("--startup-kit", type=Path, required=True, help="kit of an admin user who may submit jobs")
    command.add_argument("--job", type=Path, help="folder of the job as it was submitted (default: downloaded)")
    command.add_argument("-r", "--rounds", type=int, help="more rounds than the run had")
    command.add_argument(
        "--force",
        action="store_true",
        help="although FLARE says that it runs: only after its server was killed; needs --job",
    )
    command.add_argument("--json", action="store_true", help="print the new job's id as JSON")


def status(arguments: argparse.Namespace) -> None:
    """Ask the server of a provisioned federation, over mTLS, with the startup kit of an admin user."""
    from fedtar_flare.provision.status import job, jobs, line

    kit = arguments.startup_kit
    found = [job(kit, arguments.job_id)] if arguments.job_id else jobs(kit, arguments.limit)
    print(json.dumps(found) if arguments.json else "\n".join(map(line, found)) or "no job was submitted yet")


def watch(arguments: argparse.Namespace) -> int:
    """Print a line whenever a job gets further. Exit code 0 when it completes, 1 otherwise."""
    from fedtar_flare.provision.status import line, watch

    def say(entry: dict[str, object]) -> None:
        print(json.dumps(entry) if arguments.json else line(entry), flush=True)

    return 0 if watch(arguments.startup_kit, arguments.job_id, say) == "FINISHED:COMPLETED" else 1


def resume(arguments: argparse.Namespace) -> None:
    """Submit a new job that starts from the last whole round of an ended one.

    The server reads its own copy of the checkpoints (fedtar_checkpoints/<job id> in its kit); nothing is uploaded but
    the job.
    """
    from fedtar_flare.provision.resume import resume

    ended, kit = arguments.job_id, arguments.startup_kit
    job_id = resume(ended, kit, job_folder=arguments.job, rounds=arguments.rounds, force=arguments.force)
    print(json.dumps({"job_id": job_id, "resumes": ended}) if arguments.json else job_id)
