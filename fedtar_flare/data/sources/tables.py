"""CSV tables: those of public collections, plain or gzipped, and a hospital's own."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedtar_flare.errors import ConfigError

Row = dict[str, str]
Labels = tuple[frozenset[str], frozenset[str]]
"""Those that an image has, and those of which nobody is sure."""


def place_of(path: Path, options: Mapping[str, Any], name: str) -> Path | None:
    """The file or folder that an option names, relative to ``path``; None without the option."""
    return path / Path(str(options[name])).expanduser() if options.get(name) else None


def rows_of(
    table: Path, columns: Sequence[str], optional: Sequence[str] = (), *, strict: bool = True, others: bool = False
) -> Iterator[Row]:
    """The rows of a UTF-8 ``.csv`` or ``.csv.gz``, values trimmed, with the columns asked for (``others``: with all).

    ``optional`` columns are empty where absent. Unless ``strict``, bytes that are not UTF-8 are replaced, not refused.
    Raises :class:`ConfigError` when the table cannot be read or lacks a column.
    """
    try:
        with gzip.open(table) if table.suffix == ".gz" else table.open("rb") as raw:
            errors = "strict" if strict else "replace"
            reader = csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8-sig", errors=errors, newline=""))
            missing = [name for name in columns if name not in (reader.fieldnames or [])]
            if missing:
                there = ", ".join(reader.fieldnames or [])
                raise ConfigError(f"{table}: column(s) {', '.join(missing)} missing (there is: {there})")
            for row in reader:
                names = [name for name in row if isinstance(name, str)] if others else (*columns, *optional)
                yield {name: (row.get(name) or "").strip() for name in names}
    except (OSError, EOFError) as error:
        raise ConfigError(f"{table} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{table} is not readable as CSV in UTF-8 ({error})") from error


def find_table(folder: Path, patterns: Sequence[str], what: str) -> Path:
    """The first file that fits one of the patterns; raises :class:`ConfigError` without one."""
    for pattern in patterns:
        if files := sorted(folder.glob(pattern)):
            return files[0]
    raise ConfigError(f"{folder}: {what} is not there (looked for {', '.join(patterns)})")


def find_folder(places: Sequence[Path], what: str) -> Path:
    """The first of these folders that is there; raises :class:`ConfigError` without one."""
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(f"{what} ({' or '.join(map(str, places))})")


@contextmanager
def own_table(table: Path, what: str) -> Iterator[csv.DictReader[str]]:
    """A hospital's own UTF-8 CSV table, separated by comma, semicolon or tab, whichever its first line has most of.

    Raises :class:`ConfigError` when it cannot be read.
    """
    csv.field_size_limit(10_000_000)  # a report is one field
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            yield csv.DictReader(file, delimiter=max(",;\t", key=head.count))
    except OSError as error:
        raise ConfigError(f"{table}: {what} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{table}: {what} is not UTF-8; save it as 'CSV UTF-8'") from error
    except csv.Error as error:
        raise ConfigError(f"{table}: {what} is not readable as CSV ({error})") from error


def label_table(table: Path | None, keys: Sequence[str]) -> dict[tuple[str, ...], Labels]:
    """By study, its labels of a table with a column for each; none without a table.

    A cell says 1 (there), -1 (unsure), or anything else: not there, or not said. ``keys`` name a study's columns; all
    others are labels. Raises :class:`ConfigError` as :func:`rows_of`.
    """
    found: dict[tuple[str, ...], Labels] = {}
    for row in rows_of(table, keys, others=True) if table else ():
        values = {name: text.removesuffix(".0") for name, text in row.items() if name not in keys}
        sure, unsure = (frozenset(n for n, text in values.items() if text == said) for said in ("1", "-1"))
        found[tuple(row[key] for key in keys)] = sure, unsure
    return found
