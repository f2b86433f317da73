"""The way of TensorBoard scalars from a site to the server."""

from __future__ import annotations

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE
from nvflare.app_common.widgets.convert_to_fed_event import ConvertToFedEvent


class ScalarsToServer(ConvertToFedEvent):
    """Sends scalars to the server and nothing else; with FLARE's own class a job could choose a site's log events."""

    def __init__(self) -> None:
        super().__init__(events_to_convert=[ANALYTIC_EVENT_TYPE])
