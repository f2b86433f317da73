"""The contract of a method: what travels between server and sites, declared once, as plain data.

Guard, privacy filter, audit, controller, kit and ``fedtar export --describe`` read it; none knows a method by name. A
site reads the contract installed with its own package, so no job can widen it. Tensors are checked against it by
:mod:`~fedtar_flare.protocol.exchange`, headers by :mod:`~fedtar_flare.protocol.messages`, both at either end: by the
guard when they leave, by the controller when they arrive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.settings import matches

__all__ = [
    "ADAPTER", "CLOSE_ROUND", "Contract", "Field", "Group", "HANDSHAKE", "HEAD_NAMES", "LORA_NAMES", "PARAMETERS",
    "PRIVACY", "SCORES", "SECONDS", "TRAIN", "Task", "close_round", "handshake", "loss_field", "train",
]  # fmt: skip

LORA_NAMES = "base_model.model.*.lora_[AB].weight"
"""PEFT's names of low-rank factors, as they travel."""

HEAD_NAMES = "diagnosis.head.*"
"""Names of the tensors of a diagnosis head, a row for each finding."""

MOST = 1e9
"""No number of a header is larger, unless its field says so."""

Kind = Literal["number", "count", "numbers", "tree", "word", "words", "schema", "settings"]
NUMBER_KINDS = ("number", "count")
"""Kinds of field that travel in ``Reply.numbers``; the others travel in ``Reply.payload``."""

Sends = Literal["nothing", "initial", "difference"]
"""What an answer carries: no tensors, full weights, or the change from the weights that came down in the task."""


@dataclass(frozen=True)
class Field:
    """One field of a reply's header. No free text passes.

    Attributes
    ----------
    name : short word
    kind : ``number``: finite; ``count``: a whole number from 0; ``numbers``: None or a list of numbers; ``tree``:
        numbers and lists of numbers under short words; ``word``; ``words``: short words under short words; ``schema``:
        names and shapes of the tensors that travel; ``settings``: nested primitives that the job itself determines
    about : a description for ``--describe`` and the audit
    length : most values (``numbers``, ``words``), or characters of JSON (``tree``, ``settings``)
    least, most : bounds of every number in it
    public : whether a privacy filter lets it pass as it is: no patient data beyond numbers of visits
    noisy : whether a privacy filter adds noise to it: a ``number`` or ``numbers`` that is not public, else
        ConfigError; a field that is neither does not pass the filter
    required : whether an ``ok`` reply without it is refused
    """

    name: str
    kind: Kind
    about: str
    length: int = 100
    least: float = -MOST
    most: float = MOST
    public: bool = False
    noisy: bool = False
    required: bool = False

    def __post_init__(self) -> None:
        if self.noisy and (self.public or self.kind not in ("number", "numbers")):
            raise ConfigError(f"field '{self.name}': noise is for a 'number' or 'numbers' that is not public")


def loss_field(name: str, about: str, noisy: bool = False) -> Field:
    """Declare a loss from 0 to 10,000 nats per token; a uniform guess among 50,000 words has 11.

    Parameters
    ----------
    name, about, noisy : as of :class:`Field`

    Returns
    -------
    Field
    """
    return Field(name, "number", about, least=0, most=1e4, noisy=noisy)


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
    sends : what the answer carries: ``nothing``, ``difference`` (from what came down), or ``initial``, full weights of
        the one site that was asked for them
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
        parts += [(f"field of task '{task.name}'", task.fields) for task in self.tasks]
        names: dict[str, set[str]] = {}
        for kind, declared in parts:
            names[kind] = {item.name for item in declared}
            if len(names[kind]) < len(declared):
                raise ConfigError(f"contract of '{self.method}': a {kind} is declared twice")
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
        """Look up the group of a tensor by its name.

        Parameters
        ----------
        task, tensor : Task and str

        Returns
        -------
        Group or None, the one among the task's ``up`` that has it; None: the tensor may not leave
        """
        whole = None
        for name in task.up:
            for group in self.groups:
                if group.name == name and matches(tensor, group.names):
                    if name != PARAMETERS.name:
                        return group
                    whole = group  # any other group comes first: a site may allow any name in this one
        return whole

    def allowing(self, extra_names: Sequence[str]) -> "Contract":
        """Widen a copy's group of whole parameters.

        Parameters
        ----------
        extra_names : sequence of str, globs of the names that this site's guard adds

        Returns
        -------
        Contract
        """
        names = {PARAMETERS.name: tuple(extra_names)}
        return replace(self, groups=tuple(replace(g, names=g.names + names.get(g.name, ())) for g in self.groups))


