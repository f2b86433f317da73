"""``fedtar data pull`` and ``reports``: studies of a PACS, and reports of other systems, to what ``index`` reads."""

import argparse
import warnings
from pathlib import Path

from fedtar_flare.cli.commands import Commands, ProgressLine, add_command, existing, given, show
from fedtar_flare.core.errors import ConfigError, DataError, FedTARError


def add_commands(group: Commands) -> None:
    """Add the commands."""
    text = "Exit codes: 0 all studies are there, 1 some were left out or the PACS broke off, 2 wrong use."
    command = add_command(group, pull, "bring studies from a PACS, by DICOMweb", epilog=text)
    command.add_argument("--dicomweb", required=True, metavar="URL", help="of the service: https://HOST[:PORT]/PATH")
    what = "CSV table whose columns are DICOM keywords, such as AccessionNumber, StudyDate, Modality; a row is a query"
    command.add_argument("--query", type=Path, required=True, metavar="FILE", help=what)
    command.add_argument("-o", "--out", type=Path, required=True, help="folder; 'fedtar data index' reads OUT/studies")
    command.add_argument("--rate", type=float, default=20.0, help="megabytes a second at most (default 20)")
    command.add_argument("--verify", action="store_true", help="compare the checksums of all files that are there")
    add_login(command)

    text = (
        "Exit codes: 0 the table was written, 1 no report counts, 2 wrong use. Then: fedtar data index --reports OUT."
    )
    command = add_command(group, reports, "make a table of reports from FHIR, HL7 v2, DICOM SR or OMOP", epilog=text)
    command.add_argument("source", type=existing, help="file, or folder of .json, .ndjson, .csv, HL7 and DICOM files")
    command.add_argument("-o", "--out", type=Path, default=Path("reports.csv"), help="default reports.csv")
    where = "HL7 field (default IPC-1, else OBR-18, else OBR-3) or OMOP column (default none: patient and day)"
    command.add_argument("--accession", default="", help=f"where the accession number is: {where}")
    command.add_argument("--charset", default="ASCII", help="of HL7 without MSH-18, such as 8859/1 (default ASCII)")


def add_login(command: argparse.ArgumentParser) -> None:
    """Add the options that let this site in at a PACS."""
    for name, what in {
        "token": "a bearer token (or 'Basic ...'); only its owner may read it",
        "cert": "this client's certificate and key (PEM); likewise",
        "ca": "certificates to trust in place of the public ones (PEM)",
    }.items():
        command.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"file with {what}")


def pull(arguments: argparse.Namespace) -> int:
    """Bring the studies that a query names, as the PACS stores them, one after the other. It may be stopped at any
    time: the same command goes on, brings studies that have changed again, and deletes nothing.
    """
    from fedtar_flare.curation.pacs import Pacs
    from fedtar_flare.curation.pull import pull, read_query
    from fedtar_flare.data.sources.reading import by_reason, left_out_lines

    pacs = Pacs(arguments.dicomweb, **given(arguments, "token", "cert", "ca", "rate"))
    with ProgressLine() as line:
        query, verify = read_query(arguments.query), arguments.verify
        try:
            done, problems = pull(pacs, query, arguments.out, verify=verify, say=line, every=line.every)
        except OSError as error:
            text = f"{arguments.out} cannot be written ({error.strerror}); the same command goes on later"
            raise FedTARError(text) from error
    lines = [f"{arguments.out}: {done['asked']} studies asked for, {done['there']} there, {done['pulled']} pulled"]
    lines[0] += f" ({done['again']} again; {done['files']} files, {done['bytes'] / 1e6:.1f} MB)"
    lines += left_out_lines(problems)
    lines += [f"  {done['gone']} others are there: of another query, or no longer at the PACS"] if done["gone"] else []
    show(arguments, {**done, "left_out": by_reason(problems)}, *lines)
    return int(bool(problems))


def reports(arguments: argparse.Namespace) -> None:
    """Read the reports of other systems, and write those that count by the standard's own status: final, amended,
    corrected or appended; the newest of each; none that was withdrawn. How many others there are is said by reason.
    """
    try:
        from fedtar_flare.curation.report_sources import collect
    except ImportError as error:
        raise ConfigError("hl7 is not installed: pip install 'fedtar_flare[pacs]'") from error
    from fedtar_flare.data.sources.manifest import write_rows
    from fedtar_flare.data.sources.reading import by_reason, left_out_lines

    warnings.filterwarnings("ignore", module="pydicom")  # of texts that are counted below
    rows, problems, notes = collect(arguments.source, **given(arguments, "accession", "charset"))
    lines, left_out = left_out_lines(problems), by_reason(problems)
    lines += [f"  not read beside the text of {len(notes)} reports, such as: {notes[0]}"] if notes else []
    if not rows:
        raise DataError("\n".join([f"no report found in {arguments.source}", *lines]), reason="no-report")
    write_rows(arguments.out, rows)
    data = {"reports": len(rows), "left_out": left_out, "passed_over": by_reason(notes), "table": arguments.out}
    show(arguments, data, f"{arguments.out}: {len(rows)} reports", *lines)
