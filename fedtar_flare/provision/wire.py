"""Who may ask what in a federation: a site asks the server, the server asks sites, no site asks another.

FLARE's processes are cells, named after their place: ``server``, ``server.JOB``, ``hospital-a``, ``hospital-a.JOB``,
behind a relay ``relay.hospital-a.JOB``. FLARE 2.9 authenticates who sent a message and forwards it to any cell; most
receivers ask nothing more. So one hospital, or a member's console, could end another hospital's site, delete the folder
of its running job or start one (channel ``admin``), abort its job's process (``client_command``), or read its paths and
memory (``_net_manager``); and a hospital could command the server's processes (``server_command``).

Here every cell of a kit's processes, a relay's too, looks at who asks, for whom, and about what. A request between two
sites is neither forwarded nor answered, whatever its channel, and no reply either; a request from a site or a console
reaches the server on the channels below.

At a site FLARE checks an administrator's rights by what the server writes into the request, so the site's policy binds
an honest server alone; any other could read every text file of the site's account with FLARE's shell, switch the site's
log off, or have a folder of the kit replaced by a "job" of that name. Such requests are refused, whoever sends them.
"""

import io
import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import Any
from zipfile import ZipFile

from nvflare.apis.fl_constant import FedEventHeader, ServerCommandNames
from nvflare.app_common.widgets.convert_to_fed_event import FED_EVENT_PREFIX
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessagePropKey, MessageType, ReturnCode
from nvflare.fuel.f3.cellnet.defs import CellChannelTopic as Topic
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer
from nvflare.fuel.f3.streaming.stream_const import (
    STREAM_ACK_TOPIC,
    STREAM_CHANNEL,
    STREAM_DATA_TOPIC,
    STREAM_ERROR_TOPIC,
    StreamHeaderKey,
)
from nvflare.fuel.utils.config import ConfigFormat
from nvflare.private.admin_defs import Message as AdminMessage
from nvflare.private.admin_defs import error_reply
from nvflare.private.defs import InfoCollectorTopic, RequestHeader, SysCommandTopic, TrainingTopic
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.widgets.fed_event import FedEventRunner

from fedtar_flare.core.files import MOST_BYTES
from fedtar_flare.site.context import JOB_ID, SERVER_TIME

TO_SERVER: dict[str, frozenset[str] | None] = {
    CellChannel.SERVER_MAIN: frozenset(
        {Topic.Challenge, Topic.Register, Topic.Quit, Topic.HEART_BEAT, Topic.REPORT_JOB_FAILURE}
    ),
    CellChannel.SERVER_COMMAND: frozenset({ServerCommandNames.GET_TASK, ServerCommandNames.SUBMIT_UPDATE}),
    CellChannel.AUX_COMMUNICATION: None,  # runners' synchronisation, a console's uploads, events (:func:`event_came`)
    CellChannel.HCI: None,  # the console, which logs in; FLARE checks its rights command by command
    CellChannel.RETURN_ONLY: None,  # the streamed answer to a request of the server
    CellChannel.CELLNET: frozenset({Topic.Bye, "bulk"}),  # what is in a bulk is looked at piece by piece
    "credential_manager": frozenset({"key_exchange"}),
    STREAM_CHANNEL: frozenset({STREAM_DATA_TOPIC, STREAM_ACK_TOPIC, STREAM_ERROR_TOPIC}),  # data: by what it brings
    "download_service__": None,  # tensors too large for a message, by identifiers that the sender hands out
}
"""Topics by channel on which the server answers a site or a console; None: all."""

_ROUTING = (MessageHeaderKey.ORIGIN, MessageHeaderKey.DESTINATION, MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC)
logger = logging.getLogger(__name__)


def site_of(cell: str) -> str:
    """Name the participant whose process a cell is: its name up to the job's id."""
    path = FQCN.split(cell)
    end = next((i for i, part in enumerate(path) if i and JOB_ID.fullmatch(part)), len(path))
    return FQCN.join(path[:end])


def refusal(origin: str, destination: str, channel: str, topic: str) -> str:
    """Say why a request is neither answered nor forwarded; empty if it is."""
    sender, receiver = site_of(origin), site_of(destination)
    if sender in (receiver, FQCN.ROOT_SERVER):
        return ""
    if receiver != FQCN.ROOT_SERVER:
        return "no participant but the server asks another"
    topics = TO_SERVER.get(channel, frozenset())
    return "" if topics is None or topic in topics else "only the server's own processes ask this"


