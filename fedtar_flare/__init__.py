"""Federated learning of longitudinal medical report generation, on NVIDIA FLARE.

The public names load when they are first used, so that ``import fedtar_flare`` imports neither torch nor FLARE.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedtar_flare.version import __version__

if TYPE_CHECKING:
    from fedtar_flare.cli.job_script import run_job
    from fedtar_flare.core.errors import ConfigError, DataError, FedTARError
    from fedtar_flare.learning.drafting import Draft, Drafter, Study, load_base_model
    from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
    from fedtar_flare.runtime.recipe import MethodRecipe
    from fedtar_flare.runtime.simulation import simulate
    from fedtar_flare.site.release import verify_release

__all__ = [
    "ConfigError",
    "DataError",
    "Draft",
    "Drafter",
    "FedTARError",
    "FedTARRecipe",
    "MethodRecipe",
    "Study",
    "__version__",
    "load_base_model",
    "run_job",
    "simulate",
    "verify_release",
]

_MODULES = {
    **dict.fromkeys(("ConfigError", "DataError", "FedTARError"), "core.errors"),
    **dict.fromkeys(("Draft", "Drafter", "Study", "load_base_model"), "learning.drafting"),
    "FedTARRecipe": "methods.fedtar.recipe",
    "MethodRecipe": "runtime.recipe",
    "run_job": "cli.job_script",
    "simulate": "runtime.simulation",
    "verify_release": "site.release",
}
"""Where each public name is defined."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fedtar_flare' has no attribute '{name}'")
    return getattr(import_module(f"fedtar_flare.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
