"""Headers of tasks and replies, and what a reply may say.

A header is a flat dictionary of primitives under one key of the ``FLModel`` meta, so that a data steward can read every
field that leaves (see :mod:`fedtar_flare.site.guard`, which lets nothing else pass).
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.core.text import plain
from fedtar_flare.protocol.contract import NUMBER_KINDS, SECONDS, Contract, Field
from fedtar_flare.protocol.exchange import ExchangeSchema
from fedtar_flare.version import __version__

HEADER = "fedtar_flare"
"""Key of the header in ``FLModel.meta``."""

OK, ABSTAIN, ERROR = "ok", "abstain", "error"
STATUSES = (OK, ABSTAIN, ERROR)
LEFT = "the site has left the federation"
"""Public reason of a site that takes part no more."""

SCORED = ("test", "all")
"""Whose reports a task may have scored."""

MAX_ROUNDS, MAX_STEPS = 9999, 99
"""The largest numbers that fit the name of a state version."""
RESERVED_RUNS = ("approvals", "audit", "sites")
"""Folders of a site's state that belong to no run."""

MAX_TEXT = 512
"""Longest text of one value, in characters."""
MAX_WHOLE = 2**53
"""Largest whole number; one without a bound could spell a text."""
MAX_DEPTH = 6
"""Deepest nesting of a ``tree`` or of ``settings``."""
MAX_HEADER = 300_000
"""Largest header, in characters of JSON; the exchange schema of the paper's model needs a fifth of it."""

WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""A short name, never free text."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
"""A run id such as a controller makes (``20260101-120000-0a1b2c3d``): never the name of a file in a site's state."""
_VERSION = re.compile(r"[0-9]{4}-[0-9]{2}")
_ORIGIN = re.compile(rf"{RUN_ID.pattern}/{_VERSION.pattern}")
_NAME = re.compile(rf"{WORD.pattern}|[0-9]{{1,4}}")
_PLUGIN = re.compile(r"[0-9A-Za-z.+-]{0,40}")
_VALUE = re.compile(r"[A-Za-z0-9_.+-]{1,64}")
_RELEASE = re.compile(r"\d{1,6}\.\d{1,6}(?!\d)")


@dataclass(frozen=True)
class _Header:
    _carrier: ClassVar[tuple[str, str, str]]
    """What carries the header, the sender, the receiver: for messages."""

    def to_meta(self) -> dict[str, Any]:
        """Return the ``FLModel`` meta with this header."""
        return {HEADER: asdict(self)}

    @classmethod
    def from_meta(cls, meta: dict[str, Any] | None) -> Self:
        """Read a header, an error reply whatever the sender's version, as its reason has to be shown."""
        carrier, sender, receiver = cls._carrier
        header = (meta or {}).get(HEADER)
        if not isinstance(header, dict):
            hint = ": it was not sent by this plugin's controller" if cls is TaskHeader else ""
            raise ExchangeError(f"the {carrier} carries no '{HEADER}' header{hint}")
        plugin = header.get("plugin", "")
        readable = cls is Reply and header.get("status") == ERROR
        if not readable and not compatible(plugin):
            release = plugin[:40] if isinstance(plugin, str) and plugin else "of an earlier release"
            text = f"the {sender}'s fedtar_flare is {release}, the {receiver}'s is {__version__}"
            raise ExchangeError(f"{text}; install the same major.minor version everywhere")
        values = {known.name: header[known.name] for known in fields(cls) if known.name in header}
        try:
            return cls(**values)
        except TypeError as error:
            text = f"the header of version {header.get('plugin', '?')!s:.40} does not fit version {__version__}"
            raise ExchangeError(f"{text} ({error})") from error


