"""The run record: one JSON object a line, appended at once, so that a killed run keeps all it had."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from fedtar_flare.errors import FedTARError
from fedtar_flare.files import clean
from fedtar_flare.record.events import SHARED, Event

Kind = TypeVar("Kind", bound=Event)
ROUNDS_FILE = "rounds.jsonl"
METRICS_FILE = "metrics.json"
STATS_GROUP = "fedtar"
"""Name under which ``nvflare job stats`` shows how far a run is."""


class RunRecord:
    """Appends events to ``rounds.jsonl`` in ``folder``, ``<server run folder>/fedtar``."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / ROUNDS_FILE

    def write(self, event: Event) -> None:
        """Append one event; non-finite values are written as null, because a NaN could break a reader."""
        line = json.dumps(clean({"event": event.kind, **event.model_dump()}), allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_events(folder: Path, kinds: Iterable[type[Event]] = SHARED) -> list[Event]:
    """All whole events of the given kinds, in order; a last line cut off by a kill is left out.

    FedTARError where there is no record, or (with its number) a line is not a valid event.
    """
    known = {kind.kind: kind for kind in kinds}
    path = folder / ROUNDS_FILE
    if not path.is_file():
        raise FedTARError(f"{folder} holds no {ROUNDS_FILE}: it is not a run folder of fedtar_flare")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FedTARError(f"{path} is not text: it is not a run record of fedtar_flare") from error
    events = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise FedTARError(f"{path}, line {number}: not JSON ({error.msg})") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
            raise FedTARError(f"{path}, line {number}: not an event of a run record of fedtar_flare")
        kind = known.get(entry["event"])
        if kind is None:
            continue  # another method's, or a later version's
        try:
            events.append(kind.model_validate(clean(entry)))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise FedTARError(
                f"{path}, line {number}, event '{kind.kind}': {where}: {first['msg']}; it was written by another "
                "version, or by another program"
            ) from error
    return events


def of_kind(events: Iterable[Event], kind: type[Kind]) -> list[Kind]:
    """The events of one kind."""
    return [event for event in events if isinstance(event, kind)]
