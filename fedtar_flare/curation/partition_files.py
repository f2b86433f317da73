"""A divided collection on disk: a manifest and a site file for every simulated site. Images stay where they are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedtar_flare.curation import partition
from fedtar_flare.data.cohort import Patient
from fedtar_flare.data.sources import read_source
from fedtar_flare.data.sources.fields import labels_text
from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.data.sources.tables import rows_of
from fedtar_flare.errors import ConfigError
from fedtar_flare.files import write_text


@dataclass(frozen=True)
class PartitionedSite:
    """One site of the simulated federation."""

    site: str
    manifest: Path
    site_file: Path
    patients: int
    visits: int
    visits_per_step: tuple[int, ...]  # a patient's t-th visit at step t, later ones at the last step


def partition_source(
    source: str,
    path: Path,
    out: Path,
    *,
    by: str,
    sites: int | None = None,
    seed: int = 0,
    time_steps: int = 3,
    concentration: float = 0.5,
    classes: int = 10,
    labels: Path | None = None,
    options: Mapping[str, Any] | None = None,
    relative: bool = False,
) -> tuple[list[PartitionedSite], dict[str, int]]:
    """Divide a source into sites and write ``out/<site>/manifest.csv`` and ``out/sites/<site>.yaml``.

    What the source's ``options`` do to reports is done here, once. ``by`` is of ``partition.WAYS``; all but
    ``institution`` need the number of ``sites``. ``dirichlet`` takes a ``concentration`` and ``classes``, the number of
    report clusters, or ``labels``, a CSV table with the columns ``patient_id`` and ``label``. With ``relative``, image
    paths are relative to the manifests' folders.

    Gives the sites by name, and by reason the number of studies left out. Raises ConfigError or DataError where
    settings or data do not allow the partition, or a site is there already.
    """
    if by not in partition.WAYS:
        raise ConfigError(f"by '{by}' is not one of {', '.join(partition.WAYS)}")
    if (by == "institution") != (sites is None):
        raise ConfigError(f"by {by}: " + ("the institutions are the sites" if sites else "how many sites?"))
    if time_steps < 1:
        raise ConfigError(f"time_steps must be at least 1, not {time_steps}")
    if source == "synthetic":
        raise ConfigError("the synthetic cohort is made by site: fedtar data synth")
    reading = read_source(source, path, options)
    patients = reading.patients()
    if by == "institution":
        site_of = partition.by_institution(patients, reading.institutions)
    elif by == "random":
        site_of = partition.by_random(patients, sites or 0, seed)
    elif by == "clusters":
        site_of = partition.by_clusters(patients, sites or 0, seed)
    else:
        kinds: Mapping[str, object]
        kinds = _labels(labels, patients) if labels else partition.report_clusters(patients, classes, seed)
        site_of = partition.by_dirichlet(kinds, sites or 0, concentration, seed)
    names = sorted(set(site_of.values()), key=lambda name: (len(name), name) if by != "institution" else (0, name))
    taken = [place for name in names for place in (out / name, out / "sites" / f"{name}.yaml") if place.exists()]
    if taken:
        raise ConfigError(f"{taken[0]} is there already; name another folder, or delete it first")
    members = {name: [p for p in patients if site_of[p.patient_id] == name] for name in names}
    written = [_write(name, out, members[name], reading.institutions, time_steps, relative) for name in names]
    return written, reading.rejected()


def _write(
    name: str, out: Path, patients: Sequence[Patient], institutions: Mapping[str, str], time_steps: int, relative: bool
) -> PartitionedSite:
    folder, site_file = out / name, out / "sites" / f"{name}.yaml"
    folder.mkdir(parents=True)
    steps = [0] * time_steps
    all_labeled = all(visit.labels is not None for patient in patients for visit in patient.visits)
    rows: list[dict[str, object]] = []
    for patient in patients:
        for i, visit in enumerate(patient.visits):
            steps[min(i, time_steps - 1)] += 1
            image = visit.image.absolute()
            rows.append(
                {
                    "patient_id": patient.patient_id,
                    "study_datetime": visit.acquired.isoformat(" "),
                    "image": os.path.relpath(image, folder.absolute()) if relative else image,
                    "report": visit.report,
                    "age": "" if visit.age is None else f"{visit.age:.4f}".rstrip("0").rstrip("."),
                    "sex": patient.sex or "",
                    "institution": institutions.get(patient.patient_id, ""),
                }
            )
            if all_labeled:
                rows[-1]["labels"] = labels_text(visit.labels or frozenset(), visit.uncertain)
    write_rows(folder / "manifest.csv", rows)
    options = {"modality": patients[0].visits[0].modality}
    content = {"source": "manifest", "path": f"../{name}/manifest.csv", "options": options}
    write_text(site_file, yaml.safe_dump(content, sort_keys=False))
    return PartitionedSite(name, folder / "manifest.csv", site_file, len(patients), sum(steps), tuple(steps))


def _labels(table: Path, patients: Sequence[Patient]) -> dict[str, str]:
    labels = {row["patient_id"]: row["label"] for row in rows_of(table, ("patient_id", "label"))}
    without = [patient.patient_id for patient in patients if not labels.get(patient.patient_id)]
    if without:
        raise ConfigError(f"{table}: {len(without)} patient(s) have no label, such as {without[0]}")
    return {patient.patient_id: labels[patient.patient_id] for patient in patients}
