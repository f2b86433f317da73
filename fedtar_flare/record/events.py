"""Events of a run: one JSON object a line of ``rounds.jsonl``. A reader skips those, and fields, it does not know."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "Ahead",
    "Alarm",
    "End",
    "Evaluation",
    "Event",
    "Exchange",
    "Joined",
    "Late",
    "SHARED",
    "Scores",
    "SiteScores",
    "SiteUpdate",
    "SiteValidation",
    "Start",
    "Step",
    "TaskBegun",
    "TaskLearnt",
    "TaskOutcome",
    "Validation",
]

Counts = dict[str, list[int]]


class Event(BaseModel):
    """Base of all events; ``kind`` is the text under the key ``event``."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=True)
    kind: ClassVar[str] = ""
    curves: ClassVar[dict[str, str]] = {}
    """Charts over rounds on the comparison page: title to the field with the value, or with one per time step."""


class Part(BaseModel):
    """Base of what an event holds."""

    model_config = ConfigDict(frozen=True)


class Exchange(Part):
    """Size of one exchange in one direction, in float32, and of the whole model.

    Attributes
    ----------
    tensors, parameters, bytes : int
        Numbers of tensors and values that travel, and their bytes.
    full_parameters, full_bytes : int
        The same of the whole model.
    dtype_up : str
        Number format of updates.
    """

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    full_parameters: int = 0
    full_bytes: int = 0
    dtype_up: str = "float32"


class Start(Event):
    """After the handshake: who takes part, and with what.

    Attributes
    ----------
    method, run_id, time : str
        Name of the method; id of the run, the same when it is resumed; ISO 8601 in UTC.
    settings : dict
        Settings of the server, and of the sites under ``sites``.
    min_cell : int
        Fewest patients of a reported cell.
    model, versions : dict
        Description of the base model; versions of packages at the server.
    sites, absent : list of str, dict of str to str
        Sites that take part; reasons of those that do not.
    counts : dict
        Visits by site, split and time step.
    skipped_studies : dict
        Studies that could not be read, by site and reason.
    exchange : Exchange
    time_steps, rounds, first_round : int
        T and R; a resumed run begins at a later round than 1.
    """

    kind: ClassVar[str] = "start"
    method: str
    run_id: str
    time: str = ""
    settings: dict[str, Any] = {}
    min_cell: int = 1
    model: dict[str, Any] = {}
    versions: dict[str, str] = {}
    sites: list[str] = []
    absent: dict[str, str] = {}
    counts: dict[str, Counts] = {}
    skipped_studies: dict[str, dict[str, int]] = {}
    exchange: Exchange = Exchange()
    time_steps: int
    rounds: int
    first_round: int = 1


class Joined(Event):
    """Sites that came at the start of a round.

    Attributes
    ----------
    round : int
    sites, counts, absent : list of str, dict, dict of str to str
        As in :class:`Start`.
    """

    kind: ClassVar[str] = "joined"
    round: int
    sites: list[str] = []
    counts: dict[str, Counts] = {}
    absent: dict[str, str] = {}


class SiteUpdate(Part):
    """What a site sent at a step.

    Attributes
    ----------
    samples : int
        Visits that it trained on.
    train_loss : float or None
        Mean token loss.
    updates, planned_updates : int or None
        Local updates made and planned, in a job with ``training.seconds``.
    skipped_updates : int
        Local updates left out because their gradient was not finite.
    seconds : float or None
        Duration of the task at the site.
    bytes_up : int
        Size of the update.
    late : int
        Rounds by which it came late.
    """

    samples: int = 0
    train_loss: float | None = None
    updates: int | None = None
    planned_updates: int | None = None
    skipped_updates: int = 0
    seconds: float | None = None
    bytes_up: int = 0
    late: int = 0


class Step(Event):
    """One exchange of updates; every site that got the task is in exactly one of the four dictionaries.

    Attributes
    ----------
    round, step : int
    update_norm : float or None
        Euclidean norm of the aggregate; None where nothing is aggregated.
    lora_gap : float or None
        ``||mean(B A) - mean(B) mean(A)|| / ||mean(B A)||`` of the sites' low-rank factors; None without any.
    skipped : bool
        Whether no site had anything to add, so that the weights stay.
    sites : dict of str to SiteUpdate
    abstained, absent, refused : dict of str to str
        Reasons by site.
    seconds : float
        Until the last answer.
    bytes_down, bytes_up : int
        Sums over the sites.
    """

    kind: ClassVar[str] = "step"
    round: int
    step: int
    update_norm: float | None = None
    lora_gap: float | None = None
    skipped: bool = False
    sites: dict[str, SiteUpdate] = {}
    abstained: dict[str, str] = {}
    absent: dict[str, str] = {}
    refused: dict[str, str] = {}
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0


