"""Settings of local learning that every method shares: the adapter that travels, training, and the samples."""

import math
from collections.abc import Iterator
from datetime import datetime, time, timedelta
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field

from fedtar_flare.core.settings import Settings, problem_of
from fedtar_flare.data.cells import Timeline
from fedtar_flare.imaging.transform_list import problem_of as problem_of_transforms

LEAST_PERIOD = timedelta(days=28)
"""Shortest calendar period that a job may ask for: counts and losses of single days or hours would tell visits."""


class LoRAConfig(Settings):
    """The shared low-rank adapter, the part that travels (FedTAR, Eq. 4: ``W + s A B^T`` with ``s = alpha / rank``)."""

    rank: int = Field(4, ge=1, description="rank r of the shared and of the patient's factors")
    alpha: float = Field(128.0, gt=0, description="scale numerator: s = alpha / rank")
    exchange: tuple[str, ...] = Field(
        (), description="further parameters that are trained and exchanged whole: names with '*' for any text"
    )
    mean: Literal["factors", "product", "ffa"] = Field(
        "factors",
        description="of the sites' adapters, whose rank a site file may lower (lora_rank): of A and B, padded with "
        "zeros; of the products B A, brought back to the rank by a truncated SVD; or 'ffa', of B alone, A being frozen",
    )

    def at_most(self, rank: int | None) -> "LoRAConfig":
        """Lower the rank to a site's own, with the same scale s."""
        if rank is None or rank >= self.rank:
            return self
        return self.replace(rank=rank, alpha=self.alpha * rank / self.rank)

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if problem := problem_of(self.exchange):
            yield "exchange", problem


class TrainingConfig(Settings):
    """Local training at one time step (FedTAR, Algorithm 1)."""

    local_steps: int = Field(12, ge=1, description="optimiser updates per task")
    local_epochs: float | None = Field(
        None, gt=0, description="passes through a task's training visits (0.02: 2 % of them) in place of local_steps"
    )
    seconds: float = Field(
        0.0, ge=0, description="time for a task's updates: as many of them as fit, which count as all (FedNova); 0: all"
    )
    batch_size: int = Field(8, ge=1, le=1024, description="reports per update")
    micro_batch: int = Field(0, ge=0, description="reports in memory at once; gradients add up; 0: the whole batch")
    gradient_checkpointing: bool = Field(
        False, description="recompute the decoder's layers in the backward pass: less memory, more time, same result"
    )
    lr: float = Field(1e-3, gt=0, description="AdamW learning rate of the shared part")
    schedule: Literal["constant", "cosine"] = Field(
        "constant", description="of the learning rates of both, over rounds: 'cosine' begins at 1 and ends near 0"
    )
    weight_decay: float = Field(0.01, ge=0, description="AdamW weight decay of both")
    augment: bool = Field(False, description="small random changes of training images (MONAI; never mirrored)")
    max_grad_norm: float = Field(1.0, ge=0, description="gradient norm limit; 0 switches it off")
    noise_multiplier: float | None = Field(
        None,
        gt=0,
        description="per-patient DP-SGD: deviation of the noise over max_grad_norm, to which the gradient of each "
        "patient is clipped; patients are drawn at random, batch_size reports on average",
    )

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if self.noise_multiplier is not None and not self.max_grad_norm:
            yield "max_grad_norm", "above 0 with noise_multiplier, whose noise is in proportion to it"
        if self.seconds and (self.local_epochs is not None or self.noise_multiplier is not None):
            yield "seconds", "0 with local_epochs or noise_multiplier: the number of updates would tell of patients"

    def updates_of(self, visits: int, least: int = 1) -> int:
        """Compute how many updates a task makes."""
        if self.local_epochs is None:
            return self.local_steps
        return max(least, math.ceil(self.local_epochs * visits / self.batch_size))

    def work(self) -> str:
        """Say how many updates of how many reports a task makes."""
        share = f"{100 * (self.local_epochs or 0):g} % of its training visits in"
        much = f"{self.local_steps} updates" if self.local_epochs is None else f"{share} updates"
        much = f"as many as fit into {self.seconds:g} s of {much}" if self.seconds else much
        return f"{much} of {self.batch_size} reports"

    def draw_rate(self, visits: int) -> float:
        """Compute each patient's probability of being in an update of per-patient DP-SGD."""
        return min(1.0, self.batch_size / visits)

    def rate_of(self, round_: int, rounds: int) -> float:
        """Compute the factor of the learning rates in a round."""
        return 1.0 if self.schedule == "constant" else (1 + math.cos(math.pi * (round_ - 1) / rounds)) / 2


class DataConfig(Settings):
    """How a site's visits become samples."""

    alignment: Literal["visit", "period"] = Field("visit", description="time step by visit number or calendar period")
    periods: tuple[str, ...] = Field(
        (), description="for 'period': T - 1 ISO dates, the bounds between the bins, at least four weeks apart"
    )
    prior: Literal["none", "report", "image", "report+image", "generated", "generated+image", "auto"] = Field(
        "none",
        description="what the model sees of the patient's previous visit: 'none' (the paper), its report or image; "
        "'generated': the report in training, the model's own text when reports are written; 'auto', with a method "
        "that has the group diagnosis: 'report+image' where a head compares the visits, else 'none'",
    )
    priors: int = Field(1, ge=1, le=8, description="earlier visits that data.prior takes; more than one needs a 'vlm'")
    min_cell: int = Field(1, ge=1, description="fewest patients of a split at a step to learn from it or tell of it")
    synthetic_patients: int = Field(48, ge=1, description="patients of a simulated site")
    replay_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="with alignment 'period': share of the training visits of earlier periods that are learnt from "
        "again, next to those of the newest; 1: all so far, 0: the newest period alone, on which the round is then "
        "validated too (fedtar continue --learn). Between in simulations only",
    )
    image_changes: float = Field(
        0.0, ge=0, le=1, description="simulations: strength of each site's own blur, contrast and brightness"
    )

    transforms: tuple[dict[str, Any], ...] = Field(
        (),
        description="MONAI transforms of the lead's own, each with its name and arguments: deterministic ones on the "
        "image as it was read, random ones on training images; a site's policy.transforms says which it allows",
    )

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if self.replay_share < 1 and self.alignment != "period":
            yield "replay_share", "1 where time steps are visits: a share of earlier periods needs alignment 'period'"
        if problem := problem_of_transforms(self.transforms):
            yield "transforms", problem
        try:
            dates = [datetime.fromisoformat(text) for text in self.periods]
        except ValueError:
            dates = []
        if len(dates) < len(self.periods) or any(date.tzinfo for date in dates) or dates != sorted(set(dates)):
            yield "periods", "rising ISO dates without a time zone, such as '2020-07-01'"
        elif any(date.time() != time() for date in dates) or any(b - a < LEAST_PERIOD for a, b in pairwise(dates)):
            yield "periods", f"whole days, at least {LEAST_PERIOD.days} apart: shorter ones tell when patients came"

    def timeline(self, time_steps: int) -> Timeline:
        """Build the rule by which visits become the time steps 1 to T."""
        return Timeline(
            time_steps, self.alignment, tuple(map(datetime.fromisoformat, self.periods)), self.prior, self.priors
        )
