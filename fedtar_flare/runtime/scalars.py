"""TensorBoard scalars (a tag and a number) through FLARE's analytics, from a site or the server to the server.

What a site streams this way passes no result filter. So a real site sends nothing unless its own site file says
``shares: [losses]``, and nothing where its policy may have a privacy filter (``site.policy.streaming_allowed``).
"""

import math
from importlib.util import find_spec
from typing import Any

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsDataType, LogWriterName
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.app_common.widgets.convert_to_fed_event import ConvertToFedEvent
from nvflare.job_config.api import FedJob

from fedtar_flare.core.errors import ConfigError


class ScalarsToServer(ConvertToFedEvent):
    """Sends scalars to the server and nothing else; with FLARE's own class a job could choose a site's log events."""

    def __init__(self) -> None:
        super().__init__(events_to_convert=[ANALYTIC_EVENT_TYPE])


def add_tracking(job: FedJob, mlflow: str = "") -> None:
    """Add the components that bring scalars to ``<server run folder>/tb_events/<site>/``, and to MLflow's URI."""
    from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver  # loads tensorboard: nothing for a site

    job.to_server(TBAnalyticsReceiver(), id="tensorboard")
    job.to_clients(ScalarsToServer(), id="event_to_fed")
    if not mlflow:
        return
    if find_spec("mlflow") is None:
        raise ConfigError(
            "mlflow: MLflow's client is not installed here: pip install 'fedtar_flare[mlflow]', and at the server"
        )
    from fedtar_flare.runtime.mlflow_runs import MLflowRuns

    job.to_server(MLflowRuns(mlflow, job.name), id="mlflow")


def send_scalar(sender: FLComponent, fl_ctx: FLContext, tag: str, value: float | None, step: int) -> None:
    """Send one point of the curve ``tag`` at ``step``; None and non-finite values are left out."""
    if value is None or not math.isfinite(value):
        return
    extra: dict[str, Any] = {"global_step": int(step)}
    dxo = create_analytic_dxo(
        tag=tag, value=float(value), data_type=AnalyticsDataType.SCALAR, writer=LogWriterName.TORCH_TB, **extra
    )
    send_analytic_dxo(sender, dxo=dxo, fl_ctx=fl_ctx, event_type=ANALYTIC_EVENT_TYPE)
