"""Options that make a job, shared by ``fedtar simulate`` and ``fedtar export``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtar_flare.errors import ConfigError
from fedtar_flare.files import read_yaml

if TYPE_CHECKING:
    from fedtar_flare.flare.recipe import MethodRecipe

GROUPS = ("server", "model", "lora", "training", "data")


def add_job_options(command: argparse.ArgumentParser) -> None:
    """Add the options of a job; settings without an option are reached by ``--set`` or ``--settings``."""
    from fedtar_flare.methods import DEFAULT, METHODS

    job = command.add_argument_group("job")
    job.add_argument("--method", default=DEFAULT, help=f"one of {', '.join(METHODS)} (default {DEFAULT})")
    job.add_argument("-r", "--rounds", type=int, help="rounds R (default 3)")
    job.add_argument("-T", "--time-steps", type=int, help="time steps T (default 3)")
    job.add_argument("--preset", help="small (default), tiny, paper, timm: model, adapters, learning rates and all")
    job.add_argument("--local-steps", type=int, help="optimiser updates per site and time step")
    job.add_argument("--patients", type=int, help="patients of a synthetic site (default 48)")
    job.add_argument("--min-sites", type=int, help="fewer sites taking part stop the job (default 1)")
    job.add_argument("--seed", type=int, help="of everything random (default 0)")
    job.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="GROUP.NAME=VALUE",
        help=f"any setting of {', '.join(GROUPS)} or of a group of the method's own, such as model.slices=1 or "
        "training.lr_shared=5e-4; may be repeated",
    )
    job.add_argument("--settings", type=Path, help="YAML file with arguments of the recipe; the options above win")


def recipe_of(arguments: argparse.Namespace, **more: Any) -> MethodRecipe:
    """The recipe that the options describe. Raises ConfigError for an unknown method or setting, or a wrong value."""
    from fedtar_flare.methods import load, method

    recipe: type[MethodRecipe] = load(method(arguments.method).recipe)
    groups = (*GROUPS, *recipe.own_groups)
    settings = (
        read_yaml(arguments.settings, "'name: value' lines, arguments of the recipe") if arguments.settings else {}
    )
    for option, name in (
        ("rounds", "num_rounds"),
        ("time_steps", "time_steps"),
        ("preset", "preset"),
        ("min_sites", "min_sites"),
        ("seed", "seed"),
    ):
        if getattr(arguments, option) is not None:
            settings[name] = getattr(arguments, option)
    for option, group, name in (("local_steps", "training", "local_steps"), ("patients", "data", "synthetic_patients")):
        if getattr(arguments, option) is not None:
            settings.setdefault(group, {})[name] = getattr(arguments, option)
    for group, values in grouped(arguments.set, groups).items():
        settings[group] = {**settings.get(group, {}), **values}
    try:
        return recipe(**{**settings, **more})
    except TypeError as error:
        raise ConfigError(f"{arguments.settings or 'the job'}: {error}") from error


def grouped(texts: Sequence[str], groups: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``GROUP.NAME=VALUE`` texts of ``--set`` as settings by group. Raises ConfigError for another form or group."""
    settings: dict[str, dict[str, Any]] = {}
    for key, value in pairs(texts, "--set").items():
        group, _, name = key.partition(".")
        if group not in groups or not name:
            raise ConfigError(f"--set {key}: write GROUP.NAME=VALUE with a group of {', '.join(groups)}")
        settings.setdefault(group, {})[name] = value
    return settings


def pairs(texts: Sequence[str], option: str) -> dict[str, Any]:
    """``NAME=VALUE`` texts as a dictionary; values are read as YAML (numbers, true, lists, texts).

    Raises ConfigError for a text without ``=`` or a value that is not YAML.
    """
    import yaml

    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} {text}: write NAME=VALUE")
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{option} {text}: the value is not readable ({error})") from error
        if isinstance(values[name], str):  # YAML 1.1 takes 1e-3 for a text
            try:
                values[name] = float(value)
            except ValueError:
                continue
    return values
