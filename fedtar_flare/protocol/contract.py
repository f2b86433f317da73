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
from fedtar_flare.core.settings import matches
from fedtar_flare.protocol.exchange import WIRE_DTYPES, check_tensor, check_tensor_names, check_unit_rows
from fedtar_flare.protocol.fields import NUMBER_KINDS, Field, check_error, check_texts
from fedtar_flare.protocol.messages import ERROR, OK, Reply

__all__ = ["Contract", "Group", "HEAD_NAMES", "LORA_NAMES", "Sends", "Task", "WHOLE_PARAMETERS"]

LORA_NAMES = "base_model.model.*.lora_[AB].weight"
"""PEFT's names of low-rank factors, as they travel."""

HEAD_NAMES = "diagnosis.head.*"
"""Names of the tensors of a diagnosis head, a row for each finding."""

WHOLE_PARAMETERS = "parameters"
"""The group of base-model parameters that travel whole; each site's guard names those it lets pass."""

MAX_HEADER = 300_000
"""Largest header, in characters of JSON; the exchange schema of the paper's model needs a fifth of it."""

Sends = Literal["nothing", "initial", "difference"]
"""What an answer carries: no tensors, full weights, or the change from the weights that came down in the task."""
_SENDS = {"nothing": "no tensors", "initial": "full weights", "difference": "a difference"}


@dataclass(frozen=True)
class Group:
    """Tensors that travel together.

    Attributes
    ----------
    name : for messages and the audit
    form : ``averaged``: names and shapes are those agreed on; ``collected``: rows of a fixed width, kept apart by site
        at the server; ``pooled``: stacked along a leading axis at the server, so a site answers with the shape that
        came down or with one item of it, without the leading axis
    names : globs (:mod:`fedtar_flare.core.settings`) of the tensors' names
    about : a description for ``--describe`` and the audit
    personal : whether one row can stem from one patient
    max_rows, width : bounds of a ``collected`` group, which must have them
    narrower : whether ``width`` is the largest, and the run's model decides
    unit_rows : whether the rows must have norm 1, within 0.02
    """

    name: str
    form: Literal["averaged", "collected", "pooled"]
    names: tuple[str, ...]
    about: str
    personal: bool = False
    max_rows: int = 0
    width: int = 0
    narrower: bool = False
    unit_rows: bool = False

    def __post_init__(self) -> None:
        if self.form == "collected" and (self.max_rows < 1 or self.width < 1):
            raise ConfigError(f"group '{self.name}': a collected group needs max_rows and width")


@dataclass(frozen=True)
class Task:
    """One kind of task.

    Attributes
    ----------
    name : FLARE's name of the task
    about : a site's work in it, for ``--describe``
    fields : all that its reply's header may hold
    at : ``start``: once, before round 1 (round 0); ``round``: in every round
    down, up : names of the groups that the server sends, and that a site answers with
    sends : what the answer carries (:data:`Sends`); ``initial`` comes from the one site that was asked for it
    follows : tasks of which one must have come before in the run; empty: it may come first
    """

    name: str
    about: str
    fields: tuple[Field, ...]
    at: Literal["start", "round"] = "round"
    down: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    sends: Sends = "nothing"
    follows: tuple[str, ...] = ()

    def with_fields(self, *more: Field) -> "Task":
        """Add fields to a copy.

        Parameters
        ----------
        more : Field, each in place of one of the same name, if any

        Returns
        -------
        Task
        """
        names = {field.name for field in more}
        return replace(self, fields=(*(field for field in self.fields if field.name not in names), *more))


