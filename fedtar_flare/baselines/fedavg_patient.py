"""FedAvg with FedTAR's patient-adaptive part: the visits of all time steps are pooled, alpha is 1.

The shared adapter is averaged as in :mod:`fedtar_flare.baselines.fedavg`; each site trains its patient part (FedTAR,
Eq. 2 to 4) beside it and keeps it. What is left out of FedTAR is the aggregation over time (Eq. 7 and 8), so that the
difference between the two is what that aggregation is worth. With ``patient.time_conditioned=False`` time is left out
altogether.
"""

from __future__ import annotations

from dataclasses import replace

from fedtar_flare.baselines.fedavg import CONTRACT as FEDAVG
from fedtar_flare.baselines.fedavg import FedAvgController, PooledExecutor
from fedtar_flare.fedtar.contract import CONTRACT as FEDTAR
from fedtar_flare.fedtar.executor import PatientExecutor
from fedtar_flare.fedtar.recipe import PATIENT_PRESETS
from fedtar_flare.flare.recipe import MethodRecipe

CONTRACT = replace(
    FEDAVG,
    method="fedavg_patient",
    title="FedAvg on pooled visits, with the patient part",
    server_classes=("fedtar_flare.baselines.fedavg_patient.FedAvgPatientController",),
    site_classes=("fedtar_flare.baselines.fedavg_patient.FedAvgPatientExecutor",),
    stays=FEDTAR.stays,
    by_rows=FEDTAR.by_rows,
)


class FedAvgPatientController(FedAvgController):
    """FedAvg with the patient part at the server: what FedAvg does."""

    contract = CONTRACT


class FedAvgPatientExecutor(PooledExecutor, PatientExecutor):
    """FedAvg with the patient part at a site; arguments as :class:`PatientExecutor`."""

    contract = CONTRACT


class FedAvgPatientRecipe(MethodRecipe):
    """The job of FedAvg with the patient part; beside the arguments of :class:`MethodRecipe` it takes
    ``patient`` and ``diagnosis``."""

    contract = CONTRACT
    controller_class = FedAvgPatientController
    executor_class = FedAvgPatientExecutor
    own_groups = ("patient", "diagnosis")
    presets = PATIENT_PRESETS
