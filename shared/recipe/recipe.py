"""A recipe: everything that defines a run, as one TOML file.

Read and checked before anything is started; the resolved recipe is stored with the run, where
every service takes it from. docs/recipes.md describes each key.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from shared.errors import UserError
from shared.models.catalogue import pipeline_sigmas
from shared.recipe.checks import check_tables
from shared.recipe.errors import describe
from shared.recipe.files import read_tables
from shared.recipe.implied import with_implied
from shared.recipe.paths import resolved
from shared.recipe.rewards import ScorerTable
from shared.recipe.sampling import SigmaGrid
from shared.recipe.tables import Tables


class Recipe(Tables):
    """A recipe whose tables go together, with what its algorithm implies."""

    @model_validator(mode="before")
    @classmethod
    def _implied_by_the_algorithm(cls, plain: Any) -> Any:
        return with_implied(plain) if isinstance(plain, Mapping) else plain

    @model_validator(mode="after")
    def _tables_go_together(self) -> Self:
        check_tables(self)
        return self


def load_recipe(path: Path) -> Recipe:
    """Read, check and resolve a recipe: TOML, or the JSON of one that is resolved already.

    Raises:
        UserError: one line that names the file, the key and the remedy.
    """
    plain = read_tables(path)
    try:
        return _resolved(Recipe.model_validate(plain), path.resolve().parent)
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error, Recipe)}") from error


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with some keys changed ("run.steps": 5); None leaves a key as it is.

    Raises:
        UserError: if a value is not one that the key takes.
    """
    plain = recipe.model_dump()
    for key, value in changes.items():
        if value is not None:
            table, field = key.split(".")
            plain[table][field] = value
    try:
        return Recipe.model_validate(plain)
    except ValidationError as error:
        raise UserError(describe(error, Recipe)) from error


def _resolved(recipe: Recipe, base: Path) -> Recipe:
    """Return the recipe with absolute paths, and a model's own sigmas as numbers if it is here."""

    def scorers(given: tuple[ScorerTable, ...]) -> tuple[ScorerTable, ...]:
        return tuple(scorer.at(base) for scorer in given)

    def absolute(path: Path | None) -> Path | None:
        return None if path is None else resolved(path, base)

    def updated(table: Any, **update: Any) -> Any:
        return table.model_copy(update=update)

    evaluation, folder = recipe.evaluation, resolved(recipe.model.folder, base)
    sigmas, evaluation_sigmas = _sigmas(recipe, folder)
    return recipe.model_copy(
        update={
            "model": updated(recipe.model, folder=folder),
            "sampling": updated(recipe.sampling, sigmas=sigmas),
            "data": updated(recipe.data, prompts=resolved(recipe.data.prompts, base)),
            "reward": updated(recipe.reward, scorers=scorers(recipe.reward.scorers)),
            "evaluation": updated(
                evaluation,
                sigmas=evaluation_sigmas,
                scorers=scorers(evaluation.scorers),
                digits=absolute(evaluation.digits),
                prompts=absolute(evaluation.prompts),
            ),
        }
    )


def _sigmas(recipe: Recipe, folder: Path) -> tuple[SigmaGrid, SigmaGrid | None]:
    """Return the sigmas of sampling and evaluation; a model's own as numbers, if it is here."""
    sampling, evaluation, size = recipe.sampling, recipe.evaluation, recipe.model
    trained, evaluated = sampling.sigmas, evaluation.sigmas
    if not folder.is_dir():
        return trained, evaluated
    if (evaluated or trained) == "model":  # other steps and sizes have other numbers
        evaluated = pipeline_sigmas(
            folder,
            evaluation.steps or sampling.steps,
            height=evaluation.height or size.height,
            width=evaluation.width or size.width,
            frames=size.frames,
        )
    if trained == "model":
        trained = pipeline_sigmas(
            folder, sampling.steps, height=size.height, width=size.width, frames=size.frames
        )
    return trained, evaluated
