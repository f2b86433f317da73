"""What a hospital's own process sends for a test beside FLARE's requests, over its own connection."""

import json
import time
from pathlib import Path

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessageType
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.private.admin_defs import Message as Request


def send(cell, target, channel, topic, body, origin="", kind=MessageType.REQ):
    """Return code and answer of a request as FLARE's code would send it; one with a false origin has no answer."""
    if channel == CellChannel.CLIENT_MAIN:
        body, headers = Request(topic, ""), body
        body.set_headers(headers)
    message = new_cell_message({}, body)
    if not origin:
        reply = cell.send_request(channel, topic, target, message, timeout=20.0)
        return f"{reply.get_header(MessageHeaderKey.RETURN_CODE)} {str(reply.payload)[:200]}"
    message.add_headers({MessageHeaderKey.CHANNEL: channel, MessageHeaderKey.TOPIC: topic})
    message.add_headers({MessageHeaderKey.ORIGIN: origin, MessageHeaderKey.DESTINATION: target})
    message.add_headers({MessageHeaderKey.MSG_TYPE: kind, MessageHeaderKey.REQ_ID: ["a request"]})
    for token in cell.out_req_filter_reg.find(channel, topic):
        token.cb(message, *token.args, **token.kwargs)
    message.set_header(MessageHeaderKey.SERVER_TRANSIT_REQUIRED, False)
    _, neighbour = cell._find_endpoint(target, message)
    return cell._send_to_endpoint(neighbour, message)


def work(cell, folder):
    """Send what files of a folder ask for, as long as the process runs."""
    while True:
        for file in Path(folder).glob("*.json"):
            answers = [send(CoreCell.ALL_CELLS[cell], *attack) for attack in json.loads(file.read_text())]
            file.unlink()
            file.with_suffix(".new").write_text(json.dumps(answers))
            file.with_suffix(".new").rename(file.with_suffix(".out"))
        time.sleep(0.2)
