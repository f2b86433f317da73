"""Fields of a reply's header, each declared and checked by its kind and bounds. No free text passes."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.protocol.exchange import ExchangeSchema
from fedtar_flare.protocol.messages import WORD, Reply

__all__ = ["Field", "MAX_TEXT", "MOST", "SECONDS", "check_error", "loss_field"]

MAX_TEXT = 512
"""Longest text of one value, in characters."""

MAX_WHOLE = 2**53
"""Largest whole number; one without a bound could spell a text."""

MAX_DEPTH = 6
"""Deepest nesting of a ``tree`` or of ``settings``."""

_NAME = re.compile(rf"{WORD.pattern}|\d{{1,4}}")
_VERSION = re.compile(r"[0-9A-Za-z.+-]{0,40}")
_VALUE = re.compile(r"[A-Za-z0-9_.+-]{1,64}")

Kind = Literal["number", "count", "numbers", "tree", "word", "words", "schema", "settings"]
NUMBER_KINDS = ("number", "count")
"""Kinds of field that travel in ``Reply.numbers``; the others travel in ``Reply.payload``."""

MOST = 1e9
"""No number of a header is larger, unless its field says so."""


@dataclass(frozen=True)
class Field:
    """One field of a reply's header.

    Attributes
    ----------
    name : short word
    kind : ``number``: finite; ``count``: a whole number from 0; ``numbers``: None or a list of numbers; ``tree``:
        numbers and lists of numbers under short words; ``word``; ``words``: short words under short words; ``schema``:
        an :class:`ExchangeSchema`; ``settings``: nested primitives that the job itself determines
    about : a description for ``--describe`` and the audit
    length : most values (``numbers``, ``words``), or characters of JSON (``tree``, ``settings``)
    least, most : bounds of every number in it
    public : whether a privacy filter lets it pass as it is: no patient data beyond numbers of visits
    noisy : whether a privacy filter adds noise to it: a ``number`` or ``numbers`` that is not public, else
        ConfigError; a field that is neither does not pass the filter
    required : whether an ``ok`` reply without it is refused
    """

    name: str
    kind: Kind
    about: str
    length: int = 100
    least: float = -MOST
    most: float = MOST
    public: bool = False
    noisy: bool = False
    required: bool = False

    def __post_init__(self) -> None:
        if self.noisy and (self.public or self.kind not in ("number", "numbers")):
            raise ConfigError(f"field '{self.name}': noise is for a 'number' or 'numbers' that is not public")

    def check(self, value: Any) -> None:
        """Refuse a value that is not of this kind; the :class:`ExchangeError` names the field, never its value.

        Parameters
        ----------
        value : anything
        """
        _CHECKS[self.kind](self, value)

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            raise ExchangeError(f"the field '{self.name}' {problem}")


def loss_field(name: str, about: str, noisy: bool = False) -> Field:
    """Declare a loss from 0 to 10,000 nats per token; a uniform guess among 50,000 words has 11.

    Parameters
    ----------
    name, about, noisy : as of :class:`Field`

    Returns
    -------
    Field
    """
    return Field(name, "number", about, least=0, most=1e4, noisy=noisy)


SECONDS = Field("seconds", "number", "how long the task took", least=0)
"""The one number that every reply may carry."""


def check_error(reply: Reply) -> None:
    """Refuse an error reply that carries more than its reason and how long the task took.

    Parameters
    ----------
    reply : Reply, whose status is ``error``

    Raises
    ------
    ExchangeError
    """
    check_texts(reply)
    if reply.payload or set(reply.numbers) - {SECONDS.name}:
        raise ExchangeError("an error reply carries more than its reason")
    for value in reply.numbers.values():
        SECONDS.check(value)


def check_texts(reply: Reply) -> None:
    """Refuse a reason that is too long, or a malformed version; the :class:`ExchangeError` names the field."""
    if len(reply.reason) > MAX_TEXT:
        raise ExchangeError(f"the field 'reason' is longer than {MAX_TEXT} characters")
    if not isinstance(reply.plugin, str) or not _VERSION.fullmatch(reply.plugin):
        raise ExchangeError("the field 'plugin' is not a version")


def _number(field: Field, value: Any) -> None:
    if type(value) is int:
        field._require(abs(value) <= MAX_WHOLE, "holds a number beyond 2^53")
    else:
        field._require(isinstance(value, float) and math.isfinite(value), "is not a finite number")
    field._require(field.least <= value <= field.most, f"is not within {field.least:g} to {field.most:g}")


def _count(field: Field, value: Any) -> None:
    _number(field, value)
    field._require(value == int(value) and value >= 0, "is not a whole number from 0")


def _numbers(field: Field, value: Any) -> None:
    if value is None:
        return
    short = isinstance(value, list | tuple) and len(value) <= field.length
    field._require(short, f"is not a list of at most {field.length} numbers")
    for item in value:
        _number(field, item)


def _tree(field: Field, value: Any) -> None:
    _branch(field, replace(field, length=100), value, 0)
    _size(field, value)


def _branch(field: Field, leaf: Field, value: Any, depth: int) -> None:
    field._require(isinstance(value, Mapping) and depth <= MAX_DEPTH, "is not a dictionary of bounded depth")
    for key, item in value.items():
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise ExchangeError(f"a name within the field '{field.name}' is not a short word")
        if isinstance(item, Mapping):
            _branch(field, leaf, item, depth + 1)
        elif isinstance(item, list | tuple):
            _numbers(leaf, item)
        elif item is not None:
            _number(field, item)


def _word(field: Field, value: Any) -> None:
    field._require(isinstance(value, str) and bool(_VALUE.fullmatch(value)), "is not a short word")


def _words(field: Field, value: Any) -> None:
    short = isinstance(value, Mapping) and len(value) <= field.length
    field._require(short, f"is not a dictionary of at most {field.length} words")
    for key, item in value.items():
        _word(field, key)
        _word(field, item)


def _settings(field: Field, value: Any) -> None:
    field._require(isinstance(value, Mapping), "is not a dictionary")
    _primitives(replace(field, least=-MAX_WHOLE, most=MAX_WHOLE), value, 0)
    _size(field, value)


def _primitives(field: Field, value: Any, depth: int) -> None:
    field._require(depth <= MAX_DEPTH, "is nested too deeply")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ExchangeError(f"a name within the field '{field.name}' is not a text")
            _primitives(field, key, depth + 1)
            _primitives(field, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _primitives(field, item, depth + 1)
    elif isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise ExchangeError(f"a text of the field '{field.name}' is longer than {MAX_TEXT} characters")
    elif value is not None and not isinstance(value, bool):
        _number(field, value)


def _size(field: Field, value: Any) -> None:
    length = len(json.dumps(value))
    field._require(length <= field.length, f"has {length} characters; the limit is {field.length}")


_CHECKS: dict[str, Callable[[Field, Any], object]] = {
    "number": _number,
    "count": _count,
    "numbers": _numbers,
    "tree": _tree,
    "word": _word,
    "words": _words,
    "schema": lambda field, value: ExchangeSchema.from_dict(value),
    "settings": _settings,
}
