"""A run as its record tells it, typed: what the page, the closing table and the model card are made from.

A record may be of a run that goes on, was killed, was aborted, or failed before its first round: whatever is not
there is empty or None. What is there must have the right form, else the error names the line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedtar_flare.errors import FedTARError
from fedtar_flare.record.log import ROUNDS_FILE, read_events
from fedtar_flare.reporting.fields import Fields

KNOWN_EVENTS = ("start", "evaluation", "step", "outer", "end")
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class Cell:
    """Scores of ``n`` test reports, raw; only those that are known. A cell under ``min_cell`` has none."""

    n: int
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SiteScores:
    """Scores of one site: per time step, and over all of its test reports."""

    steps: Mapping[int, Cell]
    all: Cell


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of all sites after a round; round 0 is before training."""

    round: int
    sites: Mapping[str, SiteScores]


@dataclass(frozen=True, slots=True)
class SiteUpdate:
    """What one site sent at one step; loss and seconds None where not recorded."""

    samples: int
    train_loss: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Step:
    """One residual step. Every site that was asked is in exactly one of ``sites``, ``abstained`` (too few visits to
    train on at this step), ``absent`` (no update for another reason) and ``refused``; the last three give the reason.
    ``update_norm`` is that of the mean update, ``residual_norm`` that of the step taken: alpha times it (Theorem 2).
    """

    round: int
    step: int
    residual_norm: float | None
    update_norm: float | None
    skipped: bool
    sites: Mapping[str, SiteUpdate]
    abstained: Mapping[str, str]
    absent: Mapping[str, str]
    refused: Mapping[str, str]
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True, slots=True)
class SiteValidation:
    """One site's part of an outer step: loss over ``n`` validation reports."""

    validation_loss: float | None
    n: int


