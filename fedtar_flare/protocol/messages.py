"""Headers of tasks and replies.

A header is a flat dictionary of primitives under one key of the ``FLModel`` meta, so that a data steward can read every
field that leaves (see :mod:`fedtar_flare.site.guard`, which lets nothing else pass).
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fedtar_flare.core.errors import ExchangeError, plain
from fedtar_flare.version import __version__

HEADER = "fedtar_flare"
"""Key of the header in ``FLModel.meta``."""

OK = "ok"
ABSTAIN = "abstain"
ERROR = "error"
STATUSES = (OK, ABSTAIN, ERROR)
LEFT = "the site has left the federation"
"""Public reason of a site that takes part no more."""

SCORED = ("test", "all")
"""Whose reports a task may have scored."""

MAX_ROUNDS, MAX_STEPS = 9999, 99
"""What a state version's name can hold."""
RESERVED_RUNS = ("approvals", "audit", "sites")
"""Folders of a site's state that belong to no run."""

WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""A short name, never free text."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
"""Of the kind that a controller makes (``20260101-120000-0a1b2c3d``): never the name of a file that a site keeps."""
_VERSION = re.compile(r"\d{4}-\d{2}")


@dataclass(frozen=True)
class _Header:
    def to_meta(self) -> dict[str, Any]:
        return {HEADER: asdict(self)}


