"""``FedTARRecipe``: the FedTAR job as code; ``fedtar export`` writes ``jobs/fedtar``."""

from __future__ import annotations

from fedtar_flare.fedtar.config import PROFILES
from fedtar_flare.fedtar.contract import CONTRACT
from fedtar_flare.fedtar.controller import TemporalResidualController
from fedtar_flare.fedtar.executor import PatientAdaptiveExecutor
from fedtar_flare.flare.recipe import PAPER, SMALL, MethodRecipe

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


class FedTARRecipe(MethodRecipe):
    """The job of FedTAR.

    Beside the arguments of :class:`MethodRecipe` it takes the groups ``patient`` (``PatientConfig``), ``diagnosis``
    (``DiagnosisConfig``) and ``temporal`` (``TemporalConfig``, which the server gets too).
    """

    contract = CONTRACT
    controller_class = TemporalResidualController
    executor_class = PatientAdaptiveExecutor
    own_groups = ("patient", "diagnosis", "temporal")
    server_groups = ("temporal",)
    presets = PRESETS
