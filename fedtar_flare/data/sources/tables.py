"""CSV tables: those of public collections, plain or gzipped, and a hospital's own."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from fedtar_flare.core.errors import ConfigError, DataError, collecting, within

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
    errors = "strict" if strict else "replace"
    try:
        with gzip.open(table) if table.suffix == ".gz" else table.open("rb") as raw:
            head, rows = _records(io.TextIOWrapper(raw, encoding="utf-8-sig", errors=errors, newline=""), table)
            if missing := [name for name in columns if name not in head]:
                there = ", ".join(head)
                raise ConfigError(f"{table}: column(s) {', '.join(missing)} missing (there is: {there})")
            for number, row in rows:
                if isinstance(row, DataError):
                    raise ConfigError(f"{table}, row {number}: {row}")
                yield row if others else {name: row.get(name, "") for name in (*columns, *optional)}
    except (OSError, EOFError) as error:
        raise ConfigError(f"{table} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{table} is not readable as CSV in UTF-8 ({error})") from error


Records = Iterator[tuple[int, Row | DataError]]
"""Rows by number, or why one cannot be read."""


def _records(file: TextIO, table: Path, delimiter: str = ",") -> tuple[list[str], Records]:
    """The header, and each row that is not blank with its number as in a spreadsheet: trimmed values by column, or why
    it cannot be read.

    Nothing is guessed: a row must have as many cells as the header, and quotation marks must be as RFC 4180 has them. A
    line that ends in a report without quotation marks makes two rows, the first of which may be whole: neither counts.
    Raises :class:`ConfigError` for a column that is there twice, or where rows cannot be told apart.
    """
    csv.field_size_limit(10_000_000)  # a report is one field
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    number = 0

    def record() -> list[str] | DataError | None:
        nonlocal number
        number, begun = number + 1, reader.line_num + 1
        try:
            return next(reader, None)
        except csv.Error as error:
            if reader.line_num > begun or "end of data" in str(error):
                where = f"{table}, lines {begun} to {reader.line_num}"
                text = "a quotation mark opens a cell and its end is not clear; rows cannot be told apart"
                raise ConfigError(f"{where}: {text} ({error})") from error
            return DataError(f"quotation marks are not in pairs ({error})", reason="bad-row")

    header = record()
    if isinstance(header, DataError):
        raise ConfigError(f"{table}: the header cannot be read: {header}")
    first = header or []
    head = [name.strip() for name in first]
    if twice := sorted({name for name in head if name and head.count(name) > 1}):
        raise ConfigError(f"{table}: column(s) {', '.join(twice)} are there twice; which one counts cannot be told")

    def rows() -> Records:
        before: tuple[int, Row | DataError] | None = None
        while (cells := record()) is not None:
            if not isinstance(cells, DataError):
                if not any(map(str.strip, cells)):
                    continue
                if cells == first:
                    cells = DataError("the header again", reason="bad-row")
                elif len(cells) != len(first):
                    text = "a cell with a separator or a line break must stand in quotation marks"
                    short = before is not None and len(cells) < len(first)
                    cells = DataError(f"{len(cells)} cells under {len(first)} columns; {text}", reason="bad-row")
                    if short and before is not None and not isinstance(before[1], DataError):
                        before = before[0], DataError(f"the next row seems to be its end; {text}", reason="bad-row")
            if before is not None:
                yield before
            row = cells if isinstance(cells, DataError) else dict(zip(head, map(str.strip, cells), strict=True))
            before = number, row
        if before is not None:
            yield before

    return head, rows()


def find_table(folder: Path, patterns: Sequence[str], what: str) -> Path:
    """The first file that fits one of the patterns; raises :class:`ConfigError` without one."""
    for pattern in patterns:
        if files := sorted(folder.glob(pattern)):
            return files[0]
    raise ConfigError(f"{folder}: {what} is not there (looked for {', '.join(patterns)})")


def image_folder(path: Path, options: Mapping[str, Any], usual: Sequence[Path], what: str) -> Path:
    """The folder of the option ``images``, else the first usual one that is there; :class:`ConfigError` without one."""
    given = place_of(path, options, "images")
    places = [given] if given else usual
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(f"{what} ({' or '.join(map(str, places))})")


class OwnTable(NamedTuple):
    """A hospital's table, open."""

    columns: list[str]
    records: Records

    def rows(self, problems: list[DataError], where: str) -> Iterator[tuple[int, Row]]:
        """Rows by number; those that cannot be read are added to the problems."""
        for number, row in self.records:
            with collecting(problems), within(f"{where}, row {number}"):
                if isinstance(row, DataError):
                    raise row
            if not isinstance(row, DataError):
                yield number, row


@contextmanager
def own_table(table: Path, what: str) -> Iterator[OwnTable]:
    """A hospital's own UTF-8 CSV table, separated by comma, semicolon or tab, whichever its first line has most of.

    Raises :class:`ConfigError` when it cannot be read.
    """
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            yield OwnTable(*_records(file, table, max(",;\t", key=head.count)))
    except OSError as error:
        raise ConfigError(f"{table}: {what} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{table}: {what} is not UTF-8; save it as 'CSV UTF-8'") from error


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
