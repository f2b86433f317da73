"""``FedTARRecipe``: the FedTAR job as code; ``fedtar export`` writes ``jobs/fedtar``."""

from typing import Any

from fedtar_flare.runtime.recipe import MethodRecipe

__all__ = ["FedTARRecipe"]


class FedTARRecipe(MethodRecipe):
    """The job of FedTAR; arguments as :class:`MethodRecipe`.

    Groups of settings of its own are ``patient`` (``PatientConfig``), ``diagnosis`` (``DiagnosisConfig``) and
    ``temporal`` (``TemporalConfig``); ``server`` takes those of ``AlphaConfig`` too.
    """

    def __init__(self, **arguments: Any):
        super().__init__("fedtar", **arguments)
