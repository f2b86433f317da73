"""``fedtar data check``: look at everything a site would train on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtar_flare.cli.commands import Commands

if TYPE_CHECKING:
    from fedtar_flare.curation.check import Check


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "check",
        help="open everything that a manifest or site file names, and say what cannot be used and why",
        description=(
            "Read every row and open every image of a manifest, a folder with manifest.csv, or a site file. Prints a "
            "summary and writes a page with histograms and small pictures; both are for the site alone."
        ),
        epilog="Exit codes: 0 everything can be used, 1 something was rejected, 2 wrong use.",
    )
    command.add_argument("target", type=Path, help="manifest.csv, its folder, or a site file such as fedtar.yaml")
    command.add_argument("-o", "--page", type=Path, default=Path("data-check.html"), help="default data-check.html")
    command.add_argument("-j", "--workers", type=int, help="processes (default: one per processor, at most 4)")
    command.add_argument("--thumbnails", type=int, default=24, help="studies that are shown (default 24; 0: none)")
    command.add_argument("--json", action="store_true", help="print the summary as JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, write the page and print the summary; 1 when anything was rejected."""
    from fedtar_flare.cli.terminal import ProgressLine
    from fedtar_flare.curation.check import check
    from fedtar_flare.curation.page import write_data_page
    from fedtar_flare.imaging.workers import worker_count

    with ProgressLine() as line:
        found = check(
            arguments.target,
            workers=worker_count(arguments.workers),
            thumbnails=arguments.thumbnails,
            say=line,
            every=line.every,
        )
    page = write_data_page(found, arguments.page)
    summary = found.summary() | {"page": str(page)}
    print(json.dumps(summary) if arguments.json else _text(found, summary))
    return 1 if found.rejected else 0


def _text(found: Check, summary: dict[str, Any]) -> str:
    sexes = ", ".join(f"{sex} {n}" for sex, n in found.sexes().items() if n)
    per_patient = ", ".join(f"{n}: {count}" for n, count in summary["visits_per_patient"].items())
    lines = [
        f"{found.source}: {summary['patients']} patients, {summary['visits']} visits that can be used",
        f"  visits per patient   {per_patient or '-'}",
        f"  days between visits  {_spread(summary['gap_days'])}",
        f"  sex                  {sexes or '-'}",
        f"  age in years         {_spread(summary['age'])}, unknown at {summary['age']['unknown']} visits",
        f"  words per report     {_spread(summary['report_words'])}",
    ]
    if found.modality == "ct":
        lines.append(f"  slices per CT        {_spread(summary['slices'])}")
        lines.append(f"  slice spacing in mm  {_spread(summary['slice_spacing_mm'])}")
    lines += [f"  noted, {reason}: {n}" for reason, n in summary["notes"].items()]
    for kind, visits in sorted(found.identifiers.items()):
        lines.append(f"  likely identifier in the report, {kind}: {len(visits)}, such as in {', '.join(visits[:3])}")
    if found.excluded:
        lines.append(f"  excluded by the site: {found.excluded} visits")
    for reason, n in found.rejections().items():
        lines.append(f"  REJECTED, {reason}: {n}")
        lines += [f"    {text}" for text in summary["examples"][reason]]
    rate = f", {found.images / found.seconds:.1f} a second" if found.seconds > 0 else ""
    lines.append(f"  {found.images} images opened{rate}")
    lines.append(f"Page (patients' images: it stays at this site): {summary['page']}")
    return "\n".join(lines)


def _spread(values: dict[str, Any]) -> str:
    if not values["n"]:
        return "-"
    return f"median {values['median']:g} ({values['min']:g} to {values['max']:g})"
