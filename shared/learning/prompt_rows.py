"""Makes prompts of the rows of a file, or of a folder that the `datasets` library has saved."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared.errors import UserError
from shared.learning.hub_datasets import not_fetched
from shared.learning.image_files import IMAGE, source_image
from shared.learning.row_files import (
    ARROW,
    CSV,
    PARQUET,
    PROMPT,
    TXT,
    UnreadableFileError,
    read_file,
    separated,
)
from shared.messages.contracts import Prompt, SourceImage

METADATA, NEGATIVE = "metadata", "negative_prompt"
STATE = "state.json"
"""File of a saved dataset that names its data files, which are Arrow streams."""
SUFFIXES = (TXT, CSV, PARQUET, ARROW)
"""Suffixes of formats other than JSON."""
SPLITS = "dataset_dict.json"
"""File of a folder that holds several saved datasets."""

Row = tuple[Prompt, Path | None]
"""A prompt, and the file of its source image on this host, if it has one."""


def said(fault: Any) -> str:
    """Return pydantic's text of a fault, without its prefix for our own errors."""
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
            fault = not_fetched(path) or f"data.prompts: {file} {error.reason}"
            remedy = f"; {error.remedy}" if error.remedy else ""
            if file.suffix.lower() not in SUFFIXES:
                remedy += f"; or end the file's name in {TXT} if it has a prompt on each line"
            raise UserError(fault + remedy) from error


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


def _check_columns(where: str, names: Sequence[str]) -> None:
    if PROMPT not in names:
        raise UserError(
            f'data.prompts: {where} has no column "{PROMPT}", but {", ".join(names) or "nothing"}; '
            f"rename the one that holds the prompts{separated(names)}, or name the file as "
            "data.dataset.folder, which takes columns of other names"
        )
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f'data.prompts: {where} has two columns "{twice}"; rename one')


def _prompt_row(file: Path, where: str, row: Mapping[str, Any], beside: Path) -> Row:
    """Make a prompt of a row; its image is relative to ``beside``."""
    place = f"{file} {where}"
    if PROMPT not in row:  # a line of JSON
        _check_columns(place, list(row))
    source, image = source_image(beside, f"data.prompts: {place}", row.get(IMAGE))
    try:
        return made_prompt(row[PROMPT], _metadata(file, row), source), image
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = PROMPT if fault["loc"][0] == "text" else ".".join(map(str, fault["loc"][:2]))
        raise UserError(f"data.prompts: {place}: {key}: {said(fault)}") from error


def _metadata(file: Path, row: Mapping[str, Any]) -> Any:
    others = {name: row[name] for name in row if name not in (PROMPT, IMAGE, METADATA)}
    if METADATA not in row:
        return others
    nested, suffix = row[METADATA], file.suffix.lower()
    if suffix in SUFFIXES:
        return nested | others if isinstance(nested, dict) else {**others, METADATA: nested}
    if not isinstance(nested, dict | None):
        return nested  # which no prompt takes
    return {**(nested or {}), **{name: row[name] for name in row if name == NEGATIVE}}


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
