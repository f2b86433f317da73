"""``fedtar data synth`` and ``partition``: the sites of a simulated federation, invented or divided."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtar_flare.cli.commands import Commands, add_command, add_repeated, add_sites, existing, given, pairs, show


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    command = add_command(commands, synth, "write a synthetic longitudinal CT cohort with a planted truth")
    add_sites(command)
    command.add_argument("-o", "--out", type=Path, default=Path("hospitals"), help="folder (default hospitals)")
    command.add_argument("--patients", type=int, default=48, help="patients of each site (default 48)")
    command.add_argument("--time-steps", type=int, default=3, help="time steps (default 3)")
    command.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    option = "an option of the cohort, as under 'cohort' in a suite (repeatable): --option change=early"
    add_repeated(command, "--option", "NAME=VALUE", option)

    examples = (
        "Examples: fedtar data partition covid_chestxray covid --by institution --out parts; "
        "fedtar data partition mimic_cxr mimic-cxr-jpg --option reports=../mimic-cxr --by random -n 4 --out parts"
    )
    command = add_command(commands, partition, "divide a collection into the sites of a simulated federation", examples)
    command.add_argument("source", help="manifest, mimic_cxr, ct_rate, iu_xray, chexpert_plus or covid_chestxray")
    command.add_argument("path", type=existing, help="the table or folder of the source")
    how = "random: equal sizes; clusters: like reports together; dirichlet: classes of patients spread unevenly"
    command.add_argument("--by", required=True, choices=("institution", "random", "clusters", "dirichlet"), help=how)
    command.add_argument("-o", "--out", type=Path, required=True, help="folder to write into")
    command.add_argument("-n", "--sites", type=int, help="number of sites (not for institution)")
    command.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    command.add_argument("--time-steps", type=int, default=3, help="time steps of the printed counts (default 3)")
    unlike = "of dirichlet: small for unlike sites (default 0.5)"
    command.add_argument("--concentration", type=float, default=0.5, help=unlike)
    command.add_argument("--labels", type=Path, help="of dirichlet: CSV of patient_id and label (default: clusters)")
    option = "an option of the source, as under 'options' in a site file (repeatable): --option same_day=merge"
    add_repeated(command, "--option", "NAME=VALUE", option)


def synth(arguments: argparse.Namespace) -> None:
    """Write synthetic hospitals: DICOM series, reports, a manifest and a site file for each, and truth.json with
    everything that was planted. Train on them with FEDTAR_SITES=OUT/sites, like on real data.
    """
    from fedtar_flare.core.settings import build
    from fedtar_flare.data.cells import Timeline
    from fedtar_flare.runtime.simulation import site_names
    from fedtar_flare.synthetic.course import CohortOptions
    from fedtar_flare.synthetic.sites import write_sites

    options = build(CohortOptions, pairs(arguments.option, "--option"), "--option")
    names, timeline = site_names(arguments.sites), Timeline(arguments.time_steps)
    size = given(arguments, "patients", "seed")
    written = write_sites(arguments.out, names, timeline=timeline, options=options, **size)
    line = "{0.site}: {0.patients} patients, {0.visits} visits: {0.manifest} (truth: {0.truth.name})"
    lines = [line.format(site) for site in written]
    show(arguments, [vars(site) for site in written], *lines, _how_to_train(arguments.out, written))


def partition(arguments: argparse.Namespace) -> None:
    """Divide a collection by patient into simulated hospitals: a manifest and a site file for each; images stay where
    they are. Train on them with FEDTAR_SITES=OUT/sites.
    """
    from fedtar_flare.curation.partition import partition_source

    where = given(arguments, "source", "path", "out", "by", "sites", "seed", "time_steps")
    how = given(arguments, "concentration", "labels") | {"options": pairs(arguments.option, "--option")}
    sites, left_out = partition_source(**where, **how)
    lines, width = [], max(len(site.site) for site in sites)
    for site in sites:
        steps = ", ".join(f"t={t}: {n}" for t, n in enumerate(site.visits_per_step, start=1))
        lines.append(f"{site.site:<{width}}  {site.patients} patients, {site.visits} visits ({steps})")
    lines += ["Left out: " + ", ".join(f"{reason} {n}" for reason, n in left_out.items())] if left_out else []
    how_to = _how_to_train(arguments.out, sites)
    show(arguments, {"sites": [vars(site) for site in sites], "left_out": left_out}, *lines, how_to)


def _how_to_train(out: Path, sites: Sequence[Any]) -> str:
    folder = shlex.quote(str(out / "sites"))
    return f"Train on them: FEDTAR_SITES={folder} fedtar simulate -n {','.join(site.site for site in sites)}"
