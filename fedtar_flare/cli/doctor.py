"""``fedtar doctor``: check everything a site needs before a study starts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fedtar_flare.cli.commands import Commands

COLOURS = {"OK": "\033[32m", "WARN": "\033[33m", "FAIL": "\033[31m"}


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "doctor",
        help="check everything that a site needs: packages, disk, data, policy, certificates, the way to the server",
        description=(
            "Check a site: one line each, OK, WARN or FAIL, with the cure. Nothing is changed and no data is sent. "
            "Exit code 1 when anything fails."
        ),
    )
    command.add_argument("--kit", type=Path, help="the site's startup kit; without it, the environment alone")
    command.add_argument("--site-file", type=Path, help="another site file than the kit's local/fedtar.yaml")
    command.add_argument("-T", "--time-steps", type=int, default=3, help="time steps of the job (default 3)")
    command.add_argument("--json", action="store_true", help="print the findings as JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings."""
    from dataclasses import asdict

    from fedtar_flare.site.doctor import FAIL, WARN, diagnose

    findings = diagnose(arguments.kit, arguments.site_file, arguments.time_steps)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        colour = sys.stdout.isatty()
        for finding in findings:
            mark = f"{COLOURS[finding.status]}{finding.status:4}\033[0m" if colour else f"{finding.status:4}"
            print(f"{mark}  {finding.check}: {finding.text}")
            if finding.cure:
                print(f"      -> {finding.cure}")
        counts = {status: sum(f.status == status for f in findings) for status in (FAIL, WARN)}
        print(f"{counts[FAIL]} failed, {counts[WARN]} to look at, of {len(findings)} checks")
    return int(any(finding.status == FAIL for finding in findings))
