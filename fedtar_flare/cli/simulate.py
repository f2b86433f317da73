"""``fedtar simulate``: run the FedTAR job in FLARE's simulator, all sites side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "simulate",
        help="simulate a federation on this machine, all sites side by side",
        description=(
            "Run FedTAR in NVIDIA FLARE's simulator with one process per site. Sites without a site file in the folder "
            "that FEDTAR_SITES names train on the synthetic CT cohort."
        ),
    )
    sites = command.add_mutually_exclusive_group()
    sites.add_argument("-n", "--sites", type=int, default=3, help="number of simulated hospitals (default 3)")
    sites.add_argument("-c", "--clients", help="their names instead, separated by commas")
    command.add_argument("-r", "--rounds", type=int, default=3, help="rounds R (default 3)")
    command.add_argument("-T", "--time-steps", type=int, default=3, help="time steps T (default 3)")
    command.add_argument("-t", "--threads", type=int, help="sites that run at the same time (default: all)")
    command.add_argument("--preset", default="small", help="model preset (default small)")
    command.add_argument("--alpha-form", choices=("softmax", "sigmoid"), default="softmax", help="form of alpha")
    command.add_argument("--patients", type=int, default=48, help="patients of a synthetic site (default 48)")
    command.add_argument("--local-steps", type=int, help="optimiser updates per site and time step")
    command.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    command.add_argument(
        "-w", "--workspace", type=Path, default=Path("simulator_workspace"), help="folder of the run, made anew"
    )
    command.add_argument("--json", action="store_true", help="print the paths of the results as JSON at the end")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the simulation; prints where the results are."""
    from fedtar_flare.fedtar.recipe import FedTARRecipe
    from fedtar_flare.fedtar.simulation import simulate

    recipe = FedTARRecipe(
        preset=arguments.preset,
        num_rounds=arguments.rounds,
        time_steps=arguments.time_steps,
        seed=arguments.seed,
        server={"alpha_form": arguments.alpha_form},
        training={"local_steps": arguments.local_steps} if arguments.local_steps else None,
        data={"synthetic_patients": arguments.patients},
    )
    names = [name.strip() for name in arguments.clients.split(",")] if arguments.clients else arguments.sites
    results = simulate(recipe, names, workspace=arguments.workspace, threads=arguments.threads)
    if arguments.json:
        print(json.dumps({"results": str(results), "report": str(results / "report.html")}))
    return 0
