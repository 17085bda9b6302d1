"""The prompts of a run, and which of them each batch takes: a function of the seed alone."""

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared.errors import UserError
from shared.learning.prompt_tables import PROMPT, data_files, is_table, read_table
from shared.learning.seeds import permutation
from shared.messages.contracts import Prompt

CSV = ".csv"


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Epochs over all prompts, each in an order of its own; batches take the next ones in turn."""

    prompts: tuple[Prompt, ...]
    seed: int

    def of_group(self, batch: int, group: int, num_groups: int) -> Prompt:
        """Return the prompt of a batch's group. The data position of a run is its batch number."""
        epoch, index = divmod(batch * num_groups + group, len(self.prompts))
        return self.prompts[_epoch_order(self.seed, len(self.prompts), epoch)[index]]

    def of_batch(self, batch: int, num_groups: int) -> list[Prompt]:
        """Return the prompts of all groups of a batch."""
        return [self.of_group(batch, group, num_groups) for group in range(num_groups)]


@lru_cache(maxsize=8)
def _epoch_order(seed: int, size: int, epoch: int) -> list[int]:
    return permutation(seed, size, "epoch", epoch)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Prompts from JSON lines, ``{"prompt": "...", "metadata": {...}}``; from a text file (.txt)
    that has one on each line; from a .csv file whose header has a column ``prompt``, the other
    columns being metadata; or from a table (`shared.learning.prompt_tables`).

    Raises:
        UserError: naming the line, or the row and column, that is none.
    """
    prompts = tuple(read_table(path) if is_table(path) else _read_lines(path))
    if not prompts:
        raise UserError(f"data.prompts: {path} holds no prompt")
    return prompts


def digest(path: Path) -> str:
    """sha256 of what `read_prompts` reads: of the file, or of a folder's data files in a row."""
    found = hashlib.sha256()
    for file in data_files(path):
        found.update(file.read_bytes())
    return found.hexdigest()


def _read_lines(path: Path) -> Iterator[Prompt]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"data.prompts: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.prompts: {path} is no text; prompts are .txt, .csv, JSON lines, .parquet, or a "
            "folder made by save_to_disk"
        ) from error
    if path.suffix == CSV:
        yield from _rows(path, text)
        return
    read = _plain_prompt if path.suffix == ".txt" else _prompt
    for number, line in _numbered(text.splitlines()):
        yield read(path, number, line)


def _numbered(lines: Sequence[str]) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _plain_prompt(path: Path, number: int, line: str) -> Prompt:
    return _made(path, number, line.strip(), {})


def _rows(path: Path, text: str) -> Iterator[Prompt]:
    """Read a CSV file: metadata are texts, and an empty cell is left out."""
    rows = csv.DictReader(io.StringIO(text, newline=""), restval="", strict=True)
    try:
        names = rows.fieldnames or []
        if PROMPT not in names:
            raise UserError(
                f'data.prompts: {path} has no column "{PROMPT}" in its first line, but '
                f"{', '.join(names) or 'nothing'}; name the one that holds the prompts so"
            )
        for row in rows:
            if None in row:  # cells beyond the last name
                raise UserError(
                    f"data.prompts: {path} line {rows.line_num}: more cells than the first line "
                    "has names; put text that has a comma in double quotes"
                )
            if not row[PROMPT]:
                raise UserError(f"data.prompts: {path} line {rows.line_num}: prompt: is empty")
            told = {name: cell for name, cell in row.items() if cell and name != PROMPT}
            yield _made(path, rows.line_num, row[PROMPT], told)
    except csv.Error as error:
        raise UserError(f"data.prompts: {path} after line {rows.line_num}: {error}") from error


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        plain = json.loads(line)
        text, metadata = plain["prompt"], plain.get("metadata", {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f'data.prompts: {path} line {number} is not {{"prompt": "...", "metadata": {{...}}}}'
        ) from error
    return _made(path, number, text, metadata)


def _made(path: Path, number: int, text: Any, metadata: Any) -> Prompt:
    """Raises UserError, which names the line and what is wrong in it."""
    where = f"data.prompts: {path} line {number}"
    for name, value in metadata.items() if isinstance(metadata, dict) else ():
        if not isinstance(value, str | int | float):  # bool is an int
            raise UserError(
                f"{where}: metadata.{name}: {json.dumps(value)[:40]} is no text, number or bool, "
                "as metadata must be; write it as text, or leave it out"
            )
    try:
        return Prompt(text=text, metadata=metadata)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = "prompt" if fault["loc"][0] == "text" else "metadata"
        raise UserError(f"{where}: {key}: {fault['msg']}") from error
