"""Local-only with FedTAR's patient-adaptive part: every site alone, and no weight leaves it.

It decides whether a site needs the others once it has the patient part; see :mod:`fedtar_flare.baselines.local`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fedtar_flare.baselines.fedavg import PooledExecutor
from fedtar_flare.baselines.local import CONTRACT as LOCAL
from fedtar_flare.baselines.local import LocalController
from fedtar_flare.fedtar.executor import PatientExecutor
from fedtar_flare.fedtar.recipe import ALONE_PRESETS
from fedtar_flare.flare.recipe import MethodRecipe

if TYPE_CHECKING:
    from fedtar_flare.learning.learner import ReportLearner

CONTRACT = replace(
    LOCAL,
    method="local_patient",
    title="Local training alone, with the patient part",
    server_classes=("fedtar_flare.baselines.local_patient.LocalPatientController",),
    site_classes=("fedtar_flare.baselines.local_patient.LocalPatientExecutor",),
)


class LocalPatientController(LocalController):
    """Local-only with the patient part at the server: what local-only does."""

    contract = CONTRACT


class LocalPatientExecutor(PooledExecutor, PatientExecutor):
    """Local-only with the patient part at a site; arguments as :class:`PatientExecutor`."""

    contract = CONTRACT

    def learner_class(self) -> type[ReportLearner]:
        from fedtar_flare.baselines.learners import LocalPatientLearner

        return LocalPatientLearner


class LocalPatientRecipe(MethodRecipe):
    """The job of local-only with the patient part; beside the arguments of :class:`MethodRecipe`: ``patient``
    and ``diagnosis``."""

    contract = CONTRACT
    controller_class = LocalPatientController
    executor_class = LocalPatientExecutor
    own_groups = ("patient", "diagnosis")
    presets = ALONE_PRESETS
