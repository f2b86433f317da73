"""The contract of a method: what travels between server and sites, declared once, as plain data.

Guard, privacy filter, audit, controller, kit and ``fedtar export --describe`` read it; none knows a method by name. A
site reads the contract installed with its own package, so no job can widen it. The checks of replies and tensors run at
both ends: the guard applies them to what leaves, the controller to what arrives.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.globs import matches
from fedtar_flare.protocol.exchange import WIRE_DTYPES, check_tensor, check_tensor_names, check_unit_rows
from fedtar_flare.protocol.fields import NUMBER_KINDS, Field, check_error, check_texts
from fedtar_flare.protocol.messages import ERROR, OK, Reply

LORA_NAMES = "base_model.model.*.lora_[AB].weight"
"""PEFT's names of low-rank factors, as they travel."""

HEAD_NAMES = "diagnosis.head.*"
"""Names of the tensors of a diagnosis head, a row for each finding."""

WHOLE_PARAMETERS = "parameters"
"""The group of base-model parameters that travel whole; each site's guard names those it lets pass."""

MAX_HEADER = 300_000
"""Largest header, in characters of JSON; the exchange schema of the paper's model needs a fifth of it."""

Sends = Literal["nothing", "initial", "difference"]


@dataclass(frozen=True)
class Group:
    """Tensors that travel together.

    Their ``form`` is ``averaged``: names and shapes are those agreed on; ``collected``: rows of a fixed width, kept
    apart by site at the server; ``pooled``: stacked along a leading axis at the server, so a site answers with the
    shape that came down or with one item of it, without the leading axis.
    """

    name: str
    form: Literal["averaged", "collected", "pooled"]
    names: tuple[str, ...]  # globs (:mod:`fedtar_flare.core.globs`)
    about: str  # what ``--describe`` and the audit say of it
    personal: bool = False  # one row can stem from one patient
    max_rows: int = 0  # with ``width`` the bounds of a ``collected`` group, which must have them
    width: int = 0
    narrower: bool = False  # ``width`` is the largest; the run's model decides
    unit_rows: bool = False  # the rows must have norm 1, within 0.02

    def __post_init__(self) -> None:
        if self.form == "collected" and (self.max_rows < 1 or self.width < 1):
            raise ConfigError(f"group '{self.name}': a collected group needs max_rows and width")

    def holds(self, tensor: str) -> bool:
        """Whether a tensor of this name belongs to the group."""
        return matches(tensor, self.names)

    def check_shape(self, tensor: str, shape: tuple[int, ...], agreed: tuple[int, ...] | None) -> None:
        """Refuse (:class:`ExchangeError`) a shape that the form does not allow; ``agreed``: that which came down."""
        if self.form == "collected":
            wide = len(shape) == 2 and (shape[1] <= self.width if self.narrower else shape[1] == self.width)
            if not wide or shape[0] > self.max_rows:
                raise ExchangeError(
                    f"tensor '{tensor}' has shape {shape}; allowed: at most {self.max_rows} rows of "
                    f"{'at most ' if self.narrower else ''}{self.width}"
                )
            return
        if agreed is None:
            raise ExchangeError(f"tensor '{tensor}' was not agreed on: it did not come down in this task")
        allowed = (agreed, agreed[1:]) if self.form == "pooled" else (agreed,)
        if shape not in allowed:
            raise ExchangeError(f"tensor '{tensor}' has shape {shape}; agreed: {' or '.join(map(str, allowed))}")


@dataclass(frozen=True)
class Task:
    """One kind of task; its name is FLARE's.

    It ``sends`` ``nothing``, ``initial`` (full weights, from the one site that was asked for them) or ``difference``
    (the change from the weights that came down in this task).
    """

    name: str
    about: str  # what a site does, for ``--describe``
    fields: tuple[Field, ...]  # all that its reply's header may hold
    at: Literal["start", "round"] = "round"  # start: once, before round 1 (round 0)
    down: tuple[str, ...] = ()  # names of the groups that the server sends
    up: tuple[str, ...] = ()  # and that a site answers with
    sends: Sends = "nothing"
    follows: tuple[str, ...] = ()  # tasks of which one must have come before in the run; empty: it may come first

    def with_fields(self, *more: Field) -> "Task":
        """A copy with further fields; one of the same name is replaced."""
        names = {field.name for field in more}
        return replace(self, fields=(*(field for field in self.fields if field.name not in names), *more))

    def field(self, name: str) -> Field | None:
        """The field of that name, or None."""
        return next((field for field in self.fields if field.name == name), None)


