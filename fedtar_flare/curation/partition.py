"""Divide one collection into the sites of a simulated federation: every patient in exactly one site.

The same patients and seed give the same sites, in whatever order the patients come.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.core.files import write_text
from fedtar_flare.data.cells import SPLITS, Split, split_of
from fedtar_flare.data.cohort import Patient
from fedtar_flare.data.sources import read_source
from fedtar_flare.data.sources.fields import labels_text
from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.data.sources.reading import Reading
from fedtar_flare.data.sources.tables import rows_of
from fedtar_flare.site.cohort import derived_key

WAYS = ("institution", "random", "clusters", "dirichlet")
DRAWS = 1000
Assignment = dict[str, str]  # patient id to site name


def shuffled(ids: Iterable[str], seed: int, use: str = "partition") -> list[str]:
    """Patient ids in an order that depends on the seed (and the use) alone."""
    return sorted(ids, key=lambda i: hashlib.sha256(f"{use}\x1f{seed}\x1f{i}".encode()).digest())


def by_institution(patients: Sequence[Patient], institutions: Mapping[str, str]) -> Assignment:
    """One site for every institution, named after it."""
    if not any(patient.patient_id in institutions for patient in patients):
        raise ConfigError("this source states no institutions; divide it by random, clusters or dirichlet")
    names: dict[str, str] = {}
    for institution in sorted({institutions.get(patient.patient_id, "unknown") for patient in patients}):
        if (first := names.setdefault(name := site_name(institution), institution)) != institution:
            raise ConfigError(f"institutions '{first}' and '{institution}' would both be the site '{name}'")
    return {p.patient_id: site_name(institutions.get(p.patient_id, "unknown")) for p in patients}


def by_random(patients: Sequence[Patient], sites: int, seed: int) -> Assignment:
    """Sites whose sizes differ by one patient at most."""
    ids = shuffled((patient.patient_id for patient in patients), seed)
    return {patient_id: f"site-{i % sites + 1}" for i, patient_id in enumerate(ids)}


def by_dirichlet(classes: Mapping[str, object], sites: int, concentration: float, seed: int) -> Assignment:
    """Spread every class of patients (``classes``: patient id to class) over the sites by draws from a Dirichlet
    distribution (Hsu et al. 2019): a ``concentration`` of 0.1 gives very unlike sites, 100 nearly equal mixtures.
    """
    if not (np.isfinite(concentration) and concentration > 0):
        raise ConfigError(f"concentration must be a positive number, not {concentration}")
    rng = np.random.default_rng(seed)
    members: dict[str, list[str]] = {}
    for patient_id in shuffled(classes, seed, "dirichlet"):
        members.setdefault(str(classes[patient_id]), []).append(patient_id)
    for _ in range(DRAWS):
        site_of: Assignment = {}
        for label in sorted(members):
            shares, total = rng.dirichlet(np.full(sites, concentration)), len(members[label])
            exact = shares / shares.sum() * total if shares.sum() > 0 else np.full(sites, total / sites)
            counts = np.floor(exact).astype(int)  # and the rest by largest remainders
            counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
            drawn = np.repeat(np.arange(sites), counts)
            site_of.update({i: f"site-{k + 1}" for i, k in zip(members[label], drawn, strict=True)})
        if len(set(site_of.values())) == sites:
            return site_of
    cure = f"take fewer of the {sites} sites or a larger concentration"
    raise ConfigError(f"{DRAWS} draws left a site without patients; {cure}")


def report_clusters(patients: Sequence[Patient], clusters: int, seed: int) -> dict[str, int]:
    """Patient to cluster of reports, numbered from the largest: k-means on TF-IDF of all of a patient's reports."""
    from sklearn.cluster import KMeans
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = {patient.patient_id: "\n".join(visit.report for visit in patient.visits) for patient in patients}
    ids = shuffled(texts, seed)
    if (n := len(set(texts.values()))) < clusters:
        raise DataError(f"{n} different texts make no {clusters} clusters", reason="too-few-texts")
    try:
        features = TfidfVectorizer(sublinear_tf=True, max_features=20_000).fit_transform([texts[i] for i in ids])
    except ValueError as error:
        raise DataError(f"the reports hold no words to cluster by ({error})", reason="too-few-texts") from error
    labels = KMeans(clusters, n_init=10, random_state=seed).fit_predict(features)
    sizes = np.bincount(labels, minlength=clusters)
    if sizes.min() == 0:
        raise DataError(f"the reports are too alike for {clusters} clusters", reason="too-few-texts")
    rank = {int(label): i for i, label in enumerate(np.argsort(-sizes, kind="stable"))}
    return {patient_id: rank[int(label)] for patient_id, label in zip(ids, labels, strict=True)}


def site_name(text: str) -> str:
    """A name that FLARE and file systems take: small letters, digits and hyphens."""
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in text.strip().lower())
    return "-".join(part for part in plain.split("-") if part) or "unknown"


