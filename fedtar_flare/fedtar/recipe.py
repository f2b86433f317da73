"""``FedTARRecipe``: the FedTAR job as code. ``jobs/fedtar`` is its export."""

from __future__ import annotations

from typing import Any

from fedtar_flare.fedtar.contract import CONTRACT
from fedtar_flare.fedtar.controller import TemporalResidualController
from fedtar_flare.fedtar.executor import PatientAdaptiveExecutor
from fedtar_flare.flare.recipe import MethodRecipe

PAPER: dict[str, Any] = {
    "time_steps": 5,
    "server": {"eta": 1e-4},
    "lora": {"rank": 4, "alpha": 128.0},
    "patient": {"lr": 1e-5, "scale": 32.0, "time_conditioned": False, "components": 16, "embedding_dim": 32},
    "training": {"lr_shared": 1e-5},
}
"""The paper's settings: s_p = s = alpha / r, phi without time, learning rates 1e-5 and 1e-4, T = 5."""

PRESETS = {"paper": PAPER}


class FedTARRecipe(MethodRecipe):
    """Federated temporal adaptation (FedTAR) with patient-adaptive LoRA.

    Beside the arguments of :class:`MethodRecipe` it takes ``patient``, settings of
    :class:`fedtar_flare.fedtar.config.PatientConfig`.
    """

    contract = CONTRACT
    controller_class = TemporalResidualController
    executor_class = PatientAdaptiveExecutor
    own_groups = ("patient",)
    presets = PRESETS


if __name__ == "__main__":  # python -m fedtar_flare.fedtar.recipe, from the repository's root: makes jobs/fedtar again
    FedTARRecipe().export("jobs")
