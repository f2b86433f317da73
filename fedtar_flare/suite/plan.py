"""The runs of a suite: each arm (a method and its settings) with every seed, on every set of hospitals."""

import hashlib
import json
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
from fedtar_flare.registry import contract_of, method
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.simulation import site_names
from fedtar_flare.site.site_file import SITES_VARIABLE, SiteConfig, load_site_config, sites_folder
from fedtar_flare.suite.file import Arm, Scenario, Suite
from fedtar_flare.synthetic.course import CohortOptions
from fedtar_flare.version import __version__

FORMAT = 2  # of a result; results of another format are made anew
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
HOSPITALS = "hospitals"  # name of the number of hospitals in a point


@dataclass(frozen=True)
class Variant:
    """Hospitals of a run: who takes part, and who is outside and gets the shared adapter alone."""

    scenario: str  # empty for the suite's hospitals as they are listed
    sites: tuple[str, ...]
    outside: tuple[str, ...] = ()
    outside_split: str = "test"  # on whom hospitals outside are scored: their "test" patients, or "all"
    cohort: dict[str, dict[str, Any]] = field(default_factory=dict)  # options by hospital, where the suite sets any
    joins: dict[str, int] = field(default_factory=dict)  # rounds after the first in which hospitals begin
    point: dict[str, Any] = field(default_factory=dict)
    """Its value from each list of its scenario: the number of hospitals, and options of the cohort."""
    compared: tuple[str, ...] = ()  # whose gain is shown: those that the scenario names, else those in all its points
    local: tuple[str, ...] = ()  # where an arm that shares nothing is run: its result does not depend on others

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
        local: tuple[str, ...] = ()
        if number == min(numbers):
            # no run begins without a hospital that takes part from the start
            first = [site for site in sites if site not in joins][:1] if set(compared) <= joins.keys() else []
            local = tuple(site for site in sites if site in (*first, *compared))
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
                local=local,
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
        text = f"suite '{suite.name}' needs data of its own: make site files for {names} (fedtar data partition), and"
        raise ConfigError(f"{text} set {SITES_VARIABLE} to their folder")
    for site in (*suite.sites, *suite.outside):
        config = site_config(site)
        if suite.needs_site_files and config.source == "synthetic":
            raise ConfigError(f"{config.origin}: suite '{suite.name}' compares on real data, not on phantoms")


def site_config(site: str) -> SiteConfig:
    """A simulated site's configuration."""
    return load_site_config(site, workspace=None, simulator=True)


@dataclass(frozen=True)
class Experiment:
    """One run of a suite: an arm with a seed on a set of hospitals."""

    name: str  # of the arm
    arm: Arm
    seed: int
    variant: Variant
    recipe: dict[str, Any]  # arguments of the recipe, seed included
    digest: str
    """Of everything that decides the result, defaults included: a result with an equal digest is not made again."""

    @property
    def sites(self) -> tuple[str, ...]:
        return self.variant.sites

    @property
    def writes_reports(self) -> bool:
        """Whether its method writes reports; one that does not learns tasks of classification."""
        return method(self.arm.method).reports

    @property
    def title(self) -> str:
        return f"{self.name}{f', {self.variant.name}' if self.variant.name else ''}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        """``<arm>[-<variant>]-<seed>-<digest>``."""
        return "-".join(filter(None, (self.name, self.variant.name, str(self.seed), self.digest)))

    def build(self, threads: int = 1) -> MethodRecipe:
        """The recipe, with so many torch threads unless its settings say; ConfigError names the arm."""
        try:
            recipe: MethodRecipe = MethodRecipe(self.arm.method, **{"torch_threads": threads} | self.recipe)
        except ConfigError as error:
            raise ConfigError(f"arm '{self.name}': {error}") from error
        server = recipe.controller.config
        if server.rounds_per_period:
            raise ConfigError(f"arm '{self.name}': a suite has no visits that arrive by periods (rounds_per_period)")
        if late := [f"{s} (round {r})" for s, r in self.variant.joins.items() if r > server.num_rounds]:
            raise ConfigError(f"{late[0]} joins after the last round, {server.num_rounds}")
        return recipe


def experiments(suite: Suite) -> list[Experiment]:
    """The runs of a suite, seed by seed, so that every arm has a first result early."""
    site_names(suite.sites)
    arms = {name: build(Arm, values, f"arm '{name}'") for name, values in suite.arms.items()}
    if odd := [name for name in arms if not _NAME.fullmatch(name)]:
        raise ConfigError(f"arm '{odd[0]}': a name has lower-case letters, digits, '.', '_' and '-' alone")
    _check_kinds(suite, arms)
    sharing = {name for name, arm in arms.items() if contract_of(arm.method).shares}
    out = []
    for seed, variant in product(suite.seeds, variants(suite)):
        for name, arm in arms.items():
            if name in sharing or variant.local == variant.sites:
                out.append(_experiment(suite, name, arm, seed, variant))
            elif variant.local:
                out.append(_experiment(suite, name, arm, seed, variant.on(variant.local)))
    return out


def _check_kinds(suite: Suite, arms: Mapping[str, Arm]) -> None:
    """Refuse a suite whose arms cannot stand in one table, or that asks of classifiers what only reports answer."""
    reports = {arm.method for arm in arms.values() if method(arm.method).reports}
    classify = {arm.method for arm in arms.values()} - reports
    if reports and classify:
        text = f"arms: {min(classify)} classifies images and {min(reports)} writes reports"
        raise ConfigError(f"{text}, which have no score in common")
    given = {"outside": suite.outside, "scenarios": suite.scenarios, "drawn": suite.drawn == "studies"}
    if classify and (wrong := [name for name, value in given.items() if value]):
        raise ConfigError(f"{wrong[0]}: for methods that write reports; {min(classify)} classifies images")


def _experiment(suite: Suite, name: str, arm: Arm, seed: int, variant: Variant) -> Experiment:
    recipe = merged(suite.settings, arm.settings) | {"seed": seed}
    experiment = Experiment(name, arm, seed, variant, recipe, "")
    hospitals = {key: getattr(variant, key) for key in ("sites", "outside", "outside_split", "cohort", "joins")}
    key = json.dumps([FORMAT, __version__, arm.method, experiment.build().resolved(), hospitals], sort_keys=True)
    return replace(experiment, digest=hashlib.sha256(key.encode()).hexdigest()[:12])


def merged(common: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them, group by group."""
    out = dict(common)
    for name, value in over.items():
        group = out.get(name)
        out[name] = merged(group, value) if isinstance(group, Mapping) and isinstance(value, Mapping) else value
    return out
