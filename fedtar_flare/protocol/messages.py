"""Headers of tasks and replies.

A header is a flat dictionary of primitives under one key of the ``FLModel`` meta, so that a data steward can read every
field that leaves (see :mod:`fedtar_flare.site.guard`, which lets nothing else pass).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fedtar_flare.errors import ExchangeError
from fedtar_flare.version import __version__

HEADER = "fedtar_flare"
"""Key of the header in ``FLModel.meta``."""

OK = "ok"
ABSTAIN = "abstain"
ERROR = "error"
STATUSES = (OK, ABSTAIN, ERROR)

SCORED = ("test", "all")
"""Whose reports a task may have scored."""

MAX_ROUNDS, MAX_STEPS = 9999, 99
"""What a state version's name can hold."""
RESERVED_RUNS = ("approvals", "audit", "sites")
"""Folders that a site keeps in its state beside those of the runs."""

WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""A short name, never free text."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
"""Of the kind that a controller makes (``20260101-120000-0a1b2c3d``): never the name of a file that a site keeps."""
_VERSION = re.compile(r"\d{4}-\d{2}")


@dataclass(frozen=True)
class TaskHeader:
    """What the server asks for.

    Args:
        run_id: made by the server once per run; keys the site state.
        round: r in 1..R; 0 is the handshake.
        step: time step t in 1..T; in ``close_round`` it is T.
        after: state version (see :func:`version`) after which this task comes: the site starts from its newest version
            that is not later, so that a repeated or resumed task gives the same result.
        evaluate: whether test patients are scored within this task.
        initial_site: the site that answers the handshake with its initial shared weights; empty: none.
        member: the site took part in an earlier job of this run, so it must have its state.
        score: which patients are scored: ``test``, or ``all`` of a site that never trains.
        keep: state version of the best round so far, which the site does not prune; empty: none.
        plugin: the sender's version of fedtar_flare.

    Raises:
        ExchangeError: a field is not what a server of this package sends; nothing of it becomes a path or a size.
    """

    method: str
    run_id: str
    round: int
    step: int
    rounds: int
    time_steps: int
    after: str
    evaluate: bool = False
    initial_site: str = ""
    member: bool = False
    keep: str = ""
    score: str = "test"
    plugin: str = __version__

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not WORD.fullmatch(self.method):
            raise ExchangeError("the task's method is not a short word")
        whole = {"rounds": MAX_ROUNDS, "round": MAX_ROUNDS, "time_steps": MAX_STEPS, "step": MAX_STEPS}
        for name, limit in whole.items():
            value = getattr(self, name)
            least = 1 if name in ("rounds", "time_steps") else 0
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limit:
                raise ExchangeError(f"the task's {name} is not a whole number from {least} to {limit}")
        if self.round > self.rounds:
            raise ExchangeError(f"the task's round {self.round} is beyond its {self.rounds} rounds")
        if self.step > self.time_steps:
            raise ExchangeError(f"the task's step {self.step} is beyond its {self.time_steps} time steps")
        if not isinstance(self.run_id, str) or not RUN_ID.fullmatch(self.run_id) or self.run_id in RESERVED_RUNS:
            raise ExchangeError("the task's run_id is none that a server makes (at most 64 letters, digits and '-')")
        if not isinstance(self.after, str) or not _VERSION.fullmatch(self.after):
            raise ExchangeError("the task's state version is not of the form 0001-02")
        if self.keep and (not isinstance(self.keep, str) or not _VERSION.fullmatch(self.keep)):
            raise ExchangeError("the task's state version to keep is not of the form 0001-02")
        for name in ("evaluate", "member"):
            if not isinstance(getattr(self, name), bool):
                raise ExchangeError(f"the task's '{name}' is neither true nor false")
        if self.score not in SCORED:
            raise ExchangeError(f"the task's 'score' is not one of {', '.join(SCORED)}")
        if not isinstance(self.initial_site, str) or len(self.initial_site) > 256:
            raise ExchangeError("the task's initial_site is not a name")

    def to_meta(self) -> dict[str, Any]:
        return {HEADER: asdict(self)}

    @classmethod
    def from_meta(cls, meta: dict[str, Any] | None) -> TaskHeader:
        """Read the header of a task; :class:`ExchangeError` when missing, malformed or of an incompatible version."""
        header = (meta or {}).get(HEADER)
        if not isinstance(header, dict):
            raise ExchangeError(f"the task carries no '{HEADER}' header: it was not sent by this plugin's controller")
        return _read(cls, header, "server")


@dataclass(frozen=True)
class Reply:
    """What a site answers beside its tensors: numbers and short words only.

    Args:
        status: ``ok``, ``abstain`` (no update from this site at this step) or ``error``.
        round, step: those of the task header, so that a late answer is never taken for another step's.
        reason: why a site abstains or fails; public text, free of identity.
        numbers: scalars by name (samples, train_loss, seconds, ...).
        payload: what a task adds (schema, counts, scores, ...); nested dictionaries and lists of primitives.
        method: that of the task header; empty only in an error whose task header could not be read.
        plugin: the sender's version of fedtar_flare.
    """

    status: str
    round: int
    step: int
    reason: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    payload: dict[str, Any] = field(default_factory=dict)
    method: str = ""
    plugin: str = __version__

    def __post_init__(self) -> None:
        if not isinstance(self.status, str) or self.status not in STATUSES:
            raise ExchangeError(f"the status of a reply is not one of {', '.join(STATUSES)}")
        if not isinstance(self.method, str) or not (WORD.fullmatch(self.method) or self.method == ""):
            raise ExchangeError("the method of a reply is not a short word")
        for name, kind in (("round", int), ("step", int), ("reason", str), ("numbers", dict), ("payload", dict)):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), kind):
                raise ExchangeError(f"the field '{name}' of a reply is not of type {kind.__name__}")
        for name, limit in (("round", MAX_ROUNDS), ("step", MAX_STEPS)):
            if not -1 <= getattr(self, name) <= limit:
                raise ExchangeError(f"the field '{name}' of a reply is not a number from -1 to {limit}")

    def to_meta(self) -> dict[str, Any]:
        return {HEADER: asdict(self)}

    @classmethod
    def from_meta(cls, meta: dict[str, Any] | None) -> Reply:
        """Read the header of a reply; :class:`ExchangeError` when missing, malformed or of an incompatible version."""
        header = (meta or {}).get(HEADER)
        if not isinstance(header, dict):
            raise ExchangeError(f"the reply carries no '{HEADER}' header")
        if header.get("status") == ERROR:
            return _known(cls, header)  # of any version: its reason has to be read
        return _read(cls, header, "site")


def compatible(other: Any) -> bool:
    """Whether the other version has this one's major and minor number.

    >>> compatible(__version__)
    True
    """
    return release(other) == release(__version__) and release(other) != ""


def release(version_: Any) -> str:
    """Major and minor number of a version, ``0.1`` of ``0.1.3``; empty when it is not a version."""
    match = re.match(r"(\d{1,6}\.\d{1,6})(\D|$)", version_) if isinstance(version_, str) else None
    return match.group(1) if match else ""


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
    """Name of a state version, ``<round>-<step>``; names sort in the order of time.

    >>> version(2, 1)
    '0002-01'
    """
    return f"{round_:04d}-{step:02d}"
