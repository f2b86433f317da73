"""The suite file: which methods are compared, on which hospitals, with which seeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from fedtar_flare.files import read_yaml
from fedtar_flare.settings import Settings, build

GRID = ("patients", "hospitals", "own_words")


class Arm(Settings):
    """One row of the comparison."""

    method: str = Field(description="name of a method, as fedtar simulate --method takes it")
    label: str = Field("", description="how tables name it; the arm's name by default")
    settings: dict[str, Any] = Field({}, description="arguments of the method's recipe, over the suite's own")


class Hospital(Settings):
    """What is said of one simulated hospital."""

    joins: int = Field(1, ge=1, description="round in which it begins")
    cohort: dict[str, Any] = Field({}, description="options of its synthetic cohort, over the suite's own")


class Case(Settings):
    """A row of its own: some hospitals differ, and the gain is that of one of them."""

    label: str = Field(description="how the table names it")
    about: str = Field(description="the hospital whose gain is shown")
    hospitals: dict[str, dict[str, Any]] = Field({}, description="by name: joins and cohort")
    among: int = Field(0, ge=0, description="how many of the suite's first hospitals take part; 0: all")


class Suite(Settings):
    """A suite file (YAML)."""

    name: str = Field(description="of the suite")
    sites: tuple[str, ...] = Field(min_length=1, description="hospitals that take part")
    outside: tuple[str, ...] = Field((), description="hospitals that only get the shared adapter at the end")
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="each arm is run with each of them")
    settings: dict[str, Any] = Field({}, description="arguments of every method's recipe")
    reference: str = Field("", description="arm that the others are compared with; the first by default")
    also_compared_with: tuple[str, ...] = Field(
        (), description="further arms that all others are compared with, each in a table of its own"
    )
    needs_site_files: bool = Field(
        False, description="hospitals have data of their own: refused without the site files that FEDTAR_SITES names"
    )
    cohort: dict[str, Any] = Field({}, description="options of every hospital's synthetic cohort")
    hospitals: dict[str, dict[str, Any]] = Field({}, description="of single hospitals, by name: joins and cohort")
    leave_one_out: bool = Field(False, description="run again with each hospital in turn outside")
    grid: dict[str, list[Any]] = Field(
        {}, description="run with every combination of: patients, hospitals (the first ones), own_words"
    )
    cases: dict[str, dict[str, Any]] = Field({}, description="further runs, by name: label, about and hospitals")
    arms: dict[str, dict[str, Any]] = Field(min_length=1, description="by name: method, label and settings")

    @property
    def compared_with(self) -> str:
        """Name of the arm that the others are compared with."""
        return self.reference or next(iter(self.arms))

    @property
    def references(self) -> tuple[str, ...]:
        """The arms that have a table of differences: first the one whose differences the stars show."""
        return (self.compared_with, *self.also_compared_with)

    @property
    def joining(self) -> bool:
        """Whether the suite asks when joining pays, instead of comparing the arms on one set of hospitals."""
        return bool(self.grid or self.cases)

    def misfits(self) -> Iterator[tuple[str, str]]:
        if self.reference and self.reference not in self.arms:
            yield "reference", f"one of the arms {', '.join(self.arms)}"
        if not set(self.also_compared_with) <= set(self.arms) or len(set(self.references)) < len(self.references):
            yield "also_compared_with", f"other arms than {self.compared_with}, each once, of {', '.join(self.arms)}"
        if len({*self.sites, *self.outside}) < len(self.sites) + len(self.outside):
            yield "outside", "hospitals that are not among the sites, each once"
        if len(set(self.seeds)) < len(self.seeds):
            yield "seeds", "different numbers"
        named = {*self.hospitals, *(name for case in self.cases.values() for name in case.get("hospitals") or {})}
        if not named <= {*self.sites, *self.outside}:
            yield "hospitals", f"settings of the hospitals {', '.join((*self.sites, *self.outside))} alone"
        if self.leave_one_out and len(self.sites) < 2:
            yield "leave_one_out", "false with a single hospital"
        if not set(self.grid) <= set(GRID) or not all(self.grid.values()):
            yield "grid", f"lists of values of {', '.join(GRID)}"
        if any(not isinstance(n, int) or not 1 <= n <= len(self.sites) for n in self.grid.get("hospitals", ())):
            yield "grid", f"numbers of hospitals from 1 to {len(self.sites)}"
        if self.needs_site_files and (self.joining or self.cohort):
            yield "needs_site_files", "false where the suite says what synthetic hospitals contain"
        if odd := [name for name, case in self.cases.items() if case.get("about") not in self.sites]:
            yield "cases", f"about one of the sites ('{odd[0]}' is not)"


def read_suite(path: Path) -> Suite:
    """The suite of a file; raises :class:`ConfigError` naming the file and what does not fit."""
    return build(Suite, read_yaml(path, "'name: value' lines, settings of a suite"), str(path))
