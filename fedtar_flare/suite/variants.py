"""The sets of hospitals on which a suite runs its arms: what each of its scenarios stands for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import build
from fedtar_flare.suite.file import Scenario, Suite
from fedtar_flare.synthetic.course import CohortOptions

HOSPITALS = "hospitals"
"""How a point names the number of hospitals."""
LORA_RANK = "lora_rank"
"""Beside the options of a cohort, the one setting of a hospital's site file that a suite says."""


@dataclass(frozen=True)
class Variant:
    """Hospitals of a run: who takes part, and who is outside and gets the shared adapter alone."""

    scenario: str
    """Empty for the suite's own hospitals."""
    sites: tuple[str, ...]
    outside: tuple[str, ...] = ()
    outside_split: str = "test"
    """Whom those outside are scored on: their test patients, or ``all``."""
    cohort: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of synthetic cohorts and :data:`LORA_RANK`, by hospital; empty where the suite says nothing of any."""
    joins: dict[str, int] = field(default_factory=dict)
    """Round in which a hospital begins, of those that do not from the start."""
    point: dict[str, Any] = field(default_factory=dict)
    """What it takes from each list of its scenario: the number of hospitals, and options of the cohort."""
    compared: tuple[str, ...] = ()
    """Hospitals whose gain is shown: those that the scenario names, else those that are in all its points."""
    left_out: tuple[str, ...] = ()
    """Of the suite's hospitals, those that are outside."""
    alone: tuple[str, ...] = ()
    """Where an arm that shares nothing is run; what a hospital learns alone does not depend on others."""

    @property
    def name(self) -> str:
        """For file names and progress: the point of a scenario with lists, else the scenario."""
        said = "_".join(f"{key}-{value}" for key, value in self.point.items()) or self.scenario
        return re.sub(r"[^a-z0-9._]+", "-", said.lower()).strip("-")[:60]

    def on(self, sites: Sequence[str]) -> "Variant":
        """The same with some of the hospitals alone, and nobody outside."""
        cohort = {site: options for site, options in self.cohort.items() if site in sites}
        joins = {site: r for site, r in self.joins.items() if site in sites}
        return replace(self, sites=tuple(sites), outside=(), cohort=cohort, joins=joins)


def variants(suite: Suite) -> list[Variant]:
    """All of a suite, scenario by scenario; :class:`ConfigError` where one or an option of a cohort does not fit."""
    several = {name: build(Scenario, given, f"scenario '{name}'") for name, given in suite.scenarios.items()}
    return [one for name, scenario in (several or {"": Scenario()}).items() for one in _expanded(suite, name, scenario)]


def _expanded(suite: Suite, name: str, scenario: Scenario) -> list[Variant]:
    """A variant for each combination of what the scenario lists."""
    numbers = scenario.sites or (len(suite.sites),)
    if max(numbers) > len(suite.sites):
        raise ConfigError(f"scenario '{name}': sites must be numbers from 1 to {len(suite.sites)}")
    named = {key for key, value in scenario.cohort.items() if isinstance(value, Mapping)} | scenario.joins.keys()
    lists = {key: value for key, value in scenario.cohort.items() if isinstance(value, list | tuple)}
    found = []
    for number, *values in product(numbers, *lists.values()):
        sites = tuple(site for site in suite.sites[:number] if site not in scenario.outside)
        outside = scenario.outside or suite.outside
        if odd := sorted(named - {*sites, *outside} | {*scenario.joins, *scenario.compared} - set(sites)):
            raise ConfigError(f"scenario '{name}': among the {len(sites)} hospitals that take part is no '{odd[0]}'")
        if not sites:
            raise ConfigError(f"scenario '{name}': nobody takes part")
        point = dict(zip(lists, values, strict=True))
        compared = tuple(site for site in sites if site in (scenario.compared or named)) or sites[: min(numbers)]
        joins = {site: r for site, r in scenario.joins.items() if r > 1}
        left_out = tuple(site for site in outside if site in suite.sites)
        alone: tuple[str, ...] = ()
        if number == min(numbers) and not left_out:
            # no run begins without a hospital that is there from the start
            first = [site for site in sites if site not in joins][:1] if set(compared) <= joins.keys() else []
            alone = tuple(site for site in sites if site in (*first, *compared))
        found.append(
            Variant(
                scenario=name if scenario != Scenario() else "",
                sites=sites,
                outside=outside,
                outside_split=suite.outside_split,
                cohort=_cohorts(suite, scenario.cohort | point, (*sites, *outside)),
                joins=joins,
                point=({HOSPITALS: number} if len(numbers) > 1 else {}) | point,
                compared=compared,
                left_out=left_out,
                alone=alone,
            )
        )
    return found


def _cohorts(suite: Suite, changed: Mapping[str, Any], sites: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by hospital: the suite's, the scenario's, and the hospital's own of both."""
    parts = (suite.cohort, changed)
    shared = {key: value for part in parts for key, value in part.items() if not isinstance(value, Mapping)}
    found = {}
    for site in sites:
        found[site] = shared | {key: value for part in parts for key, value in part.get(site, {}).items()}
        own = {name: value for name, value in found[site].items() if name != LORA_RANK}
        build(CohortOptions, own, f"cohort of {site}")
    return found if any(found.values()) else {}
