"""The prompts of a run, and which of them each batch takes: a function of the seed."""

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared.errors import UserError, not_utf8
from shared.learning.hub_datasets import not_fetched
from shared.learning.image_files import IMAGE, source_image
from shared.learning.prompt_tables import (
    METADATA,
    NEGATIVE,
    PROMPT,
    Row,
    data_files,
    is_table,
    made_prompt,
    read_table,
    said,
)
from shared.learning.seeds import permutation
from shared.messages.contracts import Prompt, SourceImage

TXT, CSV = ".txt", ".csv"
MAX_REPEATS = 1000
"""Most times that an epoch takes a prompt for once that it takes the rarest."""
MIN_PROMPTS, MAX_HELD_OUT = 20, 32
"""Fewest prompts of which some are held out by default, and most that are."""


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Epochs over all prompts, each in an order of its own; batches take the next ones in turn."""

    prompts: tuple[Prompt, ...]
    seed: int

    def of_group(self, batch: int, group: int, num_groups: int) -> Prompt:
        """Return the prompt of a batch's group. The data position of a run is its batch number."""
        epoch, index = divmod(batch * num_groups + group, len(self.prompts))
        return self.prompts[epoch_order(self.seed, len(self.prompts), epoch)[index]]


@lru_cache(maxsize=8)
def epoch_order(seed: int, size: int, epoch: int) -> list[int]:
    """Return the order in which an epoch takes all prompts."""
    return permutation(seed, size, "epoch", epoch)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Prompts from JSON lines, ``{"prompt": "...", "metadata": {...}}``; from a text file (.txt)
    that has one on each line; from a .csv file whose header has a column ``prompt``, the other
    columns being metadata; or from a table (`read_table`).

    The key or column ``image`` names the image that the prompt edits, a PNG, JPEG or WebP file,
    relative to the file with the prompts and below its folder.

    Raises:
        UserError: naming the invalid line, or the row and column.
    """
    return tuple(prompt for prompt, _ in read_rows(path))


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read prompts as `read_prompts` does, each with the file of its source image."""
    rows = tuple(row for row in _all_rows(path) if row[0].text.strip())
    if not rows:
        raise UserError(f"data.prompts: {path} holds no prompt")
    if len({prompt.image is None for prompt, _ in rows}) > 1:
        text = next(prompt.text for prompt, _ in rows if prompt.image is None)
        raise UserError(
            f"data.prompts: {path}: some prompts have an image, and {text[:40]!r} has none; give "
            "all of them one, or none"
        )
    return rows


def split_rows(
    rows: Sequence[Row], held_out: int | None
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Return the rows to train, and the rows held out from training: this many different prompts,
    by default a tenth of 20 or more, at most 32. They are chosen by digest, independent of the seed
    and the order of the file, and equal prompts stay together.

    Raises:
        UserError: if none is left to train.
    """
    identities = [_identity(prompt) for prompt, _ in rows]
    ranked = sorted(set(identities))
    tenth = min(len(ranked) // 10, MAX_HELD_OUT) if len(ranked) >= MIN_PROMPTS else 0
    chosen = set(ranked[: tenth if held_out is None else held_out])
    if len(chosen) == len(ranked):
        raise UserError(
            f"evaluation.held_out: {held_out} of {len(ranked)} different prompts leave none to "
            f"train; at most {len(ranked) - 1}"
        )
    identified = list(zip(rows, identities, strict=True))
    trained = tuple(row for row, identity in identified if identity not in chosen)
    return trained, tuple(row for row, identity in identified if identity in chosen)


def num_different(rows: Sequence[Row]) -> int:
    """Return the number of different prompts."""
    return len({_identity(prompt) for prompt, _ in rows})


def _identity(prompt: Prompt) -> str:
    image = "" if prompt.image is None else prompt.image.sha256
    return hashlib.sha256(f"{image}\n{prompt.text}".encode()).hexdigest()


def num_empty(path: Path) -> int:
    """Return the number of rows without a prompt, which are left out."""
    return sum(not prompt.text.strip() for prompt, _ in _all_rows(path))


def _all_rows(path: Path) -> Iterator[Row]:
    return read_table(path) if is_table(path) else _read_lines(path)


class SourceFiles:
    """Finds the source images of a file's prompts on this host."""

    def __init__(self, path: Path) -> None:
        """Raises UserError as `read_prompts` does."""
        rows = read_rows(path)
        self._files = {prompt.image.sha256: file for prompt, file in rows if prompt.image and file}

    def read(self, image: SourceImage | None) -> bytes | None:
        """Return the file of a source image; None without one."""
        return None if image is None else self._files[image.sha256].read_bytes()


def source_digests(path: Path) -> list[str]:
    """Return the digests of the source images of a file's prompts, sorted."""
    return sorted({prompt.image.sha256 for prompt, _ in read_rows(path) if prompt.image})


def repeated(prompts: Sequence[Prompt], weight: str) -> tuple[Prompt, ...]:
    """Return each prompt as many times as an epoch takes it: its weight over the smallest one,
    rounded. A prompt of weight 0 is left out.

    Args:
        weight: name of the metadata that holds the weights; texts are read as numbers.

    Raises:
        UserError: naming the prompt whose weight is invalid, or too large relative to the
            smallest.
    """
    weights = [_weight(prompt, weight) for prompt in prompts]
    least = min((each for each in weights if each > 0), default=0.0)
    if not least:
        raise UserError(f"data.weights: no prompt has a {weight} above 0")
    if max(weights) > MAX_REPEATS * least:
        raise UserError(
            f"data.weights: {weight} is from {least:g} to {max(weights):g}; the largest may be "
            f"{MAX_REPEATS} times the smallest above 0"
        )
    pairs = zip(prompts, weights, strict=True)
    return tuple(prompt for prompt, each in pairs for _ in range(round(each / least)))


def _weight(prompt: Prompt, name: str) -> float:
    given: Any = prompt.metadata.get(name)
    try:
        found = float(given) if given is not None else math.nan
    except (ValueError, TypeError):
        found = math.nan
    if not (0 <= found < math.inf):
        raise UserError(
            f"data.weights: the prompt {prompt.text[:40]!r} has no number from 0 as {name}, but "
            f"{given!r}; give every prompt one"
        )
    return found


def digest(path: Path) -> str:
    """sha256 of what `read_prompts` reads: of the file, or of a folder's data files in a row, and
    of the digests of source images."""
    found = hashlib.sha256()
    for file in data_files(path):
        found.update(file.read_bytes())
    found.update("".join(source_digests(path)).encode())
    return found.hexdigest()


def _read_lines(path: Path) -> Iterator[Row]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        fault = not_fetched(path) or f"data.prompts: cannot read {path}: {error.strerror}"
        raise UserError(fault) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.prompts: {path} is no text in UTF-8; save it so, if it is one "
            f"({not_utf8(path)}): prompts are .txt, .csv, JSON lines, .parquet, or a folder made "
            "by save_to_disk"
        ) from error
    if path.suffix.lower() == CSV:
        yield from _rows(path, text)
        return
    is_plain = path.suffix.lower() == TXT
    # Not `splitlines`, which also ends lines at signs that a prompt may hold, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _made(path, number, line.strip(), {}) if is_plain else _prompt(path, number, line)


