"""Write the pages of docs/reference that follow from the code: ``python -m tools.make_reference``."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from fedtar_flare.cli.main import parser
from fedtar_flare.learning.config import DataConfig, LoRAConfig, TrainingConfig
from fedtar_flare.learning.pretraining import PretrainingConfig
from fedtar_flare.methods.fedkei.config import LearnerSettings
from fedtar_flare.models.classifier import ClassifierConfig
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.registry import method, own_names
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.settings import Settings
from fedtar_flare.site.privacy import PrivacySettings

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
MADE = "<!-- made by `python -m tools.make_reference`; do not edit -->\n"
KEI: dict[str, type[Settings]] = {"model": ClassifierConfig, "training": LearnerSettings}
SHARED: dict[str, type[Settings]] = {
    "model": ModelConfig,
    "lora": LoRAConfig,
    "training": TrainingConfig,
    "data": DataConfig,
}


def settings_page() -> str:
    """Every setting of a job, by group, with type, default, bounds and meaning."""
    text = ["# Settings of a job", "", MADE]
    text += [
        "`--set GROUP.NAME=VALUE` on the command line, `GROUP={NAME: VALUE}` of a recipe. Presets set other values.",
        "",
    ]
    for group, kind in SHARED.items():
        text += section(f"`{group}`, of every method that writes reports", kind)
    for name in own_names():
        found = method(name)
        for group, kind in found.settings.items():
            if group not in SHARED and not any(f"## `{group}`" in line for line in text):
                users = ", ".join(one for one in own_names() if method(one).settings.get(group) is kind)
                text += section(f"`{group}`, of {users}", kind)
        if found.server_settings is not None and not any(found.server_settings.__name__ in line for line in text):
            users = ", ".join(one for one in own_names() if method(one).server_settings is found.server_settings)
            text += section(f"`server`, of {users} ({found.server_settings.__name__})", found.server_settings)
    for group, kind in KEI.items():
        text += section(f"`{group}`, of fedkei", kind)
    text += ["## `server`, of every method", "", "| name | type | default | meaning |", "|---|---|---|---|"]
    described = re.findall(r"^    (\w+) : (.+)\n((?:        .+\n)+)", FederatedController.__doc__ or "", flags=re.M)
    arguments = inspect.signature(FederatedController.__init__).parameters
    for name, kind, meaning in described:
        if name not in ("method", "settings", "seed", "min_sites"):
            text.append(f"| `{name}` | {kind} | `{plain(arguments[name].default)}` | {' '.join(meaning.split())} |")
    text += [""]
    text += section("Pre-training (`fedtar warmstart`)", PretrainingConfig)
    text += section("`GaussianPrivacy` in a site's `privacy.json`", PrivacySettings)
    return "\n".join(text)


def section(title: str, kind: type[Settings]) -> list[str]:
    """One group as a table."""
    rows = [f"## {title}", "", "| name | type | default | meaning |", "|---|---|---|---|"]
    for name, one in kind.model_fields.items():
        default = "required" if one.is_required() else f"`{plain(one.get_default(call_default_factory=True))}`"
        limits = ", ".join(filter(None, map(bound, one.metadata)))
        meaning = (one.description or "").replace("|", "\\|") + (f" ({limits})" if limits else "")
        rows.append(f"| `{name}` | {shown(one.annotation)} | {default} | {meaning} |")
    return [*rows, ""]


def shown(annotation: Any) -> str:
    """A type as a reader knows it."""
    if annotation is type(None):
        return "none"
    if isinstance(annotation, type) and not get_args(annotation):
        return "settings" if issubclass(annotation, Settings) else annotation.__name__
    inner = [shown(one) if isinstance(one, type) or get_origin(one) else f"`{one}`" for one in get_args(annotation)]
    origin = getattr(get_origin(annotation), "__name__", "")
    if origin in ("tuple", "list", "dict"):
        return f"{origin} of {', '.join(dict.fromkeys(one for one in inner if one != '`Ellipsis`'))}"
    return " or ".join(inner) or "mapping"


def bound(metadata: Any) -> str:
    """A limit of a field in words."""
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return ", ".join(f"{word} {getattr(metadata, key)}" for key, word in signs.items() if hasattr(metadata, key))


def plain(value: Any) -> str:
    """A default as it stands in a table."""
    return str(value).replace("|", "\\|") if value != "" else "''"


def commands_page() -> str:
    """The help of every command."""
    text = ["# Command line", "", MADE]
    top = parser()
    for name, one in [("fedtar", top), *walk(top, "fedtar")]:
        kind = one.formatter_class
        one.formatter_class = lambda prog, kind=kind: kind(prog, width=110, max_help_position=32)
        text += [f"## `{name}`", "", "```", one.format_help().rstrip(), "```", ""]
    return "\n".join(text)


def walk(one: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Commands that do something, depth first."""
    inner = [action for action in one._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield name, one
    for action in inner:
        for word, command in action.choices.items():
            yield from walk(command, f"{name} {word}")


PAGES = {"settings.md": settings_page, "cli.md": commands_page}


def main() -> int:
    """Write the pages and name them."""
    for name, make in PAGES.items():
        (REFERENCE / name).write_text(make(), encoding="utf-8")
        print(REFERENCE / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