@dataclass(frozen=True)
class Contract:
    """What a method exchanges; :class:`ConfigError` where the parts contradict each other."""

    method: str  # its name, as jobs and site policies write it
    title: str
    groups: tuple[Group, ...]  # all tensors that travel
    tasks: tuple[Task, ...]  # in the order of a run
    stays: str  # what never leaves a site, for ``--describe``
    caution: str = ""  # why a site's kit allows the method only where its staff names it; empty for most
    by_rows: tuple[str, ...] = ()
    """Globs of tensors with a row for each of several things, where a site says nothing of those whose
    row is zero: the mean of a row is over the sites that say something."""

    def __post_init__(self) -> None:
        declared = [("group", [g.name for g in self.groups]), ("task", [t.name for t in self.tasks])]
        declared += [(f"field of task '{t.name}'", [f.name for f in t.fields]) for t in self.tasks]
        for what, names in declared:
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
        return tuple(task.name for task in self.tasks)

    @property
    def shares(self) -> bool:
        """Whether sites send what they learnt; False where only numbers leave after the start."""
        return any(task.sends == "difference" for task in self.tasks)

    def task(self, name: str) -> Task:
        """The task of that name; :class:`ExchangeError` when there is none."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise ExchangeError(f"task '{name:.80}' is not one of method '{self.method}' ({', '.join(self.task_names)})")

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def group_of(self, task: Task, tensor: str) -> Group | None:
        """The group among the task's ``up`` that holds a tensor; None when the tensor may not leave."""
        declared = sorted((self.group(name) for name in task.up), key=lambda group: group.name == WHOLE_PARAMETERS)
        return next((group for group in declared if group.holds(tensor)), None)

    def is_collected(self, tensor: str) -> bool:
        """Whether a tensor is rows that the server keeps apart by site, instead of averaging them."""
        return any(group.form == "collected" and group.holds(tensor) for group in self.groups)

    def is_by_rows(self, tensor: str) -> bool:
        """Whether each row of an averaged tensor is the mean of the sites alone that say something in it."""
        return matches(tensor, self.by_rows)

    def allowing(self, extra_names: Sequence[str]) -> "Contract":
        """A copy whose group of whole parameters also has these names (globs)."""
        widened = (
            replace(group, names=(*group.names, *extra_names)) if group.name == WHOLE_PARAMETERS else group
            for group in self.groups
        )
        return replace(self, groups=tuple(widened))

    def check_names(self, task: Task, tensors: Mapping[str, Any]) -> None:
        """Refuse a name that is in none of the task's ``up`` groups; the :class:`ExchangeError` names the tensor."""
        check_tensor_names(tensors)
        for name in sorted(tensors):
            if self.group_of(task, name) is None:
                hint = " unless the site's guard names it (extra_names)" if WHOLE_PARAMETERS in task.up else ""
                raise ExchangeError(f"tensor '{name}' is not allowed to leave in task '{task.name}'{hint}")

    def check_order(self, task_name: str, round_: int, done: Collection[str]) -> None:
        """Refuse (:class:`ExchangeError`) a task that may not come at a site that has answered the tasks ``done``."""
        task = self.task(task_name)
        if (task.at == "start") is not (round_ == 0):
            raise ExchangeError(f"task '{task_name}' may not be asked for in round {round_}")
        if task.follows and not set(task.follows) & set(done):
            raise ExchangeError(f"task '{task_name}' may only follow {' or '.join(task.follows)}, and none was done")

    def check_reply(self, task_name: str, reply: Reply) -> None:
        """Refuse a header that is not described here; the :class:`ExchangeError` names the field, never its value."""
        task = self.task(task_name)
        if reply.status == ERROR:
            check_error(reply)
            return
        if reply.method != self.method:
            raise ExchangeError(f"the reply is of method '{reply.method}', not of '{self.method}'")
        check_texts(reply)
        for where, values, wanted in (("numbers", reply.numbers, True), ("payload", reply.payload, False)):
            for name, value in values.items():
                field = task.field(name) if isinstance(name, str) else None
                if field is None or (field.kind in NUMBER_KINDS) is not wanted:
                    raise ExchangeError(f"the reply carries the unknown field '{name!s:.80}' in its {where}")
                field.check(value)
        if reply.status == OK:
            for field in task.fields:
                if field.required and field.name not in reply.numbers and field.name not in reply.payload:
                    raise ExchangeError(f"the reply lacks the field '{field.name}'")
        if (length := len(json.dumps([reply.numbers, reply.payload]))) > MAX_HEADER:
            raise ExchangeError(f"the header has {length} characters; the limit is {MAX_HEADER}")

    def check_tensors(
        self,
        task_name: str,
        tensors: Any,
        agreed: Mapping[str, tuple[int, ...]],
        *,
        sends: Sends,
        dtypes: Mapping[str, torch.dtype] = WIRE_DTYPES,
    ) -> None:
        """Refuse tensors that may not pass; the :class:`ExchangeError` names the tensor, never its values.

        ``agreed`` has the names and shapes that came down in this task (``difference``), or those of the schema in the
        same reply (``initial``); ``sends`` is what the message claims to be.
        """
        task = self.task(task_name)
        if not isinstance(tensors, Mapping):
            raise ExchangeError("the tensors of the message are not a dictionary")
        if task.sends == "nothing":
            raise ExchangeError(f"no tensors may leave in task '{task_name}'")
        if sends != task.sends:
            raise ExchangeError(f"only {_SENDS[task.sends]} may leave in task '{task_name}', not {_SENDS[sends]}")
        self.check_names(task, tensors)
        for name in sorted(tensors):
            check_tensor(name, tensors[name], None, dtypes)
            group = self.group_of(task, name)
            assert group is not None  # by check_names
            group.check_shape(name, tuple(tensors[name].shape), agreed.get(name))
            if group.unit_rows:
                check_unit_rows(name, tensors[name])
        for name in sorted(set(agreed) - set(tensors)):
            group = self.group_of(task, name)
            if group is not None and group.form == "averaged":
                raise ExchangeError(f"tensor '{name}' was agreed on but is missing")


_SENDS = {"nothing": "no tensors", "initial": "full weights", "difference": "a difference"}
