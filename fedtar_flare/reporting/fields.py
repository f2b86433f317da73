"""Checked access to the fields of an event: what is there must have the right form, what is not is None or 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedtar_flare.errors import FedTARError
from fedtar_flare.version import __version__


class Fields:
    """One event, or a part of one, that knows where it stands.

    Args:
        where: file, line and event, for messages.
        values: what stands there.

    Raises:
        FedTARError: here and in every getter, for a value of the wrong form; says where and which field.
    """

    def __init__(self, where: str, values: Any):
        self.where = where
        if not isinstance(values, Mapping):
            raise self.wrong(f"{values!r:.40} stands where named values belong")
        self.values = values

    def wrong(self, what: str) -> FedTARError:
        """The error for a value of the wrong form."""
        return FedTARError(
            f"{self.where}: {what}. Another version of fedtar_flare wrote this record (this one is {__version__}), "
            "or it was changed"
        )

    def text(self, key: str) -> str:
        """A text; empty when missing."""
        value = self.values.get(key)
        return "" if value is None else str(value)

    def number(self, key: str) -> float | None:
        """A finite number, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(f"'{key}' is {value!r:.40}, not a number")
        return float(value) if math.isfinite(value) else None

    def count(self, key: str) -> int:
        """A whole number that is not negative; 0 when missing."""
        value = self.number(key) or 0.0
        if value < 0 or value != int(value):
            raise self.wrong(f"'{key}' is {value:g}, not a count")
        return int(value)

    def whole(self, key: str) -> int:
        """A count that must be there."""
        if self.values.get(key) is None:
            raise self.wrong(f"'{key}' is missing")
        return self.count(key)

    def sequence(self, key: str) -> list[Any]:
        """A list; empty when missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise self.wrong(f"'{key}' is not a list")
        return list(value or ())

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers; empty when missing, or when one of them is not known."""
        values = self.sequence(key)
        if any(isinstance(value, bool) or not isinstance(value, int | float | None) for value in values):
            raise self.wrong(f"'{key}' holds something that is not a number")
        known = [float(value) for value in values if value is not None and math.isfinite(value)]
        return tuple(known) if len(known) == len(values) else ()

    def part(self, key: str) -> Fields:
        """Named values under one key; none when missing."""
        return Fields(f"{self.where}, '{key}'", self.values.get(key) or {})

    def parts(self, key: str) -> dict[str, Fields]:
        """The same for a mapping of mappings, by name."""
        part = self.part(key)
        return {str(name): Fields(f"{part.where}, '{name}'", value or {}) for name, value in part.values.items()}

    def reasons(self, key: str) -> dict[str, str]:
        """A mapping of site to reason, sorted by site."""
        return {str(site): str(reason) for site, reason in sorted(self.part(key).values.items())}
