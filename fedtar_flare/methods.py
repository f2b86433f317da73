"""The methods of this package by name: where their contract, recipe, report section and drafting are found.

The one place that lists methods. Everything is named by ``module:attribute`` and imported when it is asked for, so that
a guard that needs a contract does not import a learner.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fedtar_flare.errors import ConfigError
from fedtar_flare.protocol.contract import Contract


@dataclass(frozen=True)
class Method:
    """Where a method's parts are.

    Args:
        contract: its :class:`Contract`.
        recipe: its recipe class.
        events: tuple of its own record events; empty: none beside the shared ones.
        sections: its sections of the run page; empty: none beside the shared ones.
        personal: class that restores a site's personal part for drafting; empty: the method has none.
    """

    contract: str
    recipe: str
    events: str = ""
    sections: str = ""
    personal: str = ""


METHODS = {
    "fedtar": Method(
        contract="fedtar_flare.fedtar.contract:CONTRACT",
        recipe="fedtar_flare.fedtar.recipe:FedTARRecipe",
        events="fedtar_flare.fedtar.events:EVENTS",
        sections="fedtar_flare.fedtar.section:SECTIONS",
        personal="fedtar_flare.fedtar.personal:PersonalPart",
    ),
    "fedavg": Method(
        contract="fedtar_flare.baselines.fedavg:CONTRACT", recipe="fedtar_flare.baselines.fedavg:FedAvgRecipe"
    ),
    "fedprox": Method(
        contract="fedtar_flare.baselines.fedprox:CONTRACT", recipe="fedtar_flare.baselines.fedprox:FedProxRecipe"
    ),
    "local": Method(
        contract="fedtar_flare.baselines.local:CONTRACT", recipe="fedtar_flare.baselines.local:LocalRecipe"
    ),
}
DEFAULT = "fedtar"


def method(name: str) -> Method:
    """The method of that name.

    Raises:
        ConfigError: there is none; the nearest is suggested.
    """
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(str(name), METHODS, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise ConfigError(f"method '{name!s:.80}' is unknown{hint} (known: {', '.join(METHODS)})")


def contract_of(name: str) -> Contract:
    """A method's contract, as installed here.

    Raises:
        ConfigError: no such method.
    """
    return load(method(name).contract)


def load(path: str) -> Any:
    """What ``module:attribute`` names; None for an empty path."""
    if not path:
        return None
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
