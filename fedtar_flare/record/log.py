"""The run record: one JSON object a line, appended and flushed, so that a killed run keeps all it had."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtar_flare.errors import FedTARError

ROUNDS_FILE = "rounds.jsonl"
METRICS_FILE = "metrics.json"
STATS_GROUP = "fedtar"
"""Under which name ``nvflare job stats`` shows how far a run is."""


class RunRecord:
    """Appends events to ``<folder>/rounds.jsonl``.

    Args:
        folder: ``<server run folder>/fedtar``; made when missing.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / ROUNDS_FILE

    def write(self, event: str, **values: Any) -> dict[str, Any]:
        """Append one event. Values that are not finite are written as null: a NaN must not break a reader.

        Returns:
            the event as it was written.
        """
        entry = clean({"event": event, **values})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")
            file.flush()
        return entry


def clean(value: Any) -> Any:
    """Numbers that are not finite become None, tuples lists, mapping keys text; anything else passes unchanged."""
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file atomically, its folder too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(clean(data), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)  # noqa: PTH105


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All whole events of a run; a last line that was cut off by a kill is left out.

    Raises:
        FedTARError: when there is no record, or a line in the middle is not JSON.
    """
    path = folder / ROUNDS_FILE
    if not path.is_file():
        raise FedTARError(f"{folder} holds no {ROUNDS_FILE}: it is not a run folder of fedtar_flare")
    lines = path.read_text(encoding="utf-8").splitlines()
    events = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise FedTARError(f"{path}, line {number}: not JSON ({error.msg})") from error
    return events
