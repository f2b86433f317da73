"""The sets of hospitals on which a suite runs its arms, and their site files for the time of a run."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_text
from fedtar_flare.core.settings import build
from fedtar_flare.site.site_file import SITES_VARIABLE, SiteConfig, load_site_config, sites_folder
from fedtar_flare.suite.file import Scenario, Suite
from fedtar_flare.synthetic.course import CohortOptions

HOSPITALS = "hospitals"
"""Name of the number of hospitals in a point."""


@dataclass(frozen=True)
class Variant:
    """Hospitals of a run: who takes part, and who is outside and gets the shared adapter alone."""

    scenario: str
    """Empty for the suite's own hospitals."""
    sites: tuple[str, ...]
    outside: tuple[str, ...] = ()
    outside_split: str = "test"
    """On whom hospitals outside are scored: their ``test`` patients, or ``all``."""
    cohort: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of synthetic cohorts by hospital; empty where the suite sets none."""
    joins: dict[str, int] = field(default_factory=dict)
    """By hospital, the round in which it begins, where that is not the first."""
    point: dict[str, Any] = field(default_factory=dict)
    """Its value from each list of its scenario: the number of hospitals, and options of the cohort."""
    compared: tuple[str, ...] = ()
    """Hospitals whose gain is shown: those that the scenario names, else those that are in all its points."""
    isolated: tuple[str, ...] = ()
    """Where an arm that shares nothing is run; what a hospital learns alone does not depend on others."""

    @property
    def name(self) -> str:
        """For file names and progress: the point of a scenario with lists, else the scenario."""
        text = "_".join(f"{key}-{value}" for key, value in self.point.items()) or self.scenario
        return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-")[:60]

    def on(self, sites: Sequence[str]) -> "Variant":
        """The same with some of the hospitals alone, and nobody outside."""
        cohort = {site: options for site, options in self.cohort.items() if site in sites}
        joins = {site: r for site, r in self.joins.items() if site in sites}
        return replace(self, sites=tuple(sites), outside=(), cohort=cohort, joins=joins)


def variants(suite: Suite) -> list[Variant]:
    """All of a suite, scenario by scenario; ConfigError where a scenario or an option of a cohort does not fit."""
    scenarios = {name: build(Scenario, values, f"scenario '{name}'") for name, values in suite.scenarios.items()}
    pairs = (scenarios or {"": Scenario()}).items()
    return [variant for name, scenario in pairs for variant in _expand(suite, name, scenario)]


def _expand(suite: Suite, name: str, scenario: Scenario) -> list[Variant]:
    """A variant for each combination of what the scenario lists."""
    numbers = scenario.sites or (len(suite.sites),)
    if max(numbers) > len(suite.sites):
        raise ConfigError(f"scenario '{name}': sites must be numbers from 1 to {len(suite.sites)}")
    named = {key for key, value in scenario.cohort.items() if isinstance(value, Mapping)} | scenario.joins.keys()
    lists = {key: value for key, value in scenario.cohort.items() if isinstance(value, list | tuple)}
    joins = {site: r for site, r in scenario.joins.items() if r > 1}
    out = []
    for number, *values in product(numbers, *lists.values()):
        sites = suite.sites[:number]
        if odd := sorted(named - {*sites, *suite.outside} | scenario.joins.keys() - set(sites)):
            raise ConfigError(f"scenario '{name}': among the {len(sites)} hospitals that take part is no '{odd[0]}'")
        point = dict(zip(lists, values, strict=True))
        compared = tuple(site for site in sites if site in named) or sites[: min(numbers)]
        isolated: tuple[str, ...] = ()
        if number == min(numbers):
            # no run begins without a hospital that takes part from the start
            first = [site for site in sites if site not in joins][:1] if set(compared) <= joins.keys() else []
            isolated = tuple(site for site in sites if site in (*first, *compared))
        out.append(
            Variant(
                scenario=name if scenario != Scenario() else "",
                sites=sites,
                outside=suite.outside,
                outside_split=suite.outside_split,
                cohort=_cohorts(suite, scenario.cohort | point, (*sites, *suite.outside)),
                joins=joins,
                point=({HOSPITALS: number} if len(numbers) > 1 else {}) | point,
                compared=compared,
                isolated=isolated,
            )
        )
    return out


def _cohorts(suite: Suite, changed: Mapping[str, Any], sites: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by hospital: the suite's, the scenario's, and the hospital's own of both."""
    parts = (suite.cohort, changed)
    shared = {key: value for part in parts for key, value in part.items() if not isinstance(value, Mapping)}
    out = {}
    for site in sites:
        out[site] = shared | {key: value for part in parts for key, value in part.get(site, {}).items()}
        build(CohortOptions, out[site], f"cohort of {site}")
    return out if any(out.values()) else {}


@contextmanager
def site_files(variant: Variant, folder: Path) -> Iterator[None]:
    """Within the context, FEDTAR_SITES names site files of the variant's cohorts; no change where it sets none.

    ConfigError where FEDTAR_SITES names other site files.
    """
    if not variant.cohort:
        yield
        return
    if (named := sites_folder()) is not None:
        raise ConfigError(f"the suite describes synthetic hospitals; unset {SITES_VARIABLE}, which names {named}")
    for site, options in variant.cohort.items():
        write_text(folder / f"{site}.yaml", yaml.safe_dump({"source": "synthetic", "options": options}))
    os.environ[SITES_VARIABLE] = str(folder.resolve())
    try:
        yield
    finally:
        del os.environ[SITES_VARIABLE]


def require_hospitals(suite: Suite) -> None:
    """Check, before anything runs, that each hospital of a suite has its site file and its data."""
    if suite.needs_site_files and sites_folder() is None:
        names = ", ".join((*suite.sites, *suite.outside))
        raise ConfigError(
            f"suite '{suite.name}' needs data of its own: make site files for {names} (fedtar data partition), and set "
            f"{SITES_VARIABLE} to their folder"
        )
    for site in (*suite.sites, *suite.outside):
        config = site_config(site)
        if suite.needs_site_files and config.source == "synthetic":
            raise ConfigError(f"{config.origin}: suite '{suite.name}' compares on real data, not on phantoms")


def site_config(site: str) -> SiteConfig:
    """A simulated site's configuration."""
    return load_site_config(site, workspace=None, simulator=True)
