"""Sources: layouts of studies on disk, read into patients. A study that cannot be used is left out.

Every source in ``READERS`` is a function ``read_<name>(path, options) -> Reading``;
``docs/reference/site-file.md`` lists their options.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import suggestion

if TYPE_CHECKING:
    from fedtar_flare.data.sources.reading import Reading

READERS = ("manifest", "mimic_cxr", "ct_rate", "iu_xray", "chexpert_plus", "covid_chestxray")


def read_source(name: str, path: Path, options: Mapping[str, Any] | None = None) -> Reading:
    """Read a source by its name.

    Raises :class:`ConfigError` for an unknown source or option, or for a layout that is not the source's.
    """
    if name not in READERS:
        raise ConfigError(f"source '{name}' is not one of {', '.join(READERS)}{suggestion(name, READERS)}")
    module = import_module(f"fedtar_flare.data.sources.{name}")
    reading: Reading = getattr(module, f"read_{name}")(path, options)
    return reading
