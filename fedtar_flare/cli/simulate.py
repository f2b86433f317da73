"""``fedtar simulate``: run a method's job in FLARE's simulator, all sites side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedtar_flare.cli.job_options import add_job_options, recipe_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "simulate",
        help="simulate a federation on this machine, all sites side by side",
        description=(
            "Run a method in NVIDIA FLARE's simulator, one process per site. Sites without a site file in the folder "
            "that FEDTAR_SITES names train on the synthetic CT cohort."
        ),
    )
    sites = command.add_mutually_exclusive_group()
    sites.add_argument("-n", "--sites", type=int, default=3, help="number of simulated hospitals (default 3)")
    sites.add_argument("-c", "--clients", help="their names instead, separated by commas")
    command.add_argument("-t", "--threads", type=int, help="sites that run at the same time (default: all)")
    command.add_argument(
        "-w", "--workspace", type=Path, default=Path("simulator_workspace"), help="folder of the run, made anew"
    )
    add_job_options(command)
    command.add_argument("--json", action="store_true", help="print the paths of the results as JSON at the end")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the simulation."""
    from fedtar_flare.flare.simulation import simulate, site_names

    names = site_names(arguments.clients or arguments.sites)
    results = simulate(recipe_of(arguments), names, workspace=arguments.workspace, threads=arguments.threads)
    if arguments.json:
        print(json.dumps({"results": str(results), "report": str(results / "report.html")}))
    return 0
