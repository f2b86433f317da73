"""Settings: how they are declared (:class:`Settings`), made from a dictionary, and compared between sites."""

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedtar_flare.core.errors import ConfigError

__all__ = ["Settings"]

MAX_GLOBS, MAX_LENGTH = 200, 300
"""Globs in a list, and characters of a glob."""
_PART = r"(?:[A-Za-z0-9_?*-]|\[!?[A-Za-z0-9_-]++\])++"
_GLOB = re.compile(rf"!?{_PART}(?:\.{_PART})*+")
_Settings = TypeVar("_Settings", bound="Settings")

_ALLOWED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "is_instance_of": "a {class}",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
    "missing": "longer",
    "too_long": "at most {max_length} long",
}
"""What is allowed, by pydantic's error type."""


class Settings(BaseModel):
    """Base of all settings: frozen, compared by value, checked when built.

    Types are strict (no 2.0 or True for a whole number, no infinity), but an int may stand for a float and a list for a
    tuple, so that settings read back from JSON equal those that were written.

    Parameters
    ----------
    **values
        Values by name; the defaults stand for the others.

    Raises
    ------
    ConfigError
        For an unknown name or a wrong value; it says what is allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any):
        self._fill(values, type(self).__name__)

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        """Check what types and limits of single fields cannot express.

        Yields
        ------
        tuple of str
            A field's name, and what its value must be. Only the first is reported, so a check may rely on those before.
        """
        yield from ()

    def replace(self, **changes: Any) -> Self:
        """Copy, with some fields changed, and check anew.

        Parameters
        ----------
        **changes
            New values by name.

        Returns
        -------
        Settings
        """
        return type(self)(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Give the values by name.

        Returns
        -------
        dict
            From which the class can be built again, also after a way through JSON.
        """
        return self.model_dump()

    def _fill(self, values: Mapping[str, Any], where: str) -> None:
        check_names(values, type(self).model_fields, where)
        try:
            super().__init__(**_as_tuple(dict(values)))
        except ValidationError as error:
            first = error.errors()[0]
            name, *inner = first["loc"]
            if first["type"] == "missing":
                if not inner:
                    raise ConfigError(f"{where}: '{name}' is missing{self._help(str(name))}") from None
                inner.pop()  # the error names the list that is too short
            part = f"{name}{''.join(f'[{i}]' for i in inner)}"
            value = first["input"] if inner else values[str(name)]
            allowed = _ALLOWED.get(first["type"])
            must = f"it must be {allowed.format(**first.get('ctx', {}))}" if allowed else first["msg"]
            raise ConfigError(f"{where}: {part} is {value!r}: {must}{self._help(str(name))}") from None
        for name, allowed in self.validation_errors():
            value = getattr(self, name)
            raise ConfigError(f"{where}: {name} is {value!r}: it must be {allowed}{self._help(name)}")

    @classmethod
    def _help(cls, name: str) -> str:
        text = cls.model_fields[name].description
        return f" ({text})" if text else ""


def build(cls: type[_Settings], values: Mapping[str, Any] | None, where: str) -> _Settings:
    """Build settings from a dictionary, or the defaults of None; errors begin with ``where``, an argument or a file."""
    if not isinstance(values, Mapping | None):
        raise ConfigError(f"{where}: must hold settings by name, not {values!r}")
    settings = cls.__new__(cls)
    settings._fill(values or {}, where)
    return settings


class RunSettings(dict[str, Any]):
    """A run's settings by group; ``resolve(settings, source)`` decides what depends on a site's data (``auto``)."""

    def __init__(
        self, resolve: Callable[["RunSettings", str], "RunSettings"] | None = None, /, **groups: Settings
    ) -> None:
        super().__init__(groups)
        self._resolve = resolve
        self.given: RunSettings = self
        """The settings as the job gives them, before :meth:`at`."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"there is no group of settings '{name}'")
        return self[name]

    def at(self, source: str) -> "RunSettings":
        """The settings in full at a site whose data has this source; from these, too, :meth:`at` gives others."""
        if self._resolve is None:
            return self
        resolved = self._resolve(self.given, source)
        resolved._resolve, resolved.given = self._resolve, self.given
        return resolved

    def replace(self, **groups: Settings) -> "RunSettings":
        """Copy with some groups changed, which no source changes."""
        return RunSettings(**(self | groups))

    def digest(self) -> str:
        """Hash the settings, which all sites must share, in the order of their groups, to 16 hexadecimal digits."""
        text = json.dumps([group.to_dict() for group in self.values()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Give the values by group and name."""
        return {name: group.to_dict() for name, group in self.items()}


def check_names(names: Collection[Any], known: Collection[str], where: str, what: str = "setting") -> None:
    """Refuse the first unknown name, with the most similar known name and all known names."""
    for name in names:
        if name not in known:
            hint = f"{suggestion(str(name), known)} (known: {', '.join(known)})"
            raise ConfigError(f"{where}: unknown {what} '{name}'{hint}")


def suggestion(word: str, known: Collection[str]) -> str:
    """The most similar known word as ``; did you mean 'X'?``, to end an error with; empty where none is similar."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _as_tuple(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(zip(value, map(_as_tuple, value.values()), strict=True))
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def matches(name: str, globs: Sequence[str]) -> bool:
    """Tell whether some glob matches a name and no glob excludes it.

    ``*`` is any text, ``?`` a character, ``[ab]`` one of these; ``!`` before a glob excludes what it matches. Unlike a
    regular expression, a job's glob cannot keep a site busy for ever: its time is bounded by both lengths.
    """
    matched = False
    for glob in globs:
        if glob[:1] != "!":
            matched = matched or fnmatchcase(name, glob)
        elif fnmatchcase(name, glob[1:]):
            return False
    return matched


def problem_of(globs: Sequence[str], most: int = MAX_GLOBS) -> str | None:
    """Say what a list of globs must be, or None where it is that."""
    if isinstance(globs, str) or len(globs) > most:
        return f"a list of at most {most} names"
    for glob in globs:
        if len(glob) > MAX_LENGTH or not _GLOB.fullmatch(glob):
            plain = re.sub(r"\\d\+|\.[*+]", "*", glob[:MAX_LENGTH]).replace("\\", "")
            how = f"'{plain}'" if _GLOB.fullmatch(plain) else "one name for each alternative, such as 'decoder.*.c_fc'"
            return f"a list of names with '*' for any text, not of regular expressions: write {how}"
    return None
