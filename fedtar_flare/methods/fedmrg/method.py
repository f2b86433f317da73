"""FedMRG as one object: its presets, and where its algorithm runs."""

from pathlib import Path
from typing import Any

from fedtar_flare.learning.diagnosis import extend
from fedtar_flare.learning.drafting import SavedLearner
from fedtar_flare.methods.fedmrg.config import FedMRGConfig
from fedtar_flare.methods.fedmrg.contract import CONTRACT
from fedtar_flare.methods.fedmrg.controller import FedMRGServer
from fedtar_flare.methods.fedmrg.events import EVENTS
from fedtar_flare.methods.fedmrg.learner import FedMRGLearner
from fedtar_flare.methods.fedmrg.section import SECTIONS
from fedtar_flare.methods.fedmrg.site import ABOUT, FedMRGSite
from fedtar_flare.registry import Method
from fedtar_flare.site.state import state_of_run, trained_version

PRESETS: dict[str, dict[str, Any]] = {
    "small": {
        "training": {"local_steps": 96, "batch_size": 4, "schedule": "cosine"},
        "data": {"synthetic_patients": 96},
        "server": {"evaluate_every": 3},
        "fedmrg": {"backbone": "frozen", "prompts": "memory", "head_weights": "small", "mix": 0.0},
    },
    "tiny": {"model": {"max_length": 80}},
    "fedmrg-paper": {"lora": {"exchange": ()}},  # what travels whole follows from fedmrg.backbone
}
"""``small`` freezes the encoder, so that there is neither contrast nor bank (docs/explanation/fedmrg.md tells what was
tried); the paper's form is the settings' default. ``tiny``: room for prompts.
"""


def saved_learner(folder: Path, key: bytes | None, run_id: str, round_: int) -> SavedLearner:
    """The specialised adapter that a site had at the end of the round; no key is needed, since it knows no patient."""
    state = state_of_run(folder, run_id, "specialised adapter")
    _, about = state.read(ABOUT)
    private = state.read(trained_version(state, round_, about["time_steps"], "specialised adapter"))[0]
    settings = {"fedmrg": FedMRGConfig(mix=about["mix"])}
    return SavedLearner(FedMRGLearner, settings, private, precision=state.precision)


METHOD = Method(
    contract=CONTRACT,
    server=FedMRGServer,
    site=FedMRGSite,
    learner=FedMRGLearner,
    paper="Che et al., Communication-efficient Heterogeneous Federated Learning",
    settings={"fedmrg": FedMRGConfig},
    presets=PRESETS,
    events=EVENTS,
    sections=SECTIONS,
    saved_learner=saved_learner,
    extend=extend,
)
