"""Recipes that are the plain one of the digits but for some lines."""

from pathlib import Path

import pytest

from shared.errors import UserError
from shared.recipe.recipe import load_recipe
from tests.paths import DIGITS


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = DIGITS.read_text()
    assert old in text
    path = tmp_path / "recipe.toml"
    path.write_text(text.replace(old, new, 1))
    return path


def fault(path: Path, lines: int = 1) -> str:
    with pytest.raises(UserError) as raised:
        load_recipe(path)
    message = str(raised.value)
    assert len(set(message.splitlines())) == lines, message
    return message


def with_algorithm(tmp_path: Path, lines: str, sampling: str = "") -> Path:
    """The plain recipe with another algorithm table, and a sampling table of these lines."""
    head, _, rest = DIGITS.read_text().partition("[sampling]")
    after = rest[rest.index("\n[") :]
    while "[algorithm]" in after:
        before, _, tail = after.partition("[algorithm]")
        after = before + (tail[tail.index("\n[") :] if "\n[" in tail else "")
    path = tmp_path / "recipe.toml"
    tables = f"[sampling]\nsteps = 12\nwindow = 3\n{sampling}\n[algorithm]\n{lines}\n"
    path.write_text(head + tables + after)
    return path


def with_evaluation(tmp_path: Path, lines: str, sampling: str = "") -> Path:
    """The plain recipe with these lines in its evaluation, and these instead of its sigmas."""
    text = DIGITS.read_text().replace("[evaluation]", f"[evaluation]\n{lines}", 1)
    if sampling:
        text = text.replace('sigmas = "linear"', sampling, 1)
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path
