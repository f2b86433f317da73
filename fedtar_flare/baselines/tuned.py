"""A site's fine-tuned adapter, restored for drafting."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.errors import ConfigError
from fedtar_flare.learning.drafting import Study
from fedtar_flare.models.adapters.lora import swapped_weights
from fedtar_flare.site.state import SiteState


@dataclass(frozen=True)
class TunedPart:
    """A :class:`~fedtar_flare.learning.drafting.PersonalPart`: an adapter that takes the place of the run's."""

    model: Any
    weights: Mapping[str, torch.Tensor]

    @classmethod
    def load(cls, model: Any, folder: Path, key: bytes | None, *, run_id: str, round_: int) -> TunedPart:
        """The adapter that the site fine-tuned after the last round; it needs neither key nor the best round's adapter.

        Raises:
            ConfigError: the state is of another run, or holds no fine-tuned adapter.
            StateError: the state is missing or damaged.
        """
        if folder.parent.name != run_id:
            raise ConfigError(f"{folder} is the state of run {folder.parent.name}, the adapter is of run {run_id}")
        state = SiteState(folder.parent.parent, run_id, folder.name)
        versions = state.versions()
        weights = state.read(versions[-1])[0] if versions else {}
        if not weights:
            raise ConfigError(
                f"{folder} holds no fine-tuned adapter: the run did not end, or the site had too few training visits. "
                "Draft with the shared adapter alone (without --state)"
            )
        return cls(model, weights)

    def context(self, study: Study) -> AbstractContextManager[Any]:
        """The fine-tuned adapter, the same for every patient."""
        return swapped_weights(self.model, self.weights)
