"""A site's specialised adapter, read from its state for drafting."""

from __future__ import annotations

from pathlib import Path

from fedtar_flare.learning.drafting import Kept
from fedtar_flare.methods.fedmrg.config import FedMRGConfig
from fedtar_flare.methods.fedmrg.learner import FedMRGLearner
from fedtar_flare.methods.fedmrg.site import ABOUT
from fedtar_flare.site.trained import state_of_run, trained_version


def kept(folder: Path, key: bytes | None, run_id: str, round_: int) -> Kept:
    """The adapter that the site had at the end of the round; it knows no patient and needs no key.

    Raises ConfigError where the state is of another run, or has no specialised adapter of the round; StateError where
    the state is missing or damaged.
    """
    state = state_of_run(folder, run_id, "specialised adapter")
    _, about = state.read(ABOUT)
    private = state.read(trained_version(state, round_, about["time_steps"], "specialised adapter"))[0]
    return Kept(FedMRGLearner, {"fedmrg": FedMRGConfig(mix=about["mix"])}, private)
