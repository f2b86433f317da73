"""Events of a run: one JSON object a line of ``rounds.jsonl``. A reader skips those, and fields, it does not know."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

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
    """Size of one exchange in one direction (float32), and of the whole model's."""

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    full_parameters: int = 0
    full_bytes: int = 0
    dtype_up: str = "float32"


class Start(Event):
    """After the handshake: who takes part, with what, and why others do not (``absent``). Times are ISO 8601, UTC.

    ``counts`` has each site's visits per split and time step; a resumed run goes on with ``first_round``.
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
    """Sites that joined at the start of a round, and those that could not."""

    kind: ClassVar[str] = "joined"
    round: int
    sites: list[str] = []
    counts: dict[str, Counts] = {}
    absent: dict[str, str] = {}


class SiteUpdate(Part):
    """What one site sent at one step; losses are mean token losses, seconds the task's own.

    ``updates`` of ``planned_updates`` is known in a job with ``training.seconds``;
    ``late``: of so many rounds before.
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
    """One exchange of updates; every site that was asked is in exactly one of the four dictionaries.

    ``update_norm`` is the Euclidean norm of the mean update (None where nothing is averaged), ``seconds`` the time
    until the last answer; ``skipped``: nobody had anything to add, and the weights stay. ``lora_gap`` is
    ``||mean(B A) - mean(B) mean(A)|| / ||mean(B A)||`` of the sites' low-rank factors (None without any).
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
    """One site's validation loss over ``n`` reports."""

    validation_loss: float | None = None
    n: int = 0


class Validation(Event):
    """Mean validation loss over all sites' reports after a round (None without any); ``left_out``: site to reason.

    ``by_median``: the sites' median stands in place of their mean, and chooses the best round.
    """

    kind: ClassVar[str] = "validation"
    round: int
    loss: float | None = None
    sites: dict[str, SiteValidation] = {}
    left_out: dict[str, str] = {}
    by_median: bool = False


Scores = dict[str, float | None]
"""``n`` test reports and their raw scores by name; a cell under the minimum has only ``n``."""


class SiteScores(Part):
    """Scores of one site: per time step, over all steps shown, and of the reference reports themselves.

    ``findings``: kind (``known`` and ``new`` to the warm start, or ``stated``: classes in the references) to finding to
    ``n``, the reports that have it, and ``recall``; ``named``, those that name it, and ``precision``; what is of too
    few patients is not in it. ``references`` has ``identical_share`` and ``contradictions``.
    """

    steps: dict[int, Scores] = {}
    all: Scores = {}
    findings: dict[str, dict[str, Scores]] = {}
    references: Scores = {}


class Evaluation(Event):
    """Scores of test patients after a round (0: before training); ``generic``: of the shared adapter alone."""

    kind: ClassVar[str] = "evaluation"
    round: int
    sites: dict[str, SiteScores] = {}
    generic: dict[str, SiteScores] = {}


class Ahead(Event):
    """Scores by period and site of the reports that were written before anything was learnt from the period, of all
    jobs of a run so far.
    """

    kind: ClassVar[str] = "ahead"
    round: int
    periods: dict[int, dict[str, Scores]] = {}


class TaskOutcome(Part):
    """What one site learnt in a task of classification (a new class), on ``n`` test images; a method adds to it.

    ``at_epoch`` has the seconds of the site's own work until e = 0..E, (E + 1,); ``membership`` is the AUC of
    separating training images from test images by what was learnt.
    """

    task: str
    n: int = 0
    at_epoch: list[float] = []
    membership: float | None = None


class TaskBegun(Event):
    """Base of a method's event of what comes before a task of classification."""

    round: int

    def waited(self, site: str) -> float:
        """Seconds before the site's own work on the task."""
        return 0.0


class TaskLearnt(Event):
    """Base of a method's event of what the sites learnt in a task of classification."""

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
    """The end of a run; ``seconds`` is the duration of the whole run."""

    kind: ClassVar[str] = "end"
    time: str = ""
    seconds: float | None = None
    status: Literal["completed", "aborted", "failed"]
    reason: str = ""


SHARED = (Start, Joined, Step, Validation, Evaluation, Ahead, Alarm, Late, End)
"""Events of every method."""
