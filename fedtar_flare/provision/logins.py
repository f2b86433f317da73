"""Tell when two processes use one site's kit: somebody else may have it.

FLARE gives a site's name to whoever logged in last, with a line at the level INFO, and keeps one connection per name.
Two that live take the connection from each other again and again, and the first goes on sending its heartbeats with the
token that it had. A site that was only started again does neither.
"""

import re
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection
from nvflare.fuel.f3.sfm.sfm_endpoint import SfmEndpoint
from nvflare.fuel.sec.audit import AuditService

from fedtar_flare.provision.wire import wrap
from fedtar_flare.record.log import raise_alarm

AGAIN_AFTER = 600.0  # seconds until the same site's alarm is raised again
TAKEN_OVER, WITHIN = 3, 300.0  # how often a site's connection is taken over in how many seconds before it is an alarm

_EVICTED = re.compile(r"Client ID already registered as a client: (.+)")


class LoginAlarm(FLComponent):
    """Among the components of a server's resources: an alarm when a site's kit is used twice at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self._raised: dict[str, float] = {}
        self._taken: dict[str, deque[float]] = {}
        self._lock = threading.Lock()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            wrap(SfmEndpoint, "add_connection", self._add)
        elif event_type == EventType.CLIENT_HEARTBEAT_PROCESSED:
            match = _EVICTED.match(str(fl_ctx.get_prop(FLContextKey.COMMUNICATION_ERROR, "")))
            if match:
                self._raise(match.group(1)[:100])

    def _add(self, add: Any, endpoint: SfmEndpoint, connection: SfmConnection) -> None:
        """Tell where a new connection replaces a peer's: FLARE has no event."""
        before = bool(endpoint.connections)
        add(endpoint, connection)
        if before:
            self._taken_over(str(endpoint.endpoint.name))

    def _taken_over(self, name: str) -> None:
        if "." in name:  # a job's process, which may be started again
            return
        with self._lock:
            times = self._taken.setdefault(name[:100], deque(maxlen=TAKEN_OVER))
            times.append(time.monotonic())
            often = len(times) == TAKEN_OVER and times[-1] - times[0] <= WITHIN
        if often:
            self._raise(name[:100])

    def _raise(self, site: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._raised.get(site, -AGAIN_AFTER) < AGAIN_AFTER:
                return
            self._raised[site] = now
        text = f"two processes seem to use the kit of site '{site}' (or its network breaks again and again)"
        cure = f"if it has started only one, disable it (nvflare system disable-client {site}) and make a new kit"
        raise_alarm(Path.cwd(), f"{text}. Ask that site; {cure}")  # the server works in its kit
        AuditService.add_event(user=site, action="fedtar.second_login", msg="two processes use one kit")
