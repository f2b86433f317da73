"""Settings of what is FedMRG's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from fedtar_flare.fedmrg.bank import MOST_ROWS
from fedtar_flare.fedmrg.contrast import Denominator
from fedtar_flare.fedmrg.distill import Direction
from fedtar_flare.fedmrg.dual_adapter import Backbone
from fedtar_flare.learning.diagnosis import HeadKind, Place
from fedtar_flare.learning.labels import ClassSet, LabelerName
from fedtar_flare.settings import Settings


class FedMRGConfig(Settings):
    """Dual adapters, mutual distillation, contrast of images, and diagnoses as prompts.

    Where the paper gives no value, the default is a decision: its curves of the two weights have no numbers.
    """

    mix: float = Field(
        0.5, ge=0, le=1, description="mu of Eq. 6, at inference: 1 the generic adapter alone, 0 the specialised whole"
    )
    distill_weight: float = Field(0.5, ge=0, description="weight of the distillation, both ways (Eq. 4 and 5)")
    distill_states: bool = Field(
        True, description="compare the hidden states too (Eq. 4 and 5); False: the next token's probabilities alone"
    )
    specialised: bool = Field(
        True, description="train the specialised adapter; False: one generic adapter, without distillation"
    )
    kl: Direction = Field("teacher", description="its KL: (teacher || student), or (student || teacher) as printed")
    contrast_weight: float = Field(0.1, ge=0, description="weight of the contrast of images (Eq. 3); 0 leaves it out")
    temperature: float = Field(0.07, gt=0, description="tau of the contrast")
    denominator: Denominator = Field("decoupled", description="'infonce' adds the positive to the sum, as is usual")
    bank_rows: int = Field(
        16, ge=0, le=MOST_ROWS, description="rows that a site may add to the feature bank in a round; 0: no bank"
    )
    bank_group: int = Field(
        1,
        ge=1,
        description="training patients whose features a row is the mean of; the paper's is 1, for simulations: a real "
        "site takes at least 5",
    )
    labeler: LabelerName = Field(
        "synthetic", description="what tells the findings of a report; the same at all sites; 'none': no prompts"
    )
    prompt_classes: ClassSet = Field(
        "all", description="what a prompt tells of a finding: all four classes, or whether it is there alone"
    )
    prompt_place: Place = Field(
        "last",
        description="where prompts stand: at the decoder's 'last' positions; beside its 'begin' token, as copies of it "
        "that share its weight at first, so that untrained prompts do not disturb a trained decoder; or in its "
        "'memory', among the image's tokens, which a trained decoder heeds soonest",
    )
    prompt_truth: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the training reports whose prompts are the report's own findings (all, in the paper), "
        "not those that the branch predicts",
    )
    head: HeadKind = Field(
        "mean", description="how the branch reads the image: the mean of the tokens, or a query for each finding"
    )
    head_weights: Literal["small"] | None = Field(
        None,
        description="'small': the head that was warm-started with the preset small (findings of the synthetic cohort), "
        "and prompts for the place 'memory'; for head 'attention' and prompt_classes 'positive'",
    )
    backbone: Backbone = Field(
        "whole", description="of the encoder, its pooling and its map: trained and exchanged whole, by LoRA, or frozen"
    )
    lr_encoder: float = Field(1e-4, gt=0, description="AdamW learning rate of what travels whole of the base model")
    lr_branch: float = Field(1e-3, gt=0, description="AdamW learning rate of the head of the diagnosis branch")
    lr_prompts: float = Field(1e-3, gt=0, description="AdamW learning rate of the prompts' embeddings")
    cross_attention: bool = Field(
        True,
        description="adapt the decoder's cross-attention too, by which it reads the image; False: it stays as it is",
    )
    lr_specialised: float = Field(1e-3, gt=0, description="AdamW learning rate of the specialised adapter")
    encoder_updates: Literal["both", "generic"] = Field(
        "both", description="which half of an update moves the encoder and the branch; 'generic' costs less"
    )

    def misfits(self) -> Iterator[tuple[str, str]]:
        warm = (self.labeler, self.head, self.prompt_classes)
        if self.head_weights and self.labeler != "none" and warm != ("synthetic", "attention", "positive"):
            yield "head_weights", "none, unless labeler is synthetic, head attention and prompt_classes positive"

    def extension(self, slices: int, seed: int) -> dict[str, Any]:
        """What :func:`fedtar_flare.learning.diagnosis.extend` needs to know."""
        names = ("labeler", "prompt_classes", "prompt_place", "head", "head_weights")
        return {"slices": slices, "seed": seed} | {name: getattr(self, name) for name in names}
