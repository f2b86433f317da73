"""TensorBoard scalars (a tag and a number) through FLARE's analytics: the components of a job that carry them.

What a site streams this way passes no result filter. So a real site sends nothing unless its own site file says
``shares: [losses]``, and nothing where its policy may have a privacy filter (``site.context.streaming_allowed``).
"""

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE
from nvflare.app_common.widgets.convert_to_fed_event import ConvertToFedEvent
from nvflare.job_config.api import FedJob


class ScalarsToServer(ConvertToFedEvent):
    """Sends scalars to the server and nothing else; with FLARE's own class a job could choose a site's log events."""

    def __init__(self) -> None:
        super().__init__(events_to_convert=[ANALYTIC_EVENT_TYPE])


def add_tracking(job: FedJob) -> None:
    """Add the components that bring scalars to ``<server run folder>/tb_events/<site>/``."""
    from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver  # loads tensorboard: nothing for a site

    job.to_server(TBAnalyticsReceiver(), id="tensorboard")
    job.to_clients(ScalarsToServer(), id="event_to_fed")
