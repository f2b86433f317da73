"""CSV tables: those of public collections, plain or gzipped, and a hospital's own."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from fedtar_flare.core.errors import ConfigError, DataError, collecting, within

Row = dict[str, str]
"""Trimmed values by column."""
Labels = tuple[frozenset[str], frozenset[str]]
"""The certain and the uncertain labels of an image."""


def option_path(path: Path, options: Mapping[str, Any], name: str) -> Path | None:
    """The file or folder that an option names, relative to ``path``; None without the option."""
    return path / Path(str(options[name])).expanduser() if options.get(name) else None


def rows_of(
    table: Path, columns: Sequence[str], optional: Sequence[str] = (), *, strict: bool = True, others: bool = False
) -> Iterator[Row]:
    """Read the rows of a UTF-8 table with trimmed values."""
    with open_table(table, "the table", ",", "strict" if strict else "replace") as opened:
        if missing := [name for name in columns if name not in opened.columns]:
            present = ", ".join(opened.columns)
            raise ConfigError(f"{table}: column(s) {', '.join(missing)} missing (there is: {present})")
        for number, row in opened.records:
            if isinstance(row, DataError):
                raise ConfigError(f"{table}, row {number}: {row}")
            yield row if others else {name: row.get(name, "") for name in (*columns, *optional)}


Records = Iterator[tuple[int, Row | DataError]]
"""Rows by number, or why one cannot be read."""


def _records(file: TextIO, table: Path, delimiter: str) -> tuple[list[str], Records]:
    """The header, and each row that is not blank with its number as in a spreadsheet: trimmed values by column, or the
    reason why it cannot be read.

    Nothing is guessed: a row must have as many cells as the header, and quotation marks must follow RFC 4180. A line
    break within an unquoted report makes two rows, of which the first may look complete: neither counts. Raises
    ConfigError for two columns of one name, or where the bounds between rows are unclear.
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
                text = "a quotation mark opens a cell and its end is unclear, and so are the rows"
                raise ConfigError(f"{where}: {text} ({error})") from error
            return DataError(f"quotation marks are not in pairs ({error})", reason="bad-row")

    header = record()
    if isinstance(header, DataError):
        raise ConfigError(f"{table}: the header cannot be read: {header}")
    first = header or []
    head = [name.strip() for name in first]
    if twice := sorted({name for name in head if name and head.count(name) > 1}):
        raise ConfigError(f"{table}: column(s) {', '.join(twice)} are there twice; it is unclear which counts")

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
    """The first file that fits one of the patterns; ConfigError without one."""
    for pattern in patterns:
        if files := sorted(folder.glob(pattern)):
            return files[0]
    raise ConfigError(f"{folder}: {what} is not there (looked for {', '.join(patterns)})")


def image_folder(path: Path, options: Mapping[str, Any], usual: Sequence[Path], what: str) -> Path:
    """The folder of the option ``images``, else the first usual one that is there; :class:`ConfigError` without one."""
    given = option_path(path, options, "images")
    folders = [given] if given else usual
    for folder in folders:
        if folder.is_dir():
            return folder
    raise ConfigError(f"{what} ({' or '.join(map(str, folders))})")


class OpenTable(NamedTuple):
    """A table: its columns, and its rows with their numbers, or the reason why a row cannot be read."""

    columns: list[str]
    records: Records

    def rows(self, problems: list[DataError], where: str) -> Iterator[tuple[int, Row]]:
        """Rows with their numbers; a row that cannot be read is added to the problems."""
        for number, row in self.records:
            with collecting(problems), within(f"{where}, row {number}"):
                if isinstance(row, DataError):
                    raise row
            if not isinstance(row, DataError):
                yield number, row


@contextmanager
def open_table(
    table: Path, what: str, delimiters: str = ",;\t", errors: Literal["strict", "replace"] = "strict"
) -> Iterator[OpenTable]:
    """Open a UTF-8 table."""
    try:
        with gzip.open(table) if table.suffix == ".gz" else table.open("rb") as raw:
            file = io.TextIOWrapper(raw, encoding="utf-8-sig", errors=errors, newline="")
            head = file.readline()
            file.seek(0)
            yield OpenTable(*_records(file, table, max(delimiters, key=head.count)))
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{table}: {what} cannot be read ({reason})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{table}: {what} is not UTF-8; save it as 'CSV UTF-8'") from error


def label_table(table: Path | None, keys: Sequence[str]) -> dict[tuple[str, ...], Labels]:
    """Labels by study, from a table with the ``keys`` of a study and a column per label; empty without a table.

    A cell of 1 means present, -1 uncertain, anything else absent or not stated.
    """
    labels: dict[tuple[str, ...], Labels] = {}
    for row in rows_of(table, keys, others=True) if table else ():
        values = {name: text.removesuffix(".0") for name, text in row.items() if name not in keys}
        present, uncertain = (frozenset(n for n, value in values.items() if value == flag) for flag in ("1", "-1"))
        labels[tuple(row[key] for key in keys)] = present, uncertain
    return labels
