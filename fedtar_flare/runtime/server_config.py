"""``ServerConfig``: the settings with which the server runs a job of any method."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from fedtar_flare.core.settings import Settings
from fedtar_flare.protocol.messages import MAX_ROUNDS, MAX_STEPS
from fedtar_flare.runtime.aggregation import FEWEST_SITES, Aggregation, Weighting


class ServerConfig(Settings):
    """Settings of :class:`~fedtar_flare.runtime.controller.FederatedController`, the group ``server`` of a recipe."""

    num_rounds: int = Field(3, ge=1, le=MAX_ROUNDS, description="rounds R")
    time_steps: int = Field(3, ge=1, le=MAX_STEPS, description="time steps T")
    weighting: Weighting = Field("samples", description="of the sites in a mean; 'samples' is n_k / N")
    aggregation: Aggregation = Field(
        "mean",
        description="what the server makes of the sites' updates: their mean, or one that a lying site moves less, "
        "which needs min_sites of at least 2 or 3; validation losses and T numbers are then medians of the sites",
    )
    max_share: float = Field(0.7, gt=0, le=1, description="largest share of a site in a mean of three or more")
    min_sites: int = Field(1, ge=1, description="the job stops when fewer sites take part in a task")
    step_time_limit: int = Field(3600, ge=0, description="seconds that a site has for one task; 0: no limit")
    wait_seconds: float = Field(
        0,
        ge=0,
        description="above 0, a training task ends after so many seconds if min_sites have answered; a late answer "
        "enters the same step of a later round, at 1 / (1 + rounds late) of its size",
    )
    handshake_time_limit: int = Field(
        7200, ge=0, description="the same for the handshake, in which data is prepared; late sites join a round later"
    )
    evaluate_every: int = Field(1, ge=1, description="rounds between scorings of test patients, besides start and end")
    rounds_per_period: int = Field(
        0, ge=0, le=MAX_ROUNDS, description="simulation: rounds until the next time step's visits come; 0: all there"
    )
    update_norm_limit: float = Field(
        10.0, gt=0, description="an update is refused if its norm is above this times the norm of the weights"
    )
    initial_checkpoint: str = Field(
        "", description="checkpoint file of the server's operator (simulator: path) to begin with; empty: the seed's"
    )
    resume_from: str = Field("", description="id of a job of the same submitter (simulator: a checkpoint folder)")
    remake_before: int = Field(
        0, ge=0, le=MAX_ROUNDS, description="with resume_from: a new run from the newest checkpoint before this round"
    )
    keep_checkpoints: int = Field(3, ge=1, description="newest checkpoints that stay, besides best and a job's first")
    seed: int = Field(0, description="of the method's random numbers at the server")
    unseen: tuple[str, ...] = Field(
        (), description="sites that never train: they take part in the handshake, and all of their patients are scored"
    )

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        fewest, scored_alone = FEWEST_SITES[self.aggregation], self.rounds_per_period * (self.time_steps - 1)
        if self.min_sites < fewest:
            yield "min_sites", f"at least {fewest}: aggregation '{self.aggregation}' means nothing with fewer sites"
        if self.rounds_per_period and self.num_rounds > scored_alone:
            yield (
                "rounds_per_period",
                f"0, or enough for {self.num_rounds} rounds: with {self.time_steps} periods there are {scored_alone}, "
                "because visits of the last period are only scored",
            )
        if self.resume_from and self.initial_checkpoint:
            yield "initial_checkpoint", "empty where resume_from is given"
        if self.remake_before and not self.resume_from:
            yield "remake_before", "0 where resume_from is empty"

    def fixed(self) -> dict[str, Any]:
        """List the settings that a resumed run must share; those of special runs only where they are set."""
        fixed = {name: getattr(self, name) for name in ("num_rounds", "time_steps", "weighting", "seed")}
        special = {"rounds_per_period": self.rounds_per_period, "unseen": list(self.unseen)}
        special |= {"aggregation": self.aggregation if self.aggregation != "mean" else ""}
        return fixed | {name: value for name, value in special.items() if value}
