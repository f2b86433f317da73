"""The registry of methods: where each method's contract, recipe and other parts are found.

Parts are named ``module:attribute`` and imported on demand, so that a guard that needs a contract imports no learner.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedtar_flare.errors import ConfigError

if TYPE_CHECKING:
    from fedtar_flare.protocol.contract import Contract


@dataclass(frozen=True)
class Method:
    """Where a method's parts are; an empty name means that it has none of its own.

    Args:
        events: tuple of record events beside the shared ones.
        sections: sections of the run page beside the shared ones.
        personal: class that restores a site's personal part for drafting.
        extension: function that adds to a base model what the method's adapter needs beside it, given the model and
            what the learner's description says under ``extension``.
        reports: whether it writes reports, as those do that are compared with each other; else it classifies images.
    """

    contract: str
    recipe: str
    events: str = ""
    sections: str = ""
    personal: str = ""
    extension: str = ""
    reports: bool = True


METHODS = {
    "fedtar": Method(
        contract="fedtar_flare.fedtar.contract:CONTRACT",
        recipe="fedtar_flare.fedtar.recipe:FedTARRecipe",
        events="fedtar_flare.fedtar.events:EVENTS",
        sections="fedtar_flare.fedtar.section:SECTIONS",
        personal="fedtar_flare.fedtar.personal:PersonalPart",
        extension="fedtar_flare.learning.diagnosis:extend",
    ),
    "fedmrg": Method(
        contract="fedtar_flare.fedmrg.contract:CONTRACT",
        recipe="fedtar_flare.fedmrg.recipe:FedMRGRecipe",
        events="fedtar_flare.fedmrg.events:EVENTS",
        sections="fedtar_flare.fedmrg.section:SECTIONS",
        personal="fedtar_flare.fedmrg.personal:SpecialisedPart",
        extension="fedtar_flare.learning.diagnosis:extend",
    ),
    "fedkei": Method(
        contract="fedtar_flare.fedkei.contract:CONTRACT",
        recipe="fedtar_flare.fedkei.recipe:FedKEIRecipe",
        events="fedtar_flare.fedkei.events:EVENTS",
        sections="fedtar_flare.fedkei.section:SECTIONS",
        reports=False,
    ),
    "fedavg": Method(
        contract="fedtar_flare.baselines.fedavg:CONTRACT", recipe="fedtar_flare.baselines.fedavg:FedAvgRecipe"
    ),
    "fedpeft": Method(
        contract="fedtar_flare.baselines.fedpeft:CONTRACT",
        recipe="fedtar_flare.baselines.fedpeft:FedPEFTRecipe",
        extension="fedtar_flare.baselines.peft_parts:extend",
    ),
    "fedprox": Method(
        contract="fedtar_flare.baselines.fedprox:CONTRACT", recipe="fedtar_flare.baselines.fedprox:FedProxRecipe"
    ),
    "centralised": Method(
        contract="fedtar_flare.baselines.centralised:CONTRACT",
        recipe="fedtar_flare.baselines.centralised:CentralisedRecipe",
    ),
    "local": Method(
        contract="fedtar_flare.baselines.local:CONTRACT", recipe="fedtar_flare.baselines.local:LocalRecipe"
    ),
    "fedavg_patient": Method(
        contract="fedtar_flare.baselines.fedavg_patient:CONTRACT",
        recipe="fedtar_flare.baselines.fedavg_patient:FedAvgPatientRecipe",
        personal="fedtar_flare.fedtar.personal:PersonalPart",
        extension="fedtar_flare.learning.diagnosis:extend",
    ),
    "local_patient": Method(
        contract="fedtar_flare.baselines.local_patient:CONTRACT",
        recipe="fedtar_flare.baselines.local_patient:LocalPatientRecipe",
        extension="fedtar_flare.learning.diagnosis:extend",
    ),
    "fedavg_finetune": Method(
        contract="fedtar_flare.baselines.fedavg_finetune:CONTRACT",
        recipe="fedtar_flare.baselines.fedavg_finetune:FineTuneRecipe",
        personal="fedtar_flare.baselines.tuned:TunedPart",
    ),
    "scaffold": Method(
        contract="fedtar_flare.baselines.scaffold:CONTRACT", recipe="fedtar_flare.baselines.scaffold:ScaffoldRecipe"
    ),
    "drfa": Method(contract="fedtar_flare.baselines.drfa:CONTRACT", recipe="fedtar_flare.baselines.drfa:DRFARecipe"),
    "fedadam": Method(
        contract="fedtar_flare.baselines.fedopt:FEDADAM", recipe="fedtar_flare.baselines.fedopt:FedAdamRecipe"
    ),
    "fedyogi": Method(
        contract="fedtar_flare.baselines.fedopt:FEDYOGI", recipe="fedtar_flare.baselines.fedopt:FedYogiRecipe"
    ),
}
DEFAULT = "fedtar"


def method(name: str) -> Method:
    """The method of that name; for an unknown one a :class:`ConfigError` suggests the nearest."""
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(str(name), METHODS, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise ConfigError(f"method '{name!s:.80}' is unknown{hint} (known: {', '.join(METHODS)})")


def contract_of(name: str) -> Contract:
    """A method's contract, as installed here; :class:`ConfigError` for an unknown method."""
    return load(method(name).contract)


def load(path: str) -> Any:
    """Import what ``module:attribute`` names; None for an empty path."""
    if not path:
        return None
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
