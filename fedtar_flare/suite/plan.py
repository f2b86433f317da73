"""The runs of a suite: each arm (a method and its settings) with every seed, on every set of hospitals."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import build
from fedtar_flare.registry import contract_of, method
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.simulation import site_names
from fedtar_flare.suite.file import Arm, Suite
from fedtar_flare.suite.variants import Variant, variants
from fedtar_flare.version import __version__

FORMAT = 2
"""Of a result; results of another format are made anew."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Experiment:
    """One run of a suite: an arm with a seed on a set of hospitals."""

    name: str
    """Of the arm."""
    arm: Arm
    seed: int
    variant: Variant
    recipe: dict[str, Any]
    """Arguments of the recipe, seed included."""
    digest: str
    """Of everything that decides the result, defaults included: a result with an equal digest is not made again."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Hospitals that take part."""
        return self.variant.sites

    @property
    def writes_reports(self) -> bool:
        """Whether its method writes reports; one that does not learns tasks of classification."""
        return method(self.arm.method).reports

    @property
    def title(self) -> str:
        """For people: arm, hospitals and seed."""
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
    """List the runs of a suite, seed by seed, so that every arm has a first result early."""
    site_names(suite.sites)
    arms = {name: build(Arm, values, f"arm '{name}'") for name, values in suite.arms.items()}
    if odd := [name for name in arms if not _NAME.fullmatch(name)]:
        raise ConfigError(f"arm '{odd[0]}': a name has lower-case letters, digits, '.', '_' and '-' alone")
    _one_kind(suite, arms)
    sharing = {name for name, arm in arms.items() if contract_of(arm.method).shares}
    out = []
    for seed, variant in product(suite.seeds, variants(suite)):
        for name, arm in arms.items():
            if name in sharing or variant.isolated == variant.sites:
                out.append(_experiment(suite, name, arm, seed, variant))
            elif variant.isolated:
                out.append(_experiment(suite, name, arm, seed, variant.on(variant.isolated)))
    return out


def _one_kind(suite: Suite, arms: Mapping[str, Arm]) -> None:
    """Refuse a suite whose arms cannot stand in one table, or that asks of classifiers what only reports answer."""
    reports = {arm.method for arm in arms.values() if method(arm.method).reports}
    classify = {arm.method for arm in arms.values()} - reports
    if reports and classify:
        raise ConfigError(
            f"arms: {min(classify)} classifies images and {min(reports)} writes reports, which have no score in common"
        )
    given = {"outside": suite.outside, "scenarios": suite.scenarios, "drawn": suite.drawn == "studies"}
    if classify and (wrong := [name for name, value in given.items() if value]):
        raise ConfigError(f"{wrong[0]}: for methods that write reports; {min(classify)} classifies images")


def _experiment(suite: Suite, name: str, arm: Arm, seed: int, variant: Variant) -> Experiment:
    recipe = merged(suite.settings, arm.settings) | {"seed": seed}
    experiment = Experiment(name, arm, seed, variant, recipe, "")
    hospitals = {key: getattr(variant, key) for key in ("sites", "outside", "outside_split", "cohort", "joins")}
    key = json.dumps([FORMAT, __version__, arm.method, experiment.build().resolved(), hospitals], sort_keys=True)
    return replace(experiment, digest=hashlib.sha256(key.encode()).hexdigest()[:12])


def merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them, group by group."""
    out = dict(common)
    for name, value in own.items():
        group = out.get(name)
        out[name] = merged(group, value) if isinstance(group, Mapping) and isinstance(value, Mapping) else value
    return out
