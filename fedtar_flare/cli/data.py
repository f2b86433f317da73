"""``fedtar data``: make, check, prepare and divide data."""

from __future__ import annotations

from fedtar_flare.cli.commands import Commands, add_group

COMMANDS: tuple[str, ...] = (
    "data_index",
    "data_check",
    "data_prepare",
    "data_synth",
    "data_partition",
)


def add_parser(commands: Commands) -> None:
    """Add the group."""
    add_group(commands, "data", "make, check, prepare and divide data", COMMANDS)
