"""The prompts of a run, and which of them each batch takes: a function of the seed."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.learning.prompt_rows import Row, data_files, prompt_rows
from shared.learning.seeds import permutation
from shared.messages.contracts import Prompt, SourceImage

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
    """Prompts from JSON lines, ``{"prompt": "...", "metadata": {...}}``, or a JSON list of such
    objects; from a text file (.txt) that has one on each line; or from the column ``prompt`` of a
    .csv or Parquet file or of a saved dataset, whose other columns are metadata.

    The key or column ``image`` names the image that the prompt edits, a PNG, JPEG or WebP file,
    relative to the file with the prompts and below its folder.

    Raises:
        UserError: naming the invalid line, or the row and column.
    """
    return tuple(prompt for prompt, _ in read_rows(path))


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read prompts as `read_prompts` does, each with the file of its source image."""
    rows = tuple(row for row in prompt_rows(path) if row[0].text.strip())
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
    return sum(not prompt.text.strip() for prompt, _ in prompt_rows(path))


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
        weight = float(given) if given is not None else math.nan
    except (ValueError, TypeError):
        weight = math.nan
    if not (0 <= weight < math.inf):
        raise UserError(
            f"data.weights: the prompt {prompt.text[:40]!r} has no number from 0 as {name}, but "
            f"{given!r}; give every prompt one"
        )
    return weight


def digest(path: Path) -> str:
    """sha256 of what `read_prompts` reads: of the file, or of a folder's data files in a row, and
    of the digests of source images."""
    file_hash = hashlib.sha256()
    for file in data_files(path):
        file_hash.update(file.read_bytes())
    file_hash.update("".join(source_digests(path)).encode())
    return file_hash.hexdigest()
