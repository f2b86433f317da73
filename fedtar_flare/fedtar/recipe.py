"""``FedTARRecipe``: the FedTAR job as code; ``fedtar export`` writes ``jobs/fedtar``."""

from __future__ import annotations

from fedtar_flare.fedtar.contract import CONTRACT
from fedtar_flare.fedtar.controller import TemporalResidualController
from fedtar_flare.fedtar.executor import PatientAdaptiveExecutor
from fedtar_flare.flare.recipe import PAPER, MethodRecipe

PRESETS = {
    "small": {"server": {"alpha_form": "sigmoid"}},
    "paper": PAPER
    | {
        "server": {"eta": 1e-4},
        "patient": {
            "lr": 1e-5,
            "scale": 32.0,
            "time_conditioned": False,
            "components": 16,
            "embedding_dim": 32,
            "common": 0.0,
            "spread": 1.0,
        },
    },
}
"""``small``: each alpha_t by itself, from 0.7 on; with softmax a third of each step's mean is kept when T is 3.

``paper``: s_p = s = alpha / r, phi without time and without a common start, softmax, rates 1e-5 and 1e-4, T = 5.
"""


class FedTARRecipe(MethodRecipe):
    """The job of FedTAR; beside the arguments of :class:`MethodRecipe` it takes ``patient`` (``PatientConfig``)."""

    contract = CONTRACT
    controller_class = TemporalResidualController
    executor_class = PatientAdaptiveExecutor
    own_groups = ("patient",)
    presets = PRESETS
