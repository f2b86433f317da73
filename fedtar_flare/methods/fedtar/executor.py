"""The executor of FedTAR's jobs."""

from typing import Any, Literal

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.runtime.site_executor import SiteExecutor

__all__ = ["PatientAdaptiveExecutor"]


class PatientAdaptiveExecutor(SiteExecutor):
    """Patient-adaptive LoRA at one site, visit by visit; arguments as :class:`.SiteExecutor`."""

    # FLARE's export finds the base's parameters by the names args and kwargs
    def __init__(self, method: Literal["fedtar"] = "fedtar", *args: Any, **kwargs: Any):
        if method != "fedtar":
            raise ConfigError(f"method is '{method}': a PatientAdaptiveExecutor runs 'fedtar'")
        super().__init__(method, *args, **kwargs)
