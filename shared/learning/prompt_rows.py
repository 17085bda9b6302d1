"""Reads prompts from the rows of a file, or of a folder that the `datasets` library saved."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared.errors import UserError
from shared.learning.hub_datasets import missing_dataset_advice
from shared.learning.image_files import IMAGE, source_image
from shared.learning.row_files import (
    ARROW,
    CSV,
    PARQUET,
    PROMPT,
    TXT,
    UnreadableFileError,
    read_file,
    separator_advice,
)
from shared.messages.contracts import Prompt, SourceImage

METADATA, NEGATIVE = "metadata", "negative_prompt"
STATE = "state.json"
"""File of a saved dataset with the names of its data files (Arrow streams)."""
SUFFIXES = (TXT, CSV, PARQUET, ARROW)
"""Suffixes of formats other than JSON."""
SPLITS = "dataset_dict.json"
"""File of a folder that holds several saved datasets."""

Row = tuple[Prompt, Path | None]
"""A prompt, and the file of its source image on this host, if it has one."""


def error_message(fault: Any) -> str:
    """Return pydantic's message of an error, without its prefix for our own errors."""
    return str(fault["msg"]).removeprefix("Value error, ")


def prompt_rows(path: Path) -> Iterator[Row]:
    """Yield a prompt for each row of a file, or of a saved dataset's files.

    The column ``prompt`` is the prompt, ``image`` the path of its source image, and every other
    column is metadata. A struct column ``metadata`` stands for its fields; on a line of JSON,
    ``metadata`` stands for all other keys. Null and NaN are left out. A row without a prompt has
    the prompt "".

    Raises:
        UserError: naming the file, the line or row, and the remedy.
    """
    for file in data_files(path):
        try:
            for where, row in read_file(file, partial(_check_columns, str(file))):
                yield _prompt_row(file, where, row, path)
        except UnreadableFileError as error:
            fault = missing_dataset_advice(path) or f"data.prompts: {file} {error.reason}"
            remedy = f"; {error.remedy}" if error.remedy else ""
            if file.suffix.lower() not in SUFFIXES:
                remedy += f"; or end the file's name in {TXT} if it has a prompt on each line"
            raise UserError(fault + remedy) from error


def data_files(path: Path) -> list[Path]:
    """Return the files with the prompts: the file itself, or the files of a saved dataset.

    Raises:
        UserError: if a folder is not a saved dataset.
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
            f"data.prompts: the folder {path} is not a dataset made by save_to_disk (no readable "
            f"{STATE}); name such a folder, or a {PARQUET} file"
        ) from error


def _check_columns(where: str, names: Sequence[str]) -> None:
    if PROMPT not in names:
        raise UserError(
            f'data.prompts: {where} has no column "{PROMPT}", but {", ".join(names) or "nothing"}; '
            f"rename the column with the prompts{separator_advice(names)}, or name the file as "
            "data.dataset.folder, which accepts columns with other names"
        )
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f'data.prompts: {where} has two columns "{twice}"; rename one')


def _prompt_row(file: Path, where: str, row: Mapping[str, Any], source: Path) -> Row:
    """Return the prompt of a row; the path of its image is relative to ``source``."""
    place = f"{file} {where}"
    if PROMPT not in row:  # a line of JSON
        _check_columns(place, list(row))
    reference, image = source_image(source, f"data.prompts: {place}", row.get(IMAGE))
    try:
        return make_prompt(row[PROMPT], _metadata(file, row), reference), image
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = PROMPT if fault["loc"][0] == "text" else ".".join(map(str, fault["loc"][:2]))
        raise UserError(f"data.prompts: {place}: {key}: {error_message(fault)}") from error


def _metadata(file: Path, row: Mapping[str, Any]) -> Any:
    others = {name: row[name] for name in row if name not in (PROMPT, IMAGE, METADATA)}
    if METADATA not in row:
        return others
    nested, suffix = row[METADATA], file.suffix.lower()
    if suffix in SUFFIXES:
        return nested | others if isinstance(nested, dict) else {**others, METADATA: nested}
    if not isinstance(nested, dict | None):
        return nested  # `make_prompt` refuses it
    return {**(nested or {}), **{name: row[name] for name in row if name == NEGATIVE}}


def make_prompt(text: Any, metadata: Any, image: SourceImage | None = None) -> Prompt:
    """Return a prompt; a key ``negative_prompt`` of the metadata is the negative prompt.

    The caller leaves out empty prompts. Raises ValidationError.
    """
    if not isinstance(metadata, dict):
        return Prompt(text="", metadata=metadata)  # raises
    fields = without_null(metadata)
    negative = fields.pop(NEGATIVE, None)
    return Prompt(
        text="" if text is None else text, metadata=fields, negative_prompt=negative, image=image
    )


def without_null(value: Any) -> Any:
    """Return a value without the keys of its tables whose value is null or NaN."""
    if isinstance(value, list):
        return [without_null(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: without_null(each) for key, each in value.items() if not is_null(each)}


def is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))
