"""The time steps of a cohort's visits."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from datetime import datetime

from fedtar_flare.core.errors import ConfigError

ALIGNMENTS = ("visit", "period")
PRIORS = ("none", "report", "image", "report+image", "generated", "generated+image")
"""Values of :attr:`Timeline.prior`."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The time steps 1 to T of a run, and what a sample includes of earlier visits.

    Raises
    ------
    ConfigError
        For a value that is not allowed; the message names the field and the allowed values.
    """

    time_steps: int
    """Number T of time steps."""
    alignment: str = "visit"
    """``visit``: a patient's t-th visit by date is at step t, all beyond T at step T; ``period``: calendar bins."""
    periods: tuple[datetime, ...] = ()
    """For ``period``, T - 1 rising dates, each in the bin that it begins."""
    prior: str = "none"
    """Part of the previous visit that a sample includes, one of :data:`PRIORS`. ``generated`` is the report in
    training and in the validation loss, and the model's own draft of that visit when reports are generated."""
    priors: int = 1
    """Number of earlier visits that a sample includes."""

    def __post_init__(self) -> None:
        whole = isinstance(self.time_steps, int) and not isinstance(self.time_steps, bool)
        if not whole or self.time_steps < 1:
            raise ConfigError(f"time_steps must be a whole number of at least 1, not {self.time_steps!r}")
        for name, value, known in (("alignment", self.alignment, ALIGNMENTS), ("prior", self.prior, PRIORS)):
            if value not in known:
                raise ConfigError(f"{name} '{value}' is not one of {', '.join(known)}")
        object.__setattr__(self, "periods", tuple(self.periods))
        rising = list(self.periods) == sorted(set(self.periods))
        if self.alignment == "period" and (len(self.periods) != self.time_steps - 1 or not rising):
            raise ConfigError(
                f"alignment 'period' needs {self.time_steps - 1} rising dates as periods, the bounds between "
                f"{self.time_steps} bins, not {[date.isoformat() for date in self.periods]}"
            )

    @property
    def prior_kinds(self) -> frozenset[str]:
        """Parts of the previous visit that a sample includes: ``report``, ``image``, both, or none."""
        return frozenset(self.prior.replace("generated", "report").split("+")) - {"none"}

    @property
    def prior_generated(self) -> bool:
        """Whether the model's own draft takes the place of the previous report when reports are generated."""
        return "generated" in self.prior

    def step_of(self, before: int, acquired: datetime) -> int:
        """Time step of a visit."""
        if self.alignment == "period":
            return bisect_right(self.periods, acquired) + 1
        return min(before + 1, self.time_steps)


def extends(before: str, now: str) -> list[str]:
    """The dates by which a timeline of calendar bins continues another one.

    >>> extends("period 2019-04-01", "period 2019-04-01 2019-07-01")
    ['2019-07-01']
    """
    return now.removeprefix(before).split() if before.startswith("period") and now.startswith(f"{before} ") else []
