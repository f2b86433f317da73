"""``fedtar generate``: a draft report for one study of a patient."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fedtar_flare.cli.commands import Commands

FORMATS = ("text", "json", "sr")


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "generate",
        help="draft a report for one study from a trained adapter (not for clinical use)",
        description=(
            "Draft a report for one study. With --state, the site's personal part of that run writes along; without, "
            "the shared adapter writes alone, as at a hospital outside the run. Every output is marked as a draft, not "
            "for clinical use."
        ),
    )
    command.add_argument("study", type=Path, help="DICOM folder, file or zip, NIfTI, PNG, JPEG or DICOM radiograph")
    command.add_argument("--adapter", type=Path, required=True, help="the adapter folder that a run left")
    command.add_argument("--state", type=Path, help="the site's state of that run: <state folder>/<run id>/<site>")
    command.add_argument("--key", type=Path, help="the site's key file, fedtar.key (not needed for a simulated site)")
    command.add_argument("--patient-id", help="as the site knows it (default: the DICOM header's)")
    command.add_argument("--age", type=float, help="years at this study (default: the DICOM header's)")
    command.add_argument("--sex", choices=("F", "M"), help="default: the DICOM header's")
    command.add_argument("--time-step", type=int, help="which of the patient's visits this is, from 1")
    command.add_argument("--modality", choices=("ct", "radiograph"), help="default: by what the study looks like")
    command.add_argument("--format", choices=FORMATS, default="text", help="text, json, or a DICOM SR (default text)")
    command.add_argument("-o", "--out", type=Path, help="file to write (default: standard output; needed for sr)")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<i> (default auto)")
    command.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="setting of the base model to override, such as weights=PATH; may be repeated",
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the draft."""
    from fedtar_flare.cli.job_options import pairs
    from fedtar_flare.errors import ConfigError
    from fedtar_flare.learning.dicom_sr import structured_report
    from fedtar_flare.learning.drafting import DISCLAIMER, Drafter, study_of
    from fedtar_flare.site.key import read_key

    if arguments.format == "sr" and arguments.out is None:
        raise ConfigError("a DICOM SR is a file: name it with --out")
    study = study_of(
        arguments.study,
        arguments.modality,
        patient_id=arguments.patient_id,
        age=arguments.age,
        sex=arguments.sex,
        time_step=arguments.time_step,
    )
    drafter = Drafter(
        arguments.adapter,
        state=arguments.state,
        key=read_key(arguments.key) if arguments.key else None,
        model=pairs(arguments.model, "--model"),
        device=arguments.device,
    )
    draft = drafter.draft(study)
    if arguments.format == "sr":
        structured_report(draft, arguments.study).save_as(arguments.out)
        print(f"{arguments.out}: {DISCLAIMER}", file=sys.stderr)
        return 0
    text = json.dumps(draft.to_dict(), indent=2) if arguments.format == "json" else draft.to_text()
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
        print(f"{arguments.out}: {DISCLAIMER}", file=sys.stderr)
    else:
        print(text)
    return 0
