"""How much of a text encoder's input a source image takes, where that sees the image as well."""

import json
import math
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.models.catalogue import find_family, text_tokens

SETTINGS = "processor/preprocessor_config.json"
PROMPT_TOKENS = 256
"""Tokens that a remedy leaves for the prompt."""
_DEFAULTS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}


def check_source_tokens(
    folder: Path, wanted: int | None, *, table: str, height: int, width: int
) -> None:
    """Check that a text of ``wanted`` tokens, or of the family's usual length, has space for a
    prompt in addition to a source image of ``height`` x ``width`` pixels, sizes of the recipe's
    ``table``.

    Raises:
        UserError: if it has none, or the folder does not define how images are cut.
    """
    allowed, tokens = text_tokens(folder, wanted), source_tokens(folder, height, width)
    if tokens >= allowed:
        raise UserError(
            f"model.text_tokens: a source image of {table}.height x width, {height} x {width}, is "
            f"{tokens} tokens alone, and {allowed} are allowed; set it to {tokens + PROMPT_TOKENS} "
            "or more"
        )


def source_tokens(folder: Path, height: int, width: int) -> int:
    """Return the tokens of a source image of this many pixels, as Qwen2.5-VL's processor cuts it
    (transformers' `smart_resize`); 0 if the text encoder does not read it.

    Raises:
        UserError: if the folder does not define how it is cut.
    """
    family = find_family(folder)
    if not family.takes_image or "processor" not in family.components:
        return 0
    try:
        settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text())
        side = int(settings["patch_size"]) * int(settings["merge_size"])
        sizes = {**_DEFAULTS, **(settings.get("size") or {})}
        least = int(settings.get("min_pixels") or sizes["shortest_edge"])
        most = int(settings.get("max_pixels") or sizes["longest_edge"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"model.folder: {folder} has no {SETTINGS}, which defines how images are cut; choose "
            "a complete model"
        ) from error
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(each / scale / side)) for each in (height, width))
    elif rows * columns * side**2 < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(each * scale / side) for each in (height, width))
    return rows * columns
