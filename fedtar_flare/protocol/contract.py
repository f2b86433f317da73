"""The contract of a method: what travels between server and sites, declared once, as plain data.

Guard, privacy filter, audit, controller, kit and ``fedtar export --describe`` read it; none of them knows a method by
name. A site reads the contract that is installed with its own package, so no job can widen it. Every check of this
file runs at both ends: the guard applies it to what leaves, the controller to what arrives.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedtar_flare.errors import ConfigError, ExchangeError
from fedtar_flare.protocol.exchange import ExchangeSchema
from fedtar_flare.protocol.messages import Reply

LORA_NAMES = r"base_model\.model\..+\.lora_[AB]\.weight"
"""PEFT's names of low-rank factors, as they travel."""

MAX_TEXT = 512
"""Longest text of one value, in characters."""

MAX_HEADER = 300_000
"""Largest header, in characters of JSON; the exchange schema of the paper's model needs a fifth of it."""

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}|\d{1,4}")
_VALUE = re.compile(r"[A-Za-z0-9_.+-]{1,64}")

Kind = Literal["number", "count", "numbers", "tree", "word", "words", "schema", "settings"]
NUMBER_KINDS = ("number", "count")
"""Kinds of field that travel in :attr:`Reply.numbers`; the others travel in :attr:`Reply.payload`."""


@dataclass(frozen=True)
class Field:
    """One field of a reply's header.

    Args:
        name: in ``numbers`` (kinds ``number`` and ``count``) or ``payload`` (the others).
        kind: ``number``: finite; ``count``: a whole number from 0; ``numbers``: None or a list of numbers; ``tree``:
            numbers and lists of numbers under short words; ``word``; ``words``: short words under short words;
            ``schema``: an :class:`ExchangeSchema`; ``settings``: nested primitives that the job itself determines.
        about: what it says, for ``--describe`` and the audit.
        length: largest number of values (``numbers``), or of characters of JSON (``tree``, ``settings``).
        least, most: bounds of a ``number`` or ``count``.
        public: it holds no data of patients beyond numbers of visits; a privacy filter lets it pass as it is.
        noisy: a privacy filter may release it with noise; a field that is neither public nor noisy does not leave
            a site with a privacy filter.
        required: an ``ok`` reply without it is refused.
    """

    name: str
    kind: Kind
    about: str
    length: int = 100
    least: float = -math.inf
    most: float = math.inf
    public: bool = False
    noisy: bool = False
    required: bool = False


@dataclass(frozen=True)
class Group:
    """Tensors that travel together.

    Args:
        name: of the group.
        form: ``averaged``: each site's tensors have the names and shapes that were sent down; ``collected``: rows of
            a fixed width, kept apart by site at the server; ``pooled``: stacked along a leading axis at the server.
        names: regular expressions that must match a tensor's whole name.
        about: what it is, for ``--describe`` and the audit.
        personal: its rows are personal data (one row can stem from one patient).
        max_rows, width: of a ``collected`` group.
    """

    name: str
    form: Literal["averaged", "collected", "pooled"]
    names: tuple[str, ...]
    about: str
    personal: bool = False
    max_rows: int = 0
    width: int = 0

    def holds(self, tensor: str) -> bool:
        """Whether a tensor of this name belongs to the group."""
        return any(re.fullmatch(pattern, tensor) for pattern in self.names)


@dataclass(frozen=True)
class Task:
    """One kind of task.

    Args:
        name: FLARE's task name.
        about: what a site does, for ``--describe``.
        fields: what its reply's header may hold.
        at: ``start``: once, before round 1 (round 0); ``round``: within a round.
        down: names of the groups that the server sends.
        up: names of the groups that a site answers with.
        sends: ``nothing``, ``initial`` (full weights, from the one site that was asked for them), or ``difference``
            (what changed since the weights that came down in this task).
        follows: tasks of which one must have come before in the run; empty: it may come first.
    """

    name: str
    about: str
    fields: tuple[Field, ...]
    at: Literal["start", "round"] = "round"
    down: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    sends: Literal["nothing", "initial", "difference"] = "nothing"
    follows: tuple[str, ...] = ()

    def with_fields(self, *more: Field) -> Task:
        """The task with further fields; one of the same name is replaced."""
        names = {field.name for field in more}
        return replace(self, fields=(*(field for field in self.fields if field.name not in names), *more))

    def field(self, name: str) -> Field | None:
        """The field of that name."""
        return next((field for field in self.fields if field.name == name), None)


