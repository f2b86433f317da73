"""One adapter teaches the other (Eq. 4 and 5): cosine of the last hidden states and divergence of the next tokens.

``KD(student, teacher) = 1 - cos(h_st, h_te) + KL``, without gradient in the teacher, over the positions that predict a
token of the report. The paper prints KL(student || teacher), while the DistilBERT that it cites has (teacher ||
student), the default here.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from fedtar_flare.models.tokenizer import IGNORED

Direction = Literal["teacher", "student"]


def distill_losses(
    states: Tensor,
    logits: Tensor,
    teacher_states: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    kl: Direction = "teacher",
    with_states: bool = True,
) -> Tensor:
    """Mean KD over each report's tokens, shape (B,), float32.

    Args:
        states, teacher_states: last hidden states (B, L, E).
        logits, teacher_logits: (B, L, V); position i predicts the token at i + 1.
        labels: (B, L), -100 where no loss is taken.
        kl: ``teacher``: KL(teacher || student); ``student``: KL(student || teacher), as printed.
        with_states: whether the cosine is taken; without it, it is FedDAT's distillation.
    """
    counted = labels[:, 1:] != IGNORED
    cosine = F.cosine_similarity(states[:, :-1].float(), teacher_states[:, :-1].detach().float(), dim=-1)
    own = logits[:, :-1].float().log_softmax(-1)
    taught = teacher_logits[:, :-1].detach().float().log_softmax(-1)
    given, approximated = (taught, own) if kl == "teacher" else (own, taught)
    divergence = (given.exp() * (given - approximated)).sum(-1)
    apart = 1 - cosine + divergence if with_states else divergence
    return (apart * counted).sum(1) / counted.sum(1).clamp(min=1)
