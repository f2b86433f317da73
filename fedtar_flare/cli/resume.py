"""``fedtar resume``: go on with a run whose job ended."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedtar_flare.cli.commands import Commands


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "resume",
        help="go on with a run of a real federation whose job was killed, aborted or is to be longer",
        description=(
            "Submit a new job that starts from the last whole round of an ended one. The server reads its own copy of "
            "the checkpoints (fedtar_checkpoints/<job id> in its kit); nothing is uploaded but the job."
        ),
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
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Submit the job and print its id."""
    from fedtar_flare.provision.resume import resume

    job_id = resume(
        arguments.job_id,
        arguments.startup_kit,
        job_folder=arguments.job,
        rounds=arguments.rounds,
        force=arguments.force,
    )
    print(json.dumps({"job_id": job_id, "resumes": arguments.job_id}) if arguments.json else job_id)
    return 0
