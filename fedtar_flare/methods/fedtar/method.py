"""FedTAR as one object: its contract, its presets, and the classes that run it."""

from pathlib import Path

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import Settings, build
from fedtar_flare.data.cells import key_check, synthetic_key
from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.learning.diagnosis import extend
from fedtar_flare.learning.drafting import SavedLearner
from fedtar_flare.learning.site_diagnosis import DiagnosisConfig
from fedtar_flare.methods.fedtar.config import AlphaConfig, PatientConfig, TemporalConfig
from fedtar_flare.methods.fedtar.controller import TemporalResidualController, TemporalResidualServer
from fedtar_flare.methods.fedtar.events import EVENTS
from fedtar_flare.methods.fedtar.executor import PatientAdaptiveExecutor
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.methods.fedtar.section import SECTIONS
from fedtar_flare.methods.fedtar.site import FedTARSite, read_mixture
from fedtar_flare.protocol.contract import (
    ADAPTER,
    HEAD_NAMES,
    PARAMETERS,
    Contract,
    Field,
    close_round,
    handshake,
    train,
)
from fedtar_flare.registry import Method
from fedtar_flare.runtime.recipe import SMALL
from fedtar_flare.site.cohort import derived_key
from fedtar_flare.site.state import state_of_run, trained_version

CONTRACT = Contract(
    method="fedtar",
    title="Federated temporal adaptation (FedTAR)",
    groups=(ADAPTER, PARAMETERS),
    tasks=(
        handshake,
        train,
        close_round.with_fields(
            Field("t_numbers", "numbers", "T inner products of the validation gradient, for alpha", noisy=True)
        ),
    ),
    stays="patients, images, reports, the mixture, the hypernetwork and its projection; the diagnosis head, unless "
    "diagnosis.shared exchanges it",
    by_rows=(HEAD_NAMES,),
)

_DIAGNOSIS = {"labeler": "auto", "candidates": 8, "complete": True}
_SMALL = SMALL | {"data": SMALL["data"] | {"prior": "auto"}}
UNSHARED_PRESETS = {"small": _SMALL | {"diagnosis": _DIAGNOSIS}}
"""Presets of a method with the patient part that shares nothing (docs/research/experiments.md)."""
PATIENT_PRESETS = UNSHARED_PRESETS | {
    "small": _SMALL
    | {"diagnosis": _DIAGNOSIS | {"shared": "auto", "epochs": 3.0}, "patient": {"local_adapter": True, "dropout": 0.1}}
}
"""Presets of every other method with the patient part."""
# under a softmax with T = 3, a third of each step's mean would enter
_ALPHAS = {"server": SMALL["server"] | {"alpha_form": "sigmoid", "initial_alpha": 0.9}}
PRESETS = {"small": PATIENT_PRESETS["small"] | _ALPHAS | {"temporal": {"replay": "seen"}}}
PATIENT_SETTINGS: dict[str, type[Settings]] = {"patient": PatientConfig, "diagnosis": DiagnosisConfig}
"""Groups of settings of every method with the patient part."""


def saved_learner(folder: Path, key: bytes | None, run_id: str, round_: int) -> SavedLearner:
    """The patient part that a site had at the end of a round; a real site's needs its key."""
    state = state_of_run(folder, run_id, "patient part")
    mixture, about = read_mixture(state)
    private = state.read(trained_version(state, round_, about["time_steps"], "patient part"))[0]
    settings = {
        "patient": build(PatientConfig, about["patient"], "patient"),
        "lora": LoRAConfig(rank=about["rank"]),
        "mixture": mixture,
    }
    keys = [synthetic_key(about["seed"], about["site"]), derived_key(about["site"])] if key is None else [key]
    matching = [key for key in keys if key_check(key) == about["key"]]
    if not matching and key is None:
        raise ConfigError("the patient part of a real site needs the site's hash key: --key STATE/fedtar.key")
    if not matching:
        raise ConfigError("this is not the key with which the site's state was made; restore it from its backup")
    return SavedLearner(PatientLearner, settings, private, about["time_steps"], matching[0], state.precision)


METHOD = Method(
    contract=CONTRACT,
    server=TemporalResidualServer,
    site=FedTARSite,
    learner=PatientLearner,
    executor=PatientAdaptiveExecutor,
    controller=TemporalResidualController,
    paper="Zhu et al., CVPR 2026",
    settings=PATIENT_SETTINGS | {"temporal": TemporalConfig},
    server_settings=AlphaConfig,
    server_groups=("temporal",),
    presets=PRESETS,
    events=EVENTS,
    sections=SECTIONS,
    saved_learner=saved_learner,
    extend=extend,
    mixes_ranks=True,
)
