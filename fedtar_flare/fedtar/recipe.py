"""``FedTARRecipe``: the FedTAR job as code; ``fedtar export`` writes ``jobs/fedtar``."""

from __future__ import annotations

from fedtar_flare.fedtar.contract import CONTRACT
from fedtar_flare.fedtar.controller import TemporalResidualController
from fedtar_flare.fedtar.executor import PatientAdaptiveExecutor
from fedtar_flare.flare.recipe import PAPER, MethodRecipe

_PAPER = PAPER | {
    "patient": {
        "lr": 1e-5,
        "scale": 32.0,
        "time_conditioned": False,
        "components": 16,
        "embedding_dim": 32,
        "common": 0.0,
        "spread": 1.0,
    }
}
PATIENT_PRESETS = {"paper": _PAPER}
"""The paper's patient part: s_p = s = alpha / r, phi without time and without a common start, rates 1e-5, T = 5."""

PRESETS = {"small": {"server": {"alpha_form": "sigmoid"}}, "paper": _PAPER | {"server": {"eta": 1e-4}}}
"""``small``: each alpha_t by itself, from 0.7 on; with softmax a third of each step's mean is kept when T is 3.

``paper``: softmax and the paper's eta.
"""


class FedTARRecipe(MethodRecipe):
    """The job of FedTAR; beside the arguments of :class:`MethodRecipe` it takes ``patient`` (``PatientConfig``)."""

    contract = CONTRACT
    controller_class = TemporalResidualController
    executor_class = PatientAdaptiveExecutor
    own_groups = ("patient",)
    presets = PRESETS
