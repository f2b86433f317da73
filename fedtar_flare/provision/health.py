"""Whether a site or server is alive and ready, for probes; a site writes its heartbeats' times, a server is called."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fedtar_flare.core.files import read_json, write_json
from fedtar_flare.site.context import CLOCK_AHEAD, HEALTH, SERVER_TIME, is_server

if TYPE_CHECKING:  # a probe waits for no import of FLARE's
    from nvflare.apis.fl_context import FLContext
    from nvflare.fuel.f3.message import Message

STALLED, UNANSWERED = 180.0, 14.0
"""Seconds since the last heartbeat, and since the last that was answered. FLARE sends one every 10 s."""

WORDS = {"beat": "last heartbeat", "answered": "last answer"}


class Pulse:
    """Writes :data:`HEALTH` in the kit, from a site's own process: its id, monotonic seconds of a heartbeat and of its
    answer, and by how many seconds the site's clock is ahead of the server's.
    """

    def __init__(self) -> None:
        self._times: dict[str, float | None] = {"beat": None, "answered": None}

    def start(self, fl_ctx: FLContext) -> None:
        """The site starts; it has not registered yet."""
        from nvflare.fuel.f3.cellnet.defs import CellChannel
        from nvflare.private.defs import CellChannelTopic

        if (engine := fl_ctx.get_engine()) is not None:
            topic = CellChannelTopic.HEART_BEAT
            engine.get_cell().add_incoming_reply_filter(CellChannel.SERVER_MAIN, topic, self._answer)
            self._write()

    def beat(self) -> None:
        """A heartbeat is about to be sent."""
        self._write("beat")

    def _answer(self, reply: Message) -> None:
        from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode

        if reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK:
            if isinstance(now := reply.get_header(SERVER_TIME), float):
                self._times[CLOCK_AHEAD] = time.time() - now
            self._write("answered")

    def _write(self, *now: str) -> None:
        self._times |= dict.fromkeys(now, time.monotonic())
        with contextlib.suppress(OSError):  # a full disk: what is not written does not look healthy
            write_json(Path.cwd() / HEALTH, {"pid": os.getpid(), **self._times})  # a site works in its kit


def kit_health(kit: Path, live: bool = False, within: float = UNANSWERED) -> tuple[bool, str]:
    """Find out whether the server or site of a kit is ready; a site is if the server answered ``within`` seconds."""
    if is_server(kit):
        from fedtar_flare.site.doctor.connection import server

        finding = server(kit)
        return finding.status == "OK", finding.text
    if not (kit / HEALTH).is_file():
        return False, "the site has not started"
    pulse = read_json(kit / HEALTH)
    ages = {name: time.monotonic() - pulse[name] for name in ("beat", "answered") if pulse.get(name) is not None}
    try:
        state = Path(f"/proc/{int(pulse['pid'])}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        state = "X"
    if state in "ZXTt":  # a zombie has ended
        return False, f"the site's process {'has ended' if state in 'ZX' else 'is stopped'}"
    if not 0 <= ages.get("beat", 0) <= STALLED:
        return False, f"site: no heartbeat for {STALLED:g} s"
    times = [f"{name} {ages[key]:.0f} s ago" if key in ages else f"no {name} yet" for key, name in WORDS.items()]
    return live or 0 <= ages.get("answered", -1) <= within, "site: {}; server: {}".format(*times)
