"""Whether a site takes part: its own decision, in ``participation.json``, which it can change while a job runs.

The executor reads the file before and after each task. A paused site abstains and the job goes on without it; after
'join' it is asked again, or joins at the next round if it missed the handshake. A site that left declines every task.
"""

from __future__ import annotations

import json
import time
from enum import Enum
from pathlib import Path

from fedtar_flare.errors import FedTARError
from fedtar_flare.files import write_json

FILE = "participation.json"


class Participation(Enum):
    """What a site decided."""

    TAKING_PART = "taking part"
    PAUSED = "paused"
    LEFT = "left"


def participation(records: Path) -> Participation:
    """What the site decided, from its folder ``records``; without a file it takes part.

    Raises FedTARError if the file cannot be read: the site then does nothing rather than act against its own will.
    """
    file = records / FILE
    try:
        return Participation(json.loads(file.read_text(encoding="utf-8"))["status"])
    except FileNotFoundError:
        return Participation.TAKING_PART
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedTARError(
            f"{file} cannot be read ({error}). Run 'fedtar site pause', 'leave' or 'join' to write it anew",
            public="the site's participation file cannot be read",
        ) from error


def decide(records: Path, status: Participation) -> Path:
    """Write the site's decision atomically; returns the file."""
    records.mkdir(parents=True, exist_ok=True, mode=0o700)
    records.mkdir(parents=True, exist_ok=True, mode=0o700)
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return write_json(records / FILE, {"status": status.value, "since": since})
