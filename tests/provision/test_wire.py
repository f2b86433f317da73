"""Who may ask whom between the cells of a federation, and that every channel of FLARE's was decided on."""

import ast
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessagePropKey, MessageType
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming import stream_const as streams
from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, StreamHeaderKey
from tables import cases

from fedtar_flare.provision import wire

JOB = "0a1b2c3d-0000-4000-8000-000000000001"
SERVER, SERVER_JOB, SITE, SITE_JOB = "server", f"server.{JOB}", "hospital-a", f"hospital-a.{JOB}"
BEHIND, BEHIND_JOB = "relay.hospital-b", f"relay.hospital-b.{JOB}.R1"
CHANNELS = ["admin", "client_command", "_net_manager", "aux_communication", "download_service__", "of a later FLARE"]
CASES = cases(__file__, "wire.yaml")


def named(*cells):
    return [cell.replace("JOB", JOB) if isinstance(cell, str) else cell for cell in cells]


@pytest.mark.parametrize("channel", CHANNELS)
def test_only_the_server_and_a_site_s_own_processes_ask_a_participant(channel):
    for case in CASES["asked"]:
        origin, destination, answered = named(*case)
        assert bool(wire.refusal(origin, destination, channel, "any")) != answered, case


@pytest.mark.parametrize("origin", [SITE, SITE_JOB, BEHIND_JOB, "console"])
def test_what_the_server_answers(origin):
    for channel, topic, answered in CASES["topics"]:
        for destination in (SERVER, SERVER_JOB):
            assert bool(wire.refusal(origin, destination, channel, topic)) != answered, topic


def request(origin, destination, neighbour, channel="task", topic="register", **headers):
    names = {"ORIGIN": origin, "DESTINATION": destination, "CHANNEL": channel, "TOPIC": topic}
    message = Message({getattr(MessageHeaderKey, key): value for key, value in names.items()} | headers)
    message.set_prop(MessagePropKey.ENDPOINT, Endpoint(neighbour))
    return message


def cell_named(name):
    return SimpleNamespace(my_info=SimpleNamespace(fqcn=name))


@pytest.mark.parametrize("case", CASES["requests"])
def test_a_sender_s_name_is_worth_what_brought_it(case):
    here, origin, destination, neighbour, answered = named(*case)
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


@pytest.mark.parametrize("case", CASES["replies"])
def test_no_reply_passes_between_hospitals_or_in_the_server_s_name(case):
    here, origin, destination, neighbour, passed = named(*case)
    for kind in (MessageType.REPLY, MessageType.RETURN):
        message = request(origin, destination, neighbour, "", "", **{MessageHeaderKey.MSG_TYPE: kind})
        assert (wire._dropped(message, cell_named(here)) is None) == passed
    asking = request(SITE, BEHIND, SITE, **{MessageHeaderKey.MSG_TYPE: MessageType.REQ})
    assert wire._dropped(asking, cell_named(SITE)) is None


NEIGHBOURS = "relay", "relay-south", BEHIND, SITE
OTHERS = "hospital-c", "relay.hospital-c", "relay-south.hospital-d"
NAMES = *NEIGHBOURS, SITE_JOB, BEHIND_JOB, *(f"{name}.{JOB}" for name in OTHERS)


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


def test_flare_registers_no_channel_that_was_not_decided_on():
    registered = set()
    for file in Path(find_spec("nvflare").origin).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if name in ("register_request_cb", "register_blob_cb", "register_stream_cb"):
                named = {keyword.arg: keyword.value for keyword in node.keywords}
                registered.add(ast.unparse(named["channel"] if "channel" in named else node.args[0]))
    assert registered == {*CASES["channels"]}
    values = {value for key, value in vars(CellChannel).items() if key.isupper()}
    assert {*wire.TO_SERVER} - values == {"credential_manager", "download_service__", STREAM_CHANNEL}
