"""``FedMRGRecipe``: the FedMRG job as code; ``fedtar export --method fedmrg`` writes ``jobs/fedmrg``."""

from __future__ import annotations

from typing import Any

from fedtar_flare.fedmrg.contract import CONTRACT
from fedtar_flare.fedmrg.controller import FedMRGController
from fedtar_flare.fedmrg.executor import FedMRGExecutor
from fedtar_flare.flare.recipe import PAPER, MethodRecipe

PRESETS: dict[str, dict[str, Any]] = {
    "small": {"training": {"local_steps": 16}, "fedmrg": {"schedule": "constant"}},
    "tiny": {"model": {"max_length": 80}},
    "paper": PAPER,
}
"""``small``: for few rounds, in which a cosine would leave a third of the learning out; ``tiny``: room for prompts."""


class FedMRGRecipe(MethodRecipe):
    """The job of FedMRG; beside the arguments of :class:`MethodRecipe` it takes ``fedmrg`` (``FedMRGConfig``)."""

    contract = CONTRACT
    controller_class = FedMRGController
    executor_class = FedMRGExecutor
    own_groups = ("fedmrg",)
    presets = PRESETS
