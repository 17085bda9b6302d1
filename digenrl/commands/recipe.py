"""`digenrl recipe`: a recipe as a run would have it, and the keys that there are."""

import json
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel

from digenrl.commands.options import AsJson, RecipeFile
from digenrl.commands.recipe_options import RecipeCommand, given_keys
from shared.errors import UserError

if TYPE_CHECKING:
    from shared.recipe.keys import Key
    from shared.recipe.sources import SourcedValue

recipe = typer.Typer(
    help="Show a recipe as a run would have it, or all keys.", no_args_is_help=True
)
VALUE_WIDTH = 34


@recipe.command(cls=RecipeCommand)
def show(context: typer.Context, recipe: RecipeFile, as_json: AsJson = False) -> None:
    """Print every value of a recipe and where it comes from; keys may be given as options."""
    from shared.recipe.files import read_layers
    from shared.recipe.recipe import resolve
    from shared.recipe.sources import sourced_values

    options, layers = given_keys(context), read_layers(recipe)
    values = sourced_values(resolve(recipe, layers, options), layers, options)
    if as_json:
        typer.echo(json.dumps([_plain(each) for each in values], indent=1))
        return
    width = max(len(each.key) for each in values)
    for each in values:
        value = "none" if each.value is None else json.dumps(each.value, ensure_ascii=False)
        typer.echo(f"{each.key:<{width}}  {value:<{VALUE_WIDTH}}  {_source(each)}")


@recipe.command()
def keys(
    word: Annotated[str, typer.Argument(help="only keys that have this in their name")] = "",
) -> None:
    """Print the keys of a recipe with their defaults; with a word, also what they mean."""
    from shared.recipe.keys import ANY, recipe_keys
    from shared.recipe.recipe import Recipe

    named = {key.name.replace(ANY, "NAME"): key for key in recipe_keys(Recipe).values()}
    matching_keys = {name: key for name, key in named.items() if word in name}
    if not matching_keys:
        raise UserError(f"WORD: no key has {word!r} in its name; without a word, all are listed")
    for name, key in (
        {word: matching_keys[word]}.items() if word in matching_keys else matching_keys.items()
    ):
        typer.echo(f"--{name:<42} {format_default(key)}")
        if word:
            meaning = " ".join((key.field.description or "").split())
            typer.echo(textwrap.fill(meaning, 100, initial_indent="  ", subsequent_indent="  "))


def format_default(key: "Key") -> str:
    """Return a key's default as it is written in a recipe."""
    if key.field.is_required():
        return "required"
    default = key.field.get_default(call_default_factory=True)
    if default is None:
        return "none"
    if isinstance(default, BaseModel):
        return "a table"
    return json.dumps(default) if isinstance(default, str | bool | dict) else str(default)


def _source(value: "SourcedValue") -> str:
    match value.kind:
        case "file" | "base":
            return str(value.file)
        case "implied":
            return "implied by algorithm.name"
        case _:
            return value.kind


def _plain(value: "SourcedValue") -> dict[str, object]:
    file = None if value.file is None else str(value.file)
    return {"key": value.key, "value": value.value, "source": value.kind, "file": file}
