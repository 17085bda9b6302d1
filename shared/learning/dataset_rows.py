"""Makes a file of prompts, with a folder of images, from rows of a data set whose columns have
other names, or hold the images themselves."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared.errors import ContractError, UserError
from shared.learning.hub_datasets import CONVERTED, PROMPTS_FILE
from shared.learning.pictures import check_picture
from shared.learning.prompt_rows import error_message, make_prompt, without_null
from shared.learning.row_files import Rows, UnreadableFileError, read_file, separator_advice
from shared.limits import MAX_TEXT

IMAGES = "images"
OTHER_FILES = f"set the revision to {CONVERTED} if the hub shows its rows"

ReadFile = Callable[[str], bytes]
"""Returns the bytes of an image by its path, relative to the file of its row."""


class UnreadableError(UserError):
    """A file of rows cannot be read. Key and remedy apply to a data set of the hub; callers with
    other files replace them."""

    def __init__(self, key: str, reason: str, remedy: str = f"; {OTHER_FILES}") -> None:
        super().__init__(f"{key}.id: {reason}{remedy}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Columns:
    """Names the columns that prompts are made of."""

    prompt: str = "prompt"
    image: str | None = None
    """Source images: files' bytes, as the `datasets` library stores them, or their paths."""
    metadata: tuple[str, ...] | None = None
    """Without it, all others that hold text, numbers or bools."""


@dataclass(slots=True)
class ConversionCounts:
    """Counts what was made of rows."""

    prompts: int = 0
    empty_rows: int = 0
    """Rows without a prompt, or without a required image."""
    long_rows: int = 0
    """Rows whose prompt is longer than any may be."""
    left_out: set[str] = field(default_factory=set)
    """Columns that hold neither text, numbers nor bools, nor lists or tables of them."""


def make_prompts(
    files: Iterable[tuple[Path, ReadFile]], columns: Columns, folder: Path, key: str
) -> ConversionCounts:
    """Write the prompts of files' rows, in order, into a new folder: `PROMPTS_FILE`, and images by
    their SHA-256.

    Args:
        key: table of the recipe that names the columns, for errors.

    Raises:
        UserError: naming the column, or the file and row, and the remedy.
    """
    counts = ConversionCounts()
    (folder / IMAGES).mkdir(parents=True)
    with (folder / PROMPTS_FILE).open("w", encoding="utf-8") as lines:
        for file, read_image in files:
            for place, row in _rows(file, columns, key):
                where = f"{file.name} {place}"
                line = _Converter(columns, folder, key, read_image, counts).line(row, where)
                if line is not None:
                    lines.write(json.dumps(line, ensure_ascii=False) + "\n")
    if not counts.prompts:
        raise UserError(f"{key}.prompt: no row has one in the column {columns.prompt!r}")
    return counts


@dataclass(frozen=True, slots=True)
class _Converter:
    columns: Columns
    folder: Path
    key: str
    read_image: ReadFile
    made: ConversionCounts

    def line(self, row: Mapping[str, Any], where: str) -> dict[str, Any] | None:
        """Return a line of `PROMPTS_FILE`; None for a row without a prompt, or its image, and for
        one whose prompt is too long."""
        text, image = row.get(self.columns.prompt), self.columns.image
        if text is not None and not isinstance(text, str):
            raise UserError(
                f"{self.key}.prompt: the column {self.columns.prompt!r} holds "
                f"{type(text).__name__}, not text ({where}); name another"
            )
        if not text or not text.strip() or (image is not None and not row.get(image)):
            self.made.empty_rows += 1
            return None
        if len(text) > MAX_TEXT:
            self.made.long_rows += 1
            return None
        line: dict[str, Any] = {"prompt": text, "metadata": self._metadata(row, where)}
        self._check(line, where)
        if image is not None:
            line["image"] = self._image(row[image], where)
        self.made.prompts += 1
        return line

    def _metadata(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        named, own_columns = self.columns.metadata, {self.columns.prompt, self.columns.image}
        metadata = {}
        if named is None and isinstance(fields := row.get("metadata"), Mapping):
            row = {**{key: row[key] for key in row if key != "metadata"}, **fields}
        for name in row if named is None else named:
            value = row.get(name)
            if value is None or (named is None and name in own_columns):
                continue
            if _is_json(value):
                metadata[name] = value
            elif named is not None:
                raise UserError(
                    f"{self.key}.metadata: the column {name!r} holds {type(value).__name__}, no "
                    f"text, number or bool, and no list or table of them ({where}); leave it out"
                )
            else:
                self.made.left_out.add(name)
        return dict(without_null(metadata))

    def _check(self, line: Mapping[str, Any], where: str) -> None:
        try:
            make_prompt(line["prompt"], line["metadata"])
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            at = "prompt" if fault["loc"][0] == "text" else "metadata"
            remedy = "" if at == "prompt" else "; name the columns to keep"
            raise UserError(f"{self.key}.{at}: {where}: {error_message(fault)}{remedy}") from error

    def _image(self, value: Any, where: str) -> str:
        data = self._bytes_of(value, where)
        try:
            check_picture(data)
        except ContractError as error:
            raise UserError(f"{self.key}.image: {where}: {error}") from error
        name = f"{IMAGES}/{hashlib.sha256(data).hexdigest()}"
        (self.folder / name).write_bytes(data)
        return name

    def _bytes_of(self, value: Any, where: str) -> bytes:
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return value
        if isinstance(value, str):
            return self.read_image(value)
        raise UserError(
            f"{self.key}.image: the column {self.columns.image!r} holds "
            f"{type(value).__name__}, neither an image nor its path ({where}); name another"
        )


def _is_json(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(
            _is_json(each) for each in (value.values() if isinstance(value, dict) else value)
        )
    return isinstance(value, str | int | float | None)  # bool is an int


def _rows(file: Path, columns: Columns, key: str) -> Rows:
    """Yield the rows of a file; raises UserError if a column is missing or the file has another
    format."""
    wanted = None
    if columns.metadata is not None:
        wanted = (columns.prompt, columns.image or "", *columns.metadata)
    try:
        yield from read_file(file, partial(_check_columns, columns, key), wanted)
    except UnreadableFileError as error:
        reason = f"{file.name} {error.reason}"
        if isinstance(error.__cause__, ImportError):
            raise UnreadableError(key, reason, remedy="") from error
        raise UnreadableError(
            key, f"{reason}; {error.remedy}" if error.remedy else reason
        ) from error


def _check_columns(columns: Columns, key: str, names: Sequence[str]) -> None:
    wanted = [("prompt", columns.prompt), ("image", columns.image)]
    wanted += [("metadata", each) for each in columns.metadata or ()]
    for field_name, column in wanted:
        if column is not None and column not in names:
            raise UserError(
                f"{key}.{field_name}: there is no column {column!r}; it has {', '.join(names)}"
                f"{separator_advice(names)}"
            )
