"""Local-only with FedTAR's patient-adaptive part: no weight leaves a site.

It shows whether a site needs the others once it has the patient part; see :mod:`fedtar_flare.methods.local`.
"""

from fedtar_flare.learning.diagnosis import extend
from fedtar_flare.methods.fedavg_patient import FedAvgPatientSite
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.methods.fedtar.method import PATIENT_SETTINGS, UNSHARED_PRESETS
from fedtar_flare.methods.local import METHOD as LOCAL
from fedtar_flare.methods.local import LocalLearner


class LocalPatientLearner(LocalLearner, PatientLearner):
    """Holds the adapter and the patient part as private state of the site."""


METHOD = LOCAL.derive(
    "local_patient",
    "Local training alone, with the patient part",
    site=FedAvgPatientSite,
    learner=LocalPatientLearner,
    settings=PATIENT_SETTINGS,
    presets=UNSHARED_PRESETS,
    extend=extend,
)
