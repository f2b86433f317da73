"""Which findings are new or gone since the visit before, and the prompts that say so to the decoder.

That follows from what is there now and what was there before. Now is what the report says in training, and what the
head reads off the image when reports are written. Before is what a labeler reads in the report before, where that is
shown, else what the head reads off the image before; in training it is always what the report before says.

The prompt of a finding that is new or gone is that of what it is now plus that of its change, a direction fixed at
random, the same for every finding and at every site. That of a finding that is gone is the largest: the decoder has to
find it among all prompts, while it comes upon the others at findings that it has just named.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedtar_flare.imaging.batch import PriorBatch
from fedtar_flare.learning.labels import POSITIVE, Labeler

CHANGES = ("new", "resolved")
"""What can have become of a finding, numbered from 1; 0: neither, or before is not known."""
NEW, RESOLVED = 1, 2
UNKNOWN = -1
"""Stands for the class of a finding at a visit of which nothing is shown."""
FIXED_RMS = 1.5
"""Root mean square of a fixed prompt, about that of the shipped ones."""
CHANGE_RMS = (0.6, 1.5)
"""Of what each change adds; larger ones make a decoder name fewer findings that has not learnt to read them."""


def changes_of(now: Tensor, before: Tensor) -> Tensor:
    """Number of each finding's change, (B, D) int64, from its classes now and before, (B, D)."""
    there, was = now == POSITIVE, before == POSITIVE
    return (NEW * (there & ~was) + RESOLVED * (~there & was)) * (before != UNKNOWN)


class Comparison(nn.Module):
    """Classes of the labeler's D findings at the visits before, and the prompts (width E) of their change.

    The directions that stand for the changes depend on ``seed`` alone.
    """

    embeddings: Tensor

    def __init__(self, labeler: Labeler, width: int, seed: int):
        super().__init__()
        self._labeler = labeler
        drawn = torch.randn(len(CHANGES), width, generator=torch.Generator().manual_seed(seed))
        sizes, found = torch.tensor(CHANGE_RMS)[:, None], drawn.square().mean(1, keepdim=True).sqrt()
        self.register_buffer("embeddings", sizes * drawn / found, persistent=False)

    def prompts(self, embeddings: Tensor, now: Tensor, before: Tensor) -> Tensor:
        """Prompts (B, D, E) from those of each class (D, K, E) and the findings' classes now and before, (B, D).

        A finding that is gone has the prompt of its being there instead of one that is nothing: the decoder is to know
        which it is.
        """
        change = changes_of(now, before)
        prompts = embeddings[torch.arange(now.shape[1], device=now.device), now]
        nameless = (change == RESOLVED) & ~prompts.any(-1)
        prompts = torch.where(nameless[..., None], embeddings[:, POSITIVE], prompts)
        changed = prompts + self.embeddings.to(prompts)[(change - 1).clamp(min=0)]
        return torch.where((change > 0)[..., None], changed, prompts)

    def before(self, prior: PriorBatch, seen: Tensor | None) -> Tensor:
        """Classes (B, D) of the findings at the visits before; UNKNOWN in rows that show nothing of them.

        ``seen`` (B, D): what the head reads off the images before.
        """
        shape = (len(prior.days), len(self._labeler.findings))
        classes = torch.full(shape, UNKNOWN, device=self.embeddings.device)
        if prior.images is not None and seen is not None:
            classes = torch.where(prior.images.slice_mask.any(1, keepdim=True), seen, classes)
        for row, text in enumerate(prior.reports or ()):
            if text is not None:
                classes[row] = torch.tensor(self._labeler.label(text), device=classes.device)
        return classes

    def count_differences(self, text: str, change: Sequence[int]) -> int:
        """Findings that a text does not call new or gone as the numbers (D) of the changes do."""
        said = self._labeler.changes(text)
        return sum(
            any(((name, word) in said) != (number == own) for own, word in enumerate(CHANGES, start=1))
            for name, number in zip(self._labeler.findings, change, strict=True)
        )


def is_shown(prior: PriorBatch) -> Tensor:
    """(B,) bool: which rows show anything of the visit before."""
    shown = torch.zeros(len(prior.days), dtype=torch.bool, device=prior.days.device)
    if prior.images is not None:
        shown = shown | prior.images.slice_mask.any(1)
    return shown if prior.text_mask is None else shown | prior.text_mask.any(1)
