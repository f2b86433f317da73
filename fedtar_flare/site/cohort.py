"""The site's patients, read from the source that its site file names, without those that it excludes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtar_flare.data.cohort import EXCLUDED, Cohort, Visit
from fedtar_flare.data.sources import read_source
from fedtar_flare.data.timeline import Timeline
from fedtar_flare.errors import ConfigError
from fedtar_flare.settings import build
from fedtar_flare.site.key import derived_key, site_key
from fedtar_flare.site.site_file import SiteConfig, cache_folder

if TYPE_CHECKING:
    from fedtar_flare.imaging.pipeline import Preparation
    from fedtar_flare.imaging.transforms import InputSize
    from fedtar_flare.learning.config import DataConfig


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
    """The site's patients, without those it excludes.

    ``seed`` is that of the synthetic cohort (of ``synthetic_patients``) and of any simulated site's hash key; a real
    site keeps its key in ``workspace``, its FLARE workspace, unless ``key`` gives it. Raises ConfigError for a wrong
    setting, DataError if nothing is usable.
    """
    whole = _read(config, site_name, timeline, seed, synthetic_patients, workspace, key)
    excluded = _excluded_visits(config, whole)
    return whole.leaving_out(excluded.get) if excluded else whole


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
    """As :func:`load_cohort`, with every image prepared as a task of a job opens it; also says what there was to do.

    With ``reports``, visits without one are left out. What is left out for any reason is left out at once, so a task
    has one cohort. ``options`` are ``workers``, ``say`` and ``every`` of
    :func:`fedtar_flare.imaging.pipeline.prepare_visits`.
    """
    from fedtar_flare.imaging.pipeline import prepare_visits

    whole = _read(config, site_name, data.timeline(time_steps), seed, data.synthetic_patients, workspace)
    without = {visit: "empty-report" for visit in whole.visits if reports and not visit.report}
    without |= _excluded_visits(config, whole)
    kept = [visit for visit in whole.visits if visit not in without]
    place, limits = cache_folder(config) / "prepared", config.limits
    done = prepare_visits(kept, model, place, data.transforms, limits=limits, **options)
    without |= {visit: error.reason for visit, error in done.errors.items()}
    return whole.leaving_out(without.get, prepared=done.entries), done


def _read(
    config: SiteConfig,
    site_name: str,
    timeline: Timeline,
    seed: int,
    synthetic_patients: int,
    workspace: Path | None,
    key: bytes | None = None,
) -> Cohort:
    """All of the site's patients; arguments as of :func:`load_cohort`."""
    if config.source == "synthetic":
        from fedtar_flare.synthetic.cohort import synthetic_cohort
        from fedtar_flare.synthetic.course import CohortOptions

        return synthetic_cohort(
            site_name,
            folder=config.path or cache_folder(config) / "synthetic",
            patients=synthetic_patients,
            timeline=timeline,
            seed=seed,
            options=build(CohortOptions, config.options, f"{config.origin or 'synthetic cohort'}: options"),
        )
    assert config.path is not None  # a SiteConfig of these sources has one
    reading = read_source(config.source, config.path, config.options)
    if key is None:
        key = derived_key(seed, site_name) if config.simulated else site_key(_key_folder(config, workspace))
    return Cohort(site_name, reading.patients(), key=key, timeline=timeline, rejected=reading.rejected())


def _excluded_visits(config: SiteConfig, cohort: Cohort) -> dict[Visit, str]:
    """Visits of patients on the exclusion list, with the reason."""
    excluded = excluded_patients(config)
    absent = len(excluded - {patient.patient_id for patient in cohort.patients})
    if absent:
        logger.warning("%d id(s) of the exclusion list %s are no patients of this site", absent, config.exclude)
    return {visit: EXCLUDED for visit in cohort.visits if visit.patient_id in excluded}


def excluded_patients(config: SiteConfig) -> frozenset[str]:
    """Patient ids of the exclusion list.

    Raises ConfigError if it cannot be read: the site then trains on nothing rather than on those patients.
    """
    if config.exclude is None:
        return frozenset()
    try:
        lines = config.exclude.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{config.exclude}: the exclusion list cannot be read ({error})",
            public="the site's exclusion list cannot be read",
        ) from error
    return frozenset(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _key_folder(config: SiteConfig, workspace: Path | None) -> Path:
    """Where a real site keeps its key: with its state, else in its kit, else beside its site file."""
    if config.state_dir is not None:
        return config.state_dir
    if workspace is not None:
        return workspace / "local"
    return config.origin.parent if config.origin is not None else cache_folder(config)
