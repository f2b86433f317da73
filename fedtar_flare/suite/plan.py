"""The runs of a suite: each arm (a method and its settings) with every seed."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_text
from fedtar_flare.core.settings import build
from fedtar_flare.registry import method
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.simulation import site_names
from fedtar_flare.site.site_file import SITES_VARIABLE, SiteConfig, load_site_config, sites_folder
from fedtar_flare.suite.file import Arm, Suite
from fedtar_flare.synthetic.course import CohortOptions
from fedtar_flare.version import __version__

FORMAT = 3  # of a result; results of another format are made anew
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def cohorts(suite: Suite) -> dict[str, dict[str, Any]]:
    """Options of synthetic cohorts by hospital, the suite's and the hospital's own; empty where it sets none."""
    shared = {key: value for key, value in suite.cohort.items() if not isinstance(value, Mapping)}
    out = {site: shared | suite.cohort.get(site, {}) for site in (*suite.sites, *suite.outside)}
    for site, options in out.items():
        build(CohortOptions, options, f"cohort of {site}")
    return out if suite.cohort else {}


@contextmanager
def site_files(suite: Suite, folder: Path) -> Iterator[None]:
    """Within the context, FEDTAR_SITES names site files of the suite's cohorts; no change where it sets none."""
    if not suite.cohort:
        yield
        return
    if (named := sites_folder()) is not None:
        raise ConfigError(f"the suite describes synthetic hospitals; unset {SITES_VARIABLE}, which names {named}")
    for site, options in cohorts(suite).items():
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
    """One run of a suite: an arm with a seed."""

    suite: Suite
    name: str  # of the arm
    arm: Arm
    seed: int
    recipe: dict[str, Any]  # arguments of the recipe, seed included
    digest: str
    """Of everything that decides the result, defaults included: a result with an equal digest is not made again."""

    @property
    def writes_reports(self) -> bool:
        """Whether its method writes reports; one that does not learns tasks of classification."""
        return method(self.arm.method).reports

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.seed}-{self.digest}"

    def build(self, threads: int = 1) -> MethodRecipe:
        """The recipe, with so many torch threads unless its settings say; ConfigError names the arm."""
        try:
            recipe: MethodRecipe = MethodRecipe(self.arm.method, **{"torch_threads": threads} | self.recipe)
        except ConfigError as error:
            raise ConfigError(f"arm '{self.name}': {error}") from error
        if recipe.controller.config.rounds_per_period:
            raise ConfigError(f"arm '{self.name}': a suite has no visits that arrive by periods (rounds_per_period)")
        return recipe


def experiments(suite: Suite) -> list[Experiment]:
    """The runs of a suite, seed by seed, so that every arm has a first result early."""
    site_names(suite.sites)
    arms = {name: build(Arm, values, f"arm '{name}'") for name, values in suite.arms.items()}
    if odd := [name for name in arms if not _NAME.fullmatch(name)]:
        raise ConfigError(f"arm '{odd[0]}': a name has lower-case letters, digits, '.', '_' and '-' alone")
    _check_kinds(suite, arms)
    hospitals = {"sites": suite.sites, "outside": suite.outside, "split": suite.outside_split, "cohort": cohorts(suite)}
    out = []
    for seed, (name, arm) in product(suite.seeds, arms.items()):
        recipe = merged(suite.settings, arm.settings) | {"seed": seed}
        experiment = Experiment(suite, name, arm, seed, recipe, "")
        key = json.dumps([FORMAT, __version__, arm.method, experiment.build().resolved(), hospitals], sort_keys=True)
        out.append(replace(experiment, digest=hashlib.sha256(key.encode()).hexdigest()[:12]))
    return out


def _check_kinds(suite: Suite, arms: Mapping[str, Arm]) -> None:
    """Refuse a suite whose arms cannot stand in one table, or that asks of classifiers what only reports answer."""
    reports = {arm.method for arm in arms.values() if method(arm.method).reports}
    classify = {arm.method for arm in arms.values()} - reports
    if reports and classify:
        text = f"arms: {min(classify)} classifies images and {min(reports)} writes reports"
        raise ConfigError(f"{text}, which have no score in common")
    given = {"outside": suite.outside, "drawn": suite.drawn == "studies"}
    if classify and (wrong := [name for name, value in given.items() if value]):
        raise ConfigError(f"{wrong[0]}: for methods that write reports; {min(classify)} classifies images")


def merged(common: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them, group by group."""
    out = dict(common)
    for name, value in over.items():
        group = out.get(name)
        out[name] = merged(group, value) if isinstance(group, Mapping) and isinstance(value, Mapping) else value
    return out
