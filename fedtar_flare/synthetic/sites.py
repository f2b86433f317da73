"""A synthetic cohort handed out as a hospital would hold it: DICOM folders, a manifest, a site file, and the truth."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_text
from fedtar_flare.data.cells import Timeline
from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.synthetic.cohort import INDEX, TRUTH, synthetic_cohort
from fedtar_flare.synthetic.course import CohortOptions


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
        counts = len(cohort.patients), len(rows)
        written.append(WrittenSite(name, folder / "manifest.csv", site_file, folder / TRUTH, *counts))
    return written
