"""One adapter teaches the other: cosine of the last hidden states and divergence of the next tokens (Eq. 4 and 5).

``KD(student, teacher) = 1 - cos(h_st, h_te) + KL(teacher || student)``, without gradient in the teacher, over the
positions that predict a token of the report. The paper prints KL(student || teacher), while the DistilBERT that it
cites has the form used here.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from fedtar_flare.models.tokenizer import IGNORED

Distillation = Literal["mutual", "g2l", "l2g", "logits"]

TEACHES: dict[Distillation, tuple[str, ...]] = {"g2l": ("specialised",), "l2g": ("generic",)}
"""Which adapters are taught; where it does not say, both are."""


def distill_losses(
    states: Tensor,
    logits: Tensor,
    teacher_states: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    with_states: bool = True,
) -> Tensor:
    """Mean KD over each report's tokens.

    Parameters
    ----------
    states, teacher_states : Tensor, (B, L, E)
        Last hidden states.
    logits, teacher_logits : Tensor, (B, L, V)
        Position i predicts the token at i + 1.
    labels : Tensor, (B, L)
        -100 where no loss is taken.
    with_states : bool
        Whether the cosine is taken; without it, this is FedDAT's distillation.

    Returns
    -------
    Tensor, (B,), float32
    """
    counted = labels[:, 1:] != IGNORED
    own = logits[:, :-1].float().log_softmax(-1)
    taught = teacher_logits[:, :-1].detach().float().log_softmax(-1)
    apart = (taught.exp() * (taught - own)).sum(-1)
    if with_states:
        apart = 1 - F.cosine_similarity(states[:, :-1].float(), teacher_states[:, :-1].detach().float(), dim=-1) + apart
    return (apart * counted).sum(1) / counted.sum(1).clamp(min=1)
