"""The sets of hospitals on which a suite runs its arms: as listed, each left out in turn, and all of a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from fedtar_flare.errors import ConfigError
from fedtar_flare.settings import build
from fedtar_flare.suite.file import GRID, Case, Hospital, Suite
from fedtar_flare.synthetic.course import CohortOptions


@dataclass(frozen=True)
class Variant:
    """Hospitals of a run.

    Args:
        name: empty for the suite's own.
        sites, outside: who takes part, and who gets the shared adapter alone.
        cohort: options of the synthetic cohorts, by hospital; empty where the suite says nothing of any.
        joins: round in which a hospital begins, of those that do not from the start.
        values: what makes it differ: of the grid, ``case`` or ``left_out``.
    """

    name: str
    sites: tuple[str, ...]
    outside: tuple[str, ...] = ()
    cohort: dict[str, dict[str, Any]] = field(default_factory=dict)
    joins: dict[str, int] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def variants(suite: Suite) -> list[Variant]:
    """All of a suite: its own hospitals, or its grid and cases; then each hospital left out.

    Raises:
        ConfigError: an option of a cohort, a hospital or a case does not fit.
    """
    own = _variant(suite, "", suite.sites, suite.hospitals)
    found = [_point(suite, values) for values in _points(suite)]
    for name, given in suite.cases.items():
        case = build(Case, given, f"case '{name}'")
        hospitals = {**suite.hospitals, **case.hospitals}
        sites = suite.sites[: case.among or None]
        if case.about not in sites:
            raise ConfigError(f"case '{name}': among {case.among} hospitals there is no {case.about}")
        found.append(replace(_variant(suite, name, sites, hospitals), values={"case": name}))
    for site in suite.sites if suite.leave_one_out else ():
        others = tuple(other for other in suite.sites if other != site)
        left_out = _variant(suite, f"without-{site}", others, suite.hospitals, outside=(site,))
        found.append(replace(left_out, values={"left_out": site}))
    return found if suite.joining else [own, *found]


def needed(suite: Suite, variant: Variant) -> Variant | None:
    """Hospitals on which an arm that shares nothing is run for a variant, None for none of them.

    What a hospital learns alone does not depend on the others. So of a grid it is run with the fewest hospitals, which
    are those whose gains are shown; in a case by the hospital that it is about (and, where that one comes late, by one
    that is there before, or no run could begin); and never with a hospital left out, to which it has nothing to give.
    """
    if "left_out" in variant.values:
        return None
    if "case" in variant.values:
        about = suite.cases[variant.values["case"]]["about"]
        first = next((s for s in variant.sites if s != about and s not in variant.joins), about)
        sites = tuple(s for s in variant.sites if s == about or (s == first and about in variant.joins))
        cohort = {site: options for site, options in variant.cohort.items() if site in sites}
        joins = {site: r for site, r in variant.joins.items() if site in sites}
        return replace(variant, sites=sites, outside=(), cohort=cohort, joins=joins)
    return variant if variant.values.get("hospitals", 0) <= min(suite.grid.get("hospitals", [0])) else None


def _points(suite: Suite) -> list[dict[str, Any]]:
    names = [name for name in GRID if name in suite.grid]
    combined = product(*(suite.grid[name] for name in names)) if names else ()
    return [dict(zip(names, values, strict=True)) for values in combined]


def _point(suite: Suite, values: Mapping[str, Any]) -> Variant:
    options = {name: value for name, value in values.items() if name != "hospitals"}
    sites = suite.sites[: values.get("hospitals", len(suite.sites))]
    name = "_".join(f"{key}-{value}" for key, value in values.items())
    return replace(_variant(suite, name, sites, suite.hospitals, options), values=dict(values))


def _variant(
    suite: Suite,
    name: str,
    sites: Sequence[str],
    hospitals: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    outside: tuple[str, ...] | None = None,
) -> Variant:
    known = {site: build(Hospital, values, f"hospital '{site}'") for site, values in hospitals.items()}
    outside = suite.outside if outside is None else outside
    cohort = {}
    for site in (*sites, *outside):
        own = known[site].cohort if site in known else {}
        cohort[site] = {**suite.cohort, **(options or {}), **own}
        build(CohortOptions, cohort[site], f"cohort of {site}")
    joins = {site: known[site].joins for site in sites if site in known and known[site].joins > 1}
    return Variant(name, tuple(sites), outside, cohort if any(cohort.values()) else {}, joins)
