"""Deletion of what a site stores: state of runs, FLARE's folders of jobs, prepared images, audit.

While a run goes on, its state keeps what a resume needs (three rounds). :data:`RESUME_DAYS` after it ended well, a
running site deletes what only a resume from an earlier round needs; patients' adapters and scores stay until the site
deletes them, because only the site knows when a study is closed, or for ``retention_days`` of the site file. Never
deleted: the privacy ledger (forgetting what was spent would be a fresh budget) and the site's key; by retention neither
the audit, which is kept for those who ask later.
"""

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.data.cells import Timeline
from fedtar_flare.imaging.cache import file_identity, files_of
from fedtar_flare.learning.evaluation import REPORT_SCORES
from fedtar_flare.protocol.messages import RESERVED_RUNS
from fedtar_flare.reporting.examples import EXAMPLES_FILE, EXAMPLES_PAGE
from fedtar_flare.reporting.reading import READING
from fedtar_flare.site.audit import FOLDER
from fedtar_flare.site.cohort import load_cohort
from fedtar_flare.site.context import JOB_ID, Site, home
from fedtar_flare.site.job_records import end_runs
from fedtar_flare.site.site_file import SITE_FILE, SiteConfig, cache_folder, read_site_file
from fedtar_flare.site.state import TASK_SCORES, SiteState

RESUME_DAYS = 14


@dataclass
class Plan:
    """Paths to ``remove``, each with a description, and one line for each thing that stays (``stays``)."""

    remove: list[tuple[Path, str]] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)
    records: Path | None = None
    """The folder of a real site's own records."""

    def carry_out(self) -> None:
        """Delete the paths; one that is gone already is no error. A run whose state goes has ended at a real site."""
        ended = {path.parent.name for path, about in self.remove if about.startswith("state of run")}
        if self.records is not None and ended:
            end_runs(self.records, ended)
        for path, _ in self.remove:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for folder in {path.parent for path, about in self.remove if about.startswith("state of run")}:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def plan(
    site: Site,
    site_file: Path | None = None,
    *,
    run: str | None = None,
    patient: str | None = None,
    older_than: float | None = None,
    retention: bool = False,
    everything: bool = False,
    cache: bool = False,
) -> Plan:
    """Plan a deletion at a site."""
    file = site_file if site.simulated else site.workspace / "local" / SITE_FILE
    config = None
    if file is not None and (site.simulated or file.is_file()):
        config = read_site_file(file, simulated=site.simulated)
    state = site.state_root(config.state_dir if config else None)
    prepared = (cache_folder(config) if config else home()) / "prepared"
    runs = _runs(state, site.name if site.simulated else None)
    every = [(folder, f"state of run {name}") for name, folders in runs.items() for folder in folders]
    if not site.simulated:
        jobs = sorted(f for f in site.workspace.iterdir() if f.is_dir() and JOB_ID.fullmatch(f.name))
        every += [(folder, "FLARE's folder of a job") for folder in jobs]
    audits = [(file, "audit of a job") for file in sorted((site.records / FOLDER).glob("*.jsonl"))]
    result = Plan(records=None if site.simulated else site.records)
    if run is not None:
        if run not in runs:
            raise ConfigError(f"no run '{run}' below {state} (there: {', '.join(runs) or 'none'})")
        result.remove += [(folder, f"state of run {run}") for folder in runs[run]]
        result.stays.append(f"the audit of run {run} (what left; no data): deleted with --older-than or --all")
    if older_than is not None:
        if older_than < 0:
            raise ConfigError(f"--older-than must be a number of days, not {older_than:g}")
        result.remove += _older(every + audits, older_than)
    if retention:
        for folder, _ in _older([(f, name) for name, folders in runs.items() for f in folders], RESUME_DAYS):
            spare = SiteState(state, folder.parent.name, folder.name).spare()
            result.remove += [(file, f"what only a resume of run {folder.parent.name} needs") for file in spare]
        if config is not None and config.retention_days is not None:
            result.remove += _older(every, config.retention_days)
    if everything:
        result.remove += every + audits
    if (everything or cache) and prepared.is_dir():
        result.remove.append((prepared, "prepared images of all patients"))
    if patient is not None:
        if config is None:
            raise ConfigError("a patient's images are found through the site file, and this site has none")
        _plan_patient(result, config, site.name, patient, runs, prepared)
    result.stays += [
        "the shared model that left already: what it learnt here cannot be taken back from it",
        "FLARE's own log.txt of the kit and its neighbours: they describe the site, not its patients",
        "the privacy ledger and the key of this site, and which job began which run",
    ]
    return result


