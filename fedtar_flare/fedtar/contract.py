"""What FedTAR exchanges: the shared adapter's factors, counts, losses, scores, and T numbers a round."""

from __future__ import annotations

from fedtar_flare.protocol.contract import HEAD_NAMES, Contract
from fedtar_flare.protocol.fields import Field
from fedtar_flare.protocol.tasks import ADAPTER, PARAMETERS, close_round, handshake, train

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
    server_classes=("fedtar_flare.fedtar.controller.TemporalResidualController",),
    site_classes=("fedtar_flare.fedtar.executor.PatientAdaptiveExecutor",),
    stays="patients, images, reports, the mixture, the hypernetwork and its projection; the diagnosis head, unless "
    "diagnosis.shared exchanges it",
    by_rows=(HEAD_NAMES,),
)
