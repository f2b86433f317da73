"""``FedKEIRecipe``: the FedKEI job as code; ``fedtar export --method fedkei`` writes ``jobs/fedkei``."""

from __future__ import annotations

from typing import Any

from fedtar_flare.data.task_stream import NOTHING
from fedtar_flare.fedkei.config import STEPS, FedKEIConfig
from fedtar_flare.fedkei.contract import CONTRACT
from fedtar_flare.fedkei.controller import FedKEIController
from fedtar_flare.fedkei.executor import FedKEIExecutor
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.settings import build

BASE = [NOTHING, "cardiomegaly", "emphysema", "lymphadenopathy"]
"""Base of the phantoms, for the tasks that :class:`FedKEIConfig` lists: few of them show nothing."""

PRESETS: dict[str, dict[str, Any]] = {
    "small": {
        "model": {"slices": 8},
        "data": {"synthetic_patients": 64},
        "fedkei": {"rand_baseline": True, "base": BASE},
    },
    "tiny": {"fedkei": {"base": BASE}},
    "paper": {"training": {"epochs": 30, "batch_size": 64, "lr": 0.005, "momentum": 0.0}},
}
"""``small``: a few minutes on two cores, each start beside the common one; ``paper``: ViT-B/16, 30 epochs."""


class FedKEIRecipe(MethodRecipe):
    """The job of FedKEI, its rivals and controls (``fedkei.plan``).

    Beside arguments of :class:`MethodRecipe` (but ``lora``, which is ``model.rank`` here) it takes ``fedkei``
    (``FedKEIConfig``). ``num_rounds`` is the number of tasks, by default of all that ``fedkei.tasks`` lists.
    """

    contract = CONTRACT
    controller_class = FedKEIController
    executor_class = FedKEIExecutor
    shared_groups = ("model", "training", "data")
    own_groups = server_groups = ("fedkei",)
    presets = PRESETS

    def __init__(
        self,
        *,
        num_rounds: int | None = None,
        time_steps: int | None = None,
        fedkei: dict[str, Any] | None = None,
        **arguments: Any,
    ):
        if fedkei and "tasks" in fedkei:
            fedkei = {"base": [NOTHING], **fedkei}
        rounds = len(build(FedKEIConfig, fedkei, "fedkei").tasks) if num_rounds is None else num_rounds
        steps = STEPS if time_steps is None else time_steps
        super().__init__(num_rounds=rounds, time_steps=steps, fedkei=fedkei, **arguments)
