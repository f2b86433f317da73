"""``fedtar data synth``: write a synthetic longitudinal CT cohort with a planted truth."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedtar_flare.cli.commands import Commands


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "synth",
        help="write a synthetic longitudinal CT cohort with a planted truth",
        description=(
            "Write synthetic hospitals: DICOM series, reports, a manifest and a site file for each, and truth.json "
            "with everything that was planted. Train on them with FEDTAR_SITES=OUT/sites, like on real data."
        ),
    )
    command.add_argument("out", type=Path, help="folder to write into; a site that is there already is refused")
    sites = command.add_mutually_exclusive_group()
    sites.add_argument("-n", "--sites", type=int, default=3, help="number of hospitals, site-1 and so on (default 3)")
    sites.add_argument("-c", "--clients", help="their names instead, separated by commas")
    command.add_argument("--patients", type=int, default=48, help="patients of the largest site (default 48)")
    command.add_argument("-T", "--time-steps", type=int, default=3, help="time steps (default 3)")
    command.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    command.add_argument(
        "--change",
        choices=("none", "early", "late"),
        default="late",
        help="when wording and case mix change: never, from step 2, or late (default late)",
    )
    command.add_argument(
        "--change-group",
        choices=("women", "everyone"),
        default="women",
        help="who gets other words (default women)",
    )
    command.add_argument("--size-ratio", type=float, default=1.0, help="largest over smallest site (default 1)")
    command.add_argument("--missing-age", type=float, default=0.0, help="share of patients without an age (default 0)")
    command.add_argument(
        "--same-day", type=float, default=0.0, help="share of patients with two studies on one day (default 0)"
    )
    command.add_argument("--no-effects", action="store_true", help="leave out the effects of age and sex")
    command.add_argument("--one-scanner", action="store_true", help="the same scanner everywhere")
    command.add_argument("--json", action="store_true", help="print what was written as JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the cohorts and print one line for each."""
    from fedtar_flare.data.timeline import Timeline
    from fedtar_flare.flare.simulation import site_names
    from fedtar_flare.synthetic.course import CohortOptions
    from fedtar_flare.synthetic.sites import write_sites

    options = CohortOptions(
        change=arguments.change,
        change_group=arguments.change_group,
        size_ratio=arguments.size_ratio,
        missing_age=arguments.missing_age,
        same_day_pairs=arguments.same_day,
        wording_effect=not arguments.no_effects,
        prevalence_effect=not arguments.no_effects,
        scanner_differences=not arguments.one_scanner,
    )
    written = write_sites(
        arguments.out,
        site_names(arguments.clients or arguments.sites),
        patients=arguments.patients,
        timeline=Timeline(arguments.time_steps),
        seed=arguments.seed,
        options=options,
    )
    if arguments.json:
        print(json.dumps([{k: v if isinstance(v, int) else str(v) for k, v in vars(w).items()} for w in written]))
        return 0
    for site in written:
        print(
            f"{site.site}: {site.patients} patients, {site.visits} visits: {site.manifest} (truth: {site.truth.name})"
        )
    print(
        f"Train on them: FEDTAR_SITES={arguments.out / 'sites'} fedtar simulate -c {','.join(w.site for w in written)}"
    )
    return 0