@dataclass(frozen=True)
class Contract:
    """What a method exchanges.

    Args:
        method: its name, as jobs and site policies write it.
        title: for people.
        groups: tensors that travel.
        tasks: in the order of a run.
        server_classes, site_classes: full paths of the classes that a job of this method builds.
        stays: what never leaves a site, for ``--describe``.

    Raises:
        ConfigError: a name is there twice, or a task names a group or task that is not there.
    """

    method: str
    title: str
    groups: tuple[Group, ...]
    tasks: tuple[Task, ...]
    server_classes: tuple[str, ...]
    site_classes: tuple[str, ...]
    stays: str

    def __post_init__(self) -> None:
        for what, names in (("group", [g.name for g in self.groups]), ("task", [t.name for t in self.tasks])):
            if len(set(names)) != len(names):
                raise ConfigError(f"contract of '{self.method}': a {what} is declared twice")
        groups, tasks = {g.name for g in self.groups}, {t.name for t in self.tasks}
        for task in self.tasks:
            if not {*task.down, *task.up} <= groups or not set(task.follows) <= tasks:
                raise ConfigError(f"contract of '{self.method}': task '{task.name}' names a group or task unknown")
            if (task.sends == "nothing") == bool(task.up):
                raise ConfigError(f"contract of '{self.method}': task '{task.name}': 'up' and 'sends' do not fit")

    @property
    def task_names(self) -> tuple[str, ...]:
        """In the order of a run."""
        return tuple(task.name for task in self.tasks)

    def task(self, name: str) -> Task:
        """The task of that name.

        Raises:
            ExchangeError: there is none.
        """
        for task in self.tasks:
            if task.name == name:
                return task
        raise ExchangeError(f"task '{name:.80}' is not one of method '{self.method}' ({', '.join(self.task_names)})")

    def group(self, name: str) -> Group:
        """The group of that name."""
        return next(group for group in self.groups if group.name == name)

    def group_of(self, task: Task, tensor: str) -> Group | None:
        """The group among the task's ``up`` that holds a tensor; None when it may not leave."""
        return next((group for name in task.up if (group := self.group(name)).holds(tensor)), None)

    def check_reply(self, task_name: str, reply: Reply) -> None:
        """Refuse a header that this contract does not describe. Runs at the site and at the server.

        Raises:
            ExchangeError: names the field and never its value.
        """
        task = self.task(task_name)
        if len(reply.reason) > MAX_TEXT:
            raise ExchangeError(f"the field 'reason' is longer than {MAX_TEXT} characters")
        if len(reply.plugin) > 40 or not isinstance(reply.plugin, str):
            raise ExchangeError("the field 'plugin' is not a version")
        for where, values, wanted in (("numbers", reply.numbers, True), ("payload", reply.payload, False)):
            for name, value in values.items():
                field = task.field(name) if isinstance(name, str) else None
                if field is None or (field.kind in NUMBER_KINDS) is not wanted:
                    raise ExchangeError(f"the reply carries the unknown field '{name!s:.80}' in its {where}")
                _CHECKS[field.kind](field, value)
        if reply.status == "ok":
            for field in task.fields:
                if field.required and field.name not in reply.numbers and field.name not in reply.payload:
                    raise ExchangeError(f"the reply lacks the field '{field.name}'")
        if (length := len(json.dumps([reply.numbers, reply.payload]))) > MAX_HEADER:
            raise ExchangeError(f"the header has {length} characters; the limit is {MAX_HEADER}")


def _number(field: Field, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ExchangeError(f"the field '{field.name}' is not a finite number")
    if not field.least <= value <= field.most:
        raise ExchangeError(f"the field '{field.name}' is not within {field.least:g} to {field.most:g}")


def _count(field: Field, value: Any) -> None:
    _number(field, value)
    if value != int(value) or value < 0:
        raise ExchangeError(f"the field '{field.name}' is not a whole number from 0")


def _numbers(field: Field, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple) or len(value) > field.length:
        raise ExchangeError(f"the field '{field.name}' is not a list of at most {field.length} numbers")
    for item in value:
        _number(field, item)


def _tree(field: Field, value: Any) -> None:
    _no_text(field, value, 0)
    _size(field, value)


def _no_text(field: Field, value: Any, depth: int) -> None:
    if not isinstance(value, Mapping) or depth > 6:
        raise ExchangeError(f"the field '{field.name}' is not a dictionary of bounded depth")
    for key, item in value.items():
        if not isinstance(key, str) or not _WORD.fullmatch(key):
            raise ExchangeError(f"a name within the field '{field.name}' is not a short word")
        if isinstance(item, Mapping):
            _no_text(field, item, depth + 1)
        elif isinstance(item, list | tuple):
            _numbers(replace(field, length=100), item)
        elif item is not None:
            _number(field, item)


def _word(field: Field, value: Any) -> None:
    if not isinstance(value, str) or not _VALUE.fullmatch(value):
        raise ExchangeError(f"the field '{field.name}' is not a short word")


def _words(field: Field, value: Any) -> None:
    if not isinstance(value, Mapping) or len(value) > field.length:
        raise ExchangeError(f"the field '{field.name}' is not a dictionary of at most {field.length} words")
    for key, item in value.items():
        _word(field, key)
        _word(field, item)


def _schema(field: Field, value: Any) -> None:
    ExchangeSchema.from_dict(value)


def _settings(field: Field, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ExchangeError(f"the field '{field.name}' is not a dictionary")
    _primitives(field, value, 0)
    _size(field, value)


def _primitives(field: Field, value: Any, depth: int) -> None:
    if depth > 6:
        raise ExchangeError(f"the field '{field.name}' is nested too deeply")
    if isinstance(value, float) and not math.isfinite(value):
        raise ExchangeError(f"a value of the field '{field.name}' is not finite")
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise ExchangeError(f"a text of the field '{field.name}' is longer than {MAX_TEXT} characters")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _primitives(field, str(key), depth + 1)
            _primitives(field, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _primitives(field, item, depth + 1)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise ExchangeError(f"the field '{field.name}' carries a {type(value).__name__}")


def _size(field: Field, value: Any) -> None:
    if (length := len(json.dumps(value))) > field.length:
        raise ExchangeError(f"the field '{field.name}' has {length} characters; the limit is {field.length}")


_CHECKS: dict[str, Callable[[Field, Any], None]] = {
    "number": _number,
    "count": _count,
    "numbers": _numbers,
    "tree": _tree,
    "word": _word,
    "words": _words,
    "schema": _schema,
    "settings": _settings,
}
