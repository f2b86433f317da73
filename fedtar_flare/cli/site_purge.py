"""``fedtar site purge``: delete what a site keeps of a run or a patient."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedtar_flare.cli.commands import Commands
from fedtar_flare.cli.site_pause import add_place


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "purge",
        help="delete what the site keeps of a run or a patient; shows first, deletes with --yes",
        description=(
            "Show what would be deleted at this site and what cannot be; with --yes, delete it. Without this command "
            "only superseded state of a running job is deleted (three rounds stay); put '--older-than 90 --yes' "
            "into a nightly job to delete what is older than 90 days. Run it while no job runs here."
        ),
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", metavar="RUN_ID", dest="run_id", help="state of one run (run ids: see 'fedtar audit')")
    what.add_argument("--patient", metavar="ID", help="one patient's prepared images, and all example pages")
    what.add_argument("--older-than", metavar="DAYS", type=float, help="state and audit that nobody wrote to since")
    what.add_argument("--all", action="store_true", help="state of all runs, all prepared images, the audit")
    what.add_argument("--cache", action="store_true", help="all prepared images; they are made anew when needed")
    command.add_argument("--yes", action="store_true", help="delete; without it nothing is touched")
    add_place(command)
    command.add_argument("--site-file", type=Path, help="site file of a simulated site")
    command.add_argument("--json", action="store_true", help="print the plan as JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show or carry out the plan."""
    from fedtar_flare.site import purge

    if arguments.simulated:
        place = purge.place_of_simulated(arguments.simulated, arguments.site_file)
    else:
        place = purge.place_of_kit(arguments.kit)
    plan = purge.plan(
        place,
        run=arguments.run_id,
        patient=arguments.patient,
        older_than=arguments.older_than,
        everything=arguments.all,
        cache=arguments.cache,
    )
    if arguments.yes:
        plan.carry_out()
    if arguments.json:
        remove = [{"path": str(path), "what": what} for path, what in plan.remove]
        print(json.dumps({"deleted": arguments.yes, "remove": remove, "kept": plan.kept}))
        return 0
    for path, what in plan.remove:
        print(f"{'deleted' if arguments.yes else 'would delete'}: {what}: {path}")
    if not plan.remove:
        print("nothing to delete")
    for line in plan.kept:
        print(f"stays: {line}")
    if plan.remove and not arguments.yes:
        print("Nothing was touched. Add --yes to delete.")
    return 0
