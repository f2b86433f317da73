"""FedKEI as one object: its presets, and the classes that run it."""

from collections.abc import Mapping
from typing import Any

from fedtar_flare.core.settings import build
from fedtar_flare.methods.fedkei.config import STEPS, FedKEIConfig
from fedtar_flare.methods.fedkei.contract import CONTRACT
from fedtar_flare.methods.fedkei.controller import FedKEIServer
from fedtar_flare.methods.fedkei.events import EVENTS
from fedtar_flare.methods.fedkei.section import SECTIONS
from fedtar_flare.methods.fedkei.site import FedKEISite
from fedtar_flare.registry import Method

PRESETS: dict[str, dict[str, Any]] = {
    "small": {"model": {"slices": 8}, "data": {"synthetic_patients": 64}, "fedkei": {"rand_baseline": True}}
}
"""A few minutes on two cores; each start is compared with the common one."""


def rounds(groups: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of rounds and steps: a round for each task that the job lists, of two steps."""
    return len(build(FedKEIConfig, groups.get("fedkei"), "fedkei").tasks), STEPS


METHOD = Method(
    contract=CONTRACT,
    server=FedKEIServer,
    site=FedKEISite,
    settings={"fedkei": FedKEIConfig},
    paper="Knowledge-Enhanced Initialization for Federated Adapter Tuning",
    server_groups=("fedkei",),
    presets=PRESETS,
    events=EVENTS,
    sections=SECTIONS,
    reports=False,
    rounds=rounds,
)
