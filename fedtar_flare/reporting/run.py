"""A run as read from its record: the source of the page, the closing box and the model card."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.settings import build
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import (
    Ahead,
    Alarm,
    End,
    Evaluation,
    Event,
    Late,
    Scores,
    SiteScores,
    Start,
    Step,
    Validation,
)
from fedtar_flare.record.log import ROUNDS_FILE, best_round, of_kind, read_events, scored_round
from fedtar_flare.registry import Method, method

__all__ = ["Run"]

Kind = TypeVar("Kind", bound=Event)
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Run:
    """A run, as far as it went; events are in order, and a repeated one replaces the earlier.

    Attributes
    ----------
    folder, title, steps, validations, method_events, alarms
        ``title`` is that of the method, or its name where this version does not know it.
    start : Start
        The last start of a resumed run, with the first round of all its parts; nameless where the run failed before.
    evaluations : tuple of Evaluation
        With known numbers only; a cell under the minimum has only ``n``.
    end : End, optional
        None while the run goes on, and when it was killed.
    ahead : mapping of int to mapping
        By period and site, known scores of drafts written before anything was learnt from the period.
    """

    folder: Path
    start: Start
    steps: tuple[Step, ...]
    validations: tuple[Validation, ...]
    evaluations: tuple[Evaluation, ...]
    end: End | None
    method_events: tuple[Event, ...]
    title: str
    alarms: tuple[str, ...] = ()
    ahead: Mapping[int, Mapping[str, Scores]] = field(default_factory=dict)

    def events(self, kind: type[Kind]) -> list[Kind]:
        """Select the method's events of a kind.

        Parameters
        ----------
        kind : type of Event

        Returns
        -------
        list of Event
            The last of a repeated round or step.
        """
        return latest(of_kind(self.method_events, kind))

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
        """The evaluation after training that is shown: of the best round, whose weights are kept, if it was scored."""
        after = {event.round: event for event in self.evaluations if event.round >= self.start.first_round}
        return after[scored_round([*after.values()], self.best_round)] if after else None

    @property
    def checkpoint_note(self) -> str:
        """A note on the round whose weights are kept, where the scores shown are of another; else empty."""
        best, shown = self.best_round, self.shown
        if best is None or shown is None or best == shown.round:
            return ""
        scored = any(event.round == best for event in self.evaluations)
        why = f"not scored as round {shown.round} was" if scored else "not scored"
        return f"kept: round {best}, the best by validation loss, {why}; shown: round {shown.round}"

    @property
    def best_round(self) -> int | None:
        """Round of the lowest validation loss, or the newest where visits arrive over time; None without any."""
        if self.start.settings.get("rounds_per_period") and self.validations:
            return self.validations[-1].round
        return best_round(self.validations)

    @property
    def method(self) -> Method | None:
        """The run's method; None where this version does not know it."""
        return _known_method(self.start.method)

    @property
    def reports(self) -> bool:
        """Whether the run's method writes reports; an unknown method is assumed to."""
        return self.method is None or self.method.reports

    @property
    def site_settings(self) -> dict[str, Any]:
        """The sites' settings by group with their defaults; as in the job where this version refuses them."""
        if (given := self.start.settings.get("sites")) is None or self.method is None:
            return dict(given or {})
        kinds = dict(self.method.settings) | ({"training": TrainingConfig, "lora": LoRAConfig} if self.reports else {})
        try:
            return given | {group: build(kind, given.get(group), group).to_dict() for group, kind in kinds.items()}
        except ConfigError:
            return dict(given)


def find_run(folder: Path | str) -> Path:
    """The folder with a run's record: this one, or one below it."""
    folder = Path(folder)
    if (folder / ROUNDS_FILE).is_file():
        return folder
    folders = sorted(path.parent for path in folder.rglob(ROUNDS_FILE))
    if not folders:
        raise FedTARError(f"{folder} holds no {ROUNDS_FILE}, nor does any folder below it: no run of fedtar_flare")
    if len(folders) > 1:
        names = ", ".join(map(str, folders[:5]))
        raise FedTARError(f"{folder} holds {len(folders)} runs; name one of them: {names}")
    return folders[0]


