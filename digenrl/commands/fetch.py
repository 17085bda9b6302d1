"""`digenrl fetch`: a model of the Hugging Face hub, prompts of data sets, and rewards, onto this
host."""

from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.recipe_options import given_keys
from shared.errors import UserError

RECIPES = (".toml", ".json", ".yaml", ".yml")


def fetch(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="a recipe, or a model: org/name")],
    revision: Annotated[
        str | None, typer.Option(help="branch, tag or commit of org/name; by default main")
    ] = None,
) -> None:
    """Fetch the parts of a model that a run reads, the prompts of its data sets and the networks of
    its rewards; what is here already is not fetched again."""
    from shared.recipe.files import located

    if Path(what).suffix in RECIPES:
        if revision is not None:
            raise UserError("--revision: applies to org/name; for a recipe, give --model.revision")
        _fetch_named(located(Path(what)), given_keys(context))
    elif keys := given_keys(context):
        raise UserError(f"--{next(iter(keys))}: is a key of a recipe, and {what} is not a recipe")
    else:
        _fetch_model(what, revision)


def _fetch_named(path: Path, options: dict[str, object]) -> None:
    """Fetch the models and files of a recipe, at its revisions, including present ones."""
    from digenrl.hub.dataset import fetch_prompts
    from digenrl.hub.rewards import fetch_rewards
    from shared.recipe.files import merged, read_layers
    from shared.recipe.options import put_options
    from shared.recipe.recipe import load_recipe

    recipe = load_recipe(path, options)
    datasets = {"data": recipe.data.dataset, "evaluation": recipe.evaluation.dataset}
    rewards = list(dict.fromkeys(fetch_rewards(recipe, _say)))
    for folder in rewards:
        typer.echo(folder)
    if recipe.model.id is None and not any((*datasets.values(), *rewards)):
        raise UserError(
            f"{path}: model.folder is a folder; give model.id of a model on the hub, or "
            "data.dataset.id, or data.dataset.folder of files of your own"
        )
    if recipe.model.id is None and not recipe.model.folder.exists():
        _say(
            f"model.folder: {recipe.model.folder} is not here; --model.id ORG/NAME fetches a model"
        )
    tables = put_options(merged(read_layers(path)), options)
    if recipe.model.id is not None:
        _fetch_model(recipe.model.id, tables["model"].get("revision"))
    for table, dataset in datasets.items():
        if dataset is not None:
            named_dataset = dataset.model_copy(
                update={"revision": tables[table]["dataset"].get("revision")}
            )
            typer.echo(fetch_prompts(named_dataset, f"{table}.dataset", _say))


def _fetch_model(model: str, revision: str | None) -> None:
    from digenrl.hub.fetch import fetch as fetch_model

    typer.echo(fetch_model(model, revision, _say))


def _say(line: str) -> None:
    typer.echo(line, err=True)
