"""FedMRG's losses besides language: contrast of visits (Eq. 3), and distillation between the adapters (Eq. 4, 5).

**Contrast.** With unit features u_i and v_i of two views of visit i, and A(i) the features of all visits of *other
patients* in the batch, both views, and all rows of the bank::

    l_i = -u_i . v_i / tau + log sum_{z in A(i)} exp(u_i . z / tau)

As printed, A(i) leaves out the positive v_i, so that l_i may be negative. We also leave out visits of the same patient,
which the paper does not mention: the contrast would push a stable patient's visits apart.

**Distillation.** ``KD(student, teacher) = 1 - cos(h_st, h_te) + KL(teacher || student)``, without gradient in the
teacher, over the positions that predict a token of the report. The paper prints KL(student || teacher), while the
DistilBERT that it cites has the form used here.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.learning.diagnosis import slice_means
from fedtar_flare.learning.training import parts
from fedtar_flare.models.tokenizer import IGNORED

See = Callable[[Sequence[Sample], bool], Tensor]
"""Unit features (B, C) of samples: of the training images, or (True) of their second view."""


def features(tokens: Tensor, slice_mask: Tensor) -> Tensor:
    """Unit features (B, C), float32: the mean of the tokens (B, S, N, C) over N and the slices of the mask (B, S)."""
    means = slice_means(tokens, slice_mask).sum(1) / slice_mask.sum(1, keepdim=True).clamp(min=1)
    return F.normalize(means, dim=-1)


def contrast_losses(u: Tensor, v: Tensor, patients: Tensor, bank: Tensor, *, temperature: float) -> Tensor:
    """``l_i`` (N,) of each visit (Eq. 3), of unit features u, v (N, C) and bank rows (M, C); 0 if A(i) is empty."""
    others = patients[:, None] != patients[None, :]
    allowed = torch.cat([others, others, others.new_ones(len(u), len(bank))], dim=1)
    scores = u @ torch.cat([u, v, bank.to(u)]).T / temperature
    has_negatives = allowed.any(1)
    # a row without any negative would be a logarithm of zero, whose gradient is not a number
    scores = scores.masked_fill(~allowed & has_negatives[:, None], -torch.inf)
    losses = torch.logsumexp(scores, dim=1) - (u * v).sum(1) / temperature
    return torch.where(has_negatives, losses, torch.zeros_like(losses))


class BatchContrast:
    """Contrast of each visit of a part of the batch against the whole, by ``losses`` of (u, v, patients), exactly:
    features of the whole batch are made without a graph, and a part's loss is ``<u, dL/du> + <v, dL/dv>``.
    """

    def __init__(
        self, batch: Sequence[Sample], see: See, losses: Callable[[Tensor, Tensor, Tensor], Tensor], size: int
    ):
        self._batch, self._see, self._losses, self._size = batch, see, losses, size
        self._of: dict[Visit, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, samples: Sequence[Sample], u: Tensor) -> Tensor:
        """Loss (B,) of a part of the batch, with features u (B, C) of its training images."""
        v = self._see(samples, True)
        if len(samples) == len(self._batch):
            return self._losses(u, v, _patients(samples, u.device))
        if not self._of:
            self._of = self._gradients()
        losses, du, dv = (torch.stack(rows) for rows in zip(*(self._of[s.visit] for s in samples), strict=True))
        linear = (u * du).sum(1) + (v * dv).sum(1)
        return linear - linear.detach() + losses

    def _gradients(self) -> dict[Visit, tuple[Tensor, Tensor, Tensor]]:
        """Loss of each visit of the batch, and the gradient of their sum in both of its features."""
        with torch.no_grad():
            u, v = (
                torch.cat([self._see(part, second) for part in parts(self._batch, self._size)])
                for second in (False, True)
            )
        with torch.enable_grad():
            losses = self._losses(u.requires_grad_(), v.requires_grad_(), _patients(self._batch, u.device))
            du, dv = torch.autograd.grad(losses.sum(), (u, v))
        rows = zip(losses.detach(), du, dv, strict=True)
        return {sample.visit: row for sample, row in zip(self._batch, rows, strict=True)}


def _patients(samples: Sequence[Sample], device: torch.device) -> Tensor:
    names = [sample.visit.patient_id for sample in samples]
    return torch.tensor([names.index(name) for name in names], device=device)


def distill_losses(
    states: Tensor,
    logits: Tensor,
    teacher_states: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    with_states: bool = True,
) -> Tensor:
    """Mean KD (B,) over each report's tokens, of states (B, L, E) and logits (B, L, V); no cosine: FedDAT's."""
    counted = labels[:, 1:] != IGNORED
    learnt = logits[:, :-1].float().log_softmax(-1)
    taught = teacher_logits[:, :-1].detach().float().log_softmax(-1)
    kd = (taught.exp() * (taught - learnt)).sum(-1)
    if with_states:
        kd = 1 - F.cosine_similarity(states[:, :-1].float(), teacher_states[:, :-1].detach().float(), dim=-1) + kd
    return (kd * counted).sum(1) / counted.sum(1).clamp(min=1)
