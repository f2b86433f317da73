"""FedAvg with FedTAR's patient-adaptive part: the visits of all time steps are pooled, alpha is 1.

The shared adapter is averaged as in :mod:`fedtar_flare.methods.fedavg`; each site trains its patient part (FedTAR,
Eq. 2 to 4) beside it, which stays at the site. FedTAR's aggregation over time (Eq. 7 and 8) is missing, and is thus
what the two methods differ in. With ``patient.time_conditioned=False`` nothing depends on time.
"""

from fedtar_flare.methods.fedavg import METHOD as FEDAVG
from fedtar_flare.methods.fedavg import PooledSite
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.methods.fedtar.method import METHOD as FEDTAR
from fedtar_flare.methods.fedtar.method import PATIENT_PRESETS, PATIENT_SETTINGS
from fedtar_flare.methods.fedtar.site import PatientSite


class FedAvgPatientSite(PooledSite, PatientSite):
    """Trains on pooled visits with the patient part."""


METHOD = FEDAVG.derive(
    "fedavg_patient",
    "FedAvg on pooled visits, with the patient part",
    contract={"stays": FEDTAR.contract.stays, "by_rows": FEDTAR.contract.by_rows},
    paper="",
    site=FedAvgPatientSite,
    learner=PatientLearner,
    settings=PATIENT_SETTINGS,
    presets=PATIENT_PRESETS,
    saved_learner=FEDTAR.saved_learner,
    extend=FEDTAR.extend,
)
