"""Alarms of the server: what its operator and the study lead must look at, in a file of its kit and in ``status``."""

import json
import logging
import os
import time
from pathlib import Path

FILE = "fedtar_alarms.jsonl"
SHOWN = 5
SHOWN_FOR = 86400.0
"""Seconds; older alarms stay in the file."""

logger = logging.getLogger(__name__)


def raise_alarm(kit: Path, text: str) -> None:
    """Log an alarm and add it to the file of a kit; a full disk does not stop the server."""
    logger.error("ALARM: %s", text)
    line = json.dumps({"time": time.time(), "text": text}) + "\n"
    try:
        handle = os.open(kit / FILE, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        with os.fdopen(handle, "a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        logger.error("the alarm could not be written to %s: %s", FILE, error.strerror)


def alarms(kit: Path) -> list[str]:
    """The newest alarms of the last day, each with its time in UTC, oldest first."""
    try:
        lines = (kit / FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    recent = []
    for line in lines:
        try:
            entry = json.loads(line)
            when, text = float(entry["time"]), str(entry["text"])
        except (ValueError, KeyError, TypeError):  # a line that a kill cut off
            continue
        if time.time() - when < SHOWN_FOR:
            recent.append(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(when))} {text}")
    return recent[-SHOWN:]
