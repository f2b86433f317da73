"""``fedtar site``: what a hospital's staff does with its own state."""

from __future__ import annotations

from fedtar_flare.cli.commands import Commands, add_group

COMMANDS: tuple[str, ...] = (
    "site_pause",
    "site_purge",
)


def add_parser(commands: Commands) -> None:
    """Add the group."""
    add_group(commands, "site", "look after a site's own state", COMMANDS)
