"""A site's specialised adapter, restored from its state for drafting."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtar_flare.fedmrg.dual_adapter import add_specialised, load_specialised, mixed_model
from fedtar_flare.fedmrg.site import ABOUT
from fedtar_flare.learning.drafting import Study
from fedtar_flare.site.trained import state_of_run, trained_version


@dataclass(frozen=True)
class SpecialisedPart:
    """FedMRG's :class:`~fedtar_flare.learning.drafting.PersonalPart`; it knows no patient and needs no key."""

    model: Any
    mix: float

    @classmethod
    def load(cls, model: Any, folder: Path, key: bytes | None, *, run_id: str, round_: int) -> SpecialisedPart:
        """Restore the adapter that the site had at the end of the round.

        Raises:
            ConfigError: the state is of another run, or has no specialised adapter of the round.
            StateError: the state is missing or damaged.
        """
        state = state_of_run(folder, run_id, "specialised adapter")
        _, about = state.read(ABOUT)
        found = trained_version(state, round_, about["time_steps"], "specialised adapter")
        add_specialised(model, model.peft_config["generic"].target_modules, seed=0)
        device = next(model.parameters()).device
        load_specialised(model.to(device), state.read(found)[0])
        return cls(model, about["mix"])

    def context(self, study: Study) -> AbstractContextManager[Any]:
        """Both adapters, for every patient alike."""
        return mixed_model(self.model, self.mix)
