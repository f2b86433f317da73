"""Write the pages of docs/reference that follow from the code: ``python -m tools.make_reference``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedtar_flare.cli.main import parser
from fedtar_flare.cli.reference import REQUIRED, Row, rows, server_rows
from fedtar_flare.core.settings import Settings
from fedtar_flare.learning.config import DataConfig, LoRAConfig, TrainingConfig
from fedtar_flare.learning.pretraining import PretrainingConfig
from fedtar_flare.methods.fedkei.config import LearnerSettings
from fedtar_flare.models.classifier import ClassifierConfig
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.registry import method, own_names
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
        chosen = method(name)
        for group, kind in chosen.settings.items():
            if group not in SHARED and not any(f"## `{group}`" in line for line in text):
                users = ", ".join(one for one in own_names() if method(one).settings.get(group) is kind)
                text += section(f"`{group}`, of {users}", kind)
        if chosen.server_settings is not None and not any(chosen.server_settings.__name__ in line for line in text):
            users = ", ".join(one for one in own_names() if method(one).server_settings is chosen.server_settings)
            text += section(f"`server`, of {users} ({chosen.server_settings.__name__})", chosen.server_settings)
    for group, kind in KEI.items():
        text += section(f"`{group}`, of fedkei", kind)
    text += table("`server`, of every method", server_rows())
    text += section("Pre-training (`fedtar warmstart`)", PretrainingConfig)
    text += section("`GaussianPrivacy` in a site's `privacy.json`", PrivacySettings)
    return "\n".join(text)


def section(title: str, kind: type[Settings]) -> list[str]:
    """One group as a table."""
    return table(title, rows(kind))


def table(title: str, rows: Iterable[Row]) -> list[str]:
    """Settings as a table."""
    lines = [f"## {title}", "", "| name | type | default | meaning |", "|---|---|---|---|"]
    for name, kind, default, meaning in rows:
        cells = [f"`{name}`", kind, default if default == REQUIRED else f"`{default}`", meaning]
        lines.append(" | ".join(["", *(cell.replace("|", "\\|") for cell in cells), ""]).strip())
    return [*lines, ""]


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
