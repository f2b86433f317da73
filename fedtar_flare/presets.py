"""The papers' presets: whole settings, each value with its source (``presets.yaml``)."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedtar_flare.core.files import read_yaml

OURS = "ours"
"""Source of a value that the paper does not give."""


class PaperPreset(NamedTuple):
    """The settings of one paper: values, and where each is from, by ``group.name`` or argument of the recipe."""

    about: str = ""
    settings: Mapping[str, Any] = {}
    sources: Mapping[str, str] = {}
    classifies: bool = False  # images, instead of writing reports
    fixed: Mapping[str, Mapping[str, Any]] = {}  # by method: what is no setting, with value and source

    def group(self, name: str) -> dict[str, Any]:
        """Select the values of one group."""
        start = f"{name}."
        return {key.removeprefix(start): value for key, value in self.settings.items() if key.startswith(start)}


@cache
def papers() -> dict[str, PaperPreset]:
    """Read the papers' presets, once in a process."""
    content = read_yaml(Path(__file__).with_suffix(".yaml"), "presets by name")
    presets = {}
    for name, entry in content.items():
        like = content.get(entry.get("like"), {})
        pairs = like.get("settings", {}) | entry["settings"]
        values, sources = ({key: pair[i] for key, pair in pairs.items()} for i in (0, 1))
        classifies, fixed = entry.get("classifies", False), entry.get("fixed", like.get("fixed", {}))
        presets[name] = PaperPreset(entry["about"], values, sources, classifies, fixed)
    return presets
