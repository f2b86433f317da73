"""FedTAR as one object: what it exchanges, its presets, and where its algorithm runs."""

from __future__ import annotations

from fedtar_flare.learning.diagnosis import extend
from fedtar_flare.learning.site_diagnosis import DiagnosisConfig
from fedtar_flare.methods.fedtar.config import PROFILES, AlphaConfig, PatientConfig, TemporalConfig
from fedtar_flare.methods.fedtar.controller import TemporalResidualController, TemporalResidualServer
from fedtar_flare.methods.fedtar.events import EVENTS
from fedtar_flare.methods.fedtar.executor import PatientAdaptiveExecutor
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.methods.fedtar.personal import kept
from fedtar_flare.methods.fedtar.section import SECTIONS
from fedtar_flare.methods.fedtar.site import FedTARSite
from fedtar_flare.protocol.contract import HEAD_NAMES, Contract
from fedtar_flare.protocol.fields import Field
from fedtar_flare.protocol.tasks import ADAPTER, PARAMETERS, close_round, handshake, train
from fedtar_flare.registry import Method
from fedtar_flare.runtime.recipe import PAPER, SMALL
from fedtar_flare.settings import Settings

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

_PAPER = PAPER | {
    "patient": {
        "lr": 1e-5,
        "scale": 32.0,
        "time_conditioned": False,
        "components": 16,
        "patients_per_component": 1,
        "common_start": False,
        "profile": PROFILES[0],
    }
}
_TOLD = {"labeler": "auto", "candidates": 8, "complete": True}
ALONE_PRESETS = {"small": SMALL | {"diagnosis": _TOLD}, "paper": _PAPER}
"""Of a method with the patient part that shares nothing.

``small`` tells the decoder the findings of a synthetic cohort, searches for a report that does not say them once more,
and completes one that still leaves some out (docs/experiments.md).

``paper`` has s_p = s = alpha / r, phi without time and without a common start, a hash of the patient's id in the
profile, 16 components however few the patients, rates 1e-5, and T = 5.
"""

PATIENT_PRESETS = ALONE_PRESETS | {
    "small": SMALL | {"diagnosis": _TOLD | {"shared": "auto", "epochs": 3.0}, "patient": {"local_adapter": True}}
}
"""Of every other method with the patient part. With synthetic data the head that reads the findings is shared, too, and
where the visits are few it learns at a lower rate; reports are written beside the adapter as the site last trained it
(docs/experiments.md)."""

PRESETS = {
    "small": PATIENT_PRESETS["small"]
    | {"server": {"alpha_form": "sigmoid", "initial_alpha": 0.9}, "temporal": {"replay": "seen"}},
    "paper": _PAPER | {"server": {"eta": 1e-4}},
}
"""``small``: each alpha_t by itself, from 0.9 on; with softmax a third of each step's mean is kept when T is 3. A step
learns from the visits of other steps that the run has come to, too.

``paper``: softmax and the paper's eta.
"""

PATIENT_SETTINGS: dict[str, type[Settings]] = {"patient": PatientConfig, "diagnosis": DiagnosisConfig}
"""Groups of settings of every method with the patient part."""

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
    kept=kept,
    extend=extend,
)
