"""Events of a run: one JSON object a line of ``rounds.jsonl``. A reader skips those, and fields, it does not know."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["Event", "Scores", "TaskBegun", "TaskLearnt", "TaskOutcome"]

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
    """Tensors, values and bytes of one exchange in one direction, in float32, and of the whole model."""

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    full_parameters: int = 0
    full_bytes: int = 0


class Start(Event):
    """After the handshake: who takes part, and with what."""

    kind: ClassVar[str] = "start"
    method: str
    run_id: str  # the same when the run is resumed
    time: str = ""  # ISO 8601 in UTC
    settings: dict[str, Any] = {}  # of the server, and of the sites under ``sites``
    min_cell: int = 1  # fewest patients of a reported cell
    model: dict[str, Any] = {}  # describes the base model
    versions: dict[str, str] = {}  # of packages at the server
    sites: list[str] = []
    absent: dict[str, str] = {}  # reasons by site
    counts: dict[str, Counts] = {}  # visits by site, split and time step
    skipped_studies: dict[str, dict[str, int]] = {}  # that could not be read, by site and reason
    exchange: Exchange = Exchange()
    time_steps: int
    rounds: int
    first_round: int = 1  # later in a resumed run


class Joined(Event):
    """Sites that came at the start of a round, with the fields of :class:`Start`."""

    kind: ClassVar[str] = "joined"
    round: int
    sites: list[str] = []
    counts: dict[str, Counts] = {}
    absent: dict[str, str] = {}


class SiteUpdate(Part):
    """What a site sent at a step."""

    samples: int = 0  # visits that it trained on
    train_loss: float | None = None  # mean over tokens
    updates: int | None = None  # local updates made and planned, in a job with ``training.seconds``
    planned_updates: int | None = None
    skipped_updates: int = 0  # local updates left out because their gradient was not finite
    seconds: float | None = None
    bytes_up: int = 0
    late: int = 0  # rounds by which it came late


class Step(Event):
    """One exchange of updates; every site that got the task is in exactly one of the four dictionaries."""

    kind: ClassVar[str] = "step"
    round: int
    step: int
    update_norm: float | None = None  # Euclidean norm of the aggregate
    skipped: bool = False  # no site had anything to add, so that the weights stay
    sites: dict[str, SiteUpdate] = {}
    abstained: dict[str, str] = {}  # reasons by site
    absent: dict[str, str] = {}
    refused: dict[str, str] = {}
    seconds: float = 0.0  # until the last answer
    bytes_down: int = 0  # sums over the sites
    bytes_up: int = 0


class SiteValidation(Part):
    """Validation loss of a site over ``n`` reports."""

    validation_loss: float | None = None
    n: int = 0


class Validation(Event):
    """Validation loss after a round."""

    kind: ClassVar[str] = "validation"
    round: int
    loss: float | None = None  # mean over the reports of all sites; None without any
    sites: dict[str, SiteValidation] = {}
    left_out: dict[str, str] = {}  # reasons of the sites without a loss
    by_median: bool = False  # whether ``loss`` is the sites' median, by which the best round is then chosen


Scores = dict[str, float | None]
"""Number ``n`` of test reports and their raw scores by name; a cell under the minimum has ``n`` only."""

CERTAINTIES = (0, 50, 60, 70, 80, 90, 95)
"""Probabilities, in percent, from which on :attr:`SiteScores.certainty` counts a change."""


class SiteScores(Part):
    """Scores of a site."""

    steps: dict[int, Scores] = {}  # by time step
    all: Scores = {}  # over all steps
    findings: dict[str, dict[str, Scores]] = {}
    """By kind and finding: ``n``, the reports that have it, and ``recall``; ``named``, those that name it, and
    ``precision``. Kinds are ``known`` and ``new`` to the warm start, and ``stated`` in the reference. Findings of too
    few patients are left out."""
    references: Scores = {}  # ``identical_share`` and ``contradictions`` of the references themselves
    certainty: dict[int, tuple[int, int]] = {}
    """By probability: of the changes that reports state, how many the diagnosis head reads with at least this one, and
    how many of these rightly. Those of too few patients are left out."""


class Evaluation(Event):
    """Scores of test patients after a round; round 0 is before training."""

    kind: ClassVar[str] = "evaluation"
    round: int
    sites: dict[str, SiteScores] = {}  # with the site's personal part
    generic: dict[str, SiteScores] = {}  # with the shared adapter only


class Ahead(Event):
    """Scores of periods before anything was learnt from their visits, by period and site, of all jobs so far."""

    kind: ClassVar[str] = "ahead"
    round: int
    periods: dict[int, dict[str, Scores]] = {}


class TaskOutcome(Part):
    """What a site learnt in a task of classification (a new class); a method adds to it.

    Attributes
    ----------
    task, n
        Name of the task, and number of test images.
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
    round
    """

    round: int

    def waited(self, site: str) -> float:
        """Seconds that a site waited before its work on the task.

        Parameters
        ----------
        site : str

        Returns
        -------
        float
        """
        return 0.0


class TaskLearnt(Event):
    """Base of a method's event of what the sites learnt in a task of classification.

    Attributes
    ----------
    round, sites
    """

    round: int
    sites: Mapping[str, TaskOutcome] = {}


class Alarm(Event):
    """What the server's operator and the study lead must look at."""

    kind: ClassVar[str] = "alarm"
    time: str = ""
    text: str


class Late(Event):
    """An answer that came when its step was over: dropped, unless ``wait_seconds`` lets it enter a later round."""

    kind: ClassVar[str] = "late"
    time: str = ""
    site: str
    task: str


class End(Event):
    """The end of a run, and why it failed, or that nothing was learnt."""

    kind: ClassVar[str] = "end"
    time: str = ""
    seconds: float | None = None
    status: Literal["completed", "aborted", "failed"]
    reason: str = ""


SHARED = (Start, Joined, Step, Validation, Evaluation, Ahead, Alarm, Late, End)
