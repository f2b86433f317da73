"""What :mod:`fedtar_flare.baselines.fedpeft` trains and averages: its settings, and what the base model gets for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fedtar_flare.settings import Settings

if TYPE_CHECKING:
    from fedtar_flare.models.report_generator import ReportGenerator

WORDS = ("prompt", "prefix")
"""Kinds that learn words instead of an adapter."""


class PEFTConfig(Settings):
    """What is trained and averaged."""

    kind: Literal["adalora", "vera", "loha", "prompt", "prefix", "none"] = Field(
        "adalora", description="of what travels; 'none': no adapter, but the parameters that lora.exchange names"
    )
    target_rank: int | None = Field(
        None, ge=1, description="adalora: mean rank of a layer after pruning; default: half of lora.rank"
    )
    orthogonality: float = Field(
        0.5, ge=0, description="adalora: weight of the penalty on factors that are not orthogonal"
    )
    prompts: int = Field(16, ge=1, le=512, description="prompt, prefix: how many words are learnt")

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if self.target_rank is not None and self.kind != "adalora":
            yield "target_rank", "none, unless kind is adalora"

    def extension(self, targets: str, seed: int) -> dict[str, Any]:
        """What :func:`extend` needs to know."""
        return {"kind": self.kind, "prompts": self.prompts, "targets": targets, "seed": seed}


def extend(generator: ReportGenerator, settings: dict[str, Any]) -> None:
    """Give a base model what its adapter stands on: learnt words, or for LoHa plain linear layers."""
    from fedtar_flare.models import learned_prompts
    from fedtar_flare.models.adapters.kinds import take_linear

    if settings["kind"] in WORDS:
        every_layer = settings["kind"] == "prefix"
        learned_prompts.extend(generator, settings["prompts"], every_layer, settings["seed"])
    elif settings["kind"] == "loha":
        take_linear(generator, settings["targets"])
