"""Prompts of tables: Parquet files, and what the `datasets` library has saved."""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared.errors import UserError, how_to_install
from shared.learning.image_files import IMAGE, source_image
from shared.messages.contracts import Prompt, SourceImage

PARQUET, ARROW = ".parquet", ".arrow"
PROMPT, METADATA, NEGATIVE = "prompt", "metadata", "negative_prompt"
STATE = "state.json"
"""File of a saved dataset that names its data files, which are Arrow streams."""
SPLITS = "dataset_dict.json"
"""File of a folder that holds several saved datasets."""
TEXT = ("string", "large_string", "string_view")
PLAIN = (*TEXT, "integer", "floating", "boolean", "null")
NESTED = ("list", "large_list", "fixed_size_list", "struct")

Row = tuple[Prompt, Path | None]
"""A prompt, and the file of its source image on this host, if it has one."""


def said(fault: Any) -> str:
    """Return pydantic's text of a fault, without its prefix for our own errors."""
    return str(fault["msg"]).removeprefix("Value error, ")


def is_table(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() in (PARQUET, ARROW)


def read_table(path: Path) -> Iterator[Row]:
    """Yield a prompt for each row of a Parquet file, or of a folder or Arrow file that the
    `datasets` library has saved, file after file.

    The column ``prompt`` is the prompt, ``image`` the path of its source image, every other column
    is metadata. A struct column
    ``metadata``, which JSON lines become, stands for its fields; what is null or NaN in a row is
    left out there. A row without a prompt has the prompt "".

    Raises:
        UserError: naming the file, the row or column, and the remedy.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UserError(f"data.prompts: {path} {how_to_install('data')} ({error})") from error
    for file in data_files(path):
        yield from _read_file(file, path)


def data_files(path: Path) -> list[Path]:
    """Return the files that hold the prompts: the file itself, or a saved dataset's, in order.

    Raises:
        UserError: if a folder is no saved dataset.
    """
    if not path.is_dir():
        return [path]
    if (path / SPLITS).is_file():
        splits = sorted(each.parent.name for each in path.glob(f"*/{STATE}"))
        raise UserError(f"data.prompts: {path} holds the splits {', '.join(splits)}; name one")
    try:
        state = json.loads((path / STATE).read_text())
        return [path / str(each["filename"]) for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"data.prompts: the folder {path} is no dataset made by save_to_disk (no readable "
            f"{STATE}); name such a folder, or a {PARQUET} file"
        ) from error


def _read_file(path: Path, beside: Path) -> list[Row]:
    """Read a file of a table; images are relative to ``beside``."""
    import pyarrow

    prompts: list[Row] = []
    try:
        with _opened(path) as (schema, batches):
            _check_columns(path, schema)
            for batch in batches:
                for row in batch.to_pylist():
                    prompts.append(_table_row(path, len(prompts) + 1, row, beside))
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
        raise UserError(f"data.prompts: cannot read {path}: {reason}") from error
    return prompts


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Iterable[Any]]]:
    """Open a file: its schema, and its rows as record batches, one at a time in memory."""
    import pyarrow.ipc
    import pyarrow.parquet

    if path.suffix.lower() == ARROW:
        with pyarrow.OSFile(str(path)) as source, pyarrow.ipc.open_stream(source) as reader:
            yield reader.schema, reader
    else:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file.schema_arrow, file.iter_batches()


def _check_columns(path: Path, schema: Any) -> None:
    """Check the columns before any row is read: a column of images takes long."""

    if PROMPT not in schema.names:
        raise UserError(
            f'data.prompts: {path} has no column "{PROMPT}", but {", ".join(schema.names)}; '
            "rename the one that holds the prompts"
        )
    for field in schema:
        if field.name == PROMPT and not _has_type(TEXT, field.type):
            raise UserError(f"data.prompts: {path}, column {PROMPT}: {field.type} is no text")
        if field.name == IMAGE and not _has_type((*TEXT, "null"), field.type):
            raise UserError(
                f"data.prompts: {path}, column {IMAGE}: {field.type} is no path; name the file "
                "as data.dataset.folder, which takes images themselves, in place of data.prompts"
            )
        _check_plain(path, field.name, field.type)


def _check_plain(path: Path, column: str, kind: Any) -> None:
    if _has_type(NESTED, kind):
        for number in range(kind.num_fields):
            _check_plain(path, f"{column}.{kind.field(number).name}", kind.field(number).type)
    elif not _has_type(PLAIN, kind):
        raise UserError(
            f"data.prompts: {path}, column {column}: {kind} is no text, number or bool, and no "
            "list or table of them, as metadata must be; drop the column, or turn it into text"
        )


def _has_type(names: tuple[str, ...], kind: Any) -> bool:
    """Whether a column's type, or the type of its dictionary's values, is one of ``names``."""
    from pyarrow import types

    value = kind.value_type if types.is_dictionary(kind) else kind
    return any(getattr(types, f"is_{name}")(value) for name in names)


def _table_row(path: Path, number: int, row: dict[str, Any], beside: Path) -> Row:
    text, nested, image = row.pop(PROMPT), row.get(METADATA), row.pop(IMAGE, None)
    if isinstance(nested, dict):
        del row[METADATA]
        row = nested | row
    source, file = source_image(beside, f"data.prompts: {path} row {number}", image)
    try:
        return made_prompt(text, row, source), file
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = f"column {PROMPT}" if fault["loc"] == ("text",) else "metadata"
        raise UserError(f"data.prompts: {path} row {number}, {where}: {said(fault)}") from error


def made_prompt(text: Any, metadata: Any, image: SourceImage | None = None) -> Prompt:
    """Return the prompt of a row, whose metadata may hold the negative one; raises ValidationError.
    An empty prompt is for the caller to leave out."""
    if not isinstance(metadata, dict):
        return Prompt(text="", metadata=metadata)  # raises
    known = without_nothing(metadata)
    negative = known.pop(NEGATIVE, None)
    return Prompt(
        text="" if text is None else text, metadata=known, negative_prompt=negative, image=image
    )


def without_nothing(value: Any) -> Any:
    """Return a value without what is null or no number in its tables."""
    if isinstance(value, list):
        return [without_nothing(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: without_nothing(each) for key, each in value.items() if not is_nothing(each)}


def is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))
