"""``fedtar data``: a site's data before a run, and the sites of a simulated federation, invented or divided."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtar_flare.cli import intake
from fedtar_flare.cli.commands import (
    PRESETS,
    WORKERS,
    Commands,
    ProgressLine,
    add_command,
    add_group,
    add_repeated,
    add_sites,
    existing,
    given,
    grouped,
    pairs,
    show,
)
from fedtar_flare.core.files import PRIVATE, write_text

if TYPE_CHECKING:
    from fedtar_flare.curation.check import Check

GROUPS = ("model", "data")


def add_commands(commands: Commands) -> None:
    """Add the group."""
    group = add_group(commands, "data", "bring, index, check, prepare, invent or divide data")
    intake.add_commands(group)
    codes = "Exit codes: 0 a manifest was written, 1 none could be, 2 wrong use. Then: fedtar data check MANIFEST."
    command = add_command(group, index, "make a manifest of a DICOM export folder and a table of reports", codes)
    command.add_argument("folder", type=existing, help="the export: CT series, or CR and DX radiographs")
    which = (
        "CSV table with the column 'report' and one of 'study_instance_uid', 'accession_number' (best with 'issuer'), "
        "or 'patient_id' with 'study_date'; or a folder with <AccessionNumber>.txt or <StudyInstanceUID>.txt (default: "
        "report.txt or <AccessionNumber>.txt beside each study)"
    )
    command.add_argument("--reports", type=Path, help=which)
    command.add_argument("-o", "--out", type=Path, default=Path("manifest.csv"), help="default manifest.csv")
    command.add_argument("--modality", choices=("ct", "radiograph"), help="default: what most studies are")
    links = "make a folder of links in DIR for each study that shares its folder with others (default: leave it out)"
    command.add_argument("--links", type=Path, metavar="DIR", help=links)
    command.add_argument("-j", "--workers", type=int, help=WORKERS)

    codes = "Exit codes: 0 everything can be used, 1 something was rejected or patients share a picture, 2 wrong use."
    what = "open everything that a manifest or site file names, and say what cannot be used and why"
    command = add_command(group, check, what, codes)
    command.add_argument("target", type=existing, help="manifest.csv, its folder, or a site file such as fedtar.yaml")
    command.add_argument("-o", "--out", type=Path, default=Path("data-check.html"), help="default data-check.html")
    command.add_argument("-j", "--workers", type=int, help=WORKERS)
    command.add_argument("--thumbnails", type=int, default=24, help="studies that are shown (default 24; 0: none)")

    codes = "Exit codes: 0 something can be used, 1 nothing can, 2 wrong use."
    command = add_command(group, prepare, "prepare a site's images, so that a run begins at once", codes)
    command.add_argument("--site", help="name of the site (default: of the kit's folder, or of the site file)")
    choice = command.add_mutually_exclusive_group(required=True)
    choice.add_argument("--kit", type=Path, help="the site's startup kit, whose local/fedtar.yaml is read")
    choice.add_argument("--site-file", type=Path, help="a site file, such as one in the folder of FEDTAR_SITES")
    command.add_argument("--preset", default="small", help=f"of the job: {PRESETS}")
    which = f"a setting of the job's {' or '.join(GROUPS)} that differs from the preset, such as model.slices=1"
    add_repeated(command, "--set", "GROUP.NAME=VALUE", f"{which}; may be repeated")
    command.add_argument("--time-steps", type=int, default=3, help="of the job; for synthetic data (default 3)")
    command.add_argument("--seed", type=int, default=0, help="of the job; for synthetic data (default 0)")
    command.add_argument("-j", "--workers", type=int, help=WORKERS)

    command = add_command(group, unpack, "write packed, labelled pictures (MedMNIST's .npz) as pictures and a manifest")
    command.add_argument("file", type=existing, help="the .npz file")
    command.add_argument("-o", "--out", type=Path, required=True, help="folder of the pictures and manifest.csv")
    command.add_argument("--names", default="", help="of the classes, separated by commas (default: class-0, ...)")
    command.add_argument("--most", type=int, help="pictures of each part at most, evenly spread (default: all)")

    command = add_command(group, label, "make a manifest of pictures and the tables or folders that label them")
    command.add_argument("folder", type=existing, help="images at any depth")
    command.add_argument("-o", "--out", type=Path, default=Path("manifest.csv"), help="default manifest.csv")
    add_repeated(command, "--table", "FILE", "CSV table with a row for each image; several are joined by image")
    what = "column of image (needed), patient_id, study_datetime, order, age, sex, split or institution"
    add_repeated(command, "--column", "FIELD=COLUMN", what)
    add_repeated(command, "--labels", "COLUMN", "of label names, or of 0, 1 and -1 (repeat it, or '*': all such)")
    which = "instead of tables: regular expression whose groups are fields or labels, found in each image's path"
    command.add_argument("--name", metavar="PATTERN", help=which)

    command = add_command(group, synth, "write a synthetic longitudinal CT cohort with a planted truth")
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
    command = add_command(group, partition, "divide a collection into the sites of a simulated federation", examples)
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


def unpack(arguments: argparse.Namespace) -> None:
    """Write each picture as a PNG file and all of them as a manifest with labels, for methods that classify. Each
    picture is a patient of its own; the file's own division is the column 'split' (without it, a site divides).
    """
    from fedtar_flare.curation.unpack import unpack

    names = [name.strip() for name in arguments.names.split(",") if name.strip()]
    unpacked = unpack(arguments.file, arguments.out, names, arguments.most)
    lines, option = [f"{unpacked.manifest}: {unpacked.pictures} pictures"], ""
    if unpacked.colour:
        lines.append("  in colour: the site file has to say so (options: {modality: photograph})")
        option = " --option modality=photograph"
    lines += [f"  {name}: {n}" for name, n in unpacked.labels.items()]
    lines.append(f"Divide: fedtar data partition manifest {unpacked.manifest} --by random -n 3{option} --out parts")
    show(arguments, vars(unpacked), *lines)


def label(arguments: argparse.Namespace) -> None:
    """Write a manifest for methods that classify: each image below FOLDER with its labels, and what else is known."""
    from fedtar_flare.curation.labelled import tabulate

    columns = {field: column for field, _, column in (pair.partition("=") for pair in arguments.column)}
    how = given(arguments, "labels", "name") | {"tables": [Path(table) for table in arguments.table]}
    table = tabulate(arguments.folder, arguments.out, columns=columns, **how)
    lines = [f"{table['manifest']}: {table['images']} images of {table['patients']} patients"]
    lines += [f"  {name}: {n}" for name, n in table["labels"].items()]
    if any(left := (table["without_row"], table["without_image"])):
        lines.append("Left out: images without labels {}, named and not there {}".format(*left))
    show(arguments, table, *lines)


def index(arguments: argparse.Namespace) -> None:
    """Read the headers of all DICOM files below FOLDER (any naming, any depth, zips too), group them by patient and
    study, join the reports, and write a manifest for 'source: manifest'. Studies are dated by their StudyDate, else
    AcquisitionDate, else SeriesDate. What cannot stand in a manifest is counted by reason.
    """
    from fedtar_flare.curation.archive import index_folder, write_manifest
    from fedtar_flare.curation.archive_reports import join_reports
    from fedtar_flare.imaging.workers import worker_count

    workers = worker_count(arguments.workers)
    options = given(arguments, "modality", "links")
    with ProgressLine() as line:
        index = index_folder(arguments.folder, workers=workers, say=line, every=line.every, **options)
    join_reports(index, arguments.reports)
    rows = write_manifest(index, arguments.out)
    patients = len({study.patient_id for study in index.studies})
    notes = dict(sorted(index.notes.items()))
    counts = {"manifest": arguments.out, "files": index.files, "dicom_files": index.dicom, "studies": rows}
    counts |= {"patients": patients, "left_out": index.rejected(), "passed_over": notes}
    counts["reports_without_study"] = len(index.spare)
    lines = [f"{arguments.out}: {rows} studies of {patients} patients ({index.dicom} DICOM files of {index.files})"]
    lines += index.lines()
    lines += [f"  passed over within studies, {reason}: {n}" for reason, n in notes.items()]
    show(arguments, counts, *lines, f"Look at it all: fedtar data check {arguments.out}")


def check(arguments: argparse.Namespace) -> int:
    """Read every row and open every image of a manifest, a folder with manifest.csv, or a site file. Prints a summary
    and writes a page with histograms and small pictures; both are for the site alone.
    """
    from fedtar_flare.curation.check import check
    from fedtar_flare.curation.page import data_page
    from fedtar_flare.imaging.workers import worker_count

    workers = worker_count(arguments.workers)
    with ProgressLine() as line:
        findings = check(arguments.target, workers=workers, thumbnails=arguments.thumbnails, say=line, every=line.every)
    page = write_text(arguments.out, data_page(findings), PRIVATE)
    summary = findings.summary() | {"page": str(page)}
    show(arguments, summary, *_lines(findings, summary))
    return 1 if findings.rejected or findings.shared or not findings.patients else 0


def _lines(findings: Check, summary: dict[str, Any]) -> list[str]:
    from fedtar_flare.curation.check import SHARED_HELP

    per_patient = ", ".join(f"{n}: {count}" for n, count in summary["visits_per_patient"].items())
    spreads = {"days between visits": "gap_days", "age in years": "age", "words per report": "report_words"}
    if findings.modality == "ct":
        spreads |= {"slices per CT": "slices", "slice spacing in mm": "slice_spacing_mm"}
    lines = [f"{findings.source}: {summary['patients']} patients, {summary['visits']} visits that can be used"]
    lines.append(f"  visits per patient   {per_patient or '-'}")
    for name, key in spreads.items():
        if (values := summary[key])["n"]:
            form = ".0f" if key == "gap_days" else ".4g"
            median, least, most = (format(values[of], form) for of in ("median", "min", "max"))
            unknown = f", {n} unknown" if (n := values.get("unknown")) else ""
            lines.append(f"  {name:<21}median {median} ({least} to {most}){unknown}")
    lines += [f"  noted, {reason}: {n}" for reason, n in summary["notes"].items()]
    for kind, visits in sorted(findings.identifiers.items()):
        lines.append(f"  likely identifier in the report, {kind}: {len(visits)}, such as in {', '.join(visits[:3])}")
    lines += [f"  excluded by the site: {findings.excluded} visits"] if findings.excluded else []
    for reason, n in findings.rejections.items():
        lines += [f"  REJECTED, {reason}: {n}", *(f"    {text}" for text in summary["examples"][reason])]
    if findings.shared:
        shared = summary["shared_pictures"]
        lines.append(f"  SAME PICTURE under different patients: {shared['pairs']} pairs, {shared['patients']} patients")
        lines += [*(f"    {text}" for text in shared["examples"]), f"    {SHARED_HELP}"]
    rate = f", {findings.images / findings.seconds:.1f} a second" if findings.seconds > 0 else ""
    lines.append(f"  {findings.images} images opened{rate}")
    return [*lines, f"Page (patients' images: it stays at this site): {summary['page']}"]


def prepare(arguments: argparse.Namespace) -> None:
    """Read every study that the site file leads to and keep what the model will see of it, as the handshake of a job
    would; what is there already is only looked up. Take preset and settings from the study lead ('fedtar export
    --describe'). May be stopped and started again at any time.
    """
    from fedtar_flare.core.settings import build
    from fedtar_flare.learning.config import DataConfig
    from fedtar_flare.models.config import preset
    from fedtar_flare.site.cohort import prepare_site
    from fedtar_flare.site.context import kit_of
    from fedtar_flare.site.site_file import SITE_FILE, cache_folder, read_site_file

    settings = grouped(arguments.set, GROUPS)
    kit = kit_of(arguments.kit) if arguments.kit else None
    file, name = (kit / "local" / SITE_FILE, kit.name) if kit else (arguments.site_file, arguments.site_file.stem)
    config = read_site_file(file, simulated=True)  # no key is made for this; what is prepared does not depend on it
    with ProgressLine() as line:
        cohort, done = prepare_site(
            config,
            arguments.site or name,
            model=preset(arguments.preset, **settings.get("model", {})),
            data=build(DataConfig, settings.get("data"), "data"),
            reports=False,
            say=line,
            every=line.every,
            **given(arguments, "time_steps", "seed", "workers"),
        )
    before = len(cohort.visits) - done.computed
    left_out = dict(sorted(cohort.rejected.items()))
    folder = cache_folder(config) / "prepared"
    data = {"prepared": done.computed, "there": before, "left_out": left_out, "folder": folder}
    text = f"{file}: {done.computed} images prepared, {before} were there already ({folder})"
    show(arguments, data, text, *(f"  left out, {reason}: {n}" for reason, n in left_out.items()))


def synth(arguments: argparse.Namespace) -> None:
    """Write synthetic hospitals: DICOM series, reports, a manifest and a site file for each, and truth.json with
    everything that was planted. Train on them with FEDTAR_SITES=OUT/sites, like on real data.
    """
    from fedtar_flare.core.settings import build
    from fedtar_flare.data.cells import Timeline
    from fedtar_flare.runtime.simulation import site_names
    from fedtar_flare.synthetic.cohort import write_sites
    from fedtar_flare.synthetic.course import CohortOptions

    options = build(CohortOptions, pairs(arguments.option, "--option"), "--option")
    names, timeline = site_names(arguments.sites), Timeline(arguments.time_steps)
    size = given(arguments, "patients", "seed")
    written = write_sites(arguments.out, names, timeline=timeline, options=options, **size)
    line = "{0.site}: {0.patients} patients, {0.visits} visits: {0.manifest} (truth: {0.truth.name})"
    how_to = _how_to_train(arguments.out, written, arguments.time_steps)
    show(arguments, [vars(site) for site in written], *map(line.format, written), how_to)


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
        of_steps = ", ".join(f"t={t}: {n}" for t, n in enumerate(site.visits_per_step, start=1))
        of_splits = ", ".join(f"{split}: {n}" for split, n in site.patients_per_split.items())
        lines.append(f"{site.site:<{width}}  {site.patients} patients ({of_splits}), {site.visits} visits ({of_steps})")
    lines += ["Left out: " + ", ".join(f"{reason} {n}" for reason, n in left_out.items())] if left_out else []
    steps = max(t for site in sites for t, n in enumerate(site.visits_per_step, start=1) if n or t == 1)
    how_to = _how_to_train(arguments.out, sites, steps)
    show(arguments, {"sites": [vars(site) for site in sites], "left_out": left_out}, *lines, how_to)


def _how_to_train(out: Path, sites: Sequence[Any], time_steps: int) -> str:
    folder, names = shlex.quote(str(out / "sites")), ",".join(site.site for site in sites)
    return f"Train on them: FEDTAR_SITES={folder} fedtar simulate -n {names} --time-steps {time_steps}"