@dataclass(frozen=True, slots=True)
class Outer:
    """One outer step, after all steps of a round: validation loss at w_T, and the alphas of the next round."""

    round: int
    validation_loss: float | None
    sites: Mapping[str, SiteValidation]
    left_out: Mapping[str, str]
    psi_grad_norm: float | None
    alpha_after: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Size of one exchange (float32, one direction) and of the whole model's; 0 where not recorded."""

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    full_parameters: int = 0
    full_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as far as it went.

    Args:
        folder: where ``rounds.jsonl`` lies.
        started: ISO time, empty when the run failed before its start.
        not_joined: sites that did not get through the handshake, with the reason.
        counts: site to split to visits per time step.
        initial_alpha: (T,), before the first round.
        steps, outers, evaluations: in order; a repeated one counts once, the later.
        status: ``completed``, ``aborted``, ``failed``, or ``unfinished`` when the last event is not the end.
        seconds: of the whole run, None without an end event.
    """

    folder: Path
    run_id: str
    started: str
    sites: tuple[str, ...]
    not_joined: Mapping[str, str]
    time_steps: int
    rounds: int
    first_round: int
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    counts: Mapping[str, Mapping[str, tuple[int, ...]]]
    exchange: Exchange
    initial_alpha: tuple[float, ...]
    steps: tuple[Step, ...]
    outers: tuple[Outer, ...]
    evaluations: tuple[Evaluation, ...]
    status: str
    reason: str
    seconds: float | None

    @property
    def min_cell(self) -> int:
        """Fewest reports of a cell that is shown."""
        return _min_cell(self.settings)

    @property
    def warm_start(self) -> Evaluation | None:
        """The evaluation before training (of a resumed run: before its first round)."""
        first = self.evaluations[0] if self.evaluations else None
        return first if first and first.round < self.first_round else None

    @property
    def final(self) -> Evaluation | None:
        """The last evaluation after training."""
        last = self.evaluations[-1] if self.evaluations else None
        return last if last and last.round >= self.first_round else None

    @property
    def best_round(self) -> int | None:
        """Round of the lowest validation loss; None without any."""
        losses = [(outer.validation_loss, outer.round) for outer in self.outers if outer.validation_loss is not None]
        return min(losses)[1] if losses else None

    def alphas(self) -> list[tuple[int, tuple[float, ...]]]:
        """(round, alphas after it), beginning with the initial ones."""
        start = [(self.first_round - 1, self.initial_alpha)] if self.initial_alpha else []
        return start + [(outer.round, outer.alpha_after) for outer in self.outers if outer.alpha_after]


def find_run(folder: Path | str) -> Path:
    """The folder with the record, in or somewhere below a folder (a simulator workspace, a downloaded job).

    Raises:
        FedTARError: no record there, or several.
    """
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
    """Read the record of a run.

    Args:
        folder: the ``fedtar`` folder of a run, or the run folder around it.

    Raises:
        FedTARError: no record there; a record of something else, or of another version; a broken line (not the last).
    """
    folder = Path(folder)
    if not (folder / ROUNDS_FILE).is_file() and (folder / "fedtar" / ROUNDS_FILE).is_file():
        folder = folder / "fedtar"
    path = folder / ROUNDS_FILE
    try:
        events = read_events(folder)
    except UnicodeDecodeError as error:
        raise FedTARError(f"{path} is not text: it is not a run record of fedtar_flare") from error
    read = [_fields(path, number, event) for number, event in enumerate(events, 1)]
    known = [event for event in read if event.text("event") in KNOWN_EVENTS]  # a newer version may write more
    if not known:
        raise FedTARError(f"{path} holds no event of a run: it is empty, or another program wrote it")
    return _run(folder, known)


def _fields(path: Path, number: int, event: Any) -> Fields:
    if not isinstance(event, Mapping) or not isinstance(event.get("event"), str):
        raise FedTARError(f"{path}, line {number}: not an event of a run record of fedtar_flare")
    return Fields(f"{path}, line {number}, event '{event['event']}'", event)


def _run(folder: Path, events: list[Fields]) -> Run:
    named: dict[str, list[Fields]] = {name: [e for e in events if e.text("event") == name] for name in KNOWN_EVENTS}
    starts = named["start"]
    if not starts and events[0].text("event") != "end":  # a run that fails in the handshake has an end alone
        raise events[0].wrong("there is no event 'start' before it")
    start = starts[-1] if starts else Fields(events[0].where, {})
    last = events[-1] if events[-1].text("event") == "end" else Fields(events[-1].where, {"status": "unfinished"})
    settings = dict(start.part("settings").values)
    min_cell = _min_cell(settings)
    exchange = start.part("exchange")
    counts = {site: _counts(part) for site, part in start.parts("counts").items()}
    steps = {(step.round, step.step): step for step in (_step(event, counts, min_cell) for event in named["step"])}
    outers = {outer.round: outer for outer in map(_outer, named["outer"])}
    evaluations = {e.round: e for e in (_evaluation(event, min_cell) for event in named["evaluation"])}
    return Run(
        folder=folder,
        run_id=start.text("run_id"),
        started=start.text("time"),
        sites=tuple(str(site) for site in start.sequence("sites")),
        not_joined=start.reasons("absent"),
        time_steps=start.whole("time_steps") if starts else 0,
        rounds=start.whole("rounds") if starts else 0,
        first_round=min((event.count("first_round") or 1 for event in starts), default=1),
        settings=settings,
        versions={str(name): str(version) for name, version in start.part("versions").values.items()},
        counts=counts,
        exchange=Exchange(*(exchange.count(field.name) for field in fields(Exchange))),
        initial_alpha=starts[0].numbers("alpha") if starts else (),
        steps=tuple(steps[key] for key in sorted(steps)),
        outers=tuple(outers[key] for key in sorted(outers)),
        evaluations=tuple(evaluations[key] for key in sorted(evaluations)),
        status=last.text("status"),
        reason=last.text("reason"),
        seconds=last.number("seconds"),
    )


def _step(event: Fields, counts: Mapping[str, Mapping[str, tuple[int, ...]]], min_cell: int) -> Step:
    t = event.whole("step")
    absent, abstained = event.reasons("absent"), event.reasons("abstained")
    for site in list(absent):  # a record without 'abstained' has those sites here; their counts tell them
        train = counts.get(site, {}).get("train", ())
        if t <= len(train) and train[t - 1] < min_cell:
            abstained[site] = absent.pop(site)
    return Step(
        round=event.whole("round"),
        step=t,
        residual_norm=event.number("residual_norm"),
        update_norm=event.number("update_norm"),
        skipped=bool(event.values.get("skipped")),
        sites={
            site: SiteUpdate(part.count("samples"), part.number("train_loss"), part.number("seconds"))
            for site, part in event.parts("sites").items()
        },
        abstained=abstained,
        absent=absent,
        refused=event.reasons("refused"),
        bytes_down=event.count("bytes_down"),
        bytes_up=event.count("bytes_up"),
    )


def _outer(event: Fields) -> Outer:
    return Outer(
        round=event.whole("round"),
        validation_loss=event.number("validation_loss"),
        sites={
            site: SiteValidation(part.number("validation_loss"), part.count("n"))
            for site, part in event.parts("sites").items()
        },
        left_out=event.reasons("left_out"),
        psi_grad_norm=event.number("psi_grad_norm"),
        alpha_after=event.numbers("alpha_after"),
    )


def _evaluation(event: Fields, min_cell: int) -> Evaluation:
    sites = {}
    for site, part in event.parts("sites").items():
        steps = {int(t): _cell(cell, min_cell) for t, cell in part.parts("steps").items() if t.isdecimal()}
        sites[site] = SiteScores(dict(sorted(steps.items())), _cell(part.part("all"), min_cell))
    return Evaluation(event.whole("round"), sites)


def _cell(cell: Fields, min_cell: int) -> Cell:
    n = cell.count("n")
    known = {str(name): cell.number(str(name)) for name in cell.values if name != "n"}
    if n < 2:
        known.pop("cider", None)  # 0 for a corpus of one by definition: not a measurement
    return Cell(n, {name: value for name, value in known.items() if value is not None} if n >= min_cell else {})


def _counts(part: Fields) -> dict[str, tuple[int, ...]]:
    return {split: tuple(int(n) for n in part.numbers(split)) for split in SPLITS}


def _min_cell(settings: Mapping[str, Any]) -> int:
    data = settings.get("data")
    value = settings.get("min_cell", data.get("min_cell") if isinstance(data, Mapping) else None)
    return value if isinstance(value, int) and value > 0 else 1
