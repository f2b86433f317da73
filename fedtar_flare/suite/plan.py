"""What an experiment compares: a suite of arms (a method and its settings), each run with every seed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from fedtar_flare.errors import ConfigError
from fedtar_flare.files import read_yaml
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.flare.simulation import site_names
from fedtar_flare.methods import load, method
from fedtar_flare.settings import Settings, build
from fedtar_flare.version import __version__

_ARM = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Arm(Settings):
    """One row of the comparison."""

    method: str = Field(description="name of a method, as fedtar simulate --method takes it")
    label: str = Field("", description="how tables name it; the arm's name by default")
    settings: dict[str, Any] = Field({}, description="arguments of the method's recipe, over the suite's own")


class Suite(Settings):
    """A suite file (YAML)."""

    name: str = Field(description="of the suite")
    sites: tuple[str, ...] = Field(min_length=1, description="hospitals that take part")
    outside: tuple[str, ...] = Field((), description="hospitals that only get the shared adapter at the end")
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="each arm is run with each of them")
    settings: dict[str, Any] = Field({}, description="arguments of every method's recipe")
    reference: str = Field("", description="arm that the others are compared with; the first by default")
    arms: dict[str, dict[str, Any]] = Field(min_length=1, description="by name: method, label and settings")

    @property
    def compared_with(self) -> str:
        """Name of the arm that the others are compared with."""
        return self.reference or next(iter(self.arms))

    def misfits(self) -> Iterator[tuple[str, str]]:
        if self.reference and self.reference not in self.arms:
            yield "reference", f"one of the arms {', '.join(self.arms)}"
        if len({*self.sites, *self.outside}) < len(self.sites) + len(self.outside):
            yield "outside", "hospitals that are not among the sites, each once"
        if len(set(self.seeds)) < len(self.seeds):
            yield "seeds", "different numbers"


@dataclass(frozen=True)
class Cell:
    """One run of the suite: an arm with a seed.

    Args:
        name: of the arm.
        recipe: arguments of the recipe, seed included.
        digest: of all that decides about the result; a result with it need not be made again.
    """

    name: str
    arm: Arm
    seed: int
    sites: tuple[str, ...]
    outside: tuple[str, ...]
    recipe: dict[str, Any]
    digest: str

    def build(self, threads: int = 1) -> MethodRecipe:
        """The recipe, with so many torch threads unless it sets them; :class:`ConfigError` names the arm."""
        try:
            return load(method(self.arm.method).recipe)(**{"torch_threads": threads} | self.recipe)
        except ConfigError as error:
            raise ConfigError(f"arm '{self.name}': {error}") from error


def read_suite(path: Path) -> Suite:
    """The suite of a file; raises :class:`ConfigError` naming the file and what does not fit."""
    return build(Suite, read_yaml(path, "'name: value' lines, settings of a suite"), str(path))


def cells(suite: Suite) -> list[Cell]:
    """All runs of a suite, seed by seed, so that every arm has a first result early; all recipes are tried at once.

    Raises:
        ConfigError: an arm's name, method or settings do not fit; names the arm.
    """
    site_names(suite.sites)
    arms = {name: build(Arm, values, f"arm '{name}'") for name, values in suite.arms.items()}
    if odd := [name for name in arms if not _ARM.fullmatch(name)]:
        raise ConfigError(f"arm '{odd[0]}': a name has lower-case letters, digits, '.', '_' and '-' alone")
    planned = [_cell(suite, name, arm, seed) for seed in suite.seeds for name, arm in arms.items()]
    for cell in planned[: len(arms)]:
        cell.build()
    return planned


def _cell(suite: Suite, name: str, arm: Arm, seed: int) -> Cell:
    recipe = merged(suite.settings, arm.settings) | {"seed": seed}
    decides = [__version__, arm.method, recipe, suite.sites, suite.outside]
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
    return Cell(name, arm, seed, suite.sites, suite.outside, recipe, key)


def merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them, group by group."""
    result = dict(common)
    for name, value in own.items():
        group = result.get(name)
        if isinstance(group, Mapping) and isinstance(value, Mapping):
            value = merged(group, value)
        result[name] = value
    return result
