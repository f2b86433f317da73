"""The suite file: which methods are compared, on which hospitals, with which seeds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import read_yaml
from fedtar_flare.core.settings import Settings, build


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
    cohort: dict[str, Any] = Field(
        {}, description="options of each hospital's synthetic cohort; under a hospital's name, its own"
    )
    needs_site_files: bool = Field(
        False, description="hospitals have data of their own: refused without the site files that FEDTAR_SITES names"
    )
    outside_split: Literal["test", "all"] = Field("test", description="whom the hospitals outside are scored on")
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="each arm is run with each of them")
    settings: dict[str, Any] = Field({}, description="arguments of every method's recipe")
    references: tuple[str, ...] = Field(
        (), description="arms that all others are compared with, a table for each; the first arm by default"
    )
    drawn: Literal["patients", "studies"] = Field(
        "patients", description="what the bootstrap and the permutation of the tables of every metric draw"
    )
    arms: dict[str, dict[str, Any]] = Field(min_length=1, description="by name: method, label and settings")

    @property
    def compared_with(self) -> tuple[str, ...]:
        """Arms that all others are compared with; stars in tables of scores are about the first."""
        return self.references or (next(iter(self.arms)),)

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if not set(self.references) <= set(self.arms) or len(set(self.references)) < len(self.references):
            yield "references", f"some of the arms {', '.join(self.arms)}, each once"
        if len({*self.sites, *self.outside}) < len(self.sites) + len(self.outside):
            yield "outside", "hospitals that are not among the sites, each once"
        if odd := {key for key, options in self.cohort.items() if isinstance(options, dict)} - {
            *self.sites,
            *self.outside,
        }:
            yield "cohort", f"options, and those of single hospitals, of which '{min(odd)}' is none"
        if len(set(self.seeds)) < len(self.seeds):
            yield "seeds", "different numbers"
        if self.needs_site_files and self.cohort:
            yield "needs_site_files", "false where the suite says what synthetic hospitals contain"


def shipped() -> dict[str, Path]:
    """The suites that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "suites").glob("*.yaml"))}


def read_suite(suite: Path | str) -> Suite:
    """Read a suite."""
    path = Path(suite)
    if not path.suffix and not path.is_file():
        if str(suite) not in shipped():
            raise ConfigError(f"there is no suite '{suite}': write a suite file, or one of {', '.join(shipped())}")
        path = shipped()[str(suite)]
    return build(Suite, read_yaml(path, "'name: value' lines, settings of a suite"), str(path))
