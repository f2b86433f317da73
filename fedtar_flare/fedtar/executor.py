"""The executor that FedTAR's jobs name."""

from __future__ import annotations

from typing import Any

from fedtar_flare.flare.site_executor import SiteExecutor


class PatientAdaptiveExecutor(SiteExecutor):
    """Patient-adaptive LoRA at one site, visit by visit; arguments as :class:`SiteExecutor`."""

    def __init__(
        self, preset: str = "small", settings: dict[str, Any] | None = None, seed: int = 0, torch_threads: int = 1
    ):
        super().__init__("fedtar", preset, settings, seed, torch_threads)
