"""``fedtar warmstart``: pre-train a report generator on studies or on reports alone, before any federation."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fedtar_flare.cli.commands import Commands


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "warmstart",
        help="pre-train a report generator on a manifest's studies, or on reports alone",
        description=(
            "Pre-train centrally what a federation then adapts: on pairs of images and reports (--manifest or "
            "--site-file), on reports alone (--texts), or both. Only training patients are learned from; validation "
            "patients are scored. Give the result to a job with --set model.weights=OUT/model.safetensors."
        ),
    )
    data = command.add_mutually_exclusive_group()
    data.add_argument("--manifest", type=Path, help="table of studies (see 'fedtar data check')")
    data.add_argument("--site-file", type=Path, help="site file, whose key then decides about the splits")
    command.add_argument("--texts", type=Path, help="CSV with a column 'report', or text with empty lines between")
    command.add_argument("--preset", default="small", help="model preset: small (default), tiny, paper, timm")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="setting of the model, such as slices=1 or decoder_name=FOLDER; may be repeated",
    )
    command.add_argument("--train", choices=("all", "new"), default="all", help="all weights, or only untrained ones")
    command.add_argument("--vocabulary", type=int, help="learn a tokenizer of this size (default: the model's own)")
    command.add_argument("--steps", type=int, default=1500, help="optimiser updates (default 1500)")
    command.add_argument("--batch-size", type=int, default=8, help="reports per update (default 8)")
    command.add_argument("--lr", type=float, default=5e-4, help="highest learning rate (default 5e-4)")
    command.add_argument("--seed", type=int, default=0, help="of order and new weights (default 0)")
    command.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<i> (default auto)")
    command.add_argument("-o", "--out", type=Path, required=True, help="folder to write")
    command.add_argument("--json", action="store_true", help="print counts and scores as JSON at the end")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train and write the folder."""
    import torch

    from fedtar_flare.cli.job_options import pairs
    from fedtar_flare.data.timeline import Timeline
    from fedtar_flare.errors import ConfigError
    from fedtar_flare.learning.clinical_start import Corpus, read_texts, warm_start
    from fedtar_flare.learning.device import choose_device
    from fedtar_flare.learning.pretraining import PretrainingConfig
    from fedtar_flare.models.config import preset
    from fedtar_flare.site.cohort import load_cohort
    from fedtar_flare.site.site_file import SiteConfig, cache_folder, read_site_file

    site: SiteConfig | None = None
    if arguments.site_file:
        site = read_site_file(arguments.site_file)
    elif arguments.manifest:
        site = SiteConfig(source="manifest", path=arguments.manifest, simulated=True)
    if site is None and arguments.texts is None:
        raise ConfigError("name what to learn from: --manifest or --site-file, --texts, or both")
    torch.set_num_threads(arguments.threads)
    cohort = load_cohort(site, "warmstart", timeline=Timeline(1), seed=arguments.seed) if site else None
    about = warm_start(
        preset(arguments.preset, **{"seed": arguments.seed, **pairs(arguments.set, "--set")}),
        Corpus(cohort, read_texts(arguments.texts) if arguments.texts else ()),
        PretrainingConfig(
            steps=arguments.steps,
            batch_size=arguments.batch_size,
            warmup=min(100, arguments.steps // 10),
            lr=arguments.lr,
            seed=arguments.seed,
        ),
        arguments.out,
        cache=cache_folder(site or SiteConfig(source="synthetic")) / "prepared",
        train=arguments.train,
        vocabulary=arguments.vocabulary,
        device=choose_device(arguments.device, "float32")[0],
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if arguments.json:
        print(json.dumps({"weights": str(arguments.out / "model.safetensors"), **about}, indent=2))
        return 0
    for name, value in about["validation"].items():
        print(f"validation studies: {name} {value:.3f}")
    print(f"Use it: --set model.weights={arguments.out / 'model.safetensors'}")
    return 0