def _refused(message: Message, cell: CoreCell) -> Message | None:
    """Answer a request that is not allowed; None lets FLARE go on with it."""
    origin, destination, channel, topic = (str(message.get_header(key, "")) for key in _ROUTING)
    here, reason = cell.my_info.fqcn, ""
    if channel == STREAM_CHANNEL and topic != STREAM_DATA_TOPIC:  # an acknowledgement, which names no other channel
        reason = _of_another_s_stream(message, origin) if destination == here else ""
    elif channel == STREAM_CHANNEL and not message.get_header(StreamHeaderKey.ERROR_MSG):  # nor does who gives up
        header = message.get_header
        channel, topic = (str(header(key) or "") for key in (StreamHeaderKey.CHANNEL, StreamHeaderKey.TOPIC))
    reason = reason or refusal(origin, destination, channel, topic) or _detour(message, origin, here)
    if not reason:
        return None
    logger.warning("refused %.100r on %.100r from %.100r to %.100r: %s", topic, channel, origin, destination, reason)
    return make_reply(ReturnCode.UNAUTHENTICATED, error=f"refused: {reason}")


def _dropped(message: Message, cell: CoreCell) -> Message | None:
    """Stop a reply, or a request that comes back, before it is forwarded or its content is decoded."""
    if message.get_header(MessageHeaderKey.MSG_TYPE) == MessageType.REQ:
        return None
    origin, destination, *_ = (str(message.get_header(key, "")) for key in _ROUTING)
    sender, receiver = site_of(origin), site_of(destination)
    reason = _detour(message, origin, cell.my_info.fqcn)
    # A relay tells who is behind it that it could not forward a request.
    if not (sender == receiver or FQCN.ROOT_SERVER in (sender, receiver) or FQCN.is_ancestor(sender, receiver)):
        reason = "no participant answers another but the server"
    if not reason:
        return None
    logger.warning("dropped a reply from %.100r to %.100r: %s", origin, destination, reason)
    return make_reply(ReturnCode.UNAUTHENTICATED)


def _of_another_s_stream(message: Message, origin: str) -> str:
    """Say why a word on a stream that this process sends cannot be its receiver's: ids of streams can be guessed."""
    stream = ByteStreamer.tx_task_map.get(message.get_header(StreamHeaderKey.STREAM_ID))
    if stream is None or site_of(origin) in (site_of(stream.target), FQCN.ROOT_SERVER):
        return ""
    return "" if FQCN.is_ancestor(origin, stream.target) else "the stream goes to another"  # a relay may lose it


def _detour(message: Message, origin: str, here: str) -> str:
    """Say why a message cannot come from its sender by this neighbour, whose name FLARE holds to its certificate."""
    endpoint = message.get_prop(MessagePropKey.ENDPOINT)
    if not isinstance(endpoint, Endpoint):
        return ""
    neighbour, ends = site_of(endpoint.name), (site_of(here), site_of(origin))
    if neighbour in (*ends, FQCN.ROOT_SERVER) or any(FQCN.is_ancestor(neighbour, end) for end in ends):
        return ""  # either end's own process, the server, or a relay on the way
    return "it came by another participant than its sender"


def add_time(reply: Message) -> None:
    """Put the server's time into its answer to a heartbeat, with which a site compares its clock."""
    reply.set_header(SERVER_TIME, time.time())


def guard_cells() -> None:
    """Let every cell that this process makes look at its messages: FLARE makes its cells itself, and tells too late."""
    wrap(CoreCell, "__init__", _guarded)
    wrap(FedEventRunner, "_receive", event_came)


def event_came(receive: Any, runner: FedEventRunner, **named: Any) -> Any:
    """Have another's event begin as an application's: FLARE fires it by its name, which may be that of a run's end."""
    kind = str(named["request"].get_header(FedEventHeader.EVENT_TYPE))
    if not kind.startswith(FED_EVENT_PREFIX):
        logger.warning("refused an event of another participant: %.100r", kind)
        kind = f"{FED_EVENT_PREFIX}{kind}"
    named["request"].set_header(FedEventHeader.EVENT_TYPE, kind)
    return receive(runner, **named)


