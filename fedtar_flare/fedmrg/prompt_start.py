"""Teach prompts to be heeded by a decoder that stays as it is (part of :mod:`fedtar_flare.fedmrg.head_start`).

Reports of phantoms are learnt from prompts of what they show; half of the time the image beside them is another
phantom's, so that the prompts and not the image tell what to write. Nothing but the prompts T is trained.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedtar_flare.learning.diagnosis import DiagnosisBranch
from fedtar_flare.learning.warm_start import Pairs
from fedtar_flare.models.report_generator import ReportGenerator, report_loss
from fedtar_flare.models.tokenizer import ReportTokenizer
from fedtar_flare.synthetic.vocabulary import findings_in

BATCH, STEPS, LEARNING_RATE, FOCUS = 16, 400, 3e-2, 2.0
OTHER_IMAGE = 0.5
"""Share of the reports that stand beside another phantom's image."""


class Phantoms:
    """Phantoms as the decoder reads them, memory (B, M, E) and its mask (B, M), from the frozen encoder's tokens.

    Args:
        tokens, mask: (B, S, N, C) and (B, S).
        position_mm: of the slices, (B, S).
    """

    def __init__(self, model: ReportGenerator, tokens: Tensor, mask: Tensor, position_mm: Tensor):
        self.model, self.tokens, self.mask, self.position_mm = model, tokens, mask, position_mm

    @torch.no_grad()
    def memory(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of these phantoms."""
        rows = list(chosen)
        pooled = self.model.pooling(self.tokens[rows].float(), self.position_mm[rows])
        memory = self.model.projection(pooled)
        return memory, self.mask[rows].repeat_interleave(memory.shape[1] // self.mask.shape[1], dim=1)


def fit_prompts(
    branch: DiagnosisBranch,
    phantoms: Phantoms,
    tokenizer: ReportTokenizer,
    pairs: Pairs,
    truth: Tensor,
    seed: int,
    say: Callable[[str], None] = print,
    steps: int = STEPS,
) -> None:
    """Train the prompts of ``phantoms.model``'s ``branch`` in place, by AdamW with a cosine; ``truth`` (B, D)."""
    model = phantoms.model
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is branch.embeddings)
    optimizer = torch.optim.AdamW([branch.embeddings], lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 * (1 + math.cos(math.pi * n / steps)))
    draw, everyone = random.Random(seed), range(len(pairs.reports))
    for number in range(1, steps + 1):
        chosen = draw.choices(everyone, k=BATCH)
        beside = [draw.choice(everyone) if draw.random() < OTHER_IMAGE else one for one in chosen]
        texts = [draw.choice((pairs.reports, pairs.styled))[one] for one in chosen]
        ids, labels = tokenizer.batch(texts)
        logits, _ = model.decode(*phantoms.memory(beside), ids, branch.prompts_of(truth[chosen]))
        loss = report_loss(logits, labels, FOCUS).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if number % 100 == 0:
            say(f"prompts, step {number}/{steps}  loss {loss.item():.4f}")


@torch.no_grad()
def written_of(
    branch: DiagnosisBranch,
    phantoms: Phantoms,
    tokenizer: ReportTokenizer,
    beside: Sequence[int],
    classes: Tensor,
) -> list[frozenset[str]]:
    """Findings of the reports that are written, word by word the likeliest, from prompts (B, D) beside these images."""
    model, said = phantoms.model, []
    for start in range(0, len(beside), BATCH):
        part = slice(start, start + BATCH)
        memory, mask = phantoms.memory(beside[part])
        prompts = branch.prompts_of(classes[part])
        ids = torch.full((len(memory), 1), model.bos_id)
        while ids.shape[1] < model.max_length and not (ids == model.eos_id).any(1).all():
            logits, _ = model.decode(memory, mask, ids, prompts)
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        said += [findings_in(tokenizer.decode(_report(row, model.eos_id))) for row in ids.tolist()]
    return said


def _report(ids: list[int], end: int) -> list[int]:
    """Up to the end token."""
    return ids[: ids.index(end)] if end in ids else ids