@dataclass(frozen=True)
class TaskHeader(_Header):
    """What the server asks for; :class:`ExchangeError` for a field that no server of this package sends."""

    method: str
    run_id: str  # made by the server once per run; keys the site state
    round: int  # r in 1..R; 0 is the handshake
    step: int  # time step t in 1..T; in ``close_round`` it is T
    rounds: int
    time_steps: int
    after: str
    """State version (see :func:`version`) after which this task comes: the site starts from its newest version that is
    not later, so that a repeated or resumed task gives the same result."""
    evaluate: bool = False  # whether test patients are scored within this task
    initial_site: str = ""  # the site that answers the handshake with its initial shared weights; empty: none
    member: bool = False  # the site took part in an earlier job of this run, so it must have its state
    keep: str = ""  # state version of the best round so far, which the site does not prune; empty: none
    score: str = "test"  # whom: test patients, or ``all`` of a site that never trains
    rounds_per_period: int = 0  # in a simulation whose visits arrive period by period; 0: all are there from the start
    plugin: str = __version__  # of the sender

    def __post_init__(self) -> None:
        limits = {"rounds": (1, MAX_ROUNDS), "round": (0, MAX_ROUNDS)}
        limits |= {"time_steps": (1, MAX_STEPS), "step": (0, MAX_STEPS), "rounds_per_period": (0, MAX_ROUNDS)}
        for name, (least, most) in limits.items():
            whole = type(getattr(self, name)) is int and least <= getattr(self, name) <= most
            _require(whole, name, f"is not a whole number from {least} to {most}")
        run_id = _is(RUN_ID, self.run_id) and self.run_id not in RESERVED_RUNS
        site = isinstance(self.initial_site, str) and len(self.initial_site) <= 256
        _require(_is(WORD, self.method), "method", "is not a short word")
        _require(self.round <= self.rounds, "round", f"{self.round} is beyond its {self.rounds} rounds")
        _require(self.step <= self.time_steps, "step", f"{self.step} is beyond its {self.time_steps} time steps")
        _require(run_id, "run_id", "is none that a server makes (at most 64 letters, digits and '-')")
        _require(_is(_VERSION, self.after), "state version", "is not of the form 0001-02")
        _require(self.after <= version(self.rounds, self.time_steps), "state version", "is beyond the run's end")
        _require(self.keep == "" or _is(_VERSION, self.keep), "state version to keep", "is not of the form 0001-02")
        _require(isinstance(self.evaluate, bool), "'evaluate'", "is neither true nor false")
        _require(isinstance(self.member, bool), "'member'", "is neither true nor false")
        _require(self.score in SCORED, "'score'", f"is not one of {', '.join(SCORED)}")
        _require(site, "initial_site", "is not a name")

    @property
    def arrived(self) -> int | None:
        """How many periods the run has learnt from once this task is done; None where visits do not arrive.

        >>> [TaskHeader("x", "r", r, 0, 4, 3, "0000-00", rounds_per_period=2).arrived for r in range(5)]
        [0, 1, 1, 2, 2]
        """
        done = self.round or int(self.after[:4])
        return -(-done // self.rounds_per_period) if self.rounds_per_period else None

    @classmethod
    def from_meta(cls, meta: dict[str, Any] | None) -> "TaskHeader":
        """Read the header of a task; :class:`ExchangeError` when missing, malformed or of an incompatible version."""
        header = (meta or {}).get(HEADER)
        if not isinstance(header, dict):
            raise ExchangeError(f"the task carries no '{HEADER}' header: it was not sent by this plugin's controller")
        return _read(cls, header, "server")


@dataclass(frozen=True)
class Reply(_Header):
    """The header of a site's answer: numbers and short words only."""

    status: str  # ``ok``, ``abstain`` (no update from this site at this step) or ``error``
    round: int  # with the step that of the task header: a late answer is never taken for another step's
    step: int
    reason: str = ""  # why a site abstains or fails; public text, free of identity
    numbers: dict[str, float] = field(default_factory=dict)  # by name (samples, train_loss, seconds, ...)
    payload: dict[str, Any] = field(default_factory=dict)  # what a task adds (schema, counts, scores, ...)
    method: str = ""  # that of the task header; empty only in an error whose task header could not be read
    plugin: str = __version__  # of the sender

    def __post_init__(self) -> None:
        if not isinstance(self.status, str) or self.status not in STATUSES:
            raise ExchangeError(f"the status of a reply is not one of {', '.join(STATUSES)}")
        if self.method != "" and not _is(WORD, self.method):
            raise ExchangeError("the method of a reply is not a short word")
        for name, kind in (("reason", str), ("numbers", dict), ("payload", dict)):
            if not isinstance(getattr(self, name), kind):
                raise ExchangeError(f"the field '{name}' of a reply is not of type {kind.__name__}")
        object.__setattr__(self, "reason", plain(self.reason))  # it is printed, and must not write lines of a log
        for name, limit in (("round", MAX_ROUNDS), ("step", MAX_STEPS)):
            if type(getattr(self, name)) is not int or not -1 <= getattr(self, name) <= limit:
                raise ExchangeError(f"the field '{name}' of a reply is not a number from -1 to {limit}")

    @classmethod
    def from_meta(cls, meta: dict[str, Any] | None) -> "Reply":
        """Read the header of a reply; :class:`ExchangeError` when missing, malformed or of an incompatible version."""
        header = (meta or {}).get(HEADER)
        if not isinstance(header, dict):
            raise ExchangeError(f"the reply carries no '{HEADER}' header")
        if header.get("status") == ERROR:
            return _known(cls, header)  # of any version: its reason has to be read
        return _read(cls, header, "site")


def ok(header: TaskHeader, numbers: dict[str, float] | None = None, payload: dict[str, Any] | None = None) -> Reply:
    """A good answer to this task."""
    return Reply(OK, header.round, header.step, numbers=numbers or {}, payload=payload or {}, method=header.method)


def abstain(header: TaskHeader, reason: str) -> Reply:
    """No update from this site at this step."""
    return Reply(ABSTAIN, header.round, header.step, reason, method=header.method)


def failure(header: TaskHeader | None, reason: str) -> Reply:
    """The task failed at this site; None for a task whose header could not be read."""
    place = (header.round, header.step) if header else (-1, -1)
    return Reply(ERROR, *place, reason, method=header.method if header else "")


def _is(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _require(holds: bool, name: str, problem: str) -> None:
    if not holds:
        raise ExchangeError(f"the task's {name} {problem}")


def compatible(other: Any) -> bool:
    """Whether the other version has this one's major and minor number."""
    ours, theirs = (re.match(r"\d{1,6}\.\d{1,6}(?!\d)", str(plugin)) for plugin in (__version__, other))
    return isinstance(other, str) and ours is not None and theirs is not None and ours[0] == theirs[0]


def _read(cls: Any, header: Mapping[str, Any], sender: str) -> Any:
    """A header as its dataclass; fields that a later release of the same minor version added are ignored."""
    plugin = header.get("plugin", "")
    if not compatible(plugin):
        here, there = ("site", "server") if sender == "server" else ("server", "site")
        named = plugin[:40] if isinstance(plugin, str) and plugin else "of an earlier release"
        raise ExchangeError(
            f"the {there}'s fedtar_flare is {named}, the {here}'s is {__version__}: they do not understand each "
            "other. Install the same major.minor version everywhere"
        )
    return _known(cls, header)


def _known(cls: Any, header: Mapping[str, Any]) -> Any:
    known = {f.name for f in fields(cls)}
    try:
        return cls(**{name: value for name, value in header.items() if name in known})
    except TypeError as error:
        raise ExchangeError(
            f"the header of version {header.get('plugin', '?')!s:.40} does not fit version {__version__} ({error})"
        ) from error


def version(round_: int, step: int) -> str:
    """Name of a state version, such as ``0002-01`` of round 2, step 1; names sort in the order of time."""
    return f"{round_:04d}-{step:02d}"