@dataclass(frozen=True)
class TaskHeader(_Header):
    """The server's request; :class:`ExchangeError` for a value that no server of this package sends.

    Attributes
    ----------
    run_id : made by the server once per run; names the site's state
    round, rounds : r in 1..R, and R; round 0 is the handshake
    step, time_steps : t in 1..T, and T, which is the step of ``close_round``
    after : state version (see :func:`version`) after which the task comes. The site starts from its newest version that
        is not later, so that a repeated or resumed task gives the same result
    evaluate : whether test patients are scored within this task
    initial_site : the site that answers the handshake with its initial shared weights; empty: none
    member : whether the site took part in an earlier job of this run, so that it must have its state
    keep : state version of the best round so far, which the site does not prune; empty: none
    origin : of a run that is made again: whose state it begins with at the site, ``RUN/0002-03``; empty: none
    score : whose reports are scored: ``test`` patients', or ``all`` of a site that never trains
    rounds_per_period : rounds for each period, in a simulation whose visits arrive by periods; 0: all are there at once
    alpha : weight, from 0 to 1, with which this step's aggregate enters the weights
    replay : whether a step may learn from other steps' visits too, where the method can say so
    """

    _carrier = ("task", "server", "site")

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
    rounds_per_period: int = 0
    alpha: float = 1.0
    replay: bool = True
    origin: str = ""
    plugin: str = __version__

    def __post_init__(self) -> None:
        limits = {"rounds": (1, MAX_ROUNDS), "round": (0, MAX_ROUNDS)}
        limits |= {"time_steps": (1, MAX_STEPS), "step": (0, MAX_STEPS), "rounds_per_period": (0, MAX_ROUNDS)}
        for name, (least, most) in limits.items():
            if type(getattr(self, name)) is not int or not least <= getattr(self, name) <= most:
                raise ExchangeError(f"the task's {name} is not a whole number from {least} to {most}")
        texts = {}
        for name in ("method", "run_id", "after", "keep", "origin"):
            value = getattr(self, name)
            texts[name] = value if isinstance(value, str) else "\n"  # which no form below allows
        after, keep = texts["after"], texts["keep"]
        site = isinstance(self.initial_site, str) and len(self.initial_site) <= 256
        for holds, problem in (
            (WORD.fullmatch(texts["method"]), "method is not a short word"),
            (self.round <= self.rounds, f"round {self.round} is beyond its {self.rounds} rounds"),
            (self.step <= self.time_steps, f"step {self.step} is beyond its {self.time_steps} time steps"),
            (
                RUN_ID.fullmatch(texts["run_id"]) and self.run_id not in RESERVED_RUNS,
                "run_id is none that a server makes (at most 64 letters, digits and '-')",
            ),
            (_VERSION.fullmatch(after), "state version is not of the form 0001-02"),
            (after <= version(self.rounds, self.time_steps), "state version is beyond the run's end"),
            (keep == "" or _VERSION.fullmatch(keep), "state version to keep is not of the form 0001-02"),
            (texts["origin"] == "" or _ORIGIN.fullmatch(texts["origin"]), "origin is no run and state version"),
            (texts["origin"] == "" or not (self.round or self.evaluate), "origin is for a handshake without scores"),
            (isinstance(self.evaluate, bool), "'evaluate' is neither true nor false"),
            (isinstance(self.replay, bool), "'replay' is neither true nor false"),
            (isinstance(self.member, bool), "'member' is neither true nor false"),
            (type(self.alpha) is float and 0 <= self.alpha <= 1, "alpha is not a number from 0 to 1"),
            (self.score in SCORED, f"'score' is not one of {', '.join(SCORED)}"),
            (site, "initial_site is not a name"),
        ):
            if not holds:
                raise ExchangeError(f"the task's {problem}")

    @property
    def arrived(self) -> int | None:
        """How many periods the run has learnt from once this task is done; None where visits do not arrive.

        >>> [TaskHeader("x", "r", r, 0, 4, 3, "0000-00", rounds_per_period=2).arrived for r in range(5)]
        [0, 1, 1, 2, 2]
        """
        done = self.round or int(self.after[:4])
        return -(-done // self.rounds_per_period) if self.rounds_per_period else None


@dataclass(frozen=True)
class Reply(_Header):
    """The header of a site's answer: numbers and short words only.

    Attributes
    ----------
    status : ``ok``, ``abstain`` (no update from this site at this step) or ``error``
    round, step, method : those of the task header, so that a late answer is never taken for another step's; ``method``
        is empty in an error whose task header could not be read
    reason : why a site abstains or fails; public text, free of identity
    numbers, payload : fields of the task that are single numbers, and the others
    """

    _carrier = ("reply", "site", "server")

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
        if self.method != "" and not (isinstance(self.method, str) and WORD.fullmatch(self.method)):
            raise ExchangeError("the method of a reply is not a short word")
        for name, kind in (("reason", str), ("numbers", dict), ("payload", dict)):
            if not isinstance(getattr(self, name), kind):
                raise ExchangeError(f"the field '{name}' of a reply is not of type {kind.__name__}")
        object.__setattr__(self, "reason", plain(self.reason))  # it is printed, and must not write lines of a log
        for name, limit in (("round", MAX_ROUNDS), ("step", MAX_STEPS)):
            if type(getattr(self, name)) is not int or not -1 <= getattr(self, name) <= limit:
                raise ExchangeError(f"the field '{name}' of a reply is not a number from -1 to {limit}")


def ok(header: TaskHeader, numbers: dict[str, float] | None = None, payload: dict[str, Any] | None = None) -> Reply:
    """Answer a task that was done."""
    return Reply(OK, header.round, header.step, numbers=numbers or {}, payload=payload or {}, method=header.method)


def abstain(header: TaskHeader, reason: str) -> Reply:
    """Answer that no update comes from this site at this step."""
    return Reply(ABSTAIN, header.round, header.step, reason, method=header.method)


def failure(header: TaskHeader | None, reason: str) -> Reply:
    """Answer that the task failed at this site."""
    if header is None:
        return Reply(ERROR, -1, -1, reason)
    return Reply(ERROR, header.round, header.step, reason, method=header.method)


def compatible(other: Any) -> bool:
    """Compare a version of this package with the installed one."""
    installed, sent = _RELEASE.match(__version__), _RELEASE.match(other) if isinstance(other, str) else None
    return installed is not None and sent is not None and installed[0] == sent[0]


def version(round_: int, step: int) -> str:
    """Name a state version; names sort in the order of time."""
    return f"{round_:04d}-{step:02d}"


# ---------------------------------------------------------------------- checks; they name a field, never its value
def check_order(contract: Contract, task_name: str, round_: int, done: Collection[str]) -> None:
    """Refuse a task of another round, or before any of those that it follows was done by the site in this run."""
    task = contract.task(task_name)
    if (task.at == "start") is not (round_ == 0):
        raise ExchangeError(f"task '{task_name}' may not be asked for in round {round_}")
    if task.follows and not set(task.follows) & set(done):
        raise ExchangeError(f"task '{task_name}' may only follow {' or '.join(task.follows)}, and none was done")


def check_reply(contract: Contract, task_name: str, reply: Reply) -> None:
    """Refuse a reply's header that the contract does not describe."""
    task = contract.task(task_name)
    if reply.status == ERROR:
        check_error(reply)
        return
    if reply.method != contract.method:
        raise ExchangeError(f"the reply is of method '{reply.method}', not of '{contract.method}'")
    _check_texts(reply)
    declared: dict[Any, Field] = {field.name: field for field in task.fields}
    for part, values, are_numbers in (("numbers", reply.numbers, True), ("payload", reply.payload, False)):
        for name, value in values.items():
            known = declared.get(name)
            if known is None or (known.kind in NUMBER_KINDS) is not are_numbers:
                raise ExchangeError(f"the reply carries the unknown field '{name!s:.80}' in its {part}")
            check_field(known, value)
    if reply.status == OK:
        for field in task.fields:
            if field.required and field.name not in reply.numbers and field.name not in reply.payload:
                raise ExchangeError(f"the reply lacks the field '{field.name}'")
    if (length := len(json.dumps([reply.numbers, reply.payload]))) > MAX_HEADER:
        raise ExchangeError(f"the header has {length} characters; the limit is {MAX_HEADER}")


def check_error(reply: Reply) -> None:
    """Refuse an error reply that carries more than its reason and how long the task took."""
    _check_texts(reply)
    if reply.payload or set(reply.numbers) - {SECONDS.name}:
        raise ExchangeError("an error reply carries more than its reason")
    for value in reply.numbers.values():
        check_field(SECONDS, value)


def _check_texts(reply: Reply) -> None:
    if len(reply.reason) > MAX_TEXT:
        raise ExchangeError(f"the field 'reason' is longer than {MAX_TEXT} characters")
    if not isinstance(reply.plugin, str) or not _PLUGIN.fullmatch(reply.plugin):
        raise ExchangeError("the field 'plugin' is not a version")


def check_field(field: Field, value: Any) -> None:
    """Refuse a value that is not of the field's kind, or beyond its bounds."""
    _CHECKS[field.kind](field, value)


def _require(field: Field, holds: bool, problem: str) -> None:
    if not holds:
        raise ExchangeError(f"the field '{field.name}' {problem}")


def _number(field: Field, value: Any) -> None:
    if type(value) is int:
        _require(field, abs(value) <= MAX_WHOLE, "holds a number beyond 2^53")
    else:
        _require(field, isinstance(value, float) and math.isfinite(value), "is not a finite number")
    _require(field, field.least <= value <= field.most, f"is not within {field.least:g} to {field.most:g}")


def _count(field: Field, value: Any) -> None:
    _number(field, value)
    _require(field, value == int(value) and value >= 0, "is not a whole number from 0")


def _numbers(field: Field, value: Any) -> None:
    if value is None:
        return
    short = isinstance(value, list | tuple) and len(value) <= field.length
    _require(field, short, f"is not a list of at most {field.length} numbers")
    for item in value:
        _number(field, item)


def _tree(field: Field, value: Any) -> None:
    _branch(field, replace(field, length=100), value, 0)
    _size(field, value)


def _branch(field: Field, leaf: Field, value: Any, depth: int) -> None:
    _require(field, isinstance(value, Mapping) and depth <= MAX_DEPTH, "is not a dictionary of bounded depth")
    for key, item in value.items():
        _require(field, isinstance(key, str) and bool(_NAME.fullmatch(key)), "has a name that is not a short word")
        if isinstance(item, Mapping):
            _branch(field, leaf, item, depth + 1)
        elif isinstance(item, list | tuple):
            _numbers(leaf, item)
        elif item is not None:
            _number(field, item)


def _word(field: Field, value: Any) -> None:
    _require(field, isinstance(value, str) and bool(_VALUE.fullmatch(value)), "is not a short word")


def _words(field: Field, value: Any) -> None:
    short = isinstance(value, Mapping) and len(value) <= field.length
    _require(field, short, f"is not a dictionary of at most {field.length} words")
    for key, item in value.items():
        _word(field, key)
        _word(field, item)


def _settings(field: Field, value: Any) -> None:
    _require(field, isinstance(value, Mapping), "is not a dictionary")
    _primitives(replace(field, least=-MAX_WHOLE, most=MAX_WHOLE), value, 0)
    _size(field, value)


def _primitives(field: Field, value: Any, depth: int) -> None:
    _require(field, depth <= MAX_DEPTH, "is nested too deeply")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _require(field, isinstance(key, str), "has a name that is not a text")
            _primitives(field, key, depth + 1)
            _primitives(field, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _primitives(field, item, depth + 1)
    elif isinstance(value, str):
        _require(field, len(value) <= MAX_TEXT, f"has a text longer than {MAX_TEXT} characters")
    elif value is not None and not isinstance(value, bool):
        _number(field, value)


def _size(field: Field, value: Any) -> None:
    length = len(json.dumps(value))
    _require(field, length <= field.length, f"has {length} characters; the limit is {field.length}")


_CHECKS: dict[str, Callable[[Field, Any], object]] = {
    "number": _number,
    "count": _count,
    "numbers": _numbers,
    "tree": _tree,
    "word": _word,
    "words": _words,
    "schema": lambda field, value: ExchangeSchema.from_dict(value),
    "settings": _settings,
}
