"""``fedtar site pause``, ``leave`` and ``join``: the site's own decision to take part."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedtar_flare.cli.commands import Commands

TEXTS = {
    "pause": (
        "answer no task until 'fedtar site join'",
        "The site abstains at every task from now on, also in a job that runs: what it is computing is thrown away and "
        "the job goes on without it.",
        "paused: the site abstains at every task until 'fedtar site join'",
    ),
    "leave": (
        "decline every task, of this job and of later ones",
        "The site declines every task from now on. What it sent before is part of the shared model and stays there. "
        "'fedtar site purge' deletes what is kept here.",
        "left: the site declines every task until 'fedtar site join'",
    ),
    "join": (
        "take part again",
        "Take part again after 'pause' or 'leave': at the next task of a running job, or at its next round where the "
        "site missed the handshake.",
        "taking part",
    ),
}


def add_parser(commands: Commands) -> None:
    """Add the three commands."""
    for name, (summary, text, _) in TEXTS.items():
        command = commands.add_parser(name, help=summary, description=text)
        add_place(command)
        command.set_defaults(run=run)


def add_place(command: argparse.ArgumentParser) -> None:
    """The arguments that say which site is meant."""
    place = command.add_mutually_exclusive_group()
    place.add_argument("--kit", type=Path, default=Path(), help="the site's startup kit (default: this folder)")
    place.add_argument("--simulated", metavar="SITE", help="a site of the simulator instead, by name")


def records_of(arguments: argparse.Namespace) -> Path:
    """The folder of the site that is meant. Raises ConfigError if there is no kit."""
    from fedtar_flare.site.place import STATE, kit_of, simulated_records

    if arguments.simulated:
        return simulated_records(arguments.simulated)
    return kit_of(arguments.kit) / STATE


def run(arguments: argparse.Namespace) -> int:
    """Write the decision."""
    from fedtar_flare.site.participation import Participation, decide

    status = {"pause": Participation.PAUSED, "leave": Participation.LEFT, "join": Participation.TAKING_PART}
    file = decide(records_of(arguments), status[arguments.subcommand])
    print(f"{TEXTS[arguments.subcommand][2]} ({file})")
    return 0
