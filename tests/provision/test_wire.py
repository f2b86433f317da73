"""Who may ask whom between the cells of a federation, and that every channel of FLARE's was decided on."""

import ast
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessagePropKey, MessageType
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming import stream_const as streams
from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, StreamHeaderKey

from fedtar_flare.provision import wire

JOB, OTHER = "0a1b2c3d-0000-4000-8000-000000000001", "0a1b2c3d-0000-4000-8000-000000000002"
SERVER, SERVER_JOB, SITE, SITE_JOB = "server", f"server.{JOB}", "hospital-a", f"hospital-a.{JOB}"
BEHIND, BEHIND_JOB = "relay.hospital-b", f"relay.hospital-b.{JOB}.R1"
CHANNELS = ["admin", "client_command", "_net_manager", "aux_communication", "download_service__", "of a later FLARE"]


REFUSED = [
    (SITE, BEHIND), (SITE_JOB, BEHIND_JOB), (BEHIND, SITE_JOB), ("console", SITE), ("relay", BEHIND),
    (BEHIND, "relay"),
]  # fmt: skip
ANSWERED = [(SERVER, SITE), (SERVER_JOB, BEHIND_JOB), (SERVER_JOB, SERVER), (SERVER, SERVER_JOB)]
ANSWERED += [(SITE, SITE_JOB), (SITE_JOB, SITE)]


@pytest.mark.parametrize("channel", CHANNELS)
def test_only_the_server_and_a_site_s_own_processes_ask_a_participant(channel):
    for places, answered in ((REFUSED, False), (ANSWERED, True)):
        for origin, destination in places:
            assert bool(wire.refusal(origin, destination, channel, "any")) != answered, (origin, destination)


TOPICS = {  # of requests to the server: is one answered?
    ("task", "register"): True, ("task", "of a later FLARE"): False, ("of a later FLARE", "any"): False,
    ("server_command", "get_task"): True, ("server_command", "submit_update"): True, ("hci_channel", "command"): True,
    ("server_command", "show_stats"): False, ("server_command", "app_command"): False,
    ("server_parent_listener", "update_run_status"): False, ("_net_manager", "process_info"): False,
}  # fmt: skip


@pytest.mark.parametrize("origin", [SITE, SITE_JOB, BEHIND_JOB, "console"])
def test_what_the_server_answers(origin):
    for topic, answered in TOPICS.items():
        for destination in (SERVER, SERVER_JOB):
            assert bool(wire.refusal(origin, destination, *topic)) != answered, topic


def request(origin, destination, neighbour, channel="task", topic="register", **headers):
    names = {"ORIGIN": origin, "DESTINATION": destination, "CHANNEL": channel, "TOPIC": topic}
    message = Message({getattr(MessageHeaderKey, key): value for key, value in names.items()} | headers)
    message.set_prop(MessagePropKey.ENDPOINT, Endpoint(neighbour))
    return message


def cell_named(name):
    return SimpleNamespace(my_info=SimpleNamespace(fqcn=name))


@pytest.mark.parametrize(
    ("here", "origin", "destination", "neighbour", "answered"),
    [
        (SERVER, SITE, SERVER, SITE, True), (SERVER, SITE_JOB, SERVER_JOB, SITE, True),
        (SERVER, BEHIND, SERVER, "relay", True), (SERVER, SERVER_JOB, SITE, SERVER_JOB, True),
        (BEHIND, SERVER, BEHIND, "relay", True), (BEHIND_JOB, SERVER, BEHIND_JOB, BEHIND, True),
        (SERVER, SERVER, SITE, "console", False), (SERVER, SERVER_JOB, SITE, BEHIND, False),
        (SERVER, SITE, SERVER, "relay", False), (SITE, SERVER, SITE, "hospital-c", False),
        (SITE, SITE_JOB, SITE, "hospital-c", False), ("relay", SERVER, "relay.hospital-c", BEHIND, False),
        ("relay", "relay.hospital-c", SERVER, BEHIND, False),
    ],
)  # fmt: skip
def test_a_sender_s_name_is_worth_what_brought_it(here, origin, destination, neighbour, answered):
    reply = wire._refused(request(origin, destination, neighbour), cell_named(here))
    assert (reply is None) == answered


def test_a_stream_counts_as_what_it_brings_and_one_of_the_server_is_acknowledged():
    forbidden = {StreamHeaderKey.CHANNEL: "server_command", StreamHeaderKey.TOPIC: "app_command"}
    data = partial(request, SITE_JOB, SERVER_JOB, SITE, STREAM_CHANNEL, streams.STREAM_DATA_TOPIC)
    answered = forbidden | {StreamHeaderKey.TOPIC: "get_task"}, {StreamHeaderKey.ERROR_MSG: "given up"}
    for headers in (forbidden, {}, *answered):
        assert (wire._refused(data(**headers), cell_named(SERVER_JOB)) is None) == (headers in answered)
    headers = {StreamHeaderKey.STREAM_ID: "1", StreamHeaderKey.OFFSET: 7, StreamHeaderKey.SEQUENCE: 0}  # all it has
    for topic in (streams.STREAM_ACK_TOPIC, streams.STREAM_ERROR_TOPIC):
        acknowledged = partial(request, SITE_JOB, channel=STREAM_CHANNEL, topic=topic, **headers)
        assert wire._refused(acknowledged(SERVER_JOB, SITE), cell_named(SERVER_JOB)) is None
        assert wire._refused(acknowledged(BEHIND_JOB, SITE), cell_named(SERVER)) is not None


