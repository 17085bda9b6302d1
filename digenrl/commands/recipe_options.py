"""Every key of a recipe as an option of a command: `--trainer.learning_rate 1e-4`.

A word that begins with `--` and has a dot before any `=` is such an option. It is taken out of the
words before the command's own options are parsed, and checked against the keys of recipes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from shared.errors import UserError

META = "digenrl.recipe_options"
HELP = (
    "Every key of the recipe is an option as well: --trainer.learning_rate 1e-4; "
    "`digenrl recipe keys` lists them."
)
BOOLEAN_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0")


class RecipeCommand(TyperCommand):
    """A command whose options are its function's, and all keys of a recipe."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "epilog": HELP})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Set the keys aside that were given, and parse the rest."""
        own, texts = _divided(args)
        ctx.meta[META] = _read(texts) if texts else {}
        try:
            return super().parse_args(ctx, own)
        except Exception as error:
            _name_nearest(error)
            raise


def given_keys(context: typer.Context, **short: Any) -> dict[str, Any]:
    """Return the values of keys by their dotted names, as options of a command have them.

    Args:
        short: values of the command's own options, by the key's name with `__` for the dot; None
            if it was not given.

    Raises:
        UserError: if one key was given both ways.
    """
    given: dict[str, Any] = dict(context.meta.get(META, {}))
    for name, value in short.items():
        if value is None:
            continue
        key = name.replace("__", ".")
        if given.get(key, value) != value:
            raise UserError(f"--{key}: is given twice, as {given[key]!r} and as {value!r}")
        given[key] = value
    return given


def _divided(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Return the command's own words, and the keys with their texts."""
    own: list[str] = []
    texts: list[tuple[str, str | None]] = []
    left = iter(enumerate(words))
    for at, word in left:
        if word == "--":
            own += words[at:]
            break
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            own.append(word)
        elif equals:
            texts.append((name, text))
        elif at + 1 < len(words) and _is_value(name, words[at + 1]):
            texts.append((name, next(left)[1]))
        else:
            texts.append((name, None))
    return own, texts


def _is_value(name: str, word: str) -> bool:
    """Whether a word is the value of the option before it, and no word of the command."""
    if word.startswith("--"):
        return False
    from shared.recipe.options import find_option_key, is_switch
    from shared.recipe.recipe import Recipe

    return not is_switch(find_option_key(Recipe, name)[1]) or word.lower() in BOOLEAN_WORDS


def _read(texts: Sequence[tuple[str, str | None]]) -> Mapping[str, Any]:
    from shared.recipe.options import read_options
    from shared.recipe.recipe import Recipe

    return read_options(Recipe, texts, Path.cwd())


def _name_nearest(error: Exception) -> None:
    """Suggest a key for an unknown option."""
    name = getattr(error, "option_name", None)
    if type(error).__name__ != "NoSuchOption" or name is None:
        return
    from shared.recipe.keys import nearest
    from shared.recipe.recipe import Recipe

    meant = nearest(Recipe, str(name).lstrip("-"))
    own = tuple(getattr(error, "possibilities", None) or ())
    if meant is not None:
        error.possibilities = [*own, f"--{meant}"]  # type: ignore[attr-defined]
