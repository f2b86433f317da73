"""Methods: how one is declared, and how those that are installed are found.

A method is one object, a :class:`Method`, which its package announces by an entry point::

    [project.entry-points."fedtar_flare.methods"]
    fedmedian = "fedmedian:METHOD"

Installing a package lets nothing leave a hospital: a site's guard lists the methods that it allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from fedtar_flare.core.errors import ConfigError

if TYPE_CHECKING:
    from fedtar_flare.core.settings import Settings
    from fedtar_flare.protocol.contract import Contract

GROUP = "fedtar_flare.methods"
DEFAULT = "fedtar"
_PACKAGE = "fedtar-flare"


@dataclass(frozen=True)
class Method:
    """A federated method: plain data, and a class for each place where its algorithm runs."""

    contract: Contract  # what travels; its ``method`` is the name under which the method is announced
    server: type[Any]  # ServerStrategy: the algorithm at the server, ``one_round(w, r)``
    site: type[Any]  # SiteStrategy: what a site does in each task
    learner: type[Any] | None = None  # ReportLearner: local training; None: the site's strategy makes one of its own
    executor: type[Any] | None = None  # classes of its own that its jobs name; None: SiteExecutor
    controller: type[Any] | None = None  # and FederatedController
    paper: str = ""  # where the method is published
    settings: Mapping[str, type[Settings]] = field(default_factory=dict)  # groups of its own at a site, by name
    server_settings: type[Settings] | None = None  # of its algorithm at the server, given in the group ``server``
    server_groups: tuple[str, ...] = ()  # groups of ``settings`` that the server gets too
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # arguments of the recipe, by group
    events: tuple[Any, ...] = ()  # record events besides the shared ones
    sections: tuple[Any, ...] = ()  # of the run page besides the shared ones
    kept: Callable[..., Any] | None = None  # reads what a site keeps of a run, as ``learning.drafting.SavedLearner``
    extend: Callable[[Any, Any], None] | None = None
    """Adds to a base model what the adapter needs besides itself, given the learner's description of it."""
    mixes_ranks: bool = False  # whether sites' adapters may have ranks of their own, and ``lora.mean`` another form
    reports: bool = True  # whether it writes reports; else it classifies images
    simulation_only: bool = False  # whether no hospital may run it
    rounds: Callable[[Mapping[str, Any]], tuple[int, int]] | None = None
    """R and T where neither the job nor its preset says them, given the job's groups of settings."""

    @property
    def name(self) -> str:
        return self.contract.method

    def derive(self, name: str, title: str, *, contract: Mapping[str, Any] | None = None, **changes: Any) -> Method:
        """A method that differs from this one in name, title, these fields of its contract and these of its own, which
        say with another server whether it ``mixes_ranks``.
        """
        changes.setdefault("mixes_ranks", self.mixes_ranks and "server" not in changes)
        contract_ = replace(self.contract, method=name, title=title, **(contract or {}))
        return replace(self, contract=contract_, **changes)


@cache
def _announced() -> dict[str, EntryPoint]:
    """Entry points by name; of one name this package's own counts, so that none of its methods can be replaced."""
    found = entry_points(group=GROUP)
    own = {point.name: point for point in found if _is_own(point)}
    return own | {point.name: point for point in sorted(found, key=str) if point.name not in own}


def _is_own(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name.lower().replace("_", "-") == _PACKAGE


def names() -> tuple[str, ...]:
    """Names of all installed methods: this package's own, then those of other packages."""
    return tuple(_announced())


def own_names() -> tuple[str, ...]:
    """Names of this package's own methods."""
    return tuple(name for name, point in _announced().items() if _is_own(point))


def default_names() -> tuple[str, ...]:
    """This package's own methods that a kit allows where nobody lists any: those without a caution."""
    return tuple(name for name in own_names() if not caution_of(name))


def caution_of(name: str) -> str:
    """What the contract of a method of this package warns of; empty for any other."""
    return contract_of(name).caution if name in own_names() else ""


def package_of(name: str) -> str:
    """Name and version of the package that announces a method."""
    dist = _announced()[name].dist
    return f"{dist.name} {dist.version}" if dist is not None else "unknown"


@cache
def method(name: str) -> Method:
    """The installed method of that name; ConfigError where none, or something else, is announced under it."""
    points = _announced()
    if name not in points:
        from fedtar_flare.core.settings import suggestion  # the list of methods needs no settings

        known = ", ".join(points) or "none: install the package, pip install fedtar_flare"
        raise ConfigError(f"method '{name!s:.80}' is unknown{suggestion(str(name), points)} (known: {known})")
    try:
        found = points[name].load()
    except Exception as error:
        raise ConfigError(f"method '{name}' of {package_of(name)} cannot be loaded: {error}") from error
    if not isinstance(found, Method) or found.name != name:
        raise ConfigError(f"method '{name}' of {package_of(name)}: {points[name].value} is no Method of that name")
    return found


def contract_of(name: str) -> Contract:
    """A method's contract, as installed here; raises ConfigError as :func:`method` does."""
    return method(name).contract