@dataclass(frozen=True)
class Contract:
    """A method's exchange; :class:`ConfigError` where the parts contradict each other.

    Attributes
    ----------
    method : name of the method, as jobs and site policies write it
    title : its name on pages
    groups : all tensors that travel
    tasks : in the order of a run
    stays : a sentence on what never leaves a site, for ``--describe``
    caution : why a site's kit allows the method only where its staff names it; empty for most
    by_rows : globs of tensors with a row for each of several classes, of which a site says nothing where its row is
        zero: the mean of a row is over the other sites
    """

    method: str
    title: str
    groups: tuple[Group, ...]
    tasks: tuple[Task, ...]
    stays: str
    caution: str = ""
    by_rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parts: list[tuple[str, Sequence[Any]]] = [("group", self.groups), ("task", self.tasks)]
        for task in self.tasks:
            parts.append((f"field of task '{task.name}'", task.fields))
        names: dict[str, set[str]] = {}
        for kind, declared in parts:
            names[kind] = set()
            for item in declared:
                if item.name in names[kind]:
                    raise ConfigError(f"contract of '{self.method}': a {kind} is declared twice")
                names[kind].add(item.name)
        for task in self.tasks:
            if not {*task.down, *task.up} <= names["group"] or not set(task.follows) <= names["task"]:
                raise ConfigError(f"contract of '{self.method}': task '{task.name}' names a group or task unknown")
            if (task.sends == "nothing") == bool(task.up):
                raise ConfigError(f"contract of '{self.method}': task '{task.name}': 'up' and 'sends' do not fit")

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of the tasks, in the order of a run."""
        return tuple(task.name for task in self.tasks)

    @property
    def shares(self) -> bool:
        """Whether sites send what they learnt; False where only numbers leave after the start."""
        return any(task.sends == "difference" for task in self.tasks)

    def task(self, name: str) -> Task:
        """Look up a task.

        Parameters
        ----------
        name : str

        Returns
        -------
        Task

        Raises
        ------
        ExchangeError
            The method has no such task.
        """
        for task in self.tasks:
            if task.name == name:
                return task
        raise ExchangeError(f"task '{name:.80}' is not one of method '{self.method}' ({', '.join(self.task_names)})")

    def group_of(self, task: Task, tensor: str) -> Group | None:
        """Look up the group of a tensor that leaves.

        Parameters
        ----------
        task : Task, in which it leaves
        tensor : str, its name

        Returns
        -------
        Group or None, the one among the task's ``up`` that has it; None: the tensor may not leave
        """
        whole = None
        for name in task.up:
            for group in self.groups:
                if group.name == name and matches(tensor, group.names):
                    if name != WHOLE_PARAMETERS:
                        return group
                    whole = group  # any other group comes first: a site may allow any name in this one
        return whole

    def is_collected(self, tensor: str) -> bool:
        """Tell whether a tensor is rows that the server keeps apart by site, instead of averaging them.

        Parameters
        ----------
        tensor : str, its name

        Returns
        -------
        bool
        """
        return any(group.form == "collected" and matches(tensor, group.names) for group in self.groups)

    def allowing(self, extra_names: Sequence[str]) -> "Contract":
        """Widen a copy's group of whole parameters.

        Parameters
        ----------
        extra_names : sequence of str, globs of the names that this site's guard adds

        Returns
        -------
        Contract
        """
        groups = list(self.groups)
        for i, group in enumerate(groups):
            if group.name == WHOLE_PARAMETERS:
                groups[i] = replace(group, names=(*group.names, *extra_names))
        return replace(self, groups=tuple(groups))

    def check_names(self, task: Task, tensors: Mapping[str, Any]) -> None:
        """Refuse a name that is in none of the task's ``up`` groups.

        Parameters
        ----------
        task : Task, in which the tensors leave
        tensors : mapping from their names

        Raises
        ------
        ExchangeError
            It names the tensor.
        """
        check_tensor_names(tensors)
        for name in sorted(tensors):
            if self.group_of(task, name) is None:
                hint = " unless the site's guard names it (extra_names)" if WHOLE_PARAMETERS in task.up else ""
                raise ExchangeError(f"tensor '{name}' is not allowed to leave in task '{task.name}'{hint}")

    def check_order(self, task_name: str, round_: int, done: Collection[str]) -> None:
        """Refuse a task that may not come now.

        Parameters
        ----------
        task_name : str
        round_ : int, the round in which it is asked for
        done : collection of str, tasks that the site has answered in this run

        Raises
        ------
        ExchangeError
            It is of another round, or a task that must come first was not done.
        """
        task = self.task(task_name)
        if (task.at == "start") is not (round_ == 0):
            raise ExchangeError(f"task '{task_name}' may not be asked for in round {round_}")
        if task.follows and not set(task.follows) & set(done):
            raise ExchangeError(f"task '{task_name}' may only follow {' or '.join(task.follows)}, and none was done")

    def check_reply(self, task_name: str, reply: Reply) -> None:
        """Refuse a header that this contract does not describe.

        Parameters
        ----------
        task_name : str
        reply : Reply

        Raises
        ------
        ExchangeError
            It names the field, never its value.
        """
        task = self.task(task_name)
        if reply.status == ERROR:
            check_error(reply)
            return
        if reply.method != self.method:
            raise ExchangeError(f"the reply is of method '{reply.method}', not of '{self.method}'")
        check_texts(reply)
        declared: dict[Any, Field] = {}
        for field in task.fields:
            declared[field.name] = field
        for part, values, are_numbers in (("numbers", reply.numbers, True), ("payload", reply.payload, False)):
            for name, value in values.items():
                known = declared.get(name)
                if known is None or (known.kind in NUMBER_KINDS) is not are_numbers:
                    raise ExchangeError(f"the reply carries the unknown field '{name!s:.80}' in its {part}")
                known.check(value)
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
        """Refuse tensors that may not pass.

        Parameters
        ----------
        task_name : str
        tensors : the message's content, of any type
        agreed : mapping of names to shapes: those that came down in this task (``difference``), or those of the schema
            in the same reply (``initial``)
        sends : what the message claims to be
        dtypes : mapping, number formats that are allowed, by name

        Raises
        ------
        ExchangeError
            It names the tensor, never its values.
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
            _check_shape(group, name, tuple(tensors[name].shape), agreed.get(name))
            if group.unit_rows:
                check_unit_rows(name, tensors[name])
        for name in sorted(set(agreed) - set(tensors)):
            group = self.group_of(task, name)
            if group is not None and group.form == "averaged":
                raise ExchangeError(f"tensor '{name}' was agreed on but is missing")


def _check_shape(group: Group, tensor: str, shape: tuple[int, ...], agreed: tuple[int, ...] | None) -> None:
    """Refuse a shape that the group's form does not allow; ``agreed``: the shape that came down."""
    if group.form == "collected":
        wide = len(shape) == 2 and (shape[1] <= group.width if group.narrower else shape[1] == group.width)
        if not wide or shape[0] > group.max_rows:
            raise ExchangeError(
                f"tensor '{tensor}' has shape {shape}; allowed: at most {group.max_rows} rows of "
                f"{'at most ' if group.narrower else ''}{group.width}"
            )
        return
    if agreed is None:
        raise ExchangeError(f"tensor '{tensor}' was not agreed on: it did not come down in this task")
    allowed = (agreed, agreed[1:]) if group.form == "pooled" else (agreed,)
    if shape not in allowed:
        raise ExchangeError(f"tensor '{tensor}' has shape {shape}; agreed: {' or '.join(map(str, allowed))}")
