"""FedTAR's own events of the record: the residual of each step, and the outer step."""

from typing import ClassVar

from fedtar_flare.record.events import Event


class Alphas(Event):
    """alpha_1..alpha_T at the start of the run."""

    kind: ClassVar[str] = "alphas"
    curves: ClassVar[dict[str, str]] = {"alpha": "alpha"}
    alpha: list[float]
    first_round: int = 1

    @property
    def round(self) -> int:
        """The round before the first."""
        return self.first_round - 1


class Residual(Event):
    """One residual step (Eq. 7): ``residual_norm`` is alpha times the norm of the mean update (Theorem 2)."""

    kind: ClassVar[str] = "residual"
    round: int
    step: int
    alpha: float
    residual_norm: float | None = None


class Outer(Event):
    """One outer step (Eq. 8); ``t_numbers`` are None where a site did not receive every step of the round.

    ``retained`` are rho_1..rho_T of a corrected hypergradient.
    """

    kind: ClassVar[str] = "outer"
    curves: ClassVar[dict[str, str]] = {"alpha": "alpha_after"}
    round: int
    t_numbers: dict[str, list[float] | None] = {}
    left_out: dict[str, str] = {}
    psi_grad_norm: float | None = None
    retained: list[float] | None = None
    alpha_before: list[float]
    alpha_after: list[float]


EVENTS = (Alphas, Residual, Outer)
