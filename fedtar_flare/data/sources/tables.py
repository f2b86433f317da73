"""CSV tables: those of public collections, plain or gzipped, and a hospital's own."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.core.files import MOST_TEXT, located, open_regular

Row = dict[str, str]  # trimmed values by column
Labels = tuple[frozenset[str], frozenset[str]]  # certain and uncertain ones of an image


def option_path(path: Path, options: Mapping[str, Any], name: str) -> Path | None:
    """The file or folder that an option names, relative to ``path``; None without the option."""
    return located(path, str(options[name])) if options.get(name) else None


def rows_of(
    table: Path, columns: Sequence[str], optional: Sequence[str] = (), *, strict: bool = True, others: bool = False
) -> Iterator[Row]:
    """Read the rows of a UTF-8 table with trimmed values; a row that cannot be read is a ConfigError."""
    problems: list[DataError] = []
    with open_table(table, "the table", "strict" if strict else "replace") as opened:
        if missing := [name for name in columns if name not in opened.columns]:
            present = ", ".join(opened.columns)
            raise ConfigError(f"{table}: column(s) {', '.join(missing)} missing (there is: {present})")
        for _, row in opened.rows(problems):
            if problems:
                break
            yield row if others else {name: row.get(name, "") for name in (*columns, *optional)}
    if problems:
        raise ConfigError(str(problems[0]))


class OpenTable:
    """A table that is being read. Nothing is guessed about its rows.

    A row must have as many cells as the header, and quotation marks must follow RFC 4180. A line break within an
    unquoted report makes two rows, of which the first may look complete: neither counts. Raises ConfigError for two
    columns of one name, or where the bounds between rows are unclear.
    """

    def __init__(self, file: TextIO, table: Path, delimiter: str):
        csv.field_size_limit(MOST_TEXT)  # a report is one field
        self._reader = csv.reader(self._lines(file), delimiter=delimiter, strict=True)
        self._table, self._number, self._left = table, 0, MOST_TEXT
        header = self._next_cells()
        if isinstance(header, DataError):
            raise ConfigError(f"{table}: the header cannot be read: {header}")
        self._header = header or []
        self.columns = [name.strip() for name in self._header]
        if twice := sorted({name for name in self.columns if name and self.columns.count(name) > 1}):
            raise ConfigError(f"{table}: column(s) {', '.join(twice)} are there twice; it is unclear which counts")

    def _lines(self, file: TextIO) -> Iterator[str]:
        """The lines; a row of more than :data:`MOST_TEXT` characters would fill the memory."""
        while line := file.readline(self._left + 1):
            self._left -= len(line)
            if self._left < 0:
                text = f"more than {MOST_TEXT:,} characters: is it a table of text, with all quotation marks closed?"
                raise ConfigError(f"{self._table}, row {self._number}: {text}")
            yield line

    def _next_cells(self) -> list[str] | DataError | None:
        self._number, self._left, begun = self._number + 1, MOST_TEXT, self._reader.line_num + 1
        try:
            return next(self._reader, None)
        except csv.Error as error:
            if self._reader.line_num > begun or "end of data" in str(error):
                where = f"{self._table}, lines {begun} to {self._reader.line_num}"
                text = "a quotation mark opens a cell and its end is unclear, and so are the rows"
                raise ConfigError(f"{where}: {text} ({error})") from error
            return DataError(f"quotation marks are not in pairs ({error})", reason="bad-row")

    def rows(self, problems: list[DataError]) -> Iterator[tuple[int, Row]]:
        """Rows with their numbers as in a spreadsheet, without blank ones; one that cannot be read is a problem."""
        for number, row in self._checked_rows():
            if isinstance(row, DataError):
                problems.append(DataError(f"{self._table}, row {number}: {row}", reason=row.reason))
            else:
                yield number, dict(zip(self.columns, map(str.strip, row), strict=True))

    def _checked_rows(self) -> Iterator[tuple[int, list[str] | DataError]]:
        """Each row's number and cells, or why it cannot be read; a row waits for the next, which may be its end."""
        waiting: tuple[int, list[str] | DataError] | None = None
        text = "a cell with a separator or a line break must stand in quotation marks"
        while (cells := self._next_cells()) is not None:
            if not isinstance(cells, DataError):
                if not any(map(str.strip, cells)):
                    continue
                expected = len(self._header)
                if cells == self._header:
                    cells = DataError("the header again", reason="bad-row")
                elif len(cells) != expected:
                    if len(cells) < expected and waiting is not None and not isinstance(waiting[1], DataError):
                        cut = DataError(f"the next row seems to be its end; {text}", reason="bad-row")
                        waiting = waiting[0], cut
                    cells = DataError(f"{len(cells)} cells under {expected} columns; {text}", reason="bad-row")
            if waiting is not None:
                yield waiting
            waiting = self._number, cells
        if waiting is not None:
            yield waiting


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


@contextmanager
def open_table(table: Path, what: str, errors: Literal["strict", "replace"] = "strict") -> Iterator[OpenTable]:
    """Open a UTF-8 table, whose cells are separated by what its first line has most of."""
    try:
        with open_regular(table) as stored, gzip.open(stored) if table.suffix == ".gz" else stored as raw:
            file = io.TextIOWrapper(raw, encoding="utf-8-sig", errors=errors, newline="")
            head = file.readline(MOST_TEXT)
            file.seek(0)
            yield OpenTable(file, table, max(",;\t", key=head.count))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{table}: {what} cannot be read ({reason})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{table}: {what} is not UTF-8; save it as 'CSV UTF-8'") from error


def label_table(table: Path | None, keys: Sequence[str]) -> dict[tuple[str, ...], Labels]:
    """Labels by study: 1 in a label's column means present, -1 uncertain, all else absent; empty without a table."""
    labels: dict[tuple[str, ...], Labels] = {}
    for row in rows_of(table, keys, others=True) if table else ():
        values = {name: text.removesuffix(".0") for name, text in row.items() if name not in keys}
        present, uncertain = (frozenset(n for n, value in values.items() if value == flag) for flag in ("1", "-1"))
        labels[tuple(row[key] for key in keys)] = present, uncertain
    return labels
