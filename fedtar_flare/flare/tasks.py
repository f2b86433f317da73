"""Names of tasks and the header that travels with every message between server and sites.

The header is a flat dictionary of primitives under one key of the ``FLModel`` meta, so that a data steward can read
every field that leaves (see :mod:`fedtar_flare.flare.guard`, which lets nothing else pass).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from fedtar_flare.errors import ExchangeError

HANDSHAKE = "handshake"
TRAIN = "train"
CLOSE_ROUND = "close_round"
TASKS = (HANDSHAKE, TRAIN, CLOSE_ROUND)

HEADER = "fedtar"
"""Key of the header in ``FLModel.meta``."""

OK = "ok"
ABSTAIN = "abstain"
ERROR = "error"
STATUSES = (OK, ABSTAIN, ERROR)


@dataclass(frozen=True)
class Order:
    """What the server asks for. ``round`` is 1-based (0 = handshake), ``step`` is the time step t in 1..T.

    Args:
        run_id: made by the server once per run; keys the site state.
        round: round r.
        step: time step t; in ``close_round`` it is T.
        rounds: R.
        time_steps: T.
        after: state version (see :func:`version`) after which this task comes: the site starts from its newest
            version that is not later, so that a repeated or resumed task gives the same result.
        evaluate: whether test patients are scored within this task.
        initial_site: the site that answers the handshake with its initial shared weights; empty: none does.
    """

    run_id: str
    round: int
    step: int
    rounds: int
    time_steps: int
    after: str
    evaluate: bool = False
    initial_site: str = ""

    def to_meta(self) -> dict[str, Any]:
        """The header as a dictionary for ``FLModel.meta``."""
        return {HEADER: asdict(self)}

    @classmethod
    def from_meta(cls, meta: dict[str, Any] | None) -> Order:
        """Read the header of a task.

        Raises:
            ExchangeError: when the header is missing or has other fields than this version knows.
        """
        header = (meta or {}).get(HEADER)
        if not isinstance(header, dict):
            raise ExchangeError(f"the task carries no '{HEADER}' header: it was not sent by this plugin's controller")
        try:
            return cls(**header)
        except TypeError as error:
            raise ExchangeError(
                f"the task's header does not fit this version of fedtar_flare ({error}); "
                "install the same version at the server and at every site"
            ) from error


@dataclass(frozen=True)
class Reply:
    """What a site answers beside its tensors: numbers and short words only.

    Args:
        status: ``ok``, ``abstain`` (no update from this site at this step) or ``error``.
        round, step: those of the order, so that a late answer is never taken for another step's.
        reason: why a site abstains or fails; public text, free of identity.
        numbers: scalars by name (samples, train_loss, seconds, ...).
        payload: what a task adds (schema, counts, scores, T numbers); nested dictionaries and lists of primitives.
    """

    status: str
    round: int
    step: int
    reason: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    payload: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ExchangeError(f"status '{self.status}' of a reply is not one of {', '.join(STATUSES)}")

    def to_meta(self) -> dict[str, Any]:
        """The header as a dictionary for ``FLModel.meta``."""
        return {HEADER: asdict(self)}

    @classmethod
    def from_meta(cls, meta: dict[str, Any] | None) -> Reply:
        """Read the header of a reply.

        Raises:
            ExchangeError: when the header is missing or malformed.
        """
        header = (meta or {}).get(HEADER)
        if not isinstance(header, dict):
            raise ExchangeError(f"the reply carries no '{HEADER}' header")
        try:
            return cls(**header)
        except TypeError as error:
            raise ExchangeError(f"the reply's header does not fit this version of fedtar_flare ({error})") from error


def version(round_: int, step: int) -> str:
    """Name of a state version, ``<round>-<step>``; names sort in the order of time.

    >>> version(2, 1)
    '0002-01'
    """
    return f"{round_:04d}-{step:02d}"
