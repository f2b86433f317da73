"""What methods and settings say of themselves: ``fedtar methods``, ``settings``, ``init``, and a page of the docs."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin

from fedtar_flare.cli.commands import PRESETS, Commands, add_command, show
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import PRIVATE, clean, write_text
from fedtar_flare.core.plugins import package_of
from fedtar_flare.core.text import columns
from fedtar_flare.registry import DEFAULT, method, names

if TYPE_CHECKING:
    from fedtar_flare.core.settings import Settings

OF_RECIPE = ("num_rounds", "time_steps", "seed", "min_sites")  # settings of the server that have options
REQUIRED = "required"  # in place of a default
ABOUT = """\
# Site file of fedtar_flare: where this hospital's data lies, how it computes, and what a job may ask.
# Every key is here with its default: take the '#' before a key away to change it. 'fedtar doctor' checks the result.
# The last line must be '...'.
"""


class Row(NamedTuple):
    """One setting as a reader sees it."""

    name: str
    kind: str
    default: str
    meaning: str


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    add_command(commands, methods, "list the installed methods")

    command = add_command(commands, settings, "list every setting of a method: value, default and meaning")
    command.add_argument("method", nargs="?", default=DEFAULT, help=f"one of {', '.join(names())} (default {DEFAULT})")
    command.add_argument("--preset", default="small", help=PRESETS)

    command = add_command(commands, init, "write a site file with every key, explained", with_json=False)
    command.add_argument("-o", "--out", type=Path, default=Path("fedtar.yaml"), help="default fedtar.yaml")


def methods(arguments: argparse.Namespace) -> None:
    """List the methods that are installed here, with the package that brings each and where it is published.

    Which of them a hospital takes part in is for its own guard to say (fedtar doctor).
    """
    installed = [
        {"name": name, "title": kind.contract.title, "package": package_of("method", name), "paper": kind.paper}
        for name, kind in zip(names(), map(method, names()), strict=True)
    ]
    show(arguments, installed, *columns([list(kind.values()) for kind in installed]))


def settings(arguments: argparse.Namespace) -> None:
    """Print every setting of a method with its value under a preset, the default where that is another, and what it
    means; under a paper's preset also whether the value is the paper's or ours. Change one in 'fedtar simulate' or
    'export' with --set GROUP.NAME=VALUE, such as --set training.lr=1e-3.
    """
    from fedtar_flare.presets import OURS, PaperPreset, papers
    from fedtar_flare.runtime.recipe import MethodRecipe

    recipe = MethodRecipe(arguments.method, preset=arguments.preset)
    definition, config = recipe.definition, recipe.controller.config
    of_recipe = {"num_rounds": "rounds R (--rounds)", "time_steps": "time steps T (--time-steps)"}
    entries = [
        {"name": name, "kind": "int", "default": "3", "meaning": meaning, "value": getattr(config, name)}
        for name, meaning in of_recipe.items()
    ]

    def add(group: str, described: Iterable[Row], values: dict[str, Any]) -> None:
        for row in described:
            entries.append(row._asdict() | {"name": f"{group}.{row.name}", "value": values[row.name]})

    for group, value in recipe.executor.strategy.settings.given.items():
        if group in {*definition.site.shared_groups, *definition.settings}:
            add(group, rows(type(value)), value.to_dict())
    add("server", server_rows(), dict(config))
    if definition.server_settings is not None:
        add("server", rows(definition.server_settings), dict(recipe.controller.strategy.settings.server))
    paper, lines = papers().get(arguments.preset, PaperPreset()), []
    for entry in entries:
        name, value = entry["name"], shown(entry["value"])
        notes = [f"default {entry['default']}"] if entry["default"] not in (value, REQUIRED) else []
        if paper.settings:
            of_paper = name in paper.settings and shown(paper.settings[name]) == value
            entry["source"] = paper.sources[name] if of_paper else OURS
            notes.append(f"source: {entry['source']}")
        lines.append(f"{name} = {value}" + (f"  ({'; '.join(notes)})" if notes else ""))
        lines += textwrap.wrap(entry["meaning"], 100, initial_indent="    ", subsequent_indent="    ")
    for name, (value, source) in paper.fixed.get(arguments.method, {}).items():
        entries.append({"name": name, "kind": "fixed", "value": value, "source": source})
        lines.append(f"{name}: {value}  (no setting; source: {source})")
    show(arguments, clean(entries), *lines)


def init(arguments: argparse.Namespace) -> None:
    """Write a site file with every key, its default and what it means. A file that is there is never replaced.

    It belongs into the kit as local/fedtar.yaml, or into the folder of FEDTAR_SITES as <site>.yaml.
    """
    from fedtar_flare.core.settings import Settings
    from fedtar_flare.site.site_file import NO_KEYS, SiteConfig

    if arguments.out.exists():
        raise ConfigError(f"{arguments.out} is there already; name another file with --out")
    given, parts = {"source": "manifest", "path": "manifest.csv"}, [ABOUT]
    for row in rows(SiteConfig):
        kind = SiteConfig.model_fields[row.name].annotation
        line = f"{row.name}: {given[row.name]}" if row.name in given else f"#{row.name}: {row.default}"
        if isinstance(kind, type) and issubclass(kind, Settings):
            inner = [f"{_comment(key, '  ')}#  {key.name}: {key.default}" for key in rows(kind)]
            line = "\n".join([f"#{row.name}:", *inner])
        if row.name == "policy":  # it must be there
            line = line.removeprefix("#").replace("#  approval", "  approval")
        if row.name not in NO_KEYS:
            parts.append(f"{_comment(row)}{line}\n")
    write_text(arguments.out, "\n".join([*parts, "..."]) + "\n", PRIVATE)
    print(f"{arguments.out}: enter 'source' and 'path', then: fedtar data check {arguments.out}")


def _comment(row: Row, indent: str = "") -> str:
    return textwrap.fill(row.meaning, 100, initial_indent=f"# {indent}", subsequent_indent=f"# {indent}") + "\n"


def rows(kind: type[Settings]) -> Iterator[Row]:
    """The settings of one group."""
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    for name, field in kind.model_fields.items():
        default = REQUIRED if field.is_required() else shown(field.get_default(call_default_factory=True))
        limits = []
        for metadata in field.metadata:
            limits += [f"{word} {getattr(metadata, key)}" for key, word in signs.items() if hasattr(metadata, key)]
        meaning = (field.description or "") + (f" ({', '.join(limits)})" if limits else "")
        yield Row(name, type_words(field.annotation), default, meaning)


def server_rows() -> Iterator[Row]:
    """The settings of every method's server."""
    from fedtar_flare.runtime.server_config import ServerConfig

    return (row for row in rows(ServerConfig) if row.name not in OF_RECIPE)


def shown(value: Any) -> str:
    """A value as ``--set`` and a site file take it."""
    value = value.to_dict() if hasattr(value, "to_dict") else value
    if isinstance(value, str):
        return value or "''"
    text = json.dumps(clean(value), default=str)
    return re.sub(r"^(-?\d+)e", r"\1.0e", text)  # to YAML a number without a point before its exponent is a text


def type_words(annotation: Any) -> str:
    """A type as a reader knows it."""
    if annotation is type(None):
        return "none"
    if isinstance(annotation, type) and not get_args(annotation):
        return str(annotation.__name__)
    parts = [part for part in get_args(annotation) if part is not Ellipsis]
    inner = [type_words(part) if isinstance(part, type) or get_origin(part) else f"`{part}`" for part in parts]
    origin = getattr(get_origin(annotation), "__name__", "")
    if origin in ("tuple", "list", "dict"):
        return f"{origin} of {', '.join(dict.fromkeys(inner))}"
    return " or ".join(inner) or "mapping"
