"""Requirements of scorers on a prompt's text and metadata, checked before a run begins."""

import re
from collections.abc import Callable, Mapping

QUOTED_TEXT = re.compile(r'"([^"]*)"')
SPACES = re.compile(r"\s+")
NUM_DIGITS = 10
EDITS = ("thicken", "slant", "invert")
"""Edits of the editing demo."""


def wanted_text(metadata: Mapping[str, object]) -> str:
    """Return ``text`` of the metadata, or the prompt's part in double quotes, without spaces and in
    lower case.

    Raises:
        ValueError: if the prompt has no text.
    """
    match = QUOTED_TEXT.search(str(metadata.get("prompt", "")))
    text = metadata.get("text", match.group(1) if match else "")
    plain = without_spaces(str(text))
    if not plain:
        raise ValueError('the prompt has no text in "double quotes", nor its metadata a "text"')
    return plain


def without_spaces(text: str) -> str:
    return SPACES.sub("", text).lower()


def wanted_digit(metadata: Mapping[str, object]) -> int:
    """Return the digit that the metadata name, as a number or, as in a .csv file, as a text.

    Raises:
        ValueError: if the metadata name no digit.
    """
    digit = metadata.get("digit")
    if isinstance(digit, str) and re.fullmatch("[0-9]", digit):
        return int(digit)
    if not isinstance(digit, int) or isinstance(digit, bool) or not 0 <= digit < NUM_DIGITS:
        raise ValueError(
            f'a digit scorer needs metadata like {{"digit": 3}}, from 0 to 9; got {digit!r}'
        )
    return digit


def wanted_edit(metadata: Mapping[str, object]) -> str:
    """Return the edit that the metadata name; raises ValueError without one."""
    edit = metadata.get("edit")
    if edit not in EDITS:
        raise ValueError(f"metadata need an edit, one of {', '.join(EDITS)}; got {edit!r}")
    return str(edit)


PromptReader = Callable[[Mapping[str, object]], object]
"""Reads metadata, with the prompt's text as ``prompt``.

Raises ValueError where it finds nothing."""