def _guarded(make: Any, cell: CoreCell, *arguments: Any, **named: Any) -> None:
    make(cell, *arguments, **named)
    cell.add_incoming_request_filter("*", "*", _refused, cell=cell)  # for this cell, alone or in a bulk
    cell.set_message_interceptor(_refused, cell=cell)  # for others, through this cell
    cell.add_incoming_filter("*", "*", _dropped, cell=cell)  # replies, for this cell and for others
    cell.add_outgoing_reply_filter(CellChannel.SERVER_MAIN, Topic.HEART_BEAT, add_time)


def wrap(owner: type, name: str, function: Callable[..., Any]) -> None:
    """Put a function around a method of FLARE's, which it gets first; a second call changes nothing."""
    method = getattr(owner, name)
    if not hasattr(method, "__wrapped__"):
        setattr(owner, name, wraps(method)(lambda *arguments, **named: function(method, *arguments, **named)))


# ---------------------------------------------------------------------- the server's requests at a site
ANSWERED = frozenset((
    TrainingTopic.ABORT, TrainingTopic.ABORT_TASK, TrainingTopic.CANCEL_RESOURCE, TrainingTopic.CHECK_RESOURCE,
    TrainingTopic.CHECK_STATUS, TrainingTopic.DELETE_RUN, TrainingTopic.DEPLOY, TrainingTopic.GET_SCOPES,
    TrainingTopic.NOTIFY_JOB_STATUS, TrainingTopic.RESTART, TrainingTopic.SHUTDOWN, TrainingTopic.START_JOB,
    InfoCollectorTopic.SHOW_STATS, SysCommandTopic.REPORT_ENV, SysCommandTopic.REPORT_RESOURCES,
    SysCommandTopic.REPORT_VERSION, SysCommandTopic.SYS_INFO,
))  # fmt: skip
"""Not: the shell, error texts of a running job, levels of the logs, and whatever a later FLARE adds."""

MOST_FILES = 10_000  # most files and folders of a job's app
_OF_KITS = "comm_config", "fed_client", "fed_relay", "fed_server", "resources"
KIT_FILES = frozenset(f"{name}{ending}" for name in _OF_KITS for ending in ConfigFormat.config_ext_formats())
"""Files that FLARE looks for in a whole kit, jobs' folders included; they may name Python modules to be imported."""


def unfit_app(packed: object) -> str:
    """Say why a job's app is not unpacked, which FLARE does before it looks at its signature; empty if it is."""
    try:
        if not isinstance(packed, bytes) or len(packed) > MOST_BYTES:
            return "the app is no archive, or too large"
        if packed.count(b"PK\x01\x02") > 2 * MOST_FILES:  # each entry that zipfile reads takes 500 bytes of memory
            return "the app has too many files"
        with ZipFile(io.BytesIO(packed)) as archive:
            members = archive.infolist()
    except Exception as error:  # zipfile raises whatever the broken bytes lead to
        return f"the app cannot be unpacked ({type(error).__name__})"
    if not KIT_FILES.isdisjoint("/".join(archive.namelist()).split("/")):
        return "the app has a file by whose name FLARE finds a kit's own settings"
    fits = len(members) <= MOST_FILES and sum(member.file_size for member in members) <= MOST_BYTES
    return "" if fits else "the app would fill the disk"


class RequestFilter(RequestProcessor):
    """One of FLARE's processors of requests, behind the site's own check."""

    def __init__(self, processor: RequestProcessor):
        super().__init__()
        self.processor = processor

    def get_topics(self) -> list[str]:
        return list(self.processor.get_topics())

    def process(self, req: AdminMessage, app_ctx: object) -> AdminMessage:
        job_id = req.get_header(RequestHeader.JOB_ID)
        if req.topic not in ANSWERED:
            reason = f"no site answers '{req.topic}'"
        elif job_id not in (None, "") and not JOB_ID.fullmatch(str(job_id)):
            reason = "this is no job's id"
        elif not (req.topic == TrainingTopic.DEPLOY and (reason := unfit_app(req.body))):
            return self.processor.process(req, app_ctx)
        user = str(req.get_header(RequestHeader.USER_NAME, ""))[:100]
        logger.warning("a request of the server was refused (%s), in the name of %r", reason, user)
        return error_reply(f"refused by the site: {reason}")