def read_run(folder: Path | str) -> Run:
    """Read the run in a folder or below it; of an unknown method the shared events alone."""
    folder = find_run(folder)
    events = [event for event in read_events(folder) if not isinstance(event, Late)]
    if not events:
        raise FedTARError(f"{folder / ROUNDS_FILE} holds no event of a run: it is empty, or another program wrote it")
    starts = of_kind(events, Start)
    if not starts and not isinstance(events[0], End):  # a run that fails in the handshake has only an end
        raise FedTARError(f"{folder / ROUNDS_FILE}: there is no event 'start' before the event '{events[0].kind}'")
    start = starts[-1] if starts else Start(method="", run_id="", time_steps=0, rounds=0)
    known = _known_method(start.method)
    kinds, title = (known.events, known.contract.title) if known else ((), start.method or "Federated run")
    return Run(
        folder=folder,
        start=start.model_copy(update={"first_round": min((s.first_round for s in starts), default=1)}),
        steps=tuple(latest(of_kind(events, Step))),
        validations=tuple(latest(of_kind(events, Validation))),
        evaluations=tuple(_known(event, start.min_cell) for event in latest(of_kind(events, Evaluation))),
        end=events[-1] if isinstance(events[-1], End) else None,
        method_events=tuple(read_events(folder, kinds)) if kinds else (),
        title=title,
        alarms=tuple(alarm.text for alarm in of_kind(events, Alarm)),
        ahead={
            t: {site: _shown(scores, start.min_cell) for site, scores in sorted(sites.items())}
            for event in of_kind(events, Ahead)[-1:]
            for t, sites in sorted(event.periods.items())
        },
    )


def _known_method(name: str) -> Method | None:
    try:
        return method(name)
    except ConfigError:
        return None


def latest(events: Iterable[Kind]) -> list[Kind]:
    """Events of one kind by round and step, the last of each; events without a round come first, as recorded."""
    last = {}
    for index, event in enumerate(events):
        values = dict(event)
        key = (values["round"], values.get("step", 0)) if "round" in values else (-1, index)
        last[key] = event
    return [last[key] for key in sorted(last)]


def _known(evaluation: Evaluation, min_cell: int) -> Evaluation:
    """An evaluation with the scores alone that are known and may be shown."""

    def of_site(scores: SiteScores) -> SiteScores:
        findings: dict[str, dict[str, Scores]] = {}
        for kind, of_findings in scores.findings.items():
            findings[kind] = {}
            for (name, counts), pair in product(of_findings.items(), (("n", "recall"), ("named", "precision"))):
                if (counts.get(pair[0]) or 0) >= max(1, min_cell):
                    findings[kind].setdefault(name, {}).update({part: counts.get(part) for part in pair})
        return SiteScores(
            steps={t: _shown(cell, min_cell) for t, cell in sorted(scores.steps.items())},
            all=_shown(scores.all, min_cell),
            findings=findings,
            references=scores.references if (scores.all.get("n") or 0) >= min_cell else {},
            certainty={certainty: told for certainty, told in scores.certainty.items() if told[0] >= max(1, min_cell)},
        )

    personal, generic = (
        {site: of_site(scores) for site, scores in sites.items()} for sites in (evaluation.sites, evaluation.generic)
    )
    return Evaluation(round=evaluation.round, sites=personal, generic=generic)


def _shown(scores: Scores, min_cell: int) -> Scores:
    """``n``, and the scores that are known and may be shown."""
    n = scores.get("n") or 0
    known = {name: scores[name] for name in SCORES if scores.get(name) is not None}
    if n < 2:
        known.pop("cider", None)  # 0 for a corpus of one report by definition: no measurement
    return {"n": n, **(known if n >= min_cell else {})}
