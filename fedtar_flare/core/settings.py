"""Settings: how they are declared, checked and compared between sites.

A settings class derives from :class:`Settings`; :func:`build` makes one from a dictionary that FLARE or a file gives.
"""

import difflib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedtar_flare.core.errors import ConfigError

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
    """Base of all settings: frozen, compared by value, checked when built (ConfigError says what would be allowed).

    Types are strict (no 2.0 or True for a whole number, no infinity), but an int may stand for a float and a list for a
    tuple, so that settings read back from JSON equal those that were written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any):
        self._fill(values, type(self).__name__)

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        """Fields whose value does not fit, each with what it must be, where types and limits cannot say it.

        Only the first is reported, so a check may rely on those before it.
        """
        yield from ()

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked anew."""
        return type(self)(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump()

    def _fill(self, values: Mapping[str, Any], where: str) -> None:
        check_names(values, type(self).model_fields, where)
        try:
            super().__init__(**{name: _as_tuple(value) for name, value in values.items()})
        except ValidationError as error:
            first = error.errors()[0]
            name, *inner = first["loc"]
            if first["type"] == "missing":
                if not inner:
                    raise ConfigError(f"{where}: '{name}' is missing{self._help(str(name))}") from None
                inner.pop()  # what is named is the list that is too short
            part = f"{name}{''.join(f'[{i}]' for i in inner)}"
            value = first["input"] if inner else values[str(name)]
            allowed = _ALLOWED.get(first["type"])
            said = f"it must be {allowed.format(**first.get('ctx', {}))}" if allowed else first["msg"]
            raise ConfigError(f"{where}: {part} is {value!r}: {said}{self._help(str(name))}") from None
        for name, allowed in self.validation_errors():
            value = getattr(self, name)
            raise ConfigError(f"{where}: {name} is {value!r}: it must be {allowed}{self._help(name)}")

    @classmethod
    def _help(cls, name: str) -> str:
        text = cls.model_fields[name].description
        return f" ({text})" if text else ""


def build(cls: type[_Settings], values: Mapping[str, Any] | None, where: str) -> _Settings:
    """Settings from a dictionary (None: the defaults); errors begin with ``where``: the argument's name or the file."""
    if not isinstance(values, Mapping | None):
        raise ConfigError(f"{where}: must hold settings by name, not {values!r}")
    settings = cls.__new__(cls)
    settings._fill(values or {}, where)
    return settings


class RunSettings(dict[str, Any]):
    """The settings of one run by group, handed from the recipe down to the learner: ``settings.lora.rank``.

    >>> class Lora(Settings):
    ...     rank: int = 4
    >>> RunSettings(lora=Lora()).lora.rank
    4
    """

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"there is no group of settings '{name}'")
        return self[name]

    def replace(self, **groups: Settings) -> "RunSettings":
        """A copy with some groups changed."""
        return RunSettings(self | groups)

    def to_dict(self) -> dict[str, Any]:
        return {name: group.to_dict() for name, group in self.items()}


def check_names(names: Collection[Any], known: Collection[str], where: str, what: str = "setting") -> None:
    """Refuse an unknown name; the :class:`ConfigError` gives the nearest known one, and all of them."""
    for name in names:
        if name not in known:
            hint = f"{nearest(str(name), known)} (known: {', '.join(known)})"
            raise ConfigError(f"{where}: unknown {what} '{name}'{hint}")


def nearest(word: str, known: Collection[str]) -> str:
    """``; did you mean 'X'?`` with the known word nearest to this one, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def digest(*settings: Settings) -> str:
    """Short hash of settings that all sites must share."""
    text = json.dumps([one.to_dict() for one in settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_tuple(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_tuple(item) for name, item in value.items()}
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list | tuple) else value