# ---------------------------------------------------------------------- what most methods share
HANDSHAKE = "handshake"
TRAIN = "train"
CLOSE_ROUND = "close_round"

ADAPTER = Group("adapter", "averaged", (LORA_NAMES,), "the shared low-rank factors A and B")
PARAMETERS = Group("parameters", "averaged", (), "parameters of the base model that the run exchanges whole")
"""Which parameters may travel whole is the site's decision: ``extra_names`` of its guard."""

SECONDS = Field("seconds", "number", "how long the task took", least=0)
"""The one number that every reply may carry."""
PRIVACY = Field("privacy", "tree", "epsilon, delta and budget of a site's privacy filter", length=1_000, public=True)
SCORES = (
    Field("scores", "tree", "scores of test reports by step, finding and labeler, with the personal part", 40_000),
    Field("scores_generic", "tree", "the same without the personal part", 40_000),
)
_COUNTS = "visits per split and time step, in multiples of min_cell"
_RANK = "rank of the shared adapter at the site, where it is below the job's"

# A round is any number of `train` tasks and one `close_round`: few tasks, as each starts a process in the simulator.
handshake = Task(
    HANDSHAKE,
    "read the site's data, agree on the exchange, score the start",
    at="start",
    down=(ADAPTER.name, PARAMETERS.name),
    up=(ADAPTER.name, PARAMETERS.name),
    sends="initial",
    fields=(
        Field("schema", "schema", "names and shapes of the tensors that travel", public=True),
        Field("versions", "words", "of packages", length=20, public=True),
        Field("start", "word", "checksum of the initial weights, which follow from the seed", public=True),
        Field("settings", "word", "digest of the settings that must agree", public=True, required=True),
        Field("counts", "tree", _COUNTS, length=10_000, least=0, public=True, required=True),
        Field("min_cell", "count", "fewest distinct patients of a reported cell", least=1, most=1_000, public=True),
        Field("modality", "word", "ct, radiograph or photograph: what the adapter can draft from", public=True),
        Field("rank", "count", _RANK, least=1, public=True),
        Field("lora_mean", "word", "which mean of the adapters the job asks for, if not of the factors", public=True),
        Field("skipped_studies", "tree", "studies that could not be read, by reason", length=5_000, least=0),
        Field("adapter_config", "settings", "PEFT's own configuration of the adapter", length=8_000, public=True),
        Field("model", "settings", "sizes and settings of the base model", length=8_000, public=True),
        PRIVACY,
        SECONDS,
        *SCORES,
    ),
)

train = Task(
    TRAIN,
    "train on the site's own visits",
    down=(ADAPTER.name, PARAMETERS.name),
    up=(ADAPTER.name, PARAMETERS.name),
    sends="difference",
    follows=(HANDSHAKE,),
    fields=(
        Field("samples", "count", "visits that were trained on", least=1, public=True, required=True),
        loss_field("train_loss", "mean token loss over the local updates, to about its standard error"),
        Field("updates", "count", "local updates made, in a job with training.seconds", least=1, public=True),
        Field("planned_updates", "count", "training.local_steps, likewise", least=1, public=True),
        Field("skipped_updates", "count", "local updates left out because their gradient was not finite"),
        PRIVACY,
        SECONDS,
    ),
)

close_round = Task(
    CLOSE_ROUND,
    "validation loss, and scores when due",
    down=(ADAPTER.name, PARAMETERS.name),
    follows=(HANDSHAKE,),
    fields=(
        loss_field("validation_loss", "mean loss of the validation patients' reports, rounded alike", noisy=True),
        Field("reports", "count", "validation reports", least=1, public=True),
        PRIVACY,
        SECONDS,
        *SCORES,
    ),
)
