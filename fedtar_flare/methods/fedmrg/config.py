"""FedMRG's own settings."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from fedtar_flare.core.settings import Settings
from fedtar_flare.learning.labels import LabelerName
from fedtar_flare.methods.fedmrg.bank import MOST_ROWS
from fedtar_flare.methods.fedmrg.dual_adapter import Backbone

Prompts = Literal["paper", "memory", "none"]

PROMPTS: dict[Prompts, dict[str, Any]] = {
    "paper": {"prompt_place": "last", "prompt_classes": "all", "head": "mean"},
    "memory": {"prompt_place": "memory", "prompt_classes": "positive", "head": "attention"},
    "none": {"prompt_place": "none", "prompt_classes": "all", "head": "mean"},
}
"""Arguments of :func:`fedtar_flare.learning.diagnosis.extend` by kind of prompts."""


class FedMRGConfig(Settings):
    """FedMRG (Che et al.); each ablation of its Table IV is one setting."""

    mix: float = Field(
        0.5, ge=0, le=1, description="mu of Eq. 6, at inference: 1 the generic adapter alone, 0 the specialised in full"
    )
    specialised: bool = Field(True, description="train the specialised adapter; False: only a generic one")
    l2g_weight: float = Field(0.5, ge=0, description="weight of distilling specialised into generic (Eq. 4)")
    g2l_weight: float = Field(0.5, ge=0, description="weight of distilling generic into specialised (Eq. 5)")
    distillation: Literal["states", "logits"] = Field(
        "states", description="hidden states and probabilities are taught, or ('logits', FedDAT) the latter alone"
    )
    contrast_weight: float = Field(0.1, ge=0, description="weight of the contrast of images (Eq. 3); 0 leaves it out")
    temperature: float = Field(0.07, gt=0, description="tau of the contrast")
    bank_rows: int = Field(16, ge=0, le=MOST_ROWS, description="rows for the bank from a site in a round; 0: none")
    bank_group: int = Field(
        1, ge=1, description="patients behind a row (paper: 1); at a real site a multiple of its cell, at least 5"
    )
    labeler: LabelerName = Field(
        "synthetic", description="what reads the findings of a report, at all sites; 'none': neither prompts nor L_CE"
    )
    prompts: Prompts = Field(
        "paper",
        description="'paper': all four classes of each finding at the decoder's last positions, predicted from the "
        "mean of the image's tokens; 'memory': only whether each finding is present, among the image's tokens, "
        "predicted by a query for each finding; 'none': the decoder reads none, and the encoder still learns (L_CE)",
    )
    head_weights: Literal["small"] | None = Field(
        None, description="'small': the branch that was warm-started with the preset small, for prompts 'memory'"
    )
    backbone: Backbone = Field(
        "whole", description="of the encoder, its pooling and its map: trained and exchanged whole, by LoRA, or frozen"
    )
    lr_encoder: float = Field(1e-4, gt=0, description="AdamW learning rate of what travels whole of the base model")

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if self.head_weights and self.labeler != "none" and (self.labeler, self.prompts) != ("synthetic", "memory"):
            yield "head_weights", "none, unless labeler is synthetic and prompts is memory"

    def extension(self, slices: int, seed: int) -> dict[str, Any]:
        """Arguments of :func:`fedtar_flare.learning.diagnosis.extend`."""
        given = {"labeler": self.labeler, "head_weights": self.head_weights, "slices": slices, "seed": seed}
        return given | PROMPTS[self.prompts]
