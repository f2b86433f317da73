"""``FedTARRecipe``: the FedTAR job as code. ``jobs/fedtar`` is its export."""

from __future__ import annotations

from fedtar_flare.fedtar.contract import CONTRACT
from fedtar_flare.fedtar.controller import TemporalResidualController
from fedtar_flare.fedtar.executor import PatientAdaptiveExecutor
from fedtar_flare.flare.recipe import MethodRecipe


class FedTARRecipe(MethodRecipe):
    """Federated temporal adaptation (FedTAR) with patient-adaptive LoRA.

    Beside the arguments of :class:`MethodRecipe` it takes ``patient``, settings of
    :class:`fedtar_flare.fedtar.config.PatientConfig`.
    """

    contract = CONTRACT
    controller_class = TemporalResidualController
    executor_class = PatientAdaptiveExecutor
    own_groups = ("patient",)


if __name__ == "__main__":  # python -m fedtar_flare.fedtar.recipe, from the repository's root: makes jobs/fedtar again
    FedTARRecipe().export("jobs")
