"""The papers' presets: whole settings, each value with its source (``presets.yaml``)."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedtar_flare.core.files import read_yaml

OURS = "ours"
"""Source of a value that the paper does not give."""


class PaperPreset(NamedTuple):
    """Values and sources by ``group.name``, or by the name of an argument of the recipe."""

    about: str = ""
    settings: Mapping[str, Any] = {}
    sources: Mapping[str, str] = {}
    classifies: bool = False

    def group(self, name: str) -> dict[str, Any]:
        """The values of one group by name."""
        start = f"{name}."
        return {key.removeprefix(start): value for key, value in self.settings.items() if key.startswith(start)}


@cache
def papers() -> dict[str, PaperPreset]:
    """The papers' presets by name."""
    content = read_yaml(Path(__file__).with_suffix(".yaml"), "presets by name")
    found = {}
    for name, one in content.items():
        pairs = content.get(one.get("like"), {}).get("settings", {}) | one["settings"]
        values, sources = ({key: pair[i] for key, pair in pairs.items()} for i in (0, 1))
        found[name] = PaperPreset(one["about"], values, sources, one.get("classifies", False))
    return found
