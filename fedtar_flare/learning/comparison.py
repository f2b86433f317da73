"""Prompts that tell the decoder which findings are new or gone since the visit before.

A change follows from the classes of a finding now and before: from reports in training, later from the head's
prediction where no report is shown. The prompt of a finding that is new or gone is that of its class plus a direction
fixed at random, the same for every finding and at every site; that of one that is gone is the largest, since the
decoder has to pick it out among all prompts, while a new one belongs to a finding that it has just named.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedtar_flare.imaging.batch import PriorBatch
from fedtar_flare.learning.labels import POSITIVE, Labeler

CHANGES = ("new", "resolved")
"""Changes of a finding, numbered from 1; 0: neither, or the visit before is unknown."""
NEW, RESOLVED = 1, 2
UNKNOWN = -1
"""Class of a finding at a visit before that is not shown."""
FIXED_RMS = 1.5
"""Root mean square of a fixed prompt, about that of the shipped ones."""
CHANGE_RMS = (0.6, 1.5)
"""Root mean square of each change's prompt. An untrained decoder names fewer findings the larger these are."""


def changes_of(now: Tensor, before: Tensor) -> Tensor:
    """Find the changes (B, D), int64, among :data:`CHANGES` or 0, from a visit's classes (B, D) and those before."""
    present, was = now == POSITIVE, before == POSITIVE
    return (NEW * (present & ~was) + RESOLVED * (~present & was)) * (before != UNKNOWN)


class Comparison(nn.Module):
    """Classes of the labeler's D findings at the visits before, and prompts (E,) of their change, by ``seed`` alone."""

    embeddings: Tensor

    def __init__(self, labeler: Labeler, width: int, seed: int):
        super().__init__()
        self._labeler = labeler
        drawn = torch.randn(len(CHANGES), width, generator=torch.Generator().manual_seed(seed))
        sizes, rms = torch.tensor(CHANGE_RMS)[:, None], drawn.square().mean(1, keepdim=True).sqrt()
        self.register_buffer("embeddings", sizes * drawn / rms, persistent=False)

    def prompts(self, embeddings: Tensor, now: Tensor, before: Tensor) -> Tensor:
        """Make prompts (B, D, E) of classes (B, D) now and before, from those (D, K, E) of each class."""
        change = changes_of(now, before)
        prompts = embeddings[torch.arange(now.shape[1], device=now.device), now]
        nameless = (change == RESOLVED) & ~prompts.any(-1)
        prompts = torch.where(nameless[..., None], embeddings[:, POSITIVE], prompts)
        changed = prompts + self.embeddings.to(prompts)[(change - 1).clamp(min=0)]
        return torch.where((change > 0)[..., None], changed, prompts)

    def before(self, prior: PriorBatch, seen: Tensor | None) -> Tensor:
        """Find the classes (B, D) at the visits before: by the report, else ``seen`` in the image, else UNKNOWN."""
        shape = (len(prior.days), len(self._labeler.findings))
        classes = torch.full(shape, UNKNOWN, device=self.embeddings.device)
        if prior.images is not None and seen is not None:
            classes = torch.where(prior.images.slice_mask.any(1, keepdim=True), seen, classes)
        for row, text in enumerate(prior.reports or ()):
            if text is not None:
                classes[row] = torch.tensor(self._labeler.label(text), device=classes.device)
        return classes

    def count_differences(self, text: str, change: Sequence[int]) -> int:
        """Count the findings whose change a text states differently."""
        stated, count = self._labeler.changes(text), 0
        for name, number in zip(self._labeler.findings, change, strict=True):
            count += any(((name, word) in stated) != (number == k) for k, word in enumerate(CHANGES, start=1))
        return count


def is_shown(prior: PriorBatch) -> Tensor:
    """Find the rows (B,) that show anything of the visit before."""
    shown = torch.zeros(len(prior.days), dtype=torch.bool, device=prior.days.device)
    if prior.images is not None:
        shown = shown | prior.images.slice_mask.any(1)
    return shown if prior.text_mask is None else shown | prior.text_mask.any(1)
