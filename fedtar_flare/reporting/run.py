"""A run as its record has it: the source of the page, the closing box and the model card.

What a run did not record, as it goes on or ended early, is empty or None; a malformed line is an error that names it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import (
    Ahead,
    Alarm,
    Cell,
    End,
    Evaluation,
    Event,
    Late,
    SiteScores,
    Start,
    Step,
    Validation,
)
from fedtar_flare.record.log import ROUNDS_FILE, best_round, of_kind, read_events, scored_round
from fedtar_flare.registry import method

Kind = TypeVar("Kind", bound=Event)
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Run:
    """A run, as far as it went; events are in order, of repeated ones the later."""

    folder: Path
    start: Start
    """Of a resumed run, with the first round of all its parts; without a name where the run failed before its start."""
    steps: tuple[Step, ...]
    validations: tuple[Validation, ...]
    evaluations: tuple[Evaluation, ...]
    """They hold known numbers alone, and of a cell under the minimum only ``n``."""
    end: End | None
    """None while the run goes on, and when it was killed."""
    own: tuple[Event, ...]
    """The events of the run's method."""
    title: str
    """Of the method; its name where this version does not know it."""
    alarms: tuple[str, ...] = ()
    """Of the server."""
    ahead: Mapping[int, Mapping[str, Cell]] = field(default_factory=dict)
    """Known scores by period and site, of reports written before anything was learnt from the period."""

    def events(self, kind: type[Kind]) -> list[Kind]:
        """The method's own events of one kind; of a repeated round or step, the later one."""
        return latest(of_kind(self.own, kind))

    @property
    def status(self) -> str:
        """``completed``, ``aborted``, ``failed``, or ``unfinished`` without an end."""
        return self.end.status if self.end else "unfinished"

    @property
    def warm_start(self) -> Evaluation | None:
        """The evaluation before training (of a resumed run: before its first round)."""
        first = self.evaluations[0] if self.evaluations else None
        return first if first and first.round < self.start.first_round else None

    @property
    def shown(self) -> Evaluation | None:
        """The evaluation after training that is shown: of the best round, which is kept, if it was scored."""
        after = {one.round: one for one in self.evaluations if one.round >= self.start.first_round}
        return after[scored_round([*after.values()], self.best_round)] if after else None

    @property
    def kept(self) -> str:
        """Which round's weights are kept, where others are shown; else empty."""
        best, shown = self.best_round, self.shown
        if best is None or shown is None or best == shown.round:
            return ""
        scored = any(one.round == best for one in self.evaluations)
        why = f"not scored as round {shown.round} was" if scored else "not scored"
        return f"kept: round {best}, the best by validation loss, {why}; shown: round {shown.round}"

    @property
    def best_round(self) -> int | None:
        """Round of the lowest validation loss, or the newest where visits arrive; None without any."""
        if self.start.settings.get("rounds_per_period") and self.validations:
            return self.validations[-1].round
        return best_round(self.validations)

    @property
    def reports(self) -> bool:
        """Whether the run's method writes reports, as those that this version does not know are taken to do."""
        try:
            return method(self.start.method).reports
        except ConfigError:
            return True


def find_run(folder: Path | str) -> Path:
    """The folder with the record, in or below ``folder``; FedTARError where there is none, or several."""
    folder = Path(folder)
    if (folder / ROUNDS_FILE).is_file():
        return folder
    found = sorted(path.parent for path in folder.rglob(ROUNDS_FILE)) if folder.is_dir() else []
    if not found:
        raise FedTARError(f"{folder} holds no {ROUNDS_FILE}, nor does any folder below it: no run of fedtar_flare")
    if len(found) > 1:
        names = ", ".join(str(path) for path in found[:5])
        raise FedTARError(f"{folder} holds {len(found)} runs; name one of them: {names}")
    return found[0]


def read_run(folder: Path | str) -> Run:
    """Read the record in the ``fedtar`` folder of a run, or in the run folder around it.

    For a method that this version does not know, only the events common to all methods are read. FedTARError: no
    record, one of another program or version, or a broken line other than the last.
    """
    folder = Path(folder)
    if not (folder / ROUNDS_FILE).is_file() and (folder / "fedtar" / ROUNDS_FILE).is_file():
        folder = folder / "fedtar"
    events = [event for event in read_events(folder) if not isinstance(event, Late)]
    if not events:
        raise FedTARError(f"{folder / ROUNDS_FILE} holds no event of a run: it is empty, or another program wrote it")
    starts = of_kind(events, Start)
    if not starts and not isinstance(events[0], End):  # a run that fails in the handshake has an end alone
        raise FedTARError(f"{folder / ROUNDS_FILE}: there is no event 'start' before the event '{events[0].kind}'")
    start = starts[-1] if starts else Start(method="", run_id="", time_steps=0, rounds=0)
    try:
        found = method(start.method)
        own, title = found.events, found.contract.title
    except ConfigError:
        own, title = (), start.method or "Federated run"
    return Run(
        folder=folder,
        start=start.model_copy(update={"first_round": min((one.first_round for one in starts), default=1)}),
        steps=tuple(latest(of_kind(events, Step))),
        validations=tuple(latest(of_kind(events, Validation))),
        evaluations=tuple(_known(one, start.min_cell) for one in latest(of_kind(events, Evaluation))),
        end=events[-1] if isinstance(events[-1], End) else None,
        own=tuple(read_events(folder, own)) if own else (),
        title=title,
        alarms=tuple(one.text for one in of_kind(events, Alarm)),
        ahead={
            t: {site: _cell(cell, start.min_cell) for site, cell in sorted(sites.items())}
            for one in of_kind(events, Ahead)[-1:]
            for t, sites in sorted(one.periods.items())
        },
    )


def latest(events: Iterable[Kind]) -> list[Kind]:
    """Events of one kind by round and step, the last of each; events without a round come first, as recorded."""
    found = {}
    for index, event in enumerate(events):
        values = dict(event)
        key = (values["round"], values.get("step", 0)) if "round" in values else (-1, index)
        found[key] = event
    return [found[key] for key in sorted(found)]


def _known(evaluation: Evaluation, min_cell: int) -> Evaluation:
    def of(sites: Mapping[str, SiteScores]) -> dict[str, SiteScores]:
        return {
            site: SiteScores(
                steps={t: _cell(cell, min_cell) for t, cell in sorted(scores.steps.items())},
                all=_cell(scores.all, min_cell),
                findings={
                    kind: {name: known for name, one in found.items() if (known := _finding(one, min_cell))}
                    for kind, found in scores.findings.items()
                },
                references=scores.references if (scores.all.get("n") or 0) >= min_cell else {},
            )
            for site, scores in sites.items()
        }

    return Evaluation(round=evaluation.round, sites=of(evaluation.sites), generic=of(evaluation.generic))


def _finding(one: Cell, min_cell: int) -> Cell:
    """The counts of a finding that may be shown, each with its share."""
    shares = (("n", "recall"), ("named", "precision"))
    shown = [pair for pair in shares if (one.get(pair[0]) or 0) >= max(1, min_cell)]
    return {name: one.get(name) for pair in shown for name in pair}


def _cell(cell: Cell, min_cell: int) -> Cell:
    """``n`` of a cell, and its scores that are known and may be shown."""
    n = cell.get("n") or 0
    known = {name: cell[name] for name in SCORES if cell.get(name) is not None}
    if n < 2:
        known.pop("cider", None)  # 0 for a corpus of one by definition: not a measurement
    return {"n": n, **(known if n >= min_cell else {})}