@pytest.mark.parametrize(
    ("here", "origin", "destination", "neighbour", "passed"),
    [
        (SERVER, SITE_JOB, SERVER, SITE, True), (SITE, SERVER_JOB, SITE_JOB, SERVER, True),
        (SITE, SITE_JOB, SITE, SITE_JOB, True), (BEHIND, "relay", BEHIND_JOB, "relay", True),
        (SERVER, SITE, BEHIND, SITE, False), (SITE, BEHIND, SITE, SERVER, False), (SITE, "relay", SITE, SERVER, False),
        ("relay", BEHIND, "relay", BEHIND, False), ("relay", SERVER, BEHIND, "relay.hospital-c", False),
    ],
)  # fmt: skip
def test_no_reply_passes_between_hospitals_or_in_the_server_s_name(here, origin, destination, neighbour, passed):
    for kind in (MessageType.REPLY, MessageType.RETURN):
        message = request(origin, destination, neighbour, "", "", **{MessageHeaderKey.MSG_TYPE: kind})
        assert (wire._dropped(message, cell_named(here)) is None) == passed
    asking = request(SITE, BEHIND, SITE, **{MessageHeaderKey.MSG_TYPE: MessageType.REQ})
    assert wire._dropped(asking, cell_named(SITE)) is None


NEIGHBOURS = "relay", "relay-south", BEHIND, SITE
NAMES = (
    *NEIGHBOURS, SITE_JOB, BEHIND_JOB, f"hospital-c.{JOB}", f"relay.hospital-c.{JOB}",
    f"relay-south.hospital-d.{JOB}",
)  # fmt: skip


@pytest.mark.parametrize("here", [SERVER, SERVER_JOB])
def test_a_relay_or_a_site_brings_the_server_no_word_of_who_is_not_behind_it(here):
    """Sent, forwarded, rewritten or replayed: a task fetched, an update, or an answer under another's name."""
    for neighbour in NEIGHBOURS:
        for name in (*NAMES, SERVER, SERVER_JOB):
            own = name == neighbour or name.startswith(f"{neighbour}.")
            for topic in ("get_task", "submit_update"):
                asked = wire._refused(request(name, here, neighbour, "server_command", topic), cell_named(here))
                assert (asked is None) == own, (neighbour, name)
            for kind in (MessageType.REPLY, MessageType.RETURN):
                reply = request(name, here, neighbour, "", "", **{MessageHeaderKey.MSG_TYPE: kind})
                assert (wire._dropped(reply, cell_named(here)) is None) == own, (neighbour, name)


@pytest.mark.parametrize("topic", [streams.STREAM_ACK_TOPIC, streams.STREAM_ERROR_TOPIC])
@pytest.mark.parametrize(
    ("origin", "neighbour", "answered"),
    [(BEHIND_JOB, "relay", True), ("relay", "relay", True), (SERVER, SERVER, True), (SITE_JOB, SITE, False)],
)
def test_a_stream_is_acknowledged_or_given_up_by_its_receiver_alone(monkeypatch, topic, origin, neighbour, answered):
    monkeypatch.setitem(ByteStreamer.tx_task_map, 7, SimpleNamespace(target=BEHIND_JOB))
    word = partial(request, origin, SERVER_JOB, neighbour, STREAM_CHANNEL, topic)
    assert (wire._refused(word(**{StreamHeaderKey.STREAM_ID: 7}), cell_named(SERVER_JOB)) is None) == answered
    for stream, here in ((8, SERVER_JOB), (7, SERVER)):  # another process's stream
        assert wire._refused(word(**{StreamHeaderKey.STREAM_ID: stream}), cell_named(here)) is None


def test_every_cell_is_guarded_and_once(monkeypatch):
    made, setters = [], ("add_incoming_request_filter", "set_message_interceptor", "add_incoming_filter")
    monkeypatch.setattr(CoreCell, "__init__", lambda self, name: None)
    for name in setters:
        monkeypatch.setattr(CoreCell, name, lambda self, *_, name=name, **named: made.append(name))
    wire.guard_cells()
    wire.guard_cells()
    CoreCell("server")
    assert sorted(made) == sorted(setters)


DECIDED = {
    # at a site: from the server and its own processes alone, as is all that follows
    "CellChannel.CLIENT_MAIN", "CellChannel.CLIENT_COMMAND", "CellChannel.CLIENT_SUB_WORKER_COMMAND",
    "CellChannel.MULTI_PROCESS_EXECUTOR", "CellChannel.EDGE_REQUEST", "WORKSPACE_TRANSFER_CHANNEL", "CHANNEL",
    "defs.CHANNEL",
    # at the server: from its own processes alone
    "CellChannel.SERVER_PARENT_LISTENER", "_CHANNEL", "CC_CHANNEL",
    # from sites and consoles: wire.TO_SERVER
    "CellChannel.SERVER_MAIN", "CellChannel.SERVER_COMMAND", "CellChannel.AUX_COMMUNICATION", "CellChannel.HCI",
    "CellChannel.RETURN_ONLY", "CellChannel.CELLNET", "_SM_CHANNEL", "OBJ_DOWNLOADER_CHANNEL",
    # a stream's data is judged by the channel it brings
    "STREAM_CHANNEL",
    # only passes on, and FLARE's own test
    "channel", "MSG_CHANNEL", "TEST_CHANNEL",
}  # fmt: skip
"""Channels by the names that FLARE 2.9's modules register them under."""


def test_flare_registers_no_channel_that_was_not_decided_on():
    registered = set()
    for file in Path(find_spec("nvflare").origin).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if name in ("register_request_cb", "register_blob_cb", "register_stream_cb"):
                named = {keyword.arg: keyword.value for keyword in node.keywords}
                registered.add(ast.unparse(named["channel"] if "channel" in named else node.args[0]))
    assert registered == DECIDED
    values = {value for key, value in vars(CellChannel).items() if key.isupper()}
    assert {*wire.TO_SERVER} - values == {"credential_manager", "download_service__", STREAM_CHANNEL}
