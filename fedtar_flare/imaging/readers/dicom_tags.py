"""Values of single DICOM tags, checked; they bypass pydicom's conversion where that is slow (decimal strings)."""

import math
from functools import cache
from typing import TypeVar

from pydicom.dataset import Dataset
from pydicom.tag import BaseTag, Tag

from fedtar_flare.core.errors import DataError

Default = TypeVar("Default", int, None)


@cache
def tag(keyword: str) -> BaseTag:
    """The tag of a keyword; cached, since pydicom's look-up takes longer than reading the value."""
    return Tag(keyword)


def text(dataset: Dataset, keyword: str) -> str:
    """The value as text, its parts separated by backslashes; empty when absent."""
    item = dataset.get_item(tag(keyword))
    value = None if item is None else item.value
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("ascii", "replace").strip(" \0")
    return str(value) if isinstance(value, str) or not hasattr(value, "__iter__") else "\\".join(map(str, value))


def first(dataset: Dataset, keyword: str) -> str:
    """Read the first part of a value."""
    return text(dataset, keyword).split("\\")[0].strip(" \0")


def text_of(dataset: Dataset, keyword: str) -> str:
    """Read a value's letters by the file's own character set, as identifiers and names need it."""
    value = dataset.get(keyword)
    return "" if value is None else str(value).replace("\x1b$)A", "").strip(" \0")  # which pydicom leaves, of GB 2312


def words(dataset: Dataset, keyword: str) -> tuple[str, ...]:
    """Read all parts of a value."""
    return tuple(part.strip(" \0").upper() for part in text(dataset, keyword).split("\\"))


def decimals(dataset: Dataset, keyword: str, count: int, name: str) -> tuple[float, ...] | None:
    """The first ``count`` decimal numbers, all finite; None when the tag is absent or empty."""
    value = text(dataset, keyword)
    if not value.strip(" \\"):
        return None
    try:
        numbers = tuple(float(part) for part in value.split("\\"))
    except ValueError as error:
        raise DataError(f"{name}: {keyword} = '{value}' is no number", reason="bad-header") from error
    if len(numbers) < count or not all(map(math.isfinite, numbers)):
        raise DataError(f"{name}: {keyword} = '{value}' should be {count} finite number(s)", reason="bad-header")
    return numbers[:count]


def decimal(dataset: Dataset, keyword: str, name: str) -> float | None:
    """One decimal number; None when absent or empty."""
    numbers = decimals(dataset, keyword, 1, name)
    return numbers[0] if numbers else None


def integer(dataset: Dataset, keyword: str, name: str, default: Default) -> int | Default:
    """A whole number, or ``default`` when absent or empty."""
    try:
        value = dataset.get(keyword)
        if value is None or value == "" or value == b"":
            return default
        return int(value[0] if isinstance(value, list | tuple) else value)
    except Exception as error:  # pydicom's conversion raises whatever the broken bytes lead to
        raise DataError(f"{name}: {keyword} is not readable ({error})", reason="bad-header") from error


def positive(dataset: Dataset, keyword: str, name: str) -> int:
    """A positive whole number."""
    value = integer(dataset, keyword, name, None)
    if value is None or value < 1:
        raise DataError(f"{name}: {keyword} is missing or not positive", reason="bad-header")
    return value


def is_dicom(start: bytes) -> bool:
    """Whether a file that starts with these 132 bytes may be DICOM, also without preamble and meta information."""
    bare = start[:2] in (b"\x02\x00", b"\x08\x00") or (start[:2] == b"\x00\x08" and start[4:6].isalpha())  # big-endian
    return bare or start[128:] == b"DICM"
