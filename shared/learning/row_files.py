"""Reads rows from files: plain text, CSV, JSON, Parquet and Arrow streams."""

import csv
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shared.errors import how_to_install, not_utf8

TXT, CSV, PARQUET, ARROW = ".txt", ".csv", ".parquet", ".arrow"
PROMPT = "prompt"
"""The only column of a text file."""
ROWS_AT_ONCE = 32
"""Number of rows of a table that are in memory together; a row may contain an image."""

Rows = Iterator[tuple[str, Mapping[str, Any]]]
"""Position of each row, such as "line 3", and its cells by column; empty CSV cells are None."""
CheckColumns = Callable[[Sequence[str]], object]
"""Receives the columns of a file, and raises UserError if one is missing."""


class UnreadableFileError(Exception):
    """A file of rows cannot be read. The reason continues a sentence that begins with the file."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def read_file(file: Path, check: CheckColumns, columns: Collection[str] | None = None) -> Rows:
    """Yield the rows of a file in the format of its suffix; for an unknown suffix, in JSON.

    Args:
        check: is called with the columns before the first row. For JSON it is called after the
            last row, because rows may have different columns.
        columns: columns of a Parquet table to read; by default all.

    Raises:
        UnreadableFileError: if the file has another format.
    """
    suffix = file.suffix.lower()
    try:
        if suffix in (PARQUET, ARROW):
            yield from _table_rows(file, check, columns)
            return
        with file.open(encoding="utf-8-sig", newline="" if suffix == CSV else None) as stream:
            if suffix == CSV:
                yield from _csv_rows(csv.DictReader(stream, strict=True), check)
            elif suffix == TXT:
                lines = enumerate(map(str.strip, stream), 1)
                yield from ((f"line {number}", {PROMPT: line}) for number, line in lines if line)
            else:
                yield from _json_rows(stream, check)
    except UnicodeDecodeError as error:
        reason = f"cannot be read: it is no text in UTF-8 ({not_utf8(file)})"
        raise UnreadableFileError(reason, "save it as UTF-8") from error
    except OSError as error:
        raise UnreadableFileError(f"cannot be read: {error.strerror or error}") from error


def _table_rows(file: Path, check: CheckColumns, columns: Collection[str] | None) -> Rows:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UnreadableFileError(f"{how_to_install('data')} ({error})") from error
    number = 0
    with ExitStack() as stack:
        try:
            if file.suffix.lower() == ARROW:
                source = stack.enter_context(pyarrow.OSFile(str(file)))
                batches = stack.enter_context(pyarrow.ipc.open_stream(source))
                check(batches.schema.names)
            else:
                table = stack.enter_context(pyarrow.parquet.ParquetFile(file))
                names = table.schema_arrow.names
                check(names)
                wanted = [name for name in names if columns is None or name in columns]
                batches = table.iter_batches(ROWS_AT_ONCE, columns=wanted)
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
        except pyarrow.ArrowException as error:
            reason = f"cannot be read: {str(error).splitlines()[0]}"
            raise UnreadableFileError(reason) from error


def _csv_rows(rows: "csv.DictReader[str]", check: CheckColumns) -> Rows:
    """Yield rows without unnamed columns, such as the row numbers of pandas."""
    try:
        check(list(rows.fieldnames or ()))
        for row in rows:
            if None in row:  # cells beyond the last name
                raise UnreadableFileError(
                    f"line {rows.line_num} has more cells than the first line has names",
                    "put text with a comma in double quotes",
                )
            cells = {name: cell or None for name, cell in row.items() if name}
            yield f"line {rows.line_num}", cells
    except csv.Error as error:
        raise UnreadableFileError(
            f"cannot be read after line {rows.line_num}: {error}",
            "close every double quote, and double the quotes within a text",
        ) from error


def _json_rows(stream: Any, check: CheckColumns) -> Rows:
    """Yield the objects of a JSON list or of JSON lines."""
    names: dict[str, None] = {}
    where = "line 1"
    try:
        first = next((line for line in stream if line.strip()), "")
        stream.seek(0)
        is_list = first.lstrip().startswith("[")
        for number, entry in enumerate(json.load(stream) if is_list else stream, 1):
            where = f"{'row' if is_list else 'line'} {number}"
            if is_list or entry.strip():
                row = entry if is_list else json.loads(entry)
                names |= dict.fromkeys(row)
                yield where, {**row}
    except UnicodeDecodeError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise UnreadableFileError(
            f"{where} is no JSON object: {error}",
            f'write an object such as {{"{PROMPT}": "..."}} on each line',
        ) from error
    if names:
        check(list(names))


def separator_advice(names: Sequence[str]) -> str:
    """Return advice for a .csv file whose cells are not separated by commas; empty for others."""
    separator = next((each for each in ";\t|" if len(names) == 1 and each in names[0]), None)
    return "" if separator is None else f", and separate cells with commas, not {separator!r}"