class SiteValidation(Part):
    """Validation loss of a site.

    Attributes
    ----------
    validation_loss : float or None
    n : int
        Number of reports.
    """

    validation_loss: float | None = None
    n: int = 0


class Validation(Event):
    """Validation loss after a round.

    Attributes
    ----------
    round : int
    loss : float or None
        Mean over the reports of all sites; None without any.
    sites : dict of str to SiteValidation
    left_out : dict of str to str
        Reasons of the sites without a loss.
    by_median : bool
        Whether ``loss`` is the sites' median, by which the best round is then chosen.
    """

    kind: ClassVar[str] = "validation"
    round: int
    loss: float | None = None
    sites: dict[str, SiteValidation] = {}
    left_out: dict[str, str] = {}
    by_median: bool = False


Scores = dict[str, float | None]
"""Number ``n`` of test reports and their raw scores by name; a cell under the minimum has ``n`` only."""


class SiteScores(Part):
    """Scores of a site.

    Attributes
    ----------
    steps : dict of int to Scores
        By time step.
    all : Scores
        Over all steps.
    findings : dict
        By kind and finding: ``n``, the reports that have it, and ``recall``; ``named``, those that name it, and
        ``precision``. Kinds are ``known`` and ``new`` to the warm start, and ``stated`` in the reference. Findings of
        too few patients are left out.
    references : Scores
        Of the reference reports themselves: ``identical_share`` and ``contradictions``.
    """

    steps: dict[int, Scores] = {}
    all: Scores = {}
    findings: dict[str, dict[str, Scores]] = {}
    references: Scores = {}


class Evaluation(Event):
    """Scores of test patients after a round.

    Attributes
    ----------
    round : int
        0: before training.
    sites, generic : dict of str to SiteScores
        With the site's personal part, and with the shared adapter only.
    """

    kind: ClassVar[str] = "evaluation"
    round: int
    sites: dict[str, SiteScores] = {}
    generic: dict[str, SiteScores] = {}


class Ahead(Event):
    """Scores of periods before anything was learnt from their visits.

    Attributes
    ----------
    round : int
    periods : dict
        Scores by period and site, of all jobs of the run so far.
    """

    kind: ClassVar[str] = "ahead"
    round: int
    periods: dict[int, dict[str, Scores]] = {}


class TaskOutcome(Part):
    """What a site learnt in a task of classification (a new class); a method adds to it.

    Attributes
    ----------
    task : str
        Name of the task.
    n : int
        Number of test images.
    at_epoch : list of float, (E + 1,)
        Seconds of the site's work until epoch e = 0..E.
    membership : float or None
        AUC of a membership inference attack: training images against test images.
    """

    task: str
    n: int = 0
    at_epoch: list[float] = []
    membership: float | None = None


class TaskBegun(Event):
    """Base of a method's event of what comes before a task of classification.

    Attributes
    ----------
    round : int
    """

    round: int

    def waited(self, site: str) -> float:
        """Tell how long a site waited before its own work on the task.

        Parameters
        ----------
        site : str

        Returns
        -------
        float
            Seconds.
        """
        return 0.0


class TaskLearnt(Event):
    """Base of a method's event of what the sites learnt in a task of classification.

    Attributes
    ----------
    round : int
    sites : mapping of str to TaskOutcome
    """

    round: int
    sites: Mapping[str, TaskOutcome] = {}


class Alarm(Event):
    """What the server's operator and the study lead must look at.

    Attributes
    ----------
    time, text : str
    """

    kind: ClassVar[str] = "alarm"
    time: str = ""
    text: str


class Late(Event):
    """An answer that came when its step was over: dropped, unless ``wait_seconds`` lets it enter a later round.

    Attributes
    ----------
    time, site, task : str
    """

    kind: ClassVar[str] = "late"
    time: str = ""
    site: str
    task: str


class End(Event):
    """The end of a run.

    Attributes
    ----------
    time : str
    seconds : float or None
        Duration of the job.
    status : {"completed", "aborted", "failed"}
    reason : str
        Why it failed, or that nothing was learnt.
    """

    kind: ClassVar[str] = "end"
    time: str = ""
    seconds: float | None = None
    status: Literal["completed", "aborted", "failed"]
    reason: str = ""


SHARED = (Start, Joined, Step, Validation, Evaluation, Ahead, Alarm, Late, End)
"""Events of every method."""
