"""``FedMRGRecipe``: the FedMRG job as code; ``fedtar export --method fedmrg`` writes ``jobs/fedmrg``."""

from __future__ import annotations

from typing import Any

from fedtar_flare.fedmrg.contract import CONTRACT
from fedtar_flare.fedmrg.controller import FedMRGController
from fedtar_flare.fedmrg.executor import FedMRGExecutor
from fedtar_flare.flare.recipe import PAPER, MethodRecipe

SMALL: dict[str, Any] = {
    "backbone": "frozen",
    "prompt_place": "begin",
    "prompt_classes": "positive",
    "head": "attention",
    "head_weights": "small",
}
PRESETS: dict[str, dict[str, Any]] = {
    "small": {
        "training": {"local_steps": 48},
        "data": {"synthetic_patients": 96},
        "server": {"evaluate_every": 3},
        "fedmrg": SMALL,
    },
    "tiny": {"model": {"max_length": 80}},
    "paper": PAPER | {"training": PAPER["training"] | {"schedule": "cosine"}},
}
"""``small``: rates for few rounds, in which a cosine would leave a third of the learning out; a start that prompts do
not disturb, a head that is warm-started as the model is, and a frozen encoder (docs/fedmrg.md says what was tried). The
form of the paper is the settings' own default. ``tiny``: room for prompts.
"""


class FedMRGRecipe(MethodRecipe):
    """The job of FedMRG; beside the arguments of :class:`MethodRecipe` it takes ``fedmrg`` (``FedMRGConfig``)."""

    contract = CONTRACT
    controller_class = FedMRGController
    executor_class = FedMRGExecutor
    own_groups = ("fedmrg",)
    presets = PRESETS
