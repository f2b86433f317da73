"""The synthetic cohort on disk: written once as DICOM series and report files, read back from a small index.

It is written as a hidden folder and moved when it is whole: a half-written one is never used, and of processes that
start together the first one wins. Or it is handed out as a hospital would hold it, with a manifest and a site file.
"""

import functools
import hashlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_text
from fedtar_flare.data.cells import Timeline, synthetic_key
from fedtar_flare.data.cohort import Cohort, Patient, Visit
from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.synthetic.course import CohortOptions

INDEX, TRUTH = "index.json", "truth.json"
_ABANDONED_AFTER_S = 24 * 3600  # age from which an unfinished folder of a killed process is removed


def synthetic_cohort(
    site: str, *, folder: Path, patients: int, timeline: Timeline, seed: int, options: CohortOptions | None = None
) -> Cohort:
    """Read the synthetic cohort of a site (milliseconds); where it is missing, make it first (0.1 s per visit)."""
    options = options or CohortOptions()
    if patients < 1:
        raise ConfigError(f"a synthetic cohort needs at least one patient, not {patients}")
    settings = {"site": site, "patients": patients, "time_steps": timeline.time_steps, "seed": seed}
    periods = list(map(datetime.isoformat, timeline.periods))
    settings |= {"alignment": timeline.alignment, "periods": periods, "options": options.to_dict()}
    key = hashlib.sha256(json.dumps([_code_version(), settings], sort_keys=True).encode()).hexdigest()[:16]
    target = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', site)[:40]}-{key}"
    if not (target / INDEX).is_file():
        _make(target, settings, timeline, options)
    index = json.loads((target / INDEX).read_text())
    return Cohort(site, _patients(index["patients"], target), key=synthetic_key(seed, site), timeline=timeline)


@functools.cache
def _code_version() -> str:
    """Hash of the code that decides about a cohort's content: a change of it makes a new cohort."""
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".py", ".yaml"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _patients(entries: Sequence[Mapping[str, Any]], target: Path) -> list[Patient]:
    """The patients of an index, with images below ``target``."""
    patients = []
    for entry in entries:
        patient, visits, unreadable = entry["patient_id"], list[Visit](), list[Visit]()
        for visit in entry["visits"]:
            identifier, moment = visit["visit_id"], datetime.fromisoformat(visit["acquired"])
            image, report, age = target / visit["image"], visit["report"], visit["age"]
            findings, labels = frozenset(visit["findings"]), frozenset(visit["labels"])
            changes = frozenset(map(tuple, visit["changes"]))
            made = Visit(patient, identifier, moment, image, report, "ct", age, findings, changes, labels)
            (visits if visit["readable"] else unreadable).append(made)
        if visits:
            patients.append(Patient(patient, entry["sex"], tuple(visits), tuple(unreadable)))
    return patients


def _make(target: Path, settings: Mapping[str, Any], timeline: Timeline, options: CohortOptions) -> None:
    """Write a cohort beside its place and move it there; leaves the other's when another process was first."""
    from fedtar_flare.synthetic.build import build_cohort  # draws images and loads pydicom

    target.parent.mkdir(parents=True, exist_ok=True)
    for unfinished in target.parent.glob(".making-*"):
        if time.time() - unfinished.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(unfinished, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        index, truth = build_cohort(making, settings, timeline, options)
        (making / TRUTH).write_text(json.dumps(truth, indent=1))
        (making / INDEX).write_text(json.dumps(index))
        making.chmod(0o755)  # mkdtemp's 0700 would hide the cohort from other users of a shared folder
        if target.is_dir() and not (target / INDEX).exists():
            shutil.rmtree(target)  # what is left after somebody removed parts of it by hand
        try:
            making.rename(target)
        except OSError:
            if not (target / INDEX).exists():
                raise
    except OSError as error:
        error.filename = error.filename or str(target)  # a full disk names no file
        raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


@dataclass(frozen=True)
class WrittenSite:
    """One synthetic site on disk."""

    site: str
    manifest: Path
    site_file: Path
    truth: Path
    patients: int
    visits: int


def write_sites(
    out: Path, names: list[str], *, patients: int, timeline: Timeline, seed: int, options: CohortOptions | None = None
) -> list[WrittenSite]:
    """Write a cohort per site, ``<out>/<site>/`` with manifest and truth, and ``<out>/sites/<site>.yaml`` for
    FEDTAR_SITES.
    """
    if len(set(names)) != len(names):
        raise ConfigError(f"a site is named twice: {', '.join(names)}")
    if taken := [str(out / name) for name in names if (out / name).exists()]:
        raise ConfigError(f"{taken[0]} is there already; name another folder, or delete it first")
    written = []
    for name in names:
        cohort = synthetic_cohort(name, folder=out, patients=patients, timeline=timeline, seed=seed, options=options)
        source, folder = cohort.patients[0].visits[0].image.parents[3], out / name
        source.rename(folder)
        rows = []
        for patient in cohort.patients:
            for visit in (*patient.visits, *patient.unreadable):  # a row without an image keeps its place in time
                image, age = visit.image.relative_to(source), "" if visit.age is None else f"{visit.age:.1f}"
                files = {"image": image.as_posix(), "report_path": (image.parent / "report.txt").as_posix()}
                row = {"patient_id": patient.patient_id, "study_datetime": visit.acquired.isoformat(" "), **files}
                rows.append({**row, "age": age, "sex": patient.sex})
        write_rows(folder / "manifest.csv", rows)
        (folder / INDEX).unlink()  # the manifest takes its place
        content = yaml.safe_dump({"source": "manifest", "path": f"../{name}/manifest.csv"}, sort_keys=False)
        site_file = write_text(out / "sites" / f"{name}.yaml", content)
        paths = folder / "manifest.csv", site_file, folder / TRUTH
        written.append(WrittenSite(name, *paths, len(cohort.patients), len(rows)))
    return written
