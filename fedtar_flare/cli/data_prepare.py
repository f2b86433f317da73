"""``fedtar data prepare``: prepare a site's images before a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedtar_flare.cli.commands import Commands

GROUPS = ("model", "data")


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "prepare",
        help="prepare a site's images before a run, so that the run begins at once",
        description=(
            "Read every study that the site file leads to and keep what the model will see of it, as the handshake of "
            "a job would; what is there already is only looked up. Take preset and settings from the study lead "
            "('fedtar export --describe'). May be stopped and started again at any time."
        ),
        epilog="Exit codes: 0 something can be used, 1 nothing can, 2 wrong use.",
    )
    place = command.add_mutually_exclusive_group(required=True)
    place.add_argument("--kit", type=Path, help="the site's startup kit, whose local/fedtar.yaml is read")
    place.add_argument("--site-file", type=Path, help="a site file, such as one in the folder of FEDTAR_SITES")
    command.add_argument("--site", help="name of the site (default: of the kit's folder, or of the site file)")
    command.add_argument("--preset", default="small", help="of the job: small (default), tiny, paper, timm")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="GROUP.NAME=VALUE",
        help="a setting of the job's model or data that differs from the preset, such as model.slices=1; may be "
        "repeated",
    )
    command.add_argument("-T", "--time-steps", type=int, default=3, help="of the job; for synthetic data (default 3)")
    command.add_argument("--seed", type=int, default=0, help="of the job; for synthetic data (default 0)")
    command.add_argument("-j", "--workers", type=int, help="processes (default: one per processor, at most 4)")
    command.add_argument("--json", action="store_true", help="print the counts as JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prepare the images and print the counts."""
    from fedtar_flare.cli.job_options import grouped
    from fedtar_flare.cli.terminal import ProgressLine
    from fedtar_flare.learning.config import DataConfig
    from fedtar_flare.models.config import preset
    from fedtar_flare.settings import build
    from fedtar_flare.site.cohort import prepare_site
    from fedtar_flare.site.place import kit_of
    from fedtar_flare.site.site_file import SITE_FILE, cache_folder, read_site_file

    settings = grouped(arguments.set, GROUPS)
    kit = kit_of(arguments.kit) if arguments.kit else None
    file = kit / "local" / SITE_FILE if kit else arguments.site_file
    config = read_site_file(file, simulated=True)  # no key is made for this; what is prepared does not depend on it
    with ProgressLine() as line:
        cohort, done = prepare_site(
            config,
            arguments.site or (kit.name if kit else file.stem),
            model=preset(arguments.preset, **settings.get("model", {})),
            data=build(DataConfig, settings.get("data"), "data"),
            time_steps=arguments.time_steps,
            seed=arguments.seed,
            workers=arguments.workers,
            say=line,
            every=line.every,
        )
    there = len(cohort.visits) - done.computed
    left_out = dict(sorted(cohort.rejected.items()))
    folder = cache_folder(config) / "prepared"
    if arguments.json:
        print(json.dumps({"prepared": done.computed, "there": there, "left_out": left_out, "folder": str(folder)}))
        return 0
    print(f"{file}: {done.computed} images prepared, {there} were there already ({folder})")
    for reason, n in left_out.items():
        print(f"  left out, {reason}: {n}")
    return 0