def _rows(path: Path, text: str) -> Iterator[Row]:
    """Read a CSV file: metadata are texts. An empty cell is left out, and so is a column without a
    name, such as the row numbers that pandas writes."""
    rows = csv.DictReader(io.StringIO(text, newline=""), restval="", strict=True)
    try:
        names = rows.fieldnames or []
        if PROMPT not in names:
            raise UserError(
                f'data.prompts: {path} has no column "{PROMPT}" in its first line, but '
                f"{', '.join(names) or 'nothing'}; name the one that holds the prompts so"
                f"{separated(names)}"
            )
        twice = next((name for name in names if name and names.count(name) > 1), None)
        if twice is not None:
            raise UserError(
                f'data.prompts: {path} has two columns "{twice}" in its first line; rename one'
            )
        for row in rows:
            if None in row:  # cells beyond the last name
                raise UserError(
                    f"data.prompts: {path} line {rows.line_num}: more cells than the first line "
                    "has names; put text that has a comma in double quotes"
                )
            told = {
                name: cell for name, cell in row.items() if cell and name not in ("", PROMPT, IMAGE)
            }
            yield _made(path, rows.line_num, row[PROMPT], told, row.get(IMAGE) or None)
    except csv.Error as error:
        raise UserError(
            f"data.prompts: {path} after line {rows.line_num}: {error}; close every double quote, "
            "and double those within a text"
        ) from error


def separated(names: Sequence[str]) -> str:
    """Return what to do about the one name of a .csv file whose cells no commas separate."""
    sign = next((sign for sign in ";\t|" if len(names) == 1 and sign in names[0]), None)
    return "" if sign is None else f", and separate cells with commas, not {sign!r}"


def _prompt(path: Path, number: int, line: str) -> Row:
    try:
        plain = json.loads(line)
        text, image = plain[PROMPT], plain.get(IMAGE)
        metadata = plain.get(METADATA)
        if METADATA not in plain:  # the other keys, as a table's other columns
            metadata = {key: plain[key] for key in plain if key not in (PROMPT, IMAGE)}
        elif NEGATIVE in plain and isinstance(metadata, dict | None):
            metadata = {**(metadata or {}), NEGATIVE: plain[NEGATIVE]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f'data.prompts: {path} line {number} is not {{"prompt": "...", "metadata": {{...}}}}; '
            f"write each line so, or end the file's name in {TXT} if it has a prompt on each line, "
            f"or in {CSV}; a list, or keys of other names, are read as data.dataset.folder"
        ) from error
    return _made(path, number, text, metadata, image)


def _made(path: Path, number: int, text: Any, metadata: Any, image: Any = None) -> Row:
    """Raises UserError, which names the line and what is wrong in it."""
    where = f"data.prompts: {path} line {number}"
    for name, value in metadata.items() if isinstance(metadata, dict) else ():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{where}: metadata.{name}: {value} is no number; leave it out")
    source, file = source_image(path, where, image)
    try:
        return made_prompt(text, metadata, source), file
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = {"text": PROMPT}.get(str(fault["loc"][0]), str(fault["loc"][0]))
        raise UserError(f"{where}: {key}: {said(fault)}") from error
