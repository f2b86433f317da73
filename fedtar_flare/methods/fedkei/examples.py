"""A task's examples at one site, as the learner reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedtar_flare.errors import DataError
from fedtar_flare.imaging.batch import ImageBatch


class Examples(Protocol):
    """One split of a task at a site."""

    @property
    def labels(self) -> Tensor:
        """(n,) int64, 1: the new disease."""

    def batch(self, indices: Sequence[int]) -> ImageBatch:
        """These examples' images."""


@dataclass(frozen=True)
class TaskData:
    """A site's examples of one task. Only ``train`` must have both classes."""

    train: Examples
    validation: Examples
    test: Examples


def require_both(examples: Examples) -> None:
    """Refuse (:class:`DataError` ``one-class``) a training split without both classes."""
    if set(examples.labels.tolist()) != {0, 1}:
        raise DataError(
            "the training split of this task has examples of one class only; give it the other class too, or leave "
            "the task out at this site",
            reason="one-class",
        )


def keyed(*parts: object) -> torch.Generator:
    """A generator that depends on these words and numbers alone."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def shuffled(indices: Sequence[int], size: int, *key: object) -> list[list[int]]:
    """The batches of one epoch, in an order that the key gives; the last may be smaller."""
    order = torch.randperm(len(indices), generator=keyed(*key)).tolist()
    return [[indices[i] for i in order[at : at + size]] for at in range(0, len(order), size)]
