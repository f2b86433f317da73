"""Writes scalars to MLflow by FLARE's receiver, also those of the server and of sites that come later."""

from typing import Any

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_opt.tracking.mlflow.mlflow_receiver import MLflowReceiver


class MLflowRuns(MLflowReceiver):
    """Writes a run's TensorBoard scalars to an MLflow server, an MLflow run for each site and one for the server.

    Credentials come from the server's environment (MLFLOW_TRACKING_TOKEN and the like), never from a job.
    """

    def __init__(self, tracking_uri: str, experiment: str):
        self.experiment, self._common = experiment, ()
        about = {"experiment_name": experiment, "experiment_tags": {}, "run_tags": {}}
        super().__init__(tracking_uri, about, events=[ANALYTIC_EVENT_TYPE, f"fed.{ANALYTIC_EVENT_TYPE}"])

    def _mlflow_setup(self, *common_and_sites: Any) -> None:
        self._common = common_and_sites[:3]
        super()._mlflow_setup(*common_and_sites)

    def save(self, fl_ctx: FLContext, shareable: Shareable, record_origin: str) -> None:
        if record_origin not in self.buffer:
            self._mlflow_setup(*self._common, [record_origin], fl_ctx)
            self._init_buffer([record_origin])
        super().save(fl_ctx, shareable, record_origin)
