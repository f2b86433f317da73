"""A site's patient part, read from its state for drafting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtar_flare.data.splits import key_check, synthetic_key
from fedtar_flare.errors import ConfigError
from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.learning.drafting import Kept
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.demographics import DemographicMixture
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.settings import build
from fedtar_flare.site.key import derived_key
from fedtar_flare.site.state import SiteState, state_of_run, trained_version

MIXTURE = "mixture"
"""Name under which the handshake keeps the mixture, and what it takes to use the state without the job."""


def read_mixture(state: SiteState) -> tuple[DemographicMixture, dict[str, Any]]:
    """The mixture that the handshake fitted, and what it kept about the site."""
    arrays, about = state.read(MIXTURE)
    return DemographicMixture.from_state({name: value.numpy() for name, value in arrays.items()}), about


def kept(folder: Path, key: bytes | None, run_id: str, round_: int) -> Kept:
    """The part that the site had at the end of the round (see :class:`~fedtar_flare.learning.drafting.Kept`).

    Raises ConfigError where the state is of another run or round, or the key is missing or wrong; StateError where the
    state is missing or damaged.
    """
    state = state_of_run(folder, run_id, "patient part")
    mixture, about = read_mixture(state)
    private = state.read(trained_version(state, round_, about["time_steps"], "patient part"))[0]
    settings = {
        "patient": build(PatientConfig, about["patient"], "patient"),
        "lora": LoRAConfig(rank=about["rank"]),
        "mixture": mixture,
        "median_age": about["median_age"],
    }
    return Kept(PatientLearner, settings, private, about["time_steps"], _matching_key(about, key))


def _matching_key(about: Mapping[str, Any], key: bytes | None) -> bytes:
    if key is not None:
        if key_check(key) != about["key"]:
            raise ConfigError("this is not the key with which the site's state was made; restore it from its backup")
        return key
    for simulated in (synthetic_key(about["seed"], about["site"]), derived_key(about["seed"], about["site"])):
        if key_check(simulated) == about["key"]:
            return simulated
    raise ConfigError("the patient part of a real site needs the site's hash key (--key local/fedtar.key)")
