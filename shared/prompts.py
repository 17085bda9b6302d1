"""The prompts of a run, and which of them each batch takes: a function of the seed alone."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from shared.contracts import Prompt
from shared.errors import UserError
from shared.prompt_tables import data_files, is_table, read_table
from shared.seeds import permutation


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Epochs over all prompts, each in an order of its own; batches take the next ones in turn."""

    prompts: tuple[Prompt, ...]
    seed: int

    def of_group(self, batch: int, group: int, num_groups: int) -> Prompt:
        """The prompt of a batch's group. The data position of a run is its batch number."""
        epoch, index = divmod(batch * num_groups + group, len(self.prompts))
        return self.prompts[_epoch_order(self.seed, len(self.prompts), epoch)[index]]

    def of_batch(self, batch: int, num_groups: int) -> list[Prompt]:
        """The prompts of all its groups."""
        return [self.of_group(batch, group, num_groups) for group in range(num_groups)]


@lru_cache(maxsize=8)
def _epoch_order(seed: int, size: int, epoch: int) -> list[int]:
    return permutation(seed, size, "epoch", epoch)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Prompts from JSON lines, ``{"prompt": "...", "metadata": {...}}``; from a text file (.txt)
    that has one on each line; or from a table (`shared.prompt_tables`).

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
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"data.prompts: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.prompts: {path} is no text; prompts are .txt, JSON lines, .parquet, or a folder "
            "made by save_to_disk"
        ) from error
    read = _plain_prompt if path.suffix == ".txt" else _prompt
    for number, line in _numbered(lines):
        yield read(path, number, line)


def _numbered(lines: Sequence[str]) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _plain_prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        return Prompt(text=line.strip())
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise UserError(f"data.prompts: {path} line {number}: {reason}") from error


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        plain = json.loads(line)
        return Prompt(text=plain["prompt"], metadata=plain.get("metadata", {}))
    except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise UserError(
            f'data.prompts: {path} line {number} is not {{"prompt": "...", "metadata": {{...}}}}'
        ) from error
