"""``fedtar export``: write the job folder that FLARE runs, or say what a site needs before it joins."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedtar_flare.cli.commands import Commands
from fedtar_flare.cli.job_options import add_job_options, recipe_of


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "export",
        help="write the job for FLARE, or describe what it asks of a site",
        description=(
            "Write a job as a folder for 'nvflare simulator' or 'nvflare job submit'. For hospitals, use "
            "--no-byoc: a job with a custom folder switches their class allow-list off."
        ),
    )
    command.add_argument("-o", "--out", type=Path, default=Path("jobs"), help="folder of jobs (default jobs)")
    command.add_argument("--name", default="", help="name of the job and its folder (default: the method's)")
    command.add_argument("--no-byoc", action="store_true", help="without the custom folder: for production")
    command.add_argument(
        "--describe",
        action="store_true",
        help="write no job; print which data, model and computer a site needs to join, and what will leave it",
    )
    add_job_options(command)
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export or describe."""
    from fedtar_flare.flare.requirements import describe, requirements

    recipe = recipe_of(arguments, name=arguments.name)
    if arguments.describe:
        needs = requirements(recipe)
        print(json.dumps(needs, indent=2) if arguments.json else describe(needs))
        return 0
    recipe.export(str(arguments.out), byoc=not arguments.no_byoc)
    folder = arguments.out / recipe.name
    print(json.dumps({"job": str(folder), "byoc": not arguments.no_byoc}) if arguments.json else folder)
    return 0
