"""`digenrl fetch`: a model of the Hugging Face hub onto this host."""

from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.recipe_options import given_keys
from shared.errors import UserError

RECIPES = (".toml", ".json", ".yaml", ".yml")


def fetch(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="a recipe with model.id, or a model: org/name")],
    revision: Annotated[
        str | None, typer.Option(help="branch, tag or commit of org/name; by default main")
    ] = None,
) -> None:
    """Fetch the parts of a model that a run reads; what is here already is not fetched again."""
    from digenrl.hub.fetch import fetch as fetch_model

    if Path(what).suffix in RECIPES:
        if revision is not None:
            raise UserError("--revision: is of org/name; of a recipe, give --model.revision")
        model, revision = _named(Path(what), given_keys(context))
    elif keys := given_keys(context):
        raise UserError(f"--{next(iter(keys))}: is a key of a recipe, and {what} is none")
    else:
        model = what
    typer.echo(fetch_model(model, revision, lambda line: typer.echo(line, err=True)))


def _named(path: Path, options: dict[str, object]) -> tuple[str, str | None]:
    """Return the model and revision that a recipe asks for, whatever of it is here."""
    from shared.recipe.files import merged, read_layers
    from shared.recipe.options import put_options
    from shared.recipe.recipe import load_recipe

    model = load_recipe(path, options).model
    if model.id is None:
        raise UserError(f"{path}: model.folder is a folder; give model.id of a model on the hub")
    said = put_options(merged(read_layers(path)), options)["model"]
    return model.id, said.get("revision")
