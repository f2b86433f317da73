"""Sources: layouts of studies on disk, read into patients by functions ``read_<name>(path, options)``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import suggestion

if TYPE_CHECKING:
    from fedtar_flare.data.sources.reading import Reading

READERS = ("manifest", "mimic_cxr", "ct_rate", "iu_xray", "chexpert_plus", "covid_chestxray")  # names of the sources


def read_source(name: str, path: Path, options: Mapping[str, Any] | None = None) -> Reading:
    """Read a source by its name."""
    if name not in READERS:
        raise ConfigError(f"source '{name}' is not one of {', '.join(READERS)}{suggestion(name, READERS)}")
    reading: Reading = getattr(import_module(f"{__name__}.{name}"), f"read_{name}")(path, options or {})
    return reading
