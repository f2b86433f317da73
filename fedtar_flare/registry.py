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
from typing import TYPE_CHECKING, Any

from fedtar_flare.core.plugins import announced, is_ours, load

if TYPE_CHECKING:
    from fedtar_flare.core.settings import Settings
    from fedtar_flare.protocol.contract import Contract

__all__ = ["Method"]

DEFAULT = "fedtar"


@dataclass(frozen=True)
class Method:
    """A federated method: plain data, and a class for each place where its algorithm runs."""

    contract: Contract
    """What travels; its ``method`` is the name under which the method is announced."""
    server: type[Any]
    """ServerStrategy: the algorithm at the server, ``one_round(w, r)``."""
    site: type[Any]
    """SiteStrategy: what a site does in each task."""
    learner: type[Any] | None = None
    """ReportLearner: local training; None: the site's strategy makes one of its own."""
    executor: type[Any] | None = None
    """Classes of its own that its jobs name; None: SiteExecutor."""
    controller: type[Any] | None = None
    """And FederatedController."""
    paper: str = ""
    """Where the method is published."""
    settings: Mapping[str, type[Settings]] = field(default_factory=dict)
    """Groups of its own at a site, by name."""
    server_settings: type[Settings] | None = None
    """Of its algorithm at the server, given in the group ``server``."""
    server_groups: tuple[str, ...] = ()
    """Groups of ``settings`` that the server gets too."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments of the recipe, by group."""
    events: tuple[Any, ...] = ()
    """Record events besides the shared ones."""
    sections: tuple[Any, ...] = ()
    """Of the run page besides the shared ones."""
    saved_learner: Callable[..., Any] | None = None
    """Reads what a site keeps of a run, as ``learning.drafting.SavedLearner``."""
    extend: Callable[[Any, Any], None] | None = None
    """Adds to a base model what the adapter needs besides itself, given the learner's description of it."""
    mixes_ranks: bool = False
    """Whether sites' adapters may have ranks of their own, and ``lora.mean`` another form."""
    reports: bool = True
    """Whether it writes reports; else it classifies images."""
    simulation_only: bool = False
    """Whether no hospital may run it."""
    rounds: Callable[[Mapping[str, Any]], tuple[int, int]] | None = None
    """R and T where neither the job nor its preset says them, given the job's groups of settings."""

    @property
    def name(self) -> str:
        """Under which the method is announced."""
        return self.contract.method

    def derive(self, name: str, title: str, *, contract: Mapping[str, Any] | None = None, **changes: Any) -> Method:
        """Make a method that differs from this one.

        Parameters
        ----------
        name, title : str
            Of the new method.
        contract, **changes : dict, optional
            Fields of the contract, and of :class:`Method`, that differ. With another ``server``, ``mixes_ranks`` is
            False unless given.

        Returns
        -------
        Method
        """
        changes.setdefault("mixes_ranks", self.mixes_ranks and "server" not in changes)
        contract_ = replace(self.contract, method=name, title=title, **(contract or {}))
        return replace(self, contract=contract_, **changes)


def names() -> tuple[str, ...]:
    """Names of all installed methods: this package's, then those of others."""
    return tuple(announced("method"))


def own_names() -> tuple[str, ...]:
    """Names of this package's own methods."""
    return tuple(name for name, point in announced("method").items() if is_ours(point))


def default_names() -> tuple[str, ...]:
    """The methods that a kit allows where nobody lists any: this package's own without a caution."""
    return tuple(name for name in own_names() if not caution_of(name))


def caution_of(name: str) -> str:
    """What a method's contract warns of; empty for none, and for methods of other packages."""
    return contract_of(name).caution if name in own_names() else ""


@cache
def method(name: str) -> Method:
    """Load an installed method; ConfigError where none, or something else, is announced under the name."""
    return load("method", name, Method)


def contract_of(name: str) -> Contract:
    """What an installed method exchanges; raises as :func:`method`."""
    return method(name).contract