@dataclass(frozen=True)
class PartitionedSite:
    """One site of the simulated federation."""

    site: str
    manifest: Path
    site_file: Path
    patients: int
    visits: int
    visits_per_step: tuple[int, ...]  # a patient's t-th visit at step t, later ones at the last step
    patients_per_split: dict[Split, int]  # as the source states it, or as runs with this site's name draw it


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
) -> tuple[list[PartitionedSite], dict[str, int]]:
    """Divide a source into sites and write ``out/<site>/manifest.csv`` and ``out/sites/<site>.yaml``."""
    if by not in WAYS:
        raise ConfigError(f"by '{by}' is not one of {', '.join(WAYS)}")
    if (by == "institution") != (sites is None):
        wrong = "needs -n, the number of sites" if sites is None else "the institutions are the sites, without -n"
        raise ConfigError(f"by {by}: {wrong}")
    if time_steps < 1:
        raise ConfigError(f"time_steps must be at least 1, not {time_steps}")
    if source == "synthetic":
        raise ConfigError("the synthetic cohort is made by site: fedtar data synth")
    reading = read_source(source, path, options)
    patients = reading.patients()
    if sites is None:
        site_of = by_institution(patients, reading.institutions)
    elif sites < 1:
        raise ConfigError(f"the number of sites must be at least 1, not {sites}")
    elif len(patients) < sites:
        raise ConfigError(f"{len(patients)} patient(s) cannot fill {sites} sites")
    elif by == "random":
        site_of = by_random(patients, sites, seed)
    elif by == "clusters":  # the largest first
        site_of = {patient_id: f"site-{n + 1}" for patient_id, n in report_clusters(patients, sites, seed).items()}
    else:
        kinds: Mapping[str, object]
        kinds = _labels(labels, patients) if labels else report_clusters(patients, classes, seed)
        site_of = by_dirichlet(kinds, sites, concentration, seed)
    names = sorted(set(site_of.values()), key=lambda name: (len(name), name) if by != "institution" else (0, name))
    targets = [target for name in names for target in (out / name, out / "sites" / f"{name}.yaml")]
    if taken := [target for target in targets if target.exists()]:
        raise ConfigError(f"{taken[0]} is there already; name another folder, or delete it first")
    members = {name: [p for p in patients if site_of[p.patient_id] == name] for name in names}
    written = [_write(name, out, members[name], reading, time_steps) for name in names]
    return written, reading.rejected()


def _write(name: str, out: Path, patients: Sequence[Patient], reading: Reading, time_steps: int) -> PartitionedSite:
    folder, site_file = out / name, out / "sites" / f"{name}.yaml"
    folder.mkdir(parents=True)
    steps, splits = [0] * time_steps, dict.fromkeys(SPLITS, 0)
    visits = [visit for patient in patients for visit in patient.visits]
    all_labeled, some_lateral = all(v.labels is not None for v in visits), any(v.lateral for v in visits)

    rows: list[dict[str, object]] = []
    for patient in patients:
        splits[reading.splits.get(patient.patient_id) or split_of(patient.patient_id, derived_key(name))] += 1
        for i, visit in enumerate(patient.visits):
            steps[min(i, time_steps - 1)] += 1
            row: dict[str, object] = {"patient_id": patient.patient_id, "study_datetime": visit.acquired.isoformat(" ")}
            row |= {"image": visit.image.absolute(), "report": visit.report, "sex": patient.sex or ""}
            row["age"] = "" if visit.age is None else f"{visit.age:.4f}".rstrip("0").rstrip(".")
            row["institution"] = reading.institutions.get(patient.patient_id, "")
            if reading.splits:
                row["split"] = reading.splits.get(patient.patient_id, "")
            if some_lateral:
                row["lateral"] = visit.lateral.absolute() if visit.lateral else ""
            if all_labeled:
                row["labels"] = labels_text(visit.labels or frozenset(), visit.uncertain)
            rows.append(row)
    write_rows(folder / "manifest.csv", rows)
    options = {"modality": patients[0].visits[0].modality}
    content = {"source": "manifest", "path": f"../{name}/manifest.csv", "options": options}
    write_text(site_file, yaml.safe_dump(content, sort_keys=False))
    return PartitionedSite(name, folder / "manifest.csv", site_file, len(patients), sum(steps), tuple(steps), splits)


def _labels(table: Path, patients: Sequence[Patient]) -> dict[str, str]:
    labels = {row["patient_id"]: row["label"] for row in rows_of(table, ("patient_id", "label"))}
    if without := [patient.patient_id for patient in patients if not labels.get(patient.patient_id)]:
        raise ConfigError(f"{table}: {len(without)} patient(s) have no label, such as {without[0]}")
    return {patient.patient_id: labels[patient.patient_id] for patient in patients}