def _runs(root: Path, site: str | None) -> dict[str, list[Path]]:
    """Folders of state by run id, of one site or of all."""
    runs: dict[str, list[Path]] = {}
    for run in sorted(root.iterdir()) if root.is_dir() else ():
        if run.is_symlink() or not run.is_dir() or run.name in RESERVED_RUNS:
            continue
        if folders := [f for f in sorted(run.iterdir()) if f.is_dir() and site in (None, f.name)]:
            runs[run.name] = folders
    return runs


def summary(root: Path, retention_days: int | None) -> str:
    """Say how much state of runs there is below a folder, and in how many days which part of it goes."""
    folders = [folder for of_run in _runs(root, None).values() for folder in of_run]
    size = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
    spare = [folder for folder in folders if SiteState(root, folder.parent.name, folder.name).spare()]
    parts = [f"state of {len(folders)} runs, {size / 1e6:.1f} MB"]
    for what, days, concerned in (
        ("what only a resume needs", RESUME_DAYS, spare),
        ("all of a run", retention_days, folders),
    ):
        if days is not None and concerned:
            left = max(0.0, days - max(map(_age, concerned)))
            parts.append(f"{what} goes after {days} days without a change, next in {left:.0f}")
    return "; ".join(parts)


def _plan_patient(
    result: Plan, config: SiteConfig, site: str, patient: str, runs: dict[str, list[Path]], prepared: Path
) -> None:
    everyone = config.replace(exclude=None, simulated=True)  # also one who is excluded; and no key is made
    visits = [v for v in load_cohort(everyone, site, timeline=Timeline(1)).visits if v.patient_id == patient]
    states = [SiteState(f.parents[1], f.parent.name, f.name) for folders in runs.values() for f in folders]
    rounds = {state.folder: state.first_round(patient, config.policy.min_patients) for state in states}
    if not visits and not any(rounds.values()):
        where = f"no patient '{patient}' in {config.path or config.source}"
        raise ConfigError(f"{where}; if the rows are gone already, put them back for this, or use --cache and --run")
    images: set[Path] = set()
    for visit in visits:
        with suppress(DataError):  # the files are gone: nothing leads from them to the cache any more
            images.update(files_of(prepared, file_identity(visit.image)))
    result.remove += [(entry, f"prepared image of patient {patient}") for entry in sorted(images)]
    kinds = dict.fromkeys((EXAMPLES_FILE, EXAMPLES_PAGE), "example page with reports and images")
    kinds |= {"phi.html": "page with a point for each patient", "periods.html": "page of its patients' numbers"}
    kinds[f"{READING}*"] = "page of a blinded reading, its key or its images"
    kinds["export.key"] = "secret of the ids of exported pairs"
    kinds |= dict.fromkeys((f"{REPORT_SCORES}*", "ahead-*", f"{TASK_SCORES}*"), "scores of reports or images, with ids")
    for folder, before in rounds.items():
        result.remove += [(file, about) for name, about in kinds.items() for file in sorted(folder.glob(name))]
        if before:
            run = folder.parent.name
            learnt = f"what run {run} learnt, and a digest of the id; to have it made again, exclude the patient and"
            result.stays.append(f"{learnt} tell the lead: fedtar forget JOB --before {before}. Then purge --run {run}")
    result.remove += [(file, "labels of reports, by digest") for file in sorted(prepared.glob("labels-*.json"))]
    result.stays += [
        "images and reports, the hospital's own, and drafts and readers' answers elsewhere: nothing here deletes those",
        "prepared images made of files of the patient that were changed or are gone since: --cache finds all",
    ]
    if config.exclude is None:
        result.stays.append("the patient in coming runs: write the id into a file, named as 'exclude' in the site file")


def _age(path: Path) -> float:
    """Days since anybody wrote to one of its files; a deletion does not count."""
    written = max((f.stat().st_mtime for f in path.rglob("*") if f.is_file()), default=path.stat().st_mtime)
    return (time.time() - written) / 86400


def _older(items: list[tuple[Path, str]], days: float) -> list[tuple[Path, str]]:
    aged = [(path, about, _age(path)) for path, about in items]
    return [(path, f"{about}, last written {age:.0f} days ago") for path, about, age in aged if age > days]
