"""The site's patients, without those it excludes, and the key: the secret that decides splits and hides identities."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import private_folder, read_lines
from fedtar_flare.core.settings import build
from fedtar_flare.core.text import UNFIT_IN_ID
from fedtar_flare.data.cells import Timeline, read_key
from fedtar_flare.data.cohort import EXCLUDED, Cohort
from fedtar_flare.data.sources import read_source
from fedtar_flare.site.context import home, kit_of
from fedtar_flare.site.site_file import SiteConfig, cache_folder, read_site_file, state_folder

if TYPE_CHECKING:
    from fedtar_flare.imaging.pipeline import Preparation
    from fedtar_flare.imaging.transforms import InputSize
    from fedtar_flare.learning.config import DataConfig
    from fedtar_flare.learning.report_labeler import ReportLabeler

KEY_FILE = "fedtar.key"
logger = logging.getLogger(__name__)


def load_cohort(
    config: SiteConfig,
    site_name: str,
    *,
    timeline: Timeline,
    seed: int = 0,
    synthetic_patients: int = 48,
    workspace: Path | None = None,
    key: bytes | None = None,
) -> Cohort:
    """Read the site's patients, without those it excludes."""
    if config.source == "synthetic":
        from fedtar_flare.synthetic.cohort import synthetic_cohort
        from fedtar_flare.synthetic.course import CohortOptions

        whole = synthetic_cohort(
            site_name,
            folder=config.path or cache_folder(config) / "synthetic",
            patients=synthetic_patients,
            timeline=timeline,
            seed=seed,
            options=build(CohortOptions, config.options, f"{config.origin or 'synthetic cohort'}: options"),
        )
    else:
        assert config.path is not None  # a SiteConfig of these sources has one
        source = read_source(config.source, config.path, config.options)
        if key is None:
            key = derived_key(site_name) if config.simulated else site_key(key_folder(config, workspace))
        patients = source.patients()  # which counts what it rejects
        whole = Cohort(
            site_name, patients, key=key, timeline=timeline, rejected=source.rejected(), splits=source.splits
        )
    if not (excluded := excluded_patients(config)):
        return whole
    if absent := len(excluded.difference(*(ids_of(patient.patient_id) for patient in whole.patients))):
        logger.warning("%d id(s) of the exclusion list %s are no patients of this site", absent, config.exclude)
    return whole.leaving_out(lambda visit: EXCLUDED if excluded & ids_of(visit.patient_id) else None)


def prepare_site(
    config: SiteConfig,
    site_name: str,
    *,
    model: InputSize,
    data: DataConfig,
    time_steps: int,
    seed: int,
    workspace: Path | None = None,
    reports: bool = True,
    **options: Any,
) -> tuple[Cohort, Preparation]:
    """Read the site's patients (:func:`load_cohort`) and prepare every image as a task of a job opens it."""
    from fedtar_flare.imaging.pipeline import prepare_visits

    whole = load_cohort(
        config,
        site_name,
        timeline=data.timeline(time_steps),
        seed=seed,
        synthetic_patients=data.synthetic_patients,
        workspace=workspace,
    )
    left_out, visits = {}, []
    for visit in whole.visits:
        if reports and not visit.report:
            left_out[visit] = "empty-report"
        else:
            visits.append(visit)
    folder = cache_folder(config) / "prepared"
    prepared = prepare_visits(visits, model, folder, data.transforms, limits=config.limits, **options)
    return prepared.cohort(whole, left_out), prepared


def labeler_of_site(config: SiteConfig) -> ReportLabeler | None:
    """Load the neural labeler that the site file names, which stores references' labels beside the prepared images."""
    if config.labeler is None:
        return None
    from fedtar_flare.learning.device import choose_device
    from fedtar_flare.learning.report_labeler import ReportLabeler

    return ReportLabeler(config.labeler, choose_device(config.device)[0], cache_folder(config) / "prepared")


def ids_of(patient_id: str) -> frozenset[str]:
    """What an exclusion list may call a patient: ``fedtar data index`` puts ``^^^`` and the issuer behind some ids."""
    return frozenset((patient_id, patient_id.partition("^^^")[0]))


def excluded_patients(config: SiteConfig) -> frozenset[str]:
    """Read the exclusion list."""
    if config.exclude is None:
        return frozenset()
    what = "the site's exclusion list"
    lines = read_lines(config.exclude, what)
    for number, line in enumerate(lines, 1):
        if UNFIT_IN_ID.search(line.strip()):
            text = f"{config.exclude}, line {number}: a control character, so that nobody's id is like it; correct it"
            raise ConfigError(text, public=f"{what} cannot be read")
    return frozenset(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def patients_of_site_file(
    file: Path, *, job_seed: int | None = None, key: Path | None = None
) -> tuple[Cohort, SiteConfig]:
    """Read the patients of a site file outside a run, split with the key that its site has in a run; one time step."""
    kit, folder = None, file.expanduser().resolve().parent
    if folder.name == "local":
        with suppress(ConfigError):
            kit = kit_of(folder)
    if job_seed is not None and (kit is not None or key is not None):
        raise ConfigError(f"{file}: --job-seed is for a simulated site, which has neither startup kit nor --key")
    config = read_site_file(file, simulated=job_seed is not None, for_jobs=False)
    if job_seed is None and config.source == "synthetic":
        raise ConfigError(f"{file}: patients of a synthetic cohort are split by the seed of the job: give --job-seed")
    with_state = config.state_dir is not None and (config.state_dir / KEY_FILE).is_file()
    if job_seed is None and key is None and kit is None and not with_state:
        cure = "give the site's key (--key STATE/fedtar.key), or the seed of simulated jobs (--job-seed)"
        raise ConfigError(f"{file} does not say which patients its site tests on: {cure}")
    secret = read_key(key) if key is not None else None
    cohort = load_cohort(config, file.stem, timeline=Timeline(1), seed=job_seed or 0, workspace=kit, key=secret)
    return cohort, config


def key_folder(config: SiteConfig | None, kit: Path | None) -> Path:
    """Folder of a real site's key: that of its state, else the site file's."""
    return state_folder(kit, config) or (config.origin.parent if config and config.origin else home())


def site_key(folder: Path) -> bytes:
    """The site's secret for keyed hashes, made once and for its owner alone. Back it up: splits depend on it."""
    file = folder / KEY_FILE
    if not file.exists():
        private_folder(folder)
        temporary = file.with_name(f".{KEY_FILE}.{os.getpid()}")
        with os.fdopen(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as handle:
            handle.write(secrets.token_hex(32) + "\n")
        try:
            os.link(temporary, file)  # fails when another process was first: its key counts
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return read_key(file)


def derived_key(site: str) -> bytes:
    """Derive the key of a simulated site with real data, so that runs of all seeds test on the same patients."""
    return hashlib.sha256(f"fedtar simulated site\x1f0\x1f{site}".encode()).digest()
