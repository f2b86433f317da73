"""``fedtar data index``: a DICOM export folder to a manifest."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedtar_flare.cli.commands import Commands


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "index",
        help="make a manifest of a DICOM export folder and a table of reports",
        description=(
            "Read the headers of all DICOM files below FOLDER (any naming, any depth, zips too), group them by patient "
            "and study, join the reports, and write a manifest for 'source: manifest'. Studies are dated by their "
            "StudyDate, else AcquisitionDate, else SeriesDate. What cannot stand in a manifest is counted by reason."
        ),
        epilog="Exit codes: 0 a manifest was written, 1 none could be, 2 wrong use. Then: fedtar data check MANIFEST.",
    )
    command.add_argument("folder", type=Path, help="the export: CT series, or CR and DX radiographs")
    command.add_argument(
        "--reports",
        type=Path,
        help=(
            "CSV table with the column 'report' and one of 'study_instance_uid', 'accession_number', or 'patient_id' "
            "with 'study_date'; or a folder with <AccessionNumber>.txt or <StudyInstanceUID>.txt (default: report.txt "
            "or <AccessionNumber>.txt beside each study)"
        ),
    )
    command.add_argument("-o", "--out", type=Path, default=Path("manifest.csv"), help="default manifest.csv")
    command.add_argument(
        "--modality", choices=("ct", "radiograph"), help="take only these (default: whichever more studies are of)"
    )
    command.add_argument(
        "--links",
        type=Path,
        metavar="DIR",
        help="where several studies lie in one folder, give each a folder of symbolic links in DIR (else left out)",
    )
    command.add_argument("-j", "--workers", type=int, help="processes (default: one per processor, at most 4)")
    command.add_argument("--json", action="store_true", help="print the counts as JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the manifest and print the counts."""
    from fedtar_flare.cli.terminal import ProgressLine
    from fedtar_flare.curation.archive import index_folder, write_manifest
    from fedtar_flare.curation.archive_reports import join_reports
    from fedtar_flare.imaging.workers import worker_count

    with ProgressLine() as line:
        index = index_folder(
            arguments.folder,
            modality=arguments.modality,
            links=arguments.links,
            workers=worker_count(arguments.workers),
            say=line,
            every=line.every,
        )
    spare = join_reports(index, arguments.reports)
    rows = write_manifest(index, arguments.out)
    patients = len({study.patient_id for study in index.studies})
    counts = {
        "manifest": str(arguments.out),
        "files": index.files,
        "dicom_files": index.dicom,
        "studies": rows,
        "patients": patients,
        "left_out": index.rejected(),
        "passed_over": dict(sorted(index.notes.items())),
        "reports_without_study": spare,
    }
    if arguments.json:
        print(json.dumps(counts))
        return 0
    print(f"{arguments.out}: {rows} studies of {patients} patients ({index.dicom} DICOM files of {index.files})")
    for reason, n in index.rejected().items():
        print(f"  left out, {reason}: {n}, such as: {next(p for p in index.problems if p.reason == reason)}")
    for reason, n in sorted(index.notes.items()):
        print(f"  passed over within studies, {reason}: {n}")
    if spare:
        print(f"  reports that belong to no study: {spare}")
    print(f"Look at it all: fedtar data check {arguments.out}")
    return 0
