"""The synthetic cohort on disk: written once as DICOM series and report files, read back from a small index.

Layout of a cohort's folder::

    index.json                     what the simulator reads: patients, visits, reports, findings
    truth.json                     everything that was planted: sizes, directions, groups, effects
    patients/<patient>/<visit>/    ct/0001.dcm ... and report.txt

A cohort is written into a hidden folder beside its place and moved there when it is whole: a half-written one is never
used, and of processes that start together the first one wins.
"""

import functools
import hashlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cohort import Cohort, Patient, Visit
from fedtar_flare.data.splits import synthetic_key
from fedtar_flare.data.timeline import Timeline
from fedtar_flare.synthetic.course import CohortOptions
from fedtar_flare.synthetic.vocabulary import kind_of

INDEX, TRUTH = "index.json", "truth.json"
_ABANDONED_AFTER_S = 24 * 3600
"""Age from which an unfinished folder of a killed process is removed."""


def synthetic_cohort(
    site: str, *, folder: Path, patients: int, timeline: Timeline, seed: int, options: CohortOptions | None = None
) -> Cohort:
    """Read the synthetic cohort of a site (milliseconds); where it is missing, make it first (0.1 s per visit)."""
    options = options or CohortOptions()
    if patients < 1:
        raise ConfigError(f"a synthetic cohort needs at least one patient, not {patients}")
    settings = {
        "site": site,
        "patients": patients,
        "time_steps": timeline.time_steps,
        "seed": seed,
        "alignment": timeline.alignment,
        "periods": list(map(datetime.isoformat, timeline.periods)),
        "options": options.to_dict(),
    }
    key = hashlib.sha256(json.dumps([_code_version(), settings], sort_keys=True).encode()).hexdigest()[:16]
    target = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', site)[:40]}-{key}"
    index = _read(target / INDEX)
    if index is None:
        _make(target, settings, timeline, options)
        index = _read(target / INDEX)
        assert index is not None
    return Cohort(site, _patients(index["patients"], target), key=synthetic_key(seed, site), timeline=timeline)


@functools.cache
def _code_version() -> str:
    """Hash of the code that decides about a cohort's content: a change of it makes a new cohort."""
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".py", ".yaml"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def _patients(entries: Sequence[Mapping[str, Any]], target: Path) -> list[Patient]:
    """The patients of an index, with images below ``place``."""
    patients = []
    for entry in entries:
        visits = []
        for visit in entry["visits"]:
            visits.append(
                Visit(
                    entry["patient_id"],
                    visit["visit_id"],
                    datetime.fromisoformat(visit["acquired"]),
                    target / visit["image"],
                    visit["report"],
                    "ct",
                    visit["age"],
                    findings=frozenset(visit["findings"]),
                    changes=frozenset(map(tuple, visit["changes"])),
                    labels=frozenset(map(kind_of, visit["findings"])),
                )
            )
        patients.append(Patient(entry["patient_id"], entry["sex"], tuple(visits)))
    return patients


def _make(target: Path, settings: Mapping[str, Any], timeline: Timeline, options: CohortOptions) -> None:
    """Write a cohort beside its place and move it there; leaves the other's when another process was first."""
    from fedtar_flare.synthetic.build import build_cohort  # draws images and loads pydicom

    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(".making-*"):
        if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(left, ignore_errors=True)
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
    finally:
        shutil.rmtree(making, ignore_errors=True)
