"""``fedtar data partition``: divide one collection into the sites of a simulated federation."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedtar_flare.cli.commands import Commands


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "partition",
        help="divide one collection into the sites of a simulated federation",
        description=(
            "Divide a collection by patient into simulated hospitals: a manifest and a site file for each; images stay "
            "where they are. Train on them with FEDTAR_SITES=OUT/sites."
        ),
        epilog=(
            "Examples: fedtar data partition covid_chestxray covid --by institution --out parts; "
            "fedtar data partition mimic_cxr mimic-cxr-jpg --option reports=../mimic-cxr --by random -n 4 --out parts"
        ),
    )
    command.add_argument("source", help="manifest, mimic_cxr, ct_rate, iu_xray or covid_chestxray")
    command.add_argument("path", type=Path, help="the table or folder of the source")
    command.add_argument(
        "--by",
        required=True,
        choices=("institution", "random", "clusters", "dirichlet"),
        help="institution: as the source tells it; random: equal sizes; clusters: like reports together; dirichlet: "
        "every class of patients spread unevenly",
    )
    command.add_argument("--out", type=Path, required=True, help="folder to write into; a site there is refused")
    command.add_argument("-n", "--sites", type=int, help="number of sites (not for institution)")
    command.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    command.add_argument("-T", "--time-steps", type=int, default=3, help="time steps of the printed counts (default 3)")
    command.add_argument(
        "--concentration", type=float, default=0.5, help="of dirichlet; the smaller, the more unlike (default 0.5)"
    )
    command.add_argument("--classes", type=int, default=10, help="of dirichlet: clusters of reports (default 10)")
    command.add_argument(
        "--labels", type=Path, help="of dirichlet: CSV with patient_id and label, instead of clusters of reports"
    )
    command.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the source, as under 'options' in a site file (repeatable): --option same_day=merge",
    )
    command.add_argument("--relative", action="store_true", help="image paths relative to the manifests")
    command.add_argument("--json", action="store_true", help="print what was written as JSON")
    command.set_defaults(run=run, wrong_use=command.error)


def run(arguments: argparse.Namespace) -> int:
    """Divide, write, and print one line for each site."""
    from fedtar_flare.curation.partition_files import partition_source

    if arguments.by == "institution" and arguments.sites is not None:
        arguments.wrong_use("-n does not go with --by institution: the institutions are the sites")
    if arguments.by != "institution" and arguments.sites is None:
        arguments.wrong_use(f"--by {arguments.by} needs -n, the number of sites")
    sites, left_out = partition_source(
        arguments.source,
        arguments.path,
        arguments.out,
        by=arguments.by,
        sites=arguments.sites,
        seed=arguments.seed,
        time_steps=arguments.time_steps,
        concentration=arguments.concentration,
        classes=arguments.classes,
        labels=arguments.labels,
        options=_options(arguments),
        relative=arguments.relative,
    )
    if arguments.json:
        rows = [{k: str(v) if isinstance(v, Path) else v for k, v in vars(site).items()} for site in sites]
        print(json.dumps({"sites": rows, "left_out": left_out}))
        return 0
    width = max(len(site.site) for site in sites)
    for site in sites:
        steps = ", ".join(f"t={t}: {n}" for t, n in enumerate(site.visits_per_step, start=1))
        print(f"{site.site:<{width}}  {site.patients} patients, {site.visits} visits ({steps})")
    if left_out:
        print("Left out: " + ", ".join(f"{reason} {n}" for reason, n in left_out.items()))
    names = ",".join(site.site for site in sites)
    print(f"Train on them: FEDTAR_SITES={arguments.out / 'sites'} fedtar simulate -c {names}")
    return 0


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    import yaml

    options: dict[str, Any] = {}
    for text in arguments.option:
        key, equals, value = text.partition("=")
        if not equals or not key:
            arguments.wrong_use(f"--option '{text}' is not of the form KEY=VALUE")
        try:
            options[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            arguments.wrong_use(f"--option {key}: '{value}' is not readable as YAML")
    return options
