"""The run record and the server's alarms: one JSON object a line, appended at once, so that a kill loses nothing."""

import json
import logging
import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import clean, json_lines
from fedtar_flare.record.events import SHARED, Evaluation, Event, Validation

Kind = TypeVar("Kind", bound=Event)
ROUNDS_FILE, METRICS_FILE = "rounds.jsonl", "metrics.json"
ALARMS_FILE = "fedtar_alarms.jsonl"  # in the server's kit
ALARMS_SHOWN, SHOWN_SECONDS = 5, 86400.0  # older alarms stay in the file
STATS_GROUP = "fedtar"  # name under which ``nvflare job stats`` shows how far a run is
logger = logging.getLogger(__name__)


def utc_now() -> str:
    """Tell the time for an event."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class RunRecord:
    """Appends events to ``rounds.jsonl`` in ``<server run folder>/fedtar``, which is made where it is missing."""

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
    """Read the events of a run; a last line that a kill cut off is left out."""
    known = {kind.kind: kind for kind in kinds}
    path = folder / ROUNDS_FILE
    if not path.is_file():
        raise FedTARError(f"{folder} holds no {ROUNDS_FILE}: it is not a run folder of fedtar_flare")
    events = []
    for number, entry in json_lines(path, "a run record"):
        if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
            raise FedTARError(f"{path}, line {number}: not an event of a run record of fedtar_flare")
        kind = known.get(entry["event"])
        if kind is None:
            continue  # another method's, or a later version's
        try:
            events.append(kind.model_validate(clean(entry)))
        except ValidationError as error:
            first = error.errors()[0]
            where = f"{path}, line {number}, event '{kind.kind}': {'.'.join(map(str, first['loc']))}"
            raise FedTARError(f"{where}: {first['msg']}; it was written by another version or program") from error
    return events


def of_kind(events: Iterable[Event], kind: type[Kind]) -> list[Kind]:
    """Choose the events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def best_round(validations: Iterable[Validation]) -> int | None:
    """Choose the best round by validation loss.

    Means over different sites cannot be compared. So each round is compared with the best one before it on the sites
    that both have, by the mean of their losses weighted by the later round's number of reports. The lower mean wins;
    the earlier round wins a tie, and the later one wins where no site is shared. Where sites count by their median, the
    later round wins by that of their differences. So the weights of a round that was not the best are never needed.
    """
    best: Validation | None = None
    by_round = {validation.round: validation for validation in validations}
    for _, later in sorted(by_round.items()):
        if _losses(later) and (best is None or _better(later, best)):
            best = later
    return best.round if best else None


def scored_round(evaluations: Sequence[Evaluation], best: int | None) -> int:
    """Choose the round whose scores are shown and compared: the best by validation loss, else the last."""
    last = evaluations[-1]
    for event in evaluations:
        alike = event.sites.keys() == last.sites.keys() and event.generic.keys() == last.generic.keys()
        if event.round == best and alike:
            return event.round
    return last.round


def _better(later: Validation, best: Validation) -> bool:
    new, old = _losses(later), _losses(best)
    shared = sorted(new.keys() & old.keys())
    if shared and later.by_median:
        return statistics.median(new[site] - old[site] for site in shared) < 0
    reports = {site: max(1, later.sites[site].n) for site in shared}
    mean_new, mean_old = (sum(losses[site] * reports[site] for site in shared) for losses in (new, old))
    return not shared or mean_new < mean_old


def _losses(validation: Validation) -> dict[str, float]:
    return {
        site: part.validation_loss
        for site, part in validation.sites.items()
        if part.validation_loss is not None and math.isfinite(part.validation_loss)
    }


# ---------------------------------------------------------------------- alarms
def raise_alarm(kit: Path, text: str) -> None:
    """Log what the server's operator and the study lead must look at, and add it to a file of the server's kit.

    A full disk does not stop the server.
    """
    logger.error("ALARM: %s", text)
    line = json.dumps({"time": time.time(), "text": text}) + "\n"
    try:
        handle = os.open(kit / ALARMS_FILE, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        with os.fdopen(handle, "a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        logger.error("the alarm could not be written to %s: %s", ALARMS_FILE, error.strerror)


def alarms(kit: Path) -> list[str]:
    """The newest alarms of the last day, each with its time in UTC, oldest first."""
    try:
        lines = (kit / ALARMS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    recent = []
    for line in lines:
        try:
            entry = json.loads(line)
            when, text = float(entry["time"]), str(entry["text"])
        except (ValueError, KeyError, TypeError):  # a line that a kill cut off
            continue
        if time.time() - when < SHOWN_SECONDS:
            recent.append(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(when))} {text}")
    return recent[-ALARMS_SHOWN:]
